//! [`HeadLength`]: how many tokens are worth drafting with a head, where each takes time, from how
//! often drafts are right and from what steps take.
//!
//! Invariant: that many gives the most tokens a second by what was measured, 0 where none does.
//! Knows nothing of tokens, and measures no time.

/// The most tokens of a draft: each takes a run of the head, and is right less often than the one
/// before.
pub const MAX_HEAD_DRAFT: usize = 8;

/// The weight of a new measurement.
const NEWEST: f64 = 0.1;

/// The time that drafts add to a step, relative to a step without.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftTimes {
    /// A further row of each text in a step.
    pub row: f64,
    /// A further token of each draft.
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
    /// The share of drafted tokens that are right where those before them are.
    rate: f64,
}

impl HeadLength {
    /// At most `n_max`, which is at least 1.
    pub fn new(n_max: usize) -> Self {
        Self {
            n_max: n_max.clamp(1, MAX_HEAD_DRAFT),
            rate: 0.7,
        }
    }

    /// The number of tokens that gives the most in the time of a step; 0 where drafts do not pay.
    pub fn next(&self, times: DraftTimes) -> usize {
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

    /// The share of drafted tokens that are right, in percent.
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
        assert_eq!(after(4, 4).next(times), MAX_HEAD_DRAFT);
        let seldom = after(2, 1);
        assert!((40..=60).contains(&seldom.percent()), "{seldom:?}");
        assert_eq!(seldom.next(times), 2);
        let dear = DraftTimes {
            row: 0.1,
            draft: 0.3,
        };
        assert_eq!(seldom.next(dear), 1);
        assert_eq!(HeadLength::new(3).next(times), 3);
    }

    #[test]
    fn drafts_that_do_not_pay_end_until_they_are_right_again() {
        let mut length = after(4, 0);
        let times = DraftTimes::default();
        assert_eq!((length.next(times), length.percent()), (0, 0));
        (0..40).for_each(|_| length.learn(1, 1));
        assert!(length.next(times) > 4);
        // However right they are.
        let dear = DraftTimes {
            row: 1.0,
            draft: 0.1,
        };
        assert_eq!(after(4, 4).next(dear), 0);
    }
}
