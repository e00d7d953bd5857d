//! The table in plain Rust: the specification that every faster table is tested against.
//!
//! Sums run from the first element to the last. Packs no weights. Knows nothing of instruction
//! sets.

pub(crate) mod attend;
pub(in crate::kernels) mod matmul;
pub(in crate::kernels) mod quantize;
pub(in crate::kernels) mod vector;

use crate::isa::Isa;
use crate::kernels::{Kernels, delta, scan};

pub(in crate::kernels) static TABLE: Kernels = Kernels {
    isa: Isa::Scalar,
    dot_f32: vector::dot_f32,
    dot_f16: vector::dot_f16,
    axpy_f32: vector::axpy_f32,
    axpy_f16: vector::axpy_f16,
    scale: vector::scale,
    add: vector::add,
    mul: vector::mul,
    max: vector::max,
    exp_sum: vector::exp_sum,
    soft_cap: vector::soft_cap,
    rms_norm: vector::rms_norm,
    silu_mul: vector::silu_mul,
    gelu_tanh_mul: vector::gelu_tanh_mul,
    gelu_erf_mul: vector::gelu_erf_mul,
    sigmoid_mul: vector::sigmoid_mul,
    softplus: scan::softplus,
    multiply_add: scan::multiply_add,
    scan_tile: scan::scan_tile,
    delta_tile: delta::delta_tile,
    f32_to_f16: vector::f32_to_f16,
    f16_to_f32: vector::f16_to_f32,
    round_bf16: vector::round_bf16,
    quantize: quantize::quantize,
    multiply: matmul::matmul,
    pack: None,
    pack_bf16: None,
};
