//! The search for the scale (and minimum) of one group of values: of least squared error, weighted.
//!
//! Each candidate for a scale gives indices; these give the scale (and minimum) of least squares,
//! and its error decides. Does not know how formats store what is found.

use super::{IQ4_VALUES, bounds, extreme, nearest_iq4, representable};

/// Candidates on each side of the scale that the extreme values give.
const N_STEPS: i8 = 9;
/// Distance of two candidates, in indices of the extreme value.
const STEP: f32 = 0.1;
/// The same in numbers of the table of `IQ4_NL`.
const TABLE_STEP: f32 = 1.0;

/// Values that share a scale, with their weights.
pub(super) struct Group<'a, const LEN: usize> {
    pub(super) values: &'a [f32; LEN],
    pub(super) weights: [f32; LEN],
}

/// A scale and a minimum: `d · q + min`.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) d: f32,
    pub(super) min: f32,
}

/// The minima that a format can store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Minimum {
    Any,
    AtMostZero,
}

impl<'a, const LEN: usize> Group<'a, LEN> {
    /// Weights `importance · √(variance + x²)`, as in llama.cpp.
    pub(super) fn new(values: &'a [f32; LEN], importance: &[f32; LEN], variance: f32) -> Self {
        let weight = |i: usize| importance[i] * (variance + values[i] * values[i]).sqrt();
        Self {
            values,
            weights: std::array::from_fn(weight),
        }
    }

    /// The scale of `d · q` with `q` in `-end..end`.
    pub(super) fn symmetric(&self, end: f32) -> Option<f32> {
        let indices = |inverse: f32| {
            self.values
                .map(|x| nearest(x * inverse).clamp(-end, end - 1.0))
        };
        let extreme = extreme(self.values);
        let inverses = steps(-end, STEP).map(|steps| steps / extreme);
        self.best_scale(inverses, indices)
    }

    /// The scale of `d · table[q]`, with the table of `IQ4_NL`.
    pub(super) fn table(&self) -> Option<f32> {
        let entries = |inverse: f32| {
            self.values
                .map(|x| f32::from(IQ4_VALUES[usize::from(nearest_iq4(x * inverse))]))
        };
        let extreme = extreme(self.values);
        // The extreme value takes the first entry of the table, or the last.
        let ends = [IQ4_VALUES[0], IQ4_VALUES[15]].map(f32::from);
        let of_end = |end| steps(end, TABLE_STEP).map(move |number| number / extreme);
        self.best_scale(ends.into_iter().flat_map(of_end), entries)
    }

    /// The scale of least weighted squares for the numbers that a candidate gives, of the best
    /// candidate; `None` where all weights, or all values, are 0.
    fn best_scale(
        &self,
        inverses: impl Iterator<Item = f32>,
        numbers: impl Fn(f32) -> [f32; LEN],
    ) -> Option<f32> {
        let mut best: Option<(f32, f32)> = None;
        for inverse in inverses.filter(|inverse| inverse.is_finite()) {
            let (mut products, mut squares) = (0.0, 0.0);
            let each = self.values.iter().zip(&self.weights).zip(numbers(inverse));
            for ((&x, &w), q) in each {
                products += w * q * x;
                squares += w * q * q;
            }
            // What the squared error is less than without this scale.
            let gain = products * products / squares;
            if gain > 0.0 && gain.is_finite() && best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, products / squares));
            }
        }
        best.map(|(_, d)| representable(d))
    }

    /// Scale and minimum of `d · q + min` with `q` in `0..=last`; `None` where all weights are 0,
    /// or all values equal.
    pub(super) fn affine(&self, last: f32, minimum: Minimum) -> Option<Affine> {
        let (low, high) = match (minimum, bounds(self.values)) {
            (Minimum::Any, bounds) => bounds,
            (Minimum::AtMostZero, (low, high)) => (low.min(0.0), high),
        };
        let mut best: Option<(f32, Affine)> = None;
        let inverses = steps(last, STEP).map(|steps| steps / (high - low));
        for inverse in inverses.filter(|inverse| inverse.is_finite()) {
            let indices = self
                .values
                .map(|x| nearest((x - low) * inverse).clamp(0.0, last));
            let Some(fit) = self.least_squares(&indices, minimum) else {
                continue;
            };
            let each = self.values.iter().zip(&self.weights).zip(&indices);
            let errors = each.map(|((x, w), q)| {
                let off = x - fit.d * q - fit.min;
                w * off * off
            });
            let error: f32 = errors.sum();
            if error.is_finite() && best.is_none_or(|(least, _)| error < least) {
                best = Some((error, fit));
            }
        }
        best.map(|(_, fit)| Affine {
            d: representable(fit.d),
            min: representable(fit.min),
        })
    }

    /// The scale and minimum that fit these indices best; `None` where they are all equal, as far
    /// as they have weights.
    fn least_squares(&self, indices: &[f32; LEN], minimum: Minimum) -> Option<Affine> {
        let [mut w_, mut wq, mut wqq, mut wx, mut wqx] = [0f32; 5];
        for ((&x, &w), &q) in self.values.iter().zip(&self.weights).zip(indices) {
            w_ += w;
            wq += w * q;
            wqq += w * q * q;
            wx += w * x;
            wqx += w * q * x;
        }
        let determinant = w_ * wqq - wq * wq;
        let fit = (determinant > 0.0).then(|| Affine {
            d: (w_ * wqx - wq * wx) / determinant,
            min: (wqq * wx - wq * wqx) / determinant,
        })?;
        match minimum {
            Minimum::AtMostZero if fit.min > 0.0 => Some(Affine {
                d: wqx / wqq,
                min: 0.0,
            }),
            _ => Some(fit),
        }
    }

    /// The weighted squared error where each value reads back as `read` of it.
    pub(super) fn error(&self, read: impl Fn(f32) -> f32) -> f32 {
        let each = self.values.iter().zip(&self.weights);
        each.map(|(&x, w)| w * (x - read(x)) * (x - read(x))).sum()
    }
}

/// The nearest integer to a number below 4 million in magnitude; the even one of two. (Without
/// SSE4.1, `round` is a call of a function for each value.)
pub(super) fn nearest(x: f32) -> f32 {
    const HALVES_END: f32 = 12_582_912.0; // 1.5 · 2²³: above, floats have no fractions
    (x + HALVES_END) - HALVES_END
}

/// Candidates around the index of the extreme value.
fn steps(index: f32, step: f32) -> impl Iterator<Item = f32> {
    (-N_STEPS..=N_STEPS).map(move |n| index + step * f32::from(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums that are beyond all floats give no scale: the block is encoded without a search.
    #[test]
    fn sums_without_end_fit_nothing() {
        let found = |scale: f32, importance: f32| {
            let values: [f32; 32] = std::array::from_fn(|at| scale * (at as f32 - 9.3));
            let group = Group::new(&values, &[importance; 32], scale * scale);
            let affine = [Minimum::Any, Minimum::AtMostZero].map(|m| group.affine(15.0, m));
            let affine = affine.map(|fit| fit.is_some());
            (
                group.symmetric(8.0).is_some(),
                group.table().is_some(),
                affine,
            )
        };
        assert_eq!(found(1.0, 1.0), (true, true, [true; 2]));
        assert_eq!(found(1e11, 1e4), (false, false, [false; 2]));
    }
}
