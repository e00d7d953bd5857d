//! [`HeadLength`]: how many tokens are worth drafting for one text, from how often its drafts are
//! right and from what steps take.
//!
//! Begins with a few, and takes more only where whole drafts were right. Forgets slowly: a few
//! wrong drafts end nothing, and a text that has changed is found out by later ones. Invariant: the
//! number is one that pays by [`DraftCosts`]. Knows nothing of tokens, and measures no time.

use super::DraftCosts;

/// The most tokens of a draft of a head: each takes a run of the head, and is right less often than
/// the one before.
pub const MAX_HEAD_DRAFT: usize = 8;

/// The weight of a new token, once there were some.
const NEWEST: f64 = 0.05;

/// The number of tokens that what other texts had counts for.
const N_BEFORE: f64 = 6.0;

/// The most tokens of the first draft.
const FIRST_DRAFT: usize = 2;

/// The share of drafted tokens that are right where nothing is known.
pub const USUAL_RATE: f64 = 0.7;

/// The number of tokens that are worth drafting for one text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadLength {
    n_max: usize,
    /// No more than so many are drafted yet.
    n_tried: usize,
    /// The share of drafted tokens that are right where those before them are.
    rate: f64,
    /// Tokens that it is from.
    n_known: f64,
}

impl HeadLength {
    /// At most `n_max`, which is at least 1; `rate` is what other texts had of late.
    pub fn new(n_max: usize, rate: f64) -> Self {
        let n_max = n_max.max(1);
        Self {
            n_max,
            n_tried: FIRST_DRAFT.min(n_max),
            rate: rate.clamp(0.0, 1.0),
            n_known: N_BEFORE,
        }
    }

    /// Other texts had this share of right tokens of late: it counts while this one had none.
    pub fn assume(&mut self, rate: f64) {
        if self.n_known <= N_BEFORE {
            self.rate = rate.clamp(0.0, 1.0);
        }
    }

    /// The number of tokens that gives the most in the time of a step; 0 where drafts do not pay.
    pub fn next(&self, costs: &DraftCosts) -> usize {
        match costs.best(self.rate, self.n_max) {
            0 => 0,
            // Fewer may not pay, where the first row is dear: they tell whether more are right.
            n => n.min(self.n_tried),
        }
    }

    /// The most tokens.
    pub fn n_max(&self) -> usize {
        self.n_max
    }

    /// The share of drafted tokens that are right.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// The same in percent.
    pub fn percent(&self) -> u8 {
        (self.rate * 100.0).round() as u8
    }

    /// Of `n_drafted` tokens, the first `n_accepted` were right.
    pub fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        let n_accepted = n_accepted.min(n_drafted);
        for _ in 0..n_accepted {
            self.take(1.0);
        }
        if n_accepted < n_drafted {
            self.take(0.0);
        } else if n_drafted >= self.n_tried {
            self.n_tried = (2 * self.n_tried).min(self.n_max);
        }
    }

    fn take(&mut self, right: f64) {
        self.n_known += 1.0;
        let weight = (1.0 / self.n_known).max(NEWEST);
        self.rate += weight * (right - self.rate);
    }
}

#[cfg(test)]
mod tests {
    use super::super::DraftedBy;
    use super::*;

    fn after(n_drafted: usize, n_accepted: usize) -> HeadLength {
        let mut length = HeadLength::new(MAX_HEAD_DRAFT, USUAL_RATE);
        (0..100).for_each(|_| length.learn(n_drafted, n_accepted));
        length
    }

    fn costs(token: f64) -> DraftCosts {
        DraftCosts::of(DraftedBy::Head, |n| Some(1.0 + token * n as f64))
    }

    fn usual() -> DraftCosts {
        DraftCosts::of(DraftedBy::Head, |_| None)
    }

    #[test]
    fn drafts_are_long_where_they_are_right_and_cheap() {
        let usual = usual();
        assert_eq!(after(8, 8).next(&usual), MAX_HEAD_DRAFT);
        let mut seldom = after(2, 1);
        assert!((40..=60).contains(&seldom.percent()), "{seldom:?}");
        assert_eq!(seldom.next(&usual), 2);
        assert_eq!(seldom.next(&costs(0.3)), 1);
        assert_eq!(HeadLength::new(1, USUAL_RATE).next(&usual), 1);
        // Wrong ones make them shorter at once by what they tell, not by one alone.
        let before = seldom.percent();
        seldom.learn(2, 0);
        assert!(before - seldom.percent() <= 5);
    }

    /// However right others are, the first drafts are short.
    #[test]
    fn the_first_drafts_are_short() {
        let cheap = costs(0.02);
        let mut length = HeadLength::new(MAX_HEAD_DRAFT, 1.0);
        let mut lengths = Vec::new();
        for _ in 0..4 {
            let n = length.next(&cheap);
            lengths.push(n);
            length.learn(n, n);
        }
        assert_eq!(lengths, [2, 4, 8, 8]);
        // Of which one was wrong: no more than before.
        let mut wrong = HeadLength::new(MAX_HEAD_DRAFT, 1.0);
        wrong.learn(2, 1);
        assert_eq!(wrong.next(&cheap), 2);
    }

    /// The rate of texts before is soon worth nothing.
    #[test]
    fn a_text_is_soon_judged_by_itself() {
        let mut length = HeadLength::new(MAX_HEAD_DRAFT, 0.9);
        (0..20).for_each(|_| length.learn(1, 0));
        assert!(length.percent() < 30, "{length:?}");
        assert_eq!(length.next(&usual()), 0);
        length.assume(0.9);
        assert!(length.percent() < 30);
        let mut length = HeadLength::new(MAX_HEAD_DRAFT, 0.9);
        length.assume(0.1);
        assert_eq!(length.percent(), 10);
        (0..20).for_each(|_| length.learn(1, 1));
        assert!(length.percent() > 70, "{length:?}");
    }

    #[test]
    fn drafts_that_do_not_pay_end_until_they_are_right_again() {
        let mut length = after(4, 0);
        let usual = usual();
        assert_eq!(length.next(&usual), 0);
        // The text has changed: trials find it out.
        let mut n_trials = 0;
        while length.next(&usual) == 0 {
            length.learn(1, 1);
            n_trials += 1;
        }
        assert!((2..=12).contains(&n_trials), "{n_trials}");
        (0..40).for_each(|_| length.learn(1, 1));
        (0..2).for_each(|_| length.learn(4, 4));
        assert!(length.next(&usual) > 4);
        // However right they are.
        assert_eq!(after(8, 8).next(&costs(1.1)), 0);
    }
}
