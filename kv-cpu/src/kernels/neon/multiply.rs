//! Weight rows against activations, with and without the dot-product extension.

use std::ops::Range;

use super::dot::{Four, Fours, Pairs};
use super::lanes::Neon;
use super::one_row;
use crate::kernels::WeightRows;
use crate::kernels::multiply::multiply_by;
use crate::kernels::vector::floats;
use crate::output::OutputColumns;

multiply_by!(multiply: Four<Pairs>, "neon", multiply_f32, 1, 2, 3, 4, 5, 6);
multiply_by!(multiply_dot: Four<Fours>, "neon,dotprod", multiply_f32, 1, 2, 3, 4, 5, 6);

#[target_feature(enable = "neon")]
fn multiply_f32(
    weights: WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    floats::multiply(Neon::new(), weights, acts, tokens, out);
}
