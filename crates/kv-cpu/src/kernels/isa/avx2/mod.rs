//! The tables for x86-64 with AVX2, FMA and F16C, with and without AVX-VNNI.
//!
//! They pack no weights, and differ in dot products of int8 alone ([`dot::Dot`]). A table must only
//! be handed out where its [`Isa`] is available.

pub(crate) mod attend;
pub(in crate::kernels) mod dot;
mod float;
pub(in crate::kernels) mod gemv;
mod matmul;
mod min_correction;
mod quantize;
pub(in crate::kernels) mod unpack;
mod vector;

use half::f16;

pub(crate) use self::unpack::iq4_entries;
use self::vector::Avx2;
use crate::isa::Isa;
use crate::kernels::vector::eight_table;
use crate::kernels::{Kernels, ScanTile};

pub(in crate::kernels) const TABLE: Kernels = eight_table!("avx2,fma,f16c", Avx2::new(),
    isa: Isa::Avx2,
    // SAFETY: a table is handed out only where its features are available.
    quantize: |values, row| unsafe { quantize::quantize(values, row) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul(weights, acts, tokens, out)
    },
    pack: None,
);

pub(in crate::kernels) const VNNI_TABLE: Kernels = Kernels {
    isa: Isa::AvxVnni,
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul_vnni(weights, acts, tokens, out)
    },
    ..TABLE
};
