//! [`DraftCosts`]: what steps with drafted tokens take, and the number of tokens that pays.
//!
//! Invariant: the number that is chosen gives the most tokens in the time of a step by these costs,
//! and 0 unless that is clearly more than without drafts. Measures nothing itself.

use super::MAX_DRAFT;

/// The least gain of drafts that pay: less is within what measurements differ by.
const LEAST_GAIN: f64 = 1.1;

/// The way in which tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftedBy {
    /// A head of the model.
    #[default]
    Head,
    /// Prompt lookup.
    Lookup,
}

impl DraftedBy {
    /// The time that a further token adds to that of a step until it is measured: as where weights
    /// are read once for several rows.
    const fn usual(self) -> f64 {
        match self {
            Self::Head => 0.15,
            Self::Lookup => 0.05,
        }
    }
}

/// The time from step to step where texts have some drafted tokens each, drafting included,
/// relative to that without.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftCosts {
    /// By the number of drafted tokens of each text; never less for more of them.
    steps: [f64; MAX_DRAFT + 1],
}

impl DraftCosts {
    /// From what was measured by the number of drafted tokens of each text. What lies between two
    /// numbers that were measured is between their times, and what is beyond goes on as before.
    pub fn of(by: DraftedBy, measured: impl Fn(usize) -> Option<f64>) -> Self {
        let mut steps = [1.0; MAX_DRAFT + 1];
        let (mut known, mut slope) = (0, by.usual());
        for n in 1..=MAX_DRAFT {
            let Some(time) = measured(n).filter(|time| time.is_finite()) else {
                steps[n] = steps[n - 1] + slope;
                continue;
            };
            let before: f64 = steps[known];
            let time = time.max(before);
            let own = (time - before) / (n - known) as f64;
            let places = steps.iter_mut().skip(known + 1).take(n - known);
            for (place, distance) in places.zip(1u32..) {
                *place = before + own * f64::from(distance);
            }
            // The first row may cost more than all others: they are computed in another way.
            slope = if n == 1 { own.min(slope) } else { own };
            known = n;
        }
        Self { steps }
    }

    /// The number of tokens, at most `n_max`, that gives the most in the time of a step where each
    /// is right with the probability `rate` if those before it are; 0 where none is worth it.
    pub fn best(&self, rate: f64, n_max: usize) -> usize {
        let (mut best, mut most) = (0, LEAST_GAIN);
        let (mut n_tokens, mut is_right) = (1.0, 1.0);
        for (n, step) in self.steps.iter().enumerate().skip(1).take(n_max) {
            is_right *= rate;
            n_tokens += is_right;
            let gain = n_tokens / step;
            if gain > most {
                (best, most) = (n, gain);
            }
        }
        best
    }

    /// The least share of right tokens from which on drafts of at most `n_max` pay, in percent;
    /// `None` where none does.
    pub fn needed_percent(&self, n_max: usize) -> Option<u8> {
        let pays = |percent: u8| self.best(f64::from(percent) / 100.0, n_max) > 0;
        let (mut low, mut high) = (0, 100);
        // The more are right, the more is gained.
        while low < high {
            let middle = (low + high) / 2;
            if pays(middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        pays(low).then_some(low)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    /// Steps that take `first` more with the first row, and `row` with each further one.
    fn costs(first: f64, row: f64) -> DraftCosts {
        let time = |n: usize| Some(1.0 + first + row * (n - 1) as f64);
        DraftCosts::of(DraftedBy::Head, time)
    }

    #[test]
    fn cheap_rows_make_long_drafts_and_dear_ones_none() {
        let cheap = costs(0.1, 0.1);
        assert_eq!(cheap.best(0.95, 8), 8);
        assert_eq!(cheap.best(0.5, 8), 2);
        assert_eq!(cheap.best(0.95, 3), 3);
        assert_eq!(cheap.best(0.1, 8), 0);
        // However right they are.
        assert_eq!(costs(1.1, 1.1).best(1.0, 8), 0);
        assert_eq!(cheap.best(0.0, 8), 0);
        assert_eq!(cheap.best(0.9, 0), 0);
    }

    /// A gain that is smaller than it costs to find out is none.
    #[test]
    fn a_gain_within_the_noise_is_none() {
        let costs = costs(0.5, 0.5);
        assert_eq!(costs.best(0.6, 1), 0);
        assert_eq!(costs.best(0.7, 1), 1);
    }

    /// One row more is the step to other kernels, further ones are nearly free.
    #[test]
    fn a_dear_first_row_is_paid_by_several() {
        let costs = costs(0.8, 0.03);
        assert_eq!(costs.best(0.7, 1), 0);
        assert!(costs.best(0.9, 16) > 8);
        assert!(costs.best(0.7, 16) > 2);
        assert_eq!(costs.best(0.4, 16), 0);
    }

    #[test]
    fn what_was_not_measured_lies_between() {
        let some = |n| match n {
            2 => Some(1.2),
            6 => Some(2.0),
            _ => None,
        };
        let costs = DraftCosts::of(DraftedBy::Head, some);
        let at = |n: usize| costs.steps[n];
        assert_eq!(at(0), 1.0);
        for (n, wanted) in [(1, 1.1), (2, 1.2), (4, 1.6), (6, 2.0), (7, 2.2)] {
            assert!((at(n) - wanted).abs() < 1e-9, "{n}: {}", at(n));
        }
        // More rows never take less, and what is no number is not known.
        let odd = |n| match n {
            1 => Some(1.5),
            2 => Some(0.7),
            3 => Some(f64::NAN),
            _ => None,
        };
        let odd = DraftCosts::of(DraftedBy::Lookup, odd);
        assert!(odd.steps.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(odd.steps.iter().all(|step| step.is_finite()));
        // Lookup is tried with longer drafts, as long as nothing was measured.
        let [head, lookup] = [DraftedBy::Head, DraftedBy::Lookup]
            .map(|by| DraftCosts::of(by, |_| None).best(0.8, 16));
        assert!(0 < head && head < lookup, "{head} and {lookup}");
    }

    #[test]
    fn the_share_that_is_needed_is_said() {
        let costs = costs(0.6, 0.6);
        let needed = costs.needed_percent(8).unwrap();
        assert!(costs.best(f64::from(needed) / 100.0, 8) > 0);
        assert_eq!(costs.best(f64::from(needed - 1) / 100.0, 8), 0);
        let never = DraftCosts::of(DraftedBy::Head, |n| Some(1.0 + n as f64));
        assert_eq!(never.needed_percent(8), None);
    }
}
