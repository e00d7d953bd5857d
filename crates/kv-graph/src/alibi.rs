//! [`Alibi`]: attention with linear biases (Press et al., arXiv 2108.12409).
//!
//! Every head lowers its scores by its slope times the distance between query and key, instead of
//! giving positions to either. Knows nothing of how scores are computed.

use serde::{Deserialize, Serialize};

/// Linear biases on the scores of a layer's heads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alibi {
    /// Of `n` heads, a power of two, the last one's slope is `2^-max_bias` (8 in the paper).
    pub max_bias: f32,
    /// Factor on all slopes: 1, but for models that scale biases as they scale scores (Falcon).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub factor: f32,
}

fn one() -> f32 {
    1.0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it with a reference
fn is_one(factor: &f32) -> bool {
    *factor == 1.0
}

impl Alibi {
    /// The paper's slopes with this largest bias.
    pub const fn new(max_bias: f32) -> Self {
        Self {
            max_bias,
            factor: 1.0,
        }
    }

    /// The slope of each of `n_heads` heads: a score gets `-slope * |query position - key
    /// position|` added.
    ///
    /// For a power of two the slopes are `2^(-max_bias (h + 1) / n)`. For other numbers of heads
    /// the largest power of two below gives the first ones, and the others are every second slope
    /// of twice as many heads, as in the paper's code.
    pub fn slopes(self, n_heads: usize) -> Vec<f32> {
        let n_whole = match n_heads {
            0 => return Vec::new(),
            n => 1usize << n.ilog2(),
        };
        let slope = |h: usize, n: usize| {
            let exponent = -f64::from(self.max_bias) * (h + 1) as f64 / n as f64;
            (exponent.exp2() * f64::from(self.factor)) as f32
        };
        let between = (0..n_heads - n_whole).map(|h| slope(2 * h, 2 * n_whole));
        (0..n_whole)
            .map(|h| slope(h, n_whole))
            .chain(between)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_of_other_numbers_of_heads_lie_between() {
        let of = |n_heads| Alibi::new(8.0).slopes(n_heads);
        assert!(of(0).is_empty());
        let scaled = Alibi {
            factor: 0.5,
            ..Alibi::new(8.0)
        };
        assert_eq!(scaled.slopes(3), [0.03125, 1.0 / 512.0, 0.125]);
        assert_eq!(of(1), [1.0 / 256.0]);
        assert_eq!(of(2), [0.0625, 1.0 / 256.0]);
        assert_eq!(of(3), [0.0625, 1.0 / 256.0, 0.25]);
        assert_eq!(
            of(7)[4..],
            of(8)[..]
                .iter()
                .copied()
                .step_by(2)
                .take(3)
                .collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_factor_of_one_is_not_written() {
        let plain = Alibi::new(8.0);
        assert_eq!(
            serde_json::to_string(&plain).unwrap(),
            r#"{"max_bias":8.0}"#
        );
        assert_eq!(
            serde_json::from_str::<Alibi>(r#"{"max_bias":8.0}"#).unwrap(),
            plain
        );
        let scaled = Alibi {
            factor: 0.5,
            ..plain
        };
        let text = serde_json::to_string(&scaled).unwrap();
        assert_eq!(serde_json::from_str::<Alibi>(&text).unwrap(), scaled);
    }
}
