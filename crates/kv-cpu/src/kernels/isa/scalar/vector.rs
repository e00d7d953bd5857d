//! Small operations on vectors, in plain Rust.

use half::{bf16, f16};

use crate::operands::bf16::round;

pub(super) fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn dot_f16(a: &[f32], b: &[f16]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b.to_f32()).sum()
}

pub(super) fn axpy_f32(acc: &mut [f32], w: f32, v: &[f32]) {
    debug_assert_eq!(acc.len(), v.len());
    acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += w * v);
}

pub(super) fn axpy_f16(acc: &mut [f32], w: f32, v: &[f16]) {
    debug_assert_eq!(acc.len(), v.len());
    acc.iter_mut()
        .zip(v)
        .for_each(|(acc, v)| *acc += w * v.to_f32());
}

pub(super) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

pub(super) fn add(a: &mut [f32], b: &[f32]) {
    debug_assert_eq!(a.len(), b.len());
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
}

pub(super) fn mul(a: &mut [f32], b: &[f32]) {
    debug_assert_eq!(a.len(), b.len());
    a.iter_mut().zip(b).for_each(|(a, b)| *a *= b);
}

pub(super) fn max(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

pub(super) fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    x.iter().sum()
}

pub(super) fn soft_cap(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
}

pub(super) fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    debug_assert!(x.len() == w.len() && x.len() == out.len());
    let mean = dot_f32(x, x) / x.len().max(1) as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
        *out = x * inverse * w;
    }
}

pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

pub(super) fn sigmoid_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = up / (1.0 + (-*gate).exp());
    }
}

/// Twice the factor `sqrt(2 / π)` of GELU's tanh form.
pub(in crate::kernels) const GELU_SLOPE: f32 = 1.595_769;
/// The cubic term of GELU's tanh form.
pub(in crate::kernels) const GELU_CUBIC: f32 = 0.044_715;

/// `x/2 · (1 + tanh(y))` is `x / (1 + e^−2y)`.
pub(super) fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        let x = *gate;
        let twice = GELU_SLOPE * (x + GELU_CUBIC * x * x * x);
        *gate = x / (1.0 + (-twice).exp()) * up;
    }
}

/// How `t = 1 / (1 + p |x|)` falls in the approximation of `erfc`.
pub(in crate::kernels) const ERFC_FALL: f32 = 0.21;
/// `e^(x²/2) · erfc(|x| / sqrt(2))` as a polynomial of `t` without a constant term, the highest
/// power first: a minimax fit of our own (iteratively reweighted least squares) to 2e-8 of the
/// value.
pub(in crate::kernels) const ERFC_TERMS: [f32; 9] = [
    -0.142_587_96,
    0.563_600_66,
    -0.652_968_1,
    0.689_951_3,
    -0.181_529_34,
    0.246_937_19,
    0.139_141_37,
    0.170_024_6,
    0.167_430_33,
];

/// `max(x, 0) − |x|/2 · erfc(|x| / sqrt(2))`: nothing cancels in either tail.
pub(super) fn gelu_erf_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        let x = *gate;
        let t = 1.0 / (1.0 + ERFC_FALL * x.abs());
        let terms = ERFC_TERMS.iter().fold(0.0, |sum, term| (sum + term) * t);
        let tail = 0.5 * x.abs() * terms * (-0.5 * x * x).exp();
        *gate = (x.max(0.0) - tail) * up;
    }
}

pub(in crate::kernels) fn round_bf16(from: &[f32], to: &mut [bf16]) {
    debug_assert_eq!(from.len(), to.len());
    let rounded = from.iter().map(|x| round(*x));
    to.iter_mut().zip(rounded).for_each(|(to, x)| *to = x);
}

pub(super) fn f32_to_f16(from: &[f32], to: &mut [f16]) {
    debug_assert_eq!(from.len(), to.len());
    to.iter_mut()
        .zip(from)
        .for_each(|(to, from)| *to = f16::from_f32(*from));
}

pub(super) fn f16_to_f32(from: &[f16], to: &mut [f32]) {
    debug_assert_eq!(from.len(), to.len());
    to.iter_mut()
        .zip(from)
        .for_each(|(to, from)| *to = from.to_f32());
}
