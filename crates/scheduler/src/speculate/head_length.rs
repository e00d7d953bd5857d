//! [`HeadLength`]: how many tokens are worth drafting with a head, where each takes time, from how
//! often drafts are right and from what steps took.
//!
//! Invariant: that many gives the most tokens a second by what was measured, 0 where none does;
//! then one token is tried after a wait, which gets longer each time. Knows nothing of tokens.

/// The most tokens of a draft: each takes a run of the head, and is right less often than the one
/// before.
pub const MAX_HEAD_DRAFT: usize = 8;

/// Tokens of a text between trials while drafts do not pay.
const FIRST_WAIT: usize = 16;

/// The longest such wait.
const MAX_WAIT: usize = 512;

/// The weight of a new measurement.
const NEWEST: f64 = 0.1;

/// What steps with drafts take, relative to a step without.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftTimes {
    /// A further row of a text in a step.
    pub row: f64,
    /// Drafting a token.
    pub draft: f64,
}

impl Default for DraftTimes {
    /// Until they are measured: as where weights are read once for several rows.
    fn default() -> Self {
        Self {
            row: 0.05,
            draft: 0.1,
        }
    }
}

/// The number of tokens that are worth drafting for one text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadLength {
    n_max: usize,
    /// How often a drafted token is right where those before it are.
    rate: f64,
    /// Tokens of the text before which nothing is drafted.
    resume_at: usize,
    wait: usize,
}

impl HeadLength {
    /// At most `n_max`, which is at least 1.
    pub fn new(n_max: usize) -> Self {
        Self {
            n_max: n_max.clamp(1, MAX_HEAD_DRAFT),
            rate: 0.7,
            resume_at: 0,
            wait: FIRST_WAIT,
        }
    }

    /// Tokens to draft where the text has `n_tokens`.
    pub fn next(&mut self, n_tokens: usize, times: DraftTimes) -> usize {
        if n_tokens < self.resume_at {
            return 0;
        }
        match self.best(times) {
            0 => {
                self.resume_at = n_tokens.saturating_add(self.wait);
                self.wait = (self.wait * 2).min(MAX_WAIT);
                1
            }
            n => {
                self.wait = FIRST_WAIT;
                n
            }
        }
    }

    /// True if no draft pays by what was measured.
    pub fn is_off(&self, times: DraftTimes) -> bool {
        self.best(times) == 0
    }

    /// How often drafted tokens are right, in percent.
    pub fn percent(&self) -> u8 {
        (self.rate * 100.0).round() as u8
    }

    /// Of `n_drafted` tokens, the first `n_accepted` were right.
    pub fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        let n_accepted = n_accepted.min(n_drafted);
        for _ in 0..n_accepted {
            self.rate += NEWEST * (1.0 - self.rate);
        }
        if n_accepted < n_drafted {
            self.rate -= NEWEST * self.rate;
        }
    }

    /// The length that gives the most tokens in the time of a step.
    fn best(&self, times: DraftTimes) -> usize {
        let (mut best, mut most) = (0, 1.0);
        let (mut n_tokens, mut is_right, mut time) = (1.0, 1.0, 1.0);
        for n in 1..=self.n_max {
            is_right *= self.rate;
            n_tokens += is_right;
            time += times.row + times.draft;
            if n_tokens / time > most {
                (best, most) = (n, n_tokens / time);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(n_drafted: usize, n_accepted: usize) -> HeadLength {
        let mut length = HeadLength::new(MAX_HEAD_DRAFT);
        (0..100).for_each(|_| length.learn(n_drafted, n_accepted));
        length
    }

    #[test]
    fn drafts_are_long_where_they_are_right_and_cheap() {
        let times = DraftTimes::default();
        assert_eq!(after(4, 4).next(0, times), MAX_HEAD_DRAFT);
        let mut seldom = after(2, 1);
        assert!((40..=60).contains(&seldom.percent()), "{seldom:?}");
        assert_eq!(seldom.next(0, times), 2);
        let dear = DraftTimes {
            row: 0.1,
            draft: 0.3,
        };
        assert_eq!(seldom.next(0, dear), 1);
        assert_eq!(HeadLength::new(3).next(0, times), 3);
    }

    #[test]
    fn drafts_that_do_not_pay_become_rare() {
        let mut length = after(4, 0);
        let times = DraftTimes::default();
        assert!(length.is_off(times));
        let n_drafted: usize = (0..2000).map(|at| length.next(at, times)).sum();
        assert!((5..=10).contains(&n_drafted), "{n_drafted} of 2000 tokens");
        // They are long again when they are right again.
        (0..40).for_each(|_| length.learn(1, 1));
        assert!(!length.is_off(times) && length.next(5000, times) > 4);
    }

    #[test]
    fn what_costs_a_step_is_never_drafted_twice() {
        let mut length = after(4, 4);
        let times = DraftTimes {
            row: 1.0,
            draft: 0.1,
        };
        assert!(length.is_off(times));
        assert_eq!([0, 1, 15].map(|at| length.next(at, times)), [1, 0, 0]);
    }
}
