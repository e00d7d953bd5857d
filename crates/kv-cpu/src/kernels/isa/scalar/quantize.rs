//! Quantizes activations to int8 blocks, in plain Rust; the rule is that of
//! [`crate::operands::int8`].

use crate::operands::{BLOCK, Int8RowMut};

pub(super) fn quantize(values: &[f32], mut row: Int8RowMut<'_>) {
    for (first, values) in values.chunks(row.span.len()).enumerate() {
        // The order of bit patterns is that of magnitudes, with infinities and then NaN last.
        let largest = values.iter().map(|v| v.abs().to_bits()).max().unwrap_or(0);
        let steps = Steps::of(f32::from_bits(largest));
        for (b, values) in (first * row.span.len() / BLOCK..).zip(values.chunks(BLOCK)) {
            let Some(quants) = row.quants.get_mut(b) else {
                return;
            };
            *quants = [0; BLOCK];
            for (q, v) in quants.iter_mut().zip(values) {
                *q = (v * steps.inverse).round_ties_even() as i8;
            }
            let halves = [&quants[..BLOCK / 2], &quants[BLOCK / 2..]];
            let sums = halves.map(|half| half.iter().map(|q| i32::from(*q)).sum());
            row.set_scale_and_sums(b, steps.scale, sums);
        }
    }
}

/// The step between two neighbouring int8 values, and its inverse.
pub(in crate::kernels) struct Steps {
    pub(in crate::kernels) scale: f32,
    pub(in crate::kernels) inverse: f32,
}

impl Steps {
    /// A largest magnitude below this is none: the step would not be a normal number.
    pub(in crate::kernels) const SMALLEST: f32 = 127.0 * f32::MIN_POSITIVE;

    /// For a block whose largest magnitude is `largest` (NaN if any is).
    pub(in crate::kernels) fn of(largest: f32) -> Self {
        if largest < Self::SMALLEST {
            return Self {
                scale: 0.0,
                inverse: 0.0,
            };
        }
        if !largest.is_finite() {
            return Self {
                scale: f32::NAN,
                inverse: 0.0,
            };
        }
        Self {
            scale: largest / 127.0,
            inverse: 127.0 / largest,
        }
    }
}
