//! [`FillStep`]: how many masks a step fills, and where they are.
//!
//! Invariant: the steps of a schedule fill every mask once. Knows no tokens.

use std::ops::Range;

use super::options::FillSchedule;

/// What one step fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FillStep {
    /// Places of the text in which masks may be filled.
    pub(super) places: Range<usize>,
    /// How many are.
    pub(super) n_fill: usize,
}

impl FillSchedule {
    /// At most `n_steps` steps for `n_tokens` masks. Options were checked.
    pub(super) fn steps(self, n_tokens: usize, n_steps: usize) -> Vec<FillStep> {
        let mut steps = match self {
            Self::Blocks { n_tokens: block } => of_blocks(n_tokens, block, n_steps),
            Self::Times { end } => by_time(n_tokens, n_steps, f64::from(end)),
        };
        steps.retain(|step| step.n_fill > 0);
        steps
    }
}

/// Steps in equal parts over the blocks, the first ones with what is left over; and so the masks
/// of a block over its steps.
fn of_blocks(n_tokens: usize, block: usize, n_steps: usize) -> Vec<FillStep> {
    let n_blocks = n_tokens.div_ceil(block);
    let mut steps = Vec::new();
    for at in 0..n_blocks {
        let places = at * block..n_tokens.min((at + 1) * block);
        let n_here = part(n_steps, n_blocks, at);
        steps.extend((0..n_here).map(|step| FillStep {
            n_fill: part(places.len(), n_here, step),
            places: places.clone(),
        }));
    }
    steps
}

/// The part number `at` of `n` in so many parts whose sizes differ by one at most.
fn part(n: usize, n_parts: usize, at: usize) -> usize {
    n / n_parts + usize::from(at < n % n_parts)
}

fn by_time(n_tokens: usize, n_steps: usize, end: f64) -> Vec<FillStep> {
    let time = |step: usize| 1.0 - (1.0 - end) * step as f64 / n_steps as f64;
    let mut n_left = n_tokens;
    let step = |at: usize| {
        let n_fill = if at + 1 == n_steps {
            n_left
        } else {
            (n_left as f64 * (1.0 - time(at + 1) / time(at))) as usize
        };
        n_left -= n_fill;
        FillStep {
            places: 0..n_tokens,
            n_fill,
        }
    };
    (0..n_steps).map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(schedule: FillSchedule, n_tokens: usize, n_steps: usize) -> Vec<usize> {
        let steps = schedule.steps(n_tokens, n_steps);
        steps.iter().map(|step| step.n_fill).collect()
    }

    #[test]
    fn blocks_are_filled_one_after_the_other_in_equal_parts() {
        let blocks = FillSchedule::Blocks { n_tokens: 5 };
        let steps = blocks.steps(12, 7);
        let places: Vec<_> = steps.iter().map(|step| step.places.clone()).collect();
        assert_eq!(places, [0..5, 0..5, 0..5, 5..10, 5..10, 10..12, 10..12]);
        assert_eq!(counts(blocks, 12, 7), [2, 2, 1, 3, 2, 1, 1]);
        let whole = FillSchedule::Blocks { n_tokens: 4 };
        assert_eq!(counts(whole, 4, 9), [1, 1, 1, 1], "no step without a mask");
    }

    /// Worked out by hand: with 3 steps to 0.25 the times are 1, 0.75, 0.5, 0.25.
    #[test]
    fn times_fill_the_fraction_that_the_time_falls_by() {
        let times = FillSchedule::Times { end: 0.25 };
        // 16 / 4 = 4; 12 / 3 = 4; the rest.
        assert_eq!(counts(times, 16, 3), [4, 4, 8]);
        // The times of 0.2 are rounded: 10 masks times a little less than 0.2 are 1.
        let rounded = FillSchedule::Times { end: 0.2 };
        assert_eq!(counts(rounded, 10, 4), [1, 2, 2, 5]);
    }

    #[test]
    fn every_mask_is_filled_once() {
        for n_tokens in [1usize, 2, 7, 64] {
            for n_steps in [1usize, 2, 5, 64, 200] {
                for schedule in [
                    FillSchedule::Times { end: 1e-3 },
                    FillSchedule::Blocks {
                        n_tokens: n_tokens.div_ceil(n_steps.min(3)),
                    },
                ] {
                    let got = counts(schedule, n_tokens, n_steps);
                    assert_eq!(
                        got.iter().sum::<usize>(),
                        n_tokens,
                        "{schedule:?} {n_steps}"
                    );
                    assert!(got.len() <= n_steps);
                }
            }
        }
    }
}
