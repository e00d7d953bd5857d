//! [`StepCost`]: how long a step of so many tokens takes, learned from the steps of a trace.
//!
//! Invariant: no step takes a negative time, and more tokens never take less. Knows nothing of
//! depth: attention over long texts is in the mean.

/// The time of a step in microseconds: a part of its own, and one for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepCost {
    step: f64,
    token: f64,
}

impl StepCost {
    /// The line that fits best, by least squares. `steps` gives tokens and microseconds of each.
    pub(crate) fn fit(steps: impl Iterator<Item = Measured>) -> Self {
        let (mut n, mut sum_x, mut sum_y, mut sum_xx, mut sum_xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for Measured { n_tokens, took } in steps {
            let (x, y) = (n_tokens as f64, took as f64);
            n += 1.0;
            sum_x += x;
            sum_y += y;
            sum_xx += x * x;
            sum_xy += x * y;
        }
        if n == 0.0 {
            return Self::default();
        }
        let spread = n * sum_xx - sum_x * sum_x;
        let slope = if spread > 0.5 {
            ((n * sum_xy - sum_x * sum_y) / spread).max(0.0)
        } else {
            0.0
        };
        let step = (sum_y - slope * sum_x) / n;
        if step >= 0.0 {
            Self { step, token: slope }
        } else {
            // Through zero.
            Self {
                step: 0.0,
                token: sum_xy / sum_xx.max(1.0),
            }
        }
    }

    /// Of a step, at least 1.
    pub(crate) fn micros(&self, n_tokens: usize) -> u64 {
        ((self.step + self.token * n_tokens as f64).round() as u64).max(1)
    }
}

/// A step that was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) n_tokens: usize,
    /// In microseconds.
    pub(crate) took: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(steps: &[[u64; 2]]) -> StepCost {
        StepCost::fit(steps.iter().map(|&[n_tokens, took]| Measured {
            n_tokens: n_tokens as usize,
            took,
        }))
    }

    #[test]
    fn a_line_is_found_where_there_is_one() {
        let cost = fit(&[[1, 110], [10, 200], [100, 1100], [50, 600]]);
        assert_eq!((cost.micros(1), cost.micros(200)), (110, 2100));
        assert_eq!(fit(&[]).micros(5), 1);
        assert_eq!(fit(&[[4, 30], [4, 50]]).micros(400), 40);
        // A negative part of its own, or of a token, is none.
        let steep = fit(&[[10, 1], [20, 1000]]);
        assert!(steep.micros(1) <= 41 && steep.micros(20) > 500, "{steep:?}");
        assert_eq!(fit(&[[1, 100], [9, 20]]).micros(1000), 60);
    }
}
