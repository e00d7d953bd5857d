//! The tables for AArch64: NEON alone, with dot products of int8, and with products of int8
//! matrices (I8MM).
//!
//! They pack no weights, and differ in dot products of int8 alone ([`dot::Dot`]). A table must only
//! be handed out where its [`Isa`] is available.

pub(crate) mod attend;
mod dot;
mod dot_i8mm;
mod float;
mod gemv;
mod matmul;
mod quantize;
pub(in crate::kernels) mod unpack;
mod vector;

use half::f16;

pub(crate) use self::unpack::iq4_entries;
use self::vector::Neon;
pub(crate) use self::vector::{f16_to_f32, transpose};
use crate::isa::Isa;
use crate::kernels::vector::eight_table;
use crate::kernels::{Kernels, ScanTile};

pub(in crate::kernels) const TABLE: Kernels = eight_table!("neon", Neon::new(),
    isa: Isa::Neon,
    // SAFETY: a table is handed out only where its features are available.
    quantize: |values, row| unsafe { quantize::quantize(values, row) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul(weights, acts, tokens, out)
    },
    pack: None,
);

pub(in crate::kernels) const DOT_TABLE: Kernels = Kernels {
    isa: Isa::NeonDot,
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul_dot(weights, acts, tokens, out)
    },
    ..TABLE
};

pub(in crate::kernels) const I8MM_TABLE: Kernels = Kernels {
    isa: Isa::NeonI8mm,
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul_i8mm(weights, acts, tokens, out)
    },
    ..TABLE
};
