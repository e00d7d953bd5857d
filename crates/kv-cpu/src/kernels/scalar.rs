//! The small operations in plain Rust: the specification that every faster table is tested against.
//!
//! Sums run from the first element to the last. Knows nothing of instruction sets.

use std::ops::Range;

use half::{bf16, f16};
use kv_core::block::dequantize;

use super::{Kernels, WeightRows, scan};
use crate::activations::{self, Activations, BLOCK, Int8RowMut};
use crate::isa::Isa;
use crate::output::OutputColumns;

pub(super) static TABLE: Kernels = Kernels {
    isa: Isa::Scalar,
    dot_f32,
    dot_f16,
    axpy_f32,
    axpy_f16,
    scale,
    add,
    mul,
    max,
    exp_sum,
    soft_cap,
    rms_norm,
    silu_mul,
    gelu_tanh_mul,
    gelu_erf_mul,
    softplus: scan::softplus,
    multiply_add: scan::multiply_add,
    scan_tile: scan::scan_tile,
    f32_to_f16,
    f16_to_f32,
    round_bf16,
    quantize,
    multiply,
    pack: None,
    pack_bf16: None,
};

fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn dot_f16(a: &[f32], b: &[f16]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b.to_f32()).sum()
}

fn axpy_f32(acc: &mut [f32], w: f32, v: &[f32]) {
    debug_assert_eq!(acc.len(), v.len());
    acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += w * v);
}

fn axpy_f16(acc: &mut [f32], w: f32, v: &[f16]) {
    debug_assert_eq!(acc.len(), v.len());
    acc.iter_mut()
        .zip(v)
        .for_each(|(acc, v)| *acc += w * v.to_f32());
}

fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

fn add(a: &mut [f32], b: &[f32]) {
    debug_assert_eq!(a.len(), b.len());
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
}

fn mul(a: &mut [f32], b: &[f32]) {
    debug_assert_eq!(a.len(), b.len());
    a.iter_mut().zip(b).for_each(|(a, b)| *a *= b);
}

fn max(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    x.iter().sum()
}

fn soft_cap(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
}

fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    debug_assert!(x.len() == w.len() && x.len() == out.len());
    let mean = dot_f32(x, x) / x.len().max(1) as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
        *out = x * inverse * w;
    }
}

fn silu_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

/// Twice the factor `sqrt(2 / π)` of GELU's tanh form.
pub(super) const GELU_SLOPE: f32 = 1.595_769;
/// The cubic term of GELU's tanh form.
pub(super) const GELU_CUBIC: f32 = 0.044_715;

/// `x/2 · (1 + tanh(y))` is `x / (1 + e^−2y)`.
fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        let x = *gate;
        let twice = GELU_SLOPE * (x + GELU_CUBIC * x * x * x);
        *gate = x / (1.0 + (-twice).exp()) * up;
    }
}

/// How `t = 1 / (1 + p |x|)` falls in the approximation of `erfc`.
pub(super) const ERFC_FALL: f32 = 0.21;
/// `e^(x²/2) · erfc(|x| / sqrt(2))` as a polynomial of `t` without a constant term, the highest power
/// first: a minimax fit of our own (iteratively reweighted least squares) to 2e-8 of the value.
pub(super) const ERFC_TERMS: [f32; 9] = [
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
fn gelu_erf_mul(gate: &mut [f32], up: &[f32]) {
    debug_assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        let x = *gate;
        let t = 1.0 / (1.0 + ERFC_FALL * x.abs());
        let terms = ERFC_TERMS.iter().fold(0.0, |sum, term| (sum + term) * t);
        let tail = 0.5 * x.abs() * terms * (-0.5 * x * x).exp();
        *gate = (x.max(0.0) - tail) * up;
    }
}

pub(super) fn round_bf16(from: &[f32], to: &mut [bf16]) {
    debug_assert_eq!(from.len(), to.len());
    let rounded = from.iter().map(|x| activations::round(*x));
    to.iter_mut().zip(rounded).for_each(|(to, x)| *to = x);
}

fn f32_to_f16(from: &[f32], to: &mut [f16]) {
    debug_assert_eq!(from.len(), to.len());
    to.iter_mut()
        .zip(from)
        .for_each(|(to, from)| *to = f16::from_f32(*from));
}

fn f16_to_f32(from: &[f16], to: &mut [f32]) {
    debug_assert_eq!(from.len(), to.len());
    to.iter_mut()
        .zip(from)
        .for_each(|(to, from)| *to = from.to_f32());
}

fn quantize(values: &[f32], mut row: Int8RowMut<'_>) {
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
            row.set_marks(b, steps.scale, sums);
        }
    }
}

/// The step between two neighbouring int8 values, and its inverse.
pub(super) struct Steps {
    pub(super) scale: f32,
    pub(super) inverse: f32,
}

impl Steps {
    /// A largest magnitude below this is none: the step would not be a normal number.
    pub(super) const SMALLEST: f32 = 127.0 * f32::MIN_POSITIVE;

    /// For a block whose largest magnitude is `largest` (NaN if any is).
    pub(super) fn of(largest: f32) -> Self {
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

/// Values of a weight row that are decoded at a time: a multiple of every format's block length.
const CHUNK: usize = 256;

/// Weights are decoded by the specification of their format, activations are taken for what they
/// stand for, and both are multiplied and summed from the first column to the last.
pub(super) fn multiply(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    match acts {
        Activations::F32(rows) => {
            let row = |token: usize| rows.get(token * n..(token + 1) * n).unwrap_or_default();
            multiply_values(weights, |token, c| row(token)[c], tokens, out);
        }
        Activations::Int8(rows) => {
            let value = |token: usize, c: usize| {
                let (scale, quant) = rows.value(token, c);
                scale * f32::from(quant)
            };
            multiply_values(weights, value, tokens, out);
        }
        Activations::Bf16(rows) => {
            let row = |token: usize| rows.row(token).unwrap_or_default();
            multiply_values(weights, |token, c| row(token)[c].to_f32(), tokens, out);
        }
    }
}

fn multiply_values(
    weights: WeightRows<'_>,
    value: impl Fn(usize, usize) -> f32,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let WeightRows {
        format,
        // This table packs nothing.
        arrangement: _,
        bytes,
        row_bytes,
        first,
        n_columns,
    } = weights;
    let chunk_bytes = CHUNK / format.block_len() * format.block_bytes();
    for (column, row) in (first..).zip(bytes.chunks_exact(row_bytes.max(1))) {
        for token in tokens.clone() {
            let mut sum = 0.0;
            for (c, bytes) in row.chunks(chunk_bytes).enumerate() {
                let columns = c * CHUNK..n_columns.min((c + 1) * CHUNK);
                let mut values = [0.0; CHUNK];
                let values = &mut values[..columns.len()];
                dequantize(format, bytes, values);
                sum = values
                    .iter()
                    .zip(columns)
                    .fold(sum, |sum, (w, c)| sum + w * value(token, c));
            }
            out.set(token, column, sum);
        }
    }
}
