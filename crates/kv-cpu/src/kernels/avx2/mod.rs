//! The tables for x86-64 with AVX2, FMA and F16C, with and without AVX-VNNI.
//!
//! One file per job: [`lanes`] does arithmetic for the small operations ([`super::vector`]), [`quantize`]
//! prepares activations, [`groups`] unpacks weights, and [`multiply`] multiplies them by what [`one_row`],
//! [`eight`] and [`floats`] are for. The tables differ in dot products of bytes alone ([`eight::Dot`]).
//! Knows nothing of how the instruction set was detected: a table must only be handed out where its
//! [`Isa`] is available.

pub(super) mod beside;
pub(super) mod eight;
mod floats;
pub(super) mod groups;
pub(super) mod lanes;
mod multiply;
pub(super) mod one_row;
mod quantize;

use half::f16;

use self::lanes::Avx2;
use super::vector::eight_table;
use super::{Kernels, ScanTile};
use crate::isa::Isa;

pub(super) const TABLE: Kernels = eight_table!("avx2,fma,f16c", Avx2::new(),
    isa: Isa::Avx2,
    // SAFETY: a table is handed out only where its features are available.
    quantize: |values, row| unsafe { quantize::quantize(values, row) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply(weights, acts, tokens, out)
    },
    pack: None,
);

pub(super) const VNNI_TABLE: Kernels = Kernels {
    isa: Isa::AvxVnni,
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply_vnni(weights, acts, tokens, out)
    },
    ..TABLE
};
