//! The tables for AArch64: NEON alone, with dot products of bytes, and with products of their matrices.
//!
//! One file per job: [`lanes`] does arithmetic for the small operations ([`super::vector`]), [`quantize`]
//! prepares activations, [`groups`] unpacks weights, and [`multiply`] multiplies them by what [`one_row`],
//! [`dot`], [`matrix`] and [`floats`] are for. The tables differ in products of bytes alone ([`dot::Dot`]). Knows nothing of
//! how the instruction set was detected: a table must only be handed out where its [`Isa`] is available.

mod dot;
mod floats;
pub(super) mod groups;
mod lanes;
mod matrix;
mod multiply;
mod one_row;
mod quantize;

use half::f16;

pub(crate) use self::groups::iq4_entries;
use self::lanes::Neon;
pub(crate) use self::lanes::{transposed, widened};
use super::vector::eight_table;
use super::{Kernels, ScanTile};
use crate::isa::Isa;

pub(super) const TABLE: Kernels = eight_table!("neon", Neon::new(),
    isa: Isa::Neon,
    // SAFETY: a table is handed out only where its features are available.
    quantize: |values, row| unsafe { quantize::quantize(values, row) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply(weights, acts, tokens, out)
    },
    pack: None,
);

pub(super) const DOT_TABLE: Kernels = Kernels {
    isa: Isa::NeonDot,
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply_dot(weights, acts, tokens, out)
    },
    ..TABLE
};

pub(super) const I8MM_TABLE: Kernels = Kernels {
    isa: Isa::NeonI8mm,
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply_i8mm(weights, acts, tokens, out)
    },
    ..TABLE
};
