//! The tables for x86-64 with AVX2, FMA and F16C, with and without AVX-VNNI.
//!
//! One file per job: [`lanes`] moves eight values at a time, [`elementwise`] and [`functions`] are
//! the small operations, [`quantize`] prepares activations, [`groups`] unpacks weights, [`multiply`]
//! multiplies them by what [`one_row`] and [`eight`] are for, and [`scan`] is for recurrent layers.
//! The tables differ in dot products of bytes alone ([`eight::Dot`]). Knows nothing of how the
//! instruction set was detected: a table must only be handed out where its [`Isa`] is available.

pub(super) mod beside;
mod eight;
mod elementwise;
mod floats;
mod functions;
pub(super) mod groups;
pub(super) mod lanes;
mod multiply;
mod one_row;
mod quantize;
pub(super) mod scan;

use super::Kernels;
use crate::isa::Isa;

/// A function pointer to a function that needs the features of its table.
macro_rules! with_avx2 {
    (|$($arg:ident),+| $function:path) => {
        // SAFETY: a table is handed out only where its features are available.
        |$($arg),+| unsafe { $function($($arg),+) }
    };
}

pub(super) const TABLE: Kernels = Kernels {
    isa: Isa::Avx2,
    dot_f32: with_avx2!(|a, b| elementwise::dot_f32),
    dot_f16: with_avx2!(|a, b| elementwise::dot_f16),
    axpy_f32: with_avx2!(|acc, w, v| elementwise::axpy_f32),
    axpy_f16: with_avx2!(|acc, w, v| elementwise::axpy_f16),
    scale: with_avx2!(|x, factor| elementwise::scale),
    add: with_avx2!(|a, b| elementwise::add),
    mul: with_avx2!(|a, b| elementwise::mul),
    max: with_avx2!(|x| elementwise::max),
    exp_sum: with_avx2!(|x, max| functions::exp_sum),
    soft_cap: with_avx2!(|x, cap| functions::soft_cap),
    rms_norm: with_avx2!(|x, w, eps, out| elementwise::rms_norm),
    silu_mul: with_avx2!(|gate, up| functions::silu_mul),
    gelu_tanh_mul: with_avx2!(|gate, up| functions::gelu_tanh_mul),
    gelu_erf_mul: with_avx2!(|gate, up| functions::gelu_erf_mul),
    softplus: with_avx2!(|x| scan::softplus),
    multiply_add: with_avx2!(|acc, a, b| scan::multiply_add),
    scan_tile: with_avx2!(|tile| scan::scan_tile),
    f32_to_f16: with_avx2!(|from, to| elementwise::f32_to_f16),
    f16_to_f32: with_avx2!(|from, to| elementwise::f16_to_f32),
    quantize: with_avx2!(|values, row| quantize::quantize),
    multiply: with_avx2!(|weights, acts, tokens, out| multiply::multiply),
};

pub(super) const VNNI_TABLE: Kernels = Kernels {
    isa: Isa::AvxVnni,
    multiply: with_avx2!(|weights, acts, tokens, out| multiply::multiply_vnni),
    ..TABLE
};
