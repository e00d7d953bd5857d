//! Spans: stretches of positions whose cells are attended on their own and merged in order.
//!
//! A row's result is defined as: an online softmax over the tiles of each span, beginning anew with
//! every span, and the spans merged from the first to the last ([`Softmax::merge`]). So spans can be
//! computed by different threads (flash-decoding: Dao et al., 2023), or once for several sequences
//! that share them, and the bits are those of one thread that takes one after the other. Knows
//! nothing of cells.

use crate::kernels::Kernels;

/// Positions of a span: it begins at a multiple of this.
pub(super) const SPAN: u32 = 256;

/// The first position of the span that `pos` belongs to.
pub(super) const fn span_of(pos: u32) -> u32 {
    pos & !(SPAN - 1)
}

/// What is known of one query's scores so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Softmax {
    /// The largest.
    pub(super) max: f32,
    /// Sum of the weights, relative to the largest.
    pub(super) sum: f32,
}

impl Softmax {
    /// Nothing was seen.
    pub(super) const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };

    /// Adds what a later span gave, `(later, values)`, to this and the weighted values `out`.
    pub(super) fn merge(
        &mut self,
        kernels: &Kernels,
        out: &mut [f32],
        (later, values): (Self, &[f32]),
    ) {
        if later.max == f32::NEG_INFINITY && later.sum == 0.0 {
            return;
        }
        if self.max == f32::NEG_INFINITY && self.sum == 0.0 {
            *self = later;
            out.copy_from_slice(values);
            return;
        }
        let now = self.max.max(later.max);
        let keep = self.shrink_to(now);
        if keep != 1.0 {
            (kernels.scale)(out, keep);
        }
        let part = if later.max == now {
            1.0
        } else {
            (later.max - now).exp()
        };
        (kernels.axpy_f32)(out, part, values);
        self.sum += later.sum * part;
    }

    /// Makes weights relative to `now`, which is not below the largest so far; gives the factor by
    /// which what was added must shrink.
    pub(super) fn shrink_to(&mut self, now: f32) -> f32 {
        if self.max == now {
            return 1.0;
        }
        let keep = (self.max - now).exp();
        self.max = now;
        self.sum *= keep;
        keep
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn merging_is_the_softmax_of_all() {
        let scores: Vec<f64> = (0..12).map(|i| (f64::from(i) * 1.3).sin() * 20.0).collect();
        let wanted: f64 = {
            let weights = scores.iter().map(|s| s.exp());
            let sum: f64 = weights.clone().sum();
            weights.zip(0..).map(|(w, v)| w * f64::from(v)).sum::<f64>() / sum
        };
        let kernels = Kernels::for_isa(Isa::Scalar).unwrap();
        let (mut all, mut out) = (Softmax::EMPTY, [0.0]);
        for span in [0..4, 4..4, 4..9, 9..12] {
            let mut part = Softmax::EMPTY;
            let own = &scores[span.clone()];
            part.max = own.iter().fold(part.max, |m, s| m.max(*s as f32));
            let weights = own.iter().map(|s| (s - f64::from(part.max)).exp());
            part.sum = weights.clone().sum::<f64>() as f32;
            let value = weights.zip(span).map(|(w, v)| w * v as f64).sum::<f64>();
            all.merge(kernels, &mut out, (part, &[value as f32]));
        }
        assert!((f64::from(out[0] / all.sum) - wanted).abs() < 1e-5);
        let before = (all, out);
        all.merge(kernels, &mut out, (Softmax::EMPTY, &[9.0]));
        assert_eq!((all, out), before);
    }
}
