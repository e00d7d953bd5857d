//! The exponential and what is made of it: softmax, SiLU, GELU, softplus, soft caps.

use super::slices::{map, zip};
use super::{Vector, Vector8};
use crate::kernels::exp::{LEAST, LN_2, SERIES};
use crate::kernels::isa::scalar::vector::{ERFC_FALL, ERFC_TERMS, GELU_CUBIC, GELU_SLOPE};

/// Coefficients of a polynomial in `f` for `2^f`, from that of `f^6` down to that of `f`: least
/// greatest relative error on −1/2..1/2 (2e-9).
pub(in crate::kernels) const EXP2: [f32; 6] = [
    0.000_153_533_59,
    0.001_339_887_4,
    0.009_618_437,
    0.055_503_324,
    0.240_226_48,
    std::f32::consts::LN_2,
];

/// `2^x` for `x` up to 0, within 2 units in the last place; 0 where that is below the normal range.
#[inline(always)]
pub(super) fn exp2<E: Vector8>(e: E, x: E::F) -> E::F {
    let x = e.max(x, e.splat(-127.0));
    let n = e.round(x);
    let f = e.sub(x, n);
    let mut p = e.splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = e.mul_add(p, f, e.splat(*c));
    }
    p = e.mul_add(p, f, e.splat(1.0));
    e.mul(p, e.power_of_two(n))
}

/// `e^x`, within 2 units in the last place; 0 and infinity beyond the range of `f32`, NaN for NaN.
///
/// `x = n · ln 2 + r` with `|r| ≤ ln 2 / 2`, the Taylor series of `e^r` up to `r^7 / 7!` (the next
/// term is below 6e-9), and `2^n` in two factors or by an instruction, so that nothing leaves the
/// range of `f32` where the result is subnormal or just below infinity.
#[inline(always)]
fn exp<const N: usize, E: Vector<N>>(e: E, x: E::F) -> E::F {
    let x = e.max(e.splat(LEAST), e.min(e.splat(89.0), x));
    let n = e.round(e.mul(x, e.splat(std::f32::consts::LOG2_E)));
    let r = e.mul_add(n, e.splat(LN_2[0]), x);
    let r = e.mul_add(n, e.splat(LN_2[1]), r);
    let mut p = e.splat(SERIES[0]);
    for c in &SERIES[1..] {
        p = e.mul_add(p, r, e.splat(*c));
    }
    e.times_power_of_two(p, n)
}

/// `x / (1 + e^−y)`.
#[inline(always)]
fn times_sigmoid<const N: usize, E: Vector<N>>(e: E, x: E::F, y: E::F) -> E::F {
    let power = exp(e, e.sub(e.splat(0.0), y));
    e.div(x, e.add(e.splat(1.0), power))
}

#[inline(always)]
pub(in crate::kernels) fn exp_sum<E: Vector8>(e: E, x: &mut [f32], max: f32) -> f32 {
    let max = e.splat(max);
    let mut total = e.splat(0.0);
    map(
        e,
        x,
        f32::NEG_INFINITY,
        #[inline(always)]
        |x| {
            let power = exp(e, e.sub(x, max));
            total = e.add(total, power);
            power
        },
    );
    e.sum(total)
}

/// `tanh(y) = 1 − 2 / (e^2y + 1)`.
#[inline(always)]
pub(in crate::kernels) fn soft_cap<const N: usize, E: Vector<N>>(e: E, x: &mut [f32], cap: f32) {
    let (one, cap) = (e.splat(1.0), e.splat(cap));
    map(
        e,
        x,
        0.0,
        #[inline(always)]
        |x| {
            let y = e.div(x, cap);
            let power = exp(e, e.add(y, y));
            let quotient = e.div(e.splat(2.0), e.add(power, one));
            e.mul(cap, e.sub(one, quotient))
        },
    );
}

#[inline(always)]
pub(in crate::kernels) fn silu_mul<const N: usize, E: Vector<N>>(
    e: E,
    gate: &mut [f32],
    up: &[f32],
) {
    zip(
        e,
        gate,
        up,
        #[inline(always)]
        |x, up| e.mul(times_sigmoid(e, x, x), up),
    );
}

#[inline(always)]
pub(in crate::kernels) fn sigmoid_mul<const N: usize, E: Vector<N>>(
    e: E,
    gate: &mut [f32],
    up: &[f32],
) {
    zip(
        e,
        gate,
        up,
        #[inline(always)]
        |x, up| times_sigmoid(e, up, x),
    );
}

#[inline(always)]
pub(in crate::kernels) fn gelu_tanh_mul<const N: usize, E: Vector<N>>(
    e: E,
    gate: &mut [f32],
    up: &[f32],
) {
    let (slope, cubic) = (e.splat(GELU_SLOPE), e.splat(GELU_CUBIC));
    zip(
        e,
        gate,
        up,
        #[inline(always)]
        |x, up| {
            let cube = e.mul(e.mul(x, x), x);
            let y = e.mul(slope, e.mul_add(cubic, cube, x));
            e.mul(times_sigmoid(e, x, y), up)
        },
    );
}

/// The scalar kernel's formula.
#[inline(always)]
pub(in crate::kernels) fn gelu_erf_mul<const N: usize, E: Vector<N>>(
    e: E,
    gate: &mut [f32],
    up: &[f32],
) {
    zip(
        e,
        gate,
        up,
        #[inline(always)]
        |x, up| {
            let size = e.abs(x);
            let fall = e.mul_add(e.splat(ERFC_FALL), size, e.splat(1.0));
            let t = e.div(e.splat(1.0), fall);
            let mut terms = e.splat(0.0);
            for term in ERFC_TERMS {
                terms = e.mul(e.add(terms, e.splat(term)), t);
            }
            let half = e.mul(e.splat(0.5), size);
            let bell = exp(e, e.mul(e.splat(-0.5), e.mul(x, x)));
            let tail = e.mul(e.mul(half, terms), bell);
            let kept = e.max(x, e.splat(0.0));
            e.mul(e.sub(kept, tail), up)
        },
    );
}

/// `max(x, 0) + ln(1 + t)` with `t = e^-|x|`, and `ln(1 + t) = 2 artanh(z)` with `z = t / (2 + t)`,
/// which is at most 1/3, so that seven terms of its series suffice (the next is below 2e-8).
#[inline(always)]
pub(in crate::kernels) fn softplus<const N: usize, E: Vector<N>>(e: E, x: &mut [f32]) {
    map(
        e,
        x,
        0.0,
        #[inline(always)]
        |x| {
            let t = exp(e, e.sub(e.splat(0.0), e.abs(x)));
            let z = e.div(t, e.add(e.splat(2.0), t));
            let square = e.mul(z, z);
            let mut p = e.splat(1.0 / 13.0);
            for odd in [11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
                p = e.mul_add(p, square, e.splat(1.0 / odd));
            }
            let log = e.mul(e.add(z, z), p);
            e.add(e.max(x, e.splat(0.0)), log)
        },
    );
}
