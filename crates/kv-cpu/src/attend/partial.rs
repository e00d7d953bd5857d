//! Flash-decoding partials: [`SoftmaxState`] and how the results of position splits are merged.
//!
//! The result of a query is *defined* as: one online softmax over the KV tiles of each split of
//! [`SPLIT_POSITIONS`] positions, starting anew with every split, and the splits merged in order
//! ([`SoftmaxState::merge`]). So splits may be computed by different threads (flash-decoding: Dao
//! et al., 2023), or once for several sequences that share them, with the same bits as one thread
//! that takes them in order. Knows nothing of cells.

use crate::kernels::Kernels;

/// Positions of a split; it begins at a multiple of this.
pub(crate) const SPLIT_POSITIONS: u32 = 256;

/// The first position of the split that contains `pos`.
pub(crate) const fn split_start(pos: u32) -> u32 {
    pos & !(SPLIT_POSITIONS - 1)
}

/// Running maximum and sum of one query's online softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SoftmaxState {
    /// The largest score so far.
    pub(crate) max: f32,
    /// Sum of `e^(score - max)` so far.
    pub(crate) sum: f32,
}

/// A split's result for one query: its softmax state and the weighted sum of values, `[v_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partial<'a> {
    pub(crate) softmax: SoftmaxState,
    pub(crate) values: &'a [f32],
}

impl SoftmaxState {
    /// Before the first score.
    pub(crate) const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };

    /// The logarithm of the sum of `e^score`; `-inf` before the first score.
    pub(crate) fn logarithm(self) -> f32 {
        if self.is_empty() {
            f32::NEG_INFINITY
        } else {
            self.max + self.sum.ln()
        }
    }

    fn is_empty(self) -> bool {
        self.max == f32::NEG_INFINITY && self.sum == 0.0
    }

    /// Merges a later split's partial into this state and its weighted values `out`, `[v_dim]`.
    pub(crate) fn merge(&mut self, kernels: &Kernels, out: &mut [f32], later: Partial<'_>) {
        if later.softmax.is_empty() {
            return;
        }
        if self.is_empty() {
            *self = later.softmax;
            out.copy_from_slice(later.values);
            return;
        }
        let max = self.max.max(later.softmax.max);
        let rescale = self.rescale_to(max);
        if rescale != 1.0 {
            (kernels.scale)(out, rescale);
        }
        let factor = if later.softmax.max == max {
            1.0
        } else {
            (later.softmax.max - max).exp()
        };
        (kernels.axpy_f32)(out, factor, later.values);
        self.sum += later.softmax.sum * factor;
    }

    /// Makes the sum relative to `max`, which is not below the present maximum; returns the factor
    /// by which the weighted values must be rescaled.
    pub(crate) fn rescale_to(&mut self, max: f32) -> f32 {
        if self.max == max {
            return 1.0;
        }
        let factor = (self.max - max).exp();
        self.max = max;
        self.sum *= factor;
        factor
    }
}

/// Merges the results of a query over different rows, `[dim + 1]` each, to `out`, `[dim]` or like
/// them: see [`Op::MergePartials`](kv_graph::Op::MergePartials).
pub(crate) fn merge_results(a: &[f32], b: &[f32], out: &mut [f32]) {
    let (Some((&log_a, a)), Some((&log_b, b))) = (a.split_last(), b.split_last()) else {
        return;
    };
    let max = log_a.max(log_b);
    let (out, logarithm) = out.split_at_mut(a.len().min(out.len()));
    if max == f32::NEG_INFINITY {
        out.fill(0.0);
        return logarithm.fill(max);
    }
    let (weight_a, weight_b) = ((log_a - max).exp(), (log_b - max).exp());
    let sum = weight_a + weight_b;
    logarithm.fill(max + sum.ln());
    let (weight_a, weight_b) = (weight_a / sum, weight_b / sum);
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = weight_a * a + weight_b * b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn results_merge_by_the_sums_of_their_weights() {
        let merged = |a: [f32; 2], b: [f32; 2]| {
            let (mut out, mut with_logarithm) = ([f32::NAN], [f32::NAN; 2]);
            merge_results(&a, &b, &mut out);
            merge_results(&a, &b, &mut with_logarithm);
            let [value, logarithm] = with_logarithm;
            assert_eq!(out, [value]);
            let wanted = a[1].exp() + b[1].exp();
            assert!(
                wanted.is_infinite() || (logarithm.exp() - wanted).abs() < 1e-6 * wanted.max(1.0)
            );
            value
        };
        let nothing = [0.0, f32::NEG_INFINITY];
        assert_eq!(merged(nothing, nothing), 0.0);
        assert_eq!(merged([3.0, -90.0], nothing), 3.0);
        assert_eq!(merged(nothing, [3.0, 90.0]), 3.0);
        let got = merged([1.0, 3f32.ln()], [5.0, 0.0]);
        assert!((got - 2.0).abs() < 1e-6, "{got}");
        assert_eq!(merged([1.0, 200.0], [5.0, 0.0]), 1.0);
    }

    #[test]
    fn merged_splits_are_the_softmax_of_all() {
        let scores: Vec<f64> = (0..12).map(|i| (f64::from(i) * 1.3).sin() * 20.0).collect();
        let wanted: f64 = {
            let weights = scores.iter().map(|s| s.exp());
            let sum: f64 = weights.clone().sum();
            weights.zip(0..).map(|(w, v)| w * f64::from(v)).sum::<f64>() / sum
        };
        let kernels = Kernels::for_isa(Isa::Scalar).unwrap();
        let (mut all, mut out) = (SoftmaxState::EMPTY, [0.0]);
        for split in [0..4, 4..4, 4..9, 9..12] {
            let mut softmax = SoftmaxState::EMPTY;
            let own = &scores[split.clone()];
            softmax.max = own.iter().fold(softmax.max, |m, s| m.max(*s as f32));
            let weights = own.iter().map(|s| (s - f64::from(softmax.max)).exp());
            softmax.sum = weights.clone().sum::<f64>() as f32;
            let value = weights.zip(split).map(|(w, v)| w * v as f64).sum::<f64>();
            let values = &[value as f32];
            all.merge(kernels, &mut out, Partial { softmax, values });
        }
        assert!((f64::from(out[0] / all.sum) - wanted).abs() < 1e-5);
        let before = (all, out);
        let empty = Partial {
            softmax: SoftmaxState::EMPTY,
            values: &[9.0],
        };
        all.merge(kernels, &mut out, empty);
        assert_eq!((all, out), before);
    }
}
