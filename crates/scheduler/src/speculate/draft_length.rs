//! [`DraftLength`]: how many tokens are worth drafting, learned from what became of drafts.
//!
//! Doubles where a whole draft was right, halves where it was not, and after drafts of which
//! nothing was right waits longer each time: a text that does not repeat itself is nearly as fast
//! as without drafts. Knows nothing of tokens.

/// Steps without a draft after the first one that was all wrong.
const FIRST_WAIT: usize = 4;

/// The longest such wait, in tokens.
const MAX_WAIT: usize = 128;

/// The first draft.
const FIRST_DRAFT: usize = 4;

/// The number of tokens that are worth drafting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLength {
    n_max: usize,
    n_next: usize,
    /// Tokens of the text before which nothing is drafted.
    resume_at: usize,
    /// The length of the next wait.
    wait: usize,
}

impl DraftLength {
    /// At most `n_max`, which is at least 1.
    pub fn new(n_max: usize) -> Self {
        let n_max = n_max.max(1);
        Self {
            n_max,
            n_next: FIRST_DRAFT.min(n_max),
            resume_at: 0,
            wait: FIRST_WAIT,
        }
    }

    /// Tokens to draft where the text has `n_tokens`, of which the last `n_match` occurred together
    /// before: a short match may be chance.
    pub fn next(&self, n_tokens: usize, n_match: usize) -> usize {
        if n_tokens < self.resume_at {
            0
        } else {
            self.n_next.min(n_match)
        }
    }

    /// Of `n_drafted` tokens, the first `n_accepted` were right; the text has `n_tokens` now.
    pub fn learn(&mut self, n_tokens: usize, n_drafted: usize, n_accepted: usize) {
        if n_drafted == 0 {
            return;
        }
        if n_accepted >= n_drafted {
            self.n_next = (self.n_next.max(n_drafted) * 2).min(self.n_max);
            self.wait = FIRST_WAIT;
        } else if n_accepted > 0 {
            self.n_next = (n_accepted + 1).max(n_drafted / 2).min(self.n_max);
            self.wait = (self.wait / 2).max(FIRST_WAIT);
        } else {
            self.n_next = (self.n_next / 2).max(1);
            self.resume_at = n_tokens.saturating_add(self.wait);
            self.wait = (self.wait * 2).min(MAX_WAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_grow_while_they_are_right() {
        let mut length = DraftLength::new(16);
        let mut lengths = Vec::new();
        for n_tokens in [10, 15, 24, 41] {
            let n = length.next(n_tokens, 64);
            lengths.push(n);
            length.learn(n_tokens, n, n);
        }
        assert_eq!(lengths, [4, 8, 16, 16]);
        // A step without drafts tells nothing.
        length.learn(50, 0, 0);
        assert_eq!(length.next(50, 64), 16);
        length.learn(60, 16, 2);
        assert_eq!(length.next(60, 64), 8);
    }

    #[test]
    fn a_short_match_is_trusted_less() {
        let length = DraftLength::new(16);
        assert_eq!(length.next(10, 3), 3);
        assert_eq!(DraftLength::new(2).next(10, 3), 2);
    }

    #[test]
    fn wrong_drafts_become_rare() {
        let mut length = DraftLength::new(16);
        let mut n_steps = 0;
        for n_tokens in 0..1000 {
            if length.next(n_tokens, 64) > 0 {
                n_steps += 1;
                length.learn(n_tokens, 4, 0);
            }
        }
        assert!((5..=14).contains(&n_steps), "{n_steps} of 1000 steps");
        // One that is right ends that.
        length.learn(2000, 1, 1);
        assert_eq!(length.next(2000, 64), 2);
    }
}
