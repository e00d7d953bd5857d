//! The exponential and what is made of it: softmax, SiLU, GELU, soft caps.

use std::arch::x86_64::*;

use super::lanes::{load, map, sum, zip};
use crate::kernels::scalar::{ERFC_FALL, ERFC_TERMS, GELU_CUBIC, GELU_SLOPE};

/// `e^x`, within 2 units in the last place; 0 and infinity beyond the range of `f32`, NaN for NaN.
///
/// `x = n · ln 2 + r` with `|r| ≤ ln 2 / 2`, the Taylor series of `e^r` up to `r^7 / 7!` (the next
/// term is below 6e-9), and `2^n` in two factors, so that neither leaves the range of `f32` where
/// the result is subnormal or just below infinity.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn exp(x: __m256) -> __m256 {
    let constant = |c: f32| _mm256_set1_ps(c);
    // The instructions give their second operand where one is NaN: `x`.
    let x = _mm256_max_ps(constant(-104.0), _mm256_min_ps(constant(89.0), x));
    let n = _mm256_mul_ps(x, constant(std::f32::consts::LOG2_E));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(n);
    // ln 2 in two parts; the first has few bits, so that its product with `n` is exact.
    let r = _mm256_fnmadd_ps(n, constant(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, constant(-2.121_944_4e-4), r);
    let mut p = constant(1.0 / 5040.0);
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = _mm256_fmadd_ps(p, r, constant(c));
    }
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let p = _mm256_mul_ps(p, power_of_two(half));
    _mm256_mul_ps(p, power_of_two(_mm256_sub_epi32(n, half)))
}

/// `2^n` for `n` in −126..=127.
#[inline]
#[target_feature(enable = "avx2")]
fn power_of_two(n: __m256i) -> __m256 {
    let exponent = _mm256_add_epi32(n, _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
}

/// `x / (1 + e^−y)`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn times_sigmoid(x: __m256, y: __m256) -> __m256 {
    let e = exp(_mm256_sub_ps(_mm256_setzero_ps(), y));
    _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0), e))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    let max = _mm256_set1_ps(max);
    let mut total = _mm256_setzero_ps();
    map(x, f32::NEG_INFINITY, |x| {
        let e = exp(_mm256_sub_ps(x, max));
        total = _mm256_add_ps(total, e);
        e
    });
    sum(total)
}

/// `tanh(y) = 1 − 2 / (e^2y + 1)`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn soft_cap(x: &mut [f32], cap: f32) {
    let (one, cap) = (_mm256_set1_ps(1.0), _mm256_set1_ps(cap));
    map(x, 0.0, |x| {
        let y = _mm256_div_ps(x, cap);
        let e = exp(_mm256_add_ps(y, y));
        let quotient = _mm256_div_ps(_mm256_set1_ps(2.0), _mm256_add_ps(e, one));
        _mm256_mul_ps(cap, _mm256_sub_ps(one, quotient))
    });
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    zip(
        gate,
        up,
        |up| load(up),
        |x, up| _mm256_mul_ps(times_sigmoid(x, x), up),
    );
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) {
    let (slope, cubic) = (_mm256_set1_ps(GELU_SLOPE), _mm256_set1_ps(GELU_CUBIC));
    zip(
        gate,
        up,
        |up| load(up),
        |x, up| {
            let cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
            let y = _mm256_mul_ps(slope, _mm256_fmadd_ps(cubic, cube, x));
            _mm256_mul_ps(times_sigmoid(x, y), up)
        },
    );
}

/// The scalar kernel's formula.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn gelu_erf_mul(gate: &mut [f32], up: &[f32]) {
    let constant = |c: f32| _mm256_set1_ps(c);
    zip(
        gate,
        up,
        |up| load(up),
        |x, up| {
            let size = _mm256_andnot_ps(constant(-0.0), x);
            let fall = _mm256_fmadd_ps(constant(ERFC_FALL), size, constant(1.0));
            let t = _mm256_div_ps(constant(1.0), fall);
            let mut terms = _mm256_setzero_ps();
            for term in ERFC_TERMS {
                terms = _mm256_mul_ps(_mm256_add_ps(terms, constant(term)), t);
            }
            let half = _mm256_mul_ps(constant(0.5), size);
            let bell = exp(_mm256_mul_ps(constant(-0.5), _mm256_mul_ps(x, x)));
            let tail = _mm256_mul_ps(_mm256_mul_ps(half, terms), bell);
            let kept = _mm256_max_ps(x, _mm256_setzero_ps());
            _mm256_mul_ps(_mm256_sub_ps(kept, tail), up)
        },
    );
}
