//! Dot products, sums and conversions, eight values at a time. Knows no function of a real number.

use std::arch::x86_64::*;

use half::f16;

use super::lanes::{load, load_f16, map, padded, sum, zip};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    dot(a, b, |b| load(b))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_f16(a: &[f32], b: &[f16]) -> f32 {
    dot(a, b, |b| load_f16(b))
}

/// Four accumulators hide the latency of the additions; what is left after whole groups of 32
/// values goes to the first.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<B: Copy + Default>(a: &[f32], b: &[B], load_b: impl Fn(&[B; 8]) -> __m256) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let n = a.len().min(b.len());
    let (a, a_rest) = a[..n].as_chunks::<8>();
    let (b, b_rest) = b[..n].as_chunks::<8>();
    let (a, a_single) = a.as_chunks::<4>();
    let (b, b_single) = b.as_chunks::<4>();
    let mut acc = [_mm256_setzero_ps(); 4];
    for (a, b) in a.iter().zip(b) {
        for i in 0..4 {
            acc[i] = _mm256_fmadd_ps(load(&a[i]), load_b(&b[i]), acc[i]);
        }
    }
    for (a, b) in a_single.iter().zip(b_single) {
        acc[0] = _mm256_fmadd_ps(load(a), load_b(b), acc[0]);
    }
    if !a_rest.is_empty() {
        let (a, b) = (padded(a_rest, 0.0), padded(b_rest, B::default()));
        acc[0] = _mm256_fmadd_ps(load(&a), load_b(&b), acc[0]);
    }
    let [a, b, c, d] = acc;
    sum(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn axpy_f32(acc: &mut [f32], w: f32, v: &[f32]) {
    let w = _mm256_set1_ps(w);
    zip(acc, v, |v| load(v), |acc, v| _mm256_fmadd_ps(w, v, acc));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn axpy_f16(acc: &mut [f32], w: f32, v: &[f16]) {
    let w = _mm256_set1_ps(w);
    zip(acc, v, |v| load_f16(v), |acc, v| _mm256_fmadd_ps(w, v, acc));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scale(x: &mut [f32], factor: f32) {
    let factor = _mm256_set1_ps(factor);
    map(x, 0.0, |x| _mm256_mul_ps(x, factor));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add(a: &mut [f32], b: &[f32]) {
    zip(a, b, |b| load(b), |a, b| _mm256_add_ps(a, b));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn mul(a: &mut [f32], b: &[f32]) {
    zip(a, b, |b| load(b), |a, b| _mm256_mul_ps(a, b));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn max(x: &[f32]) -> f32 {
    let (whole, rest) = x.as_chunks::<8>();
    // The instruction gives its second operand where one is NaN: the maximum so far.
    let most = whole
        .iter()
        .fold(_mm256_set1_ps(f32::NEG_INFINITY), |most, x| {
            _mm256_max_ps(load(x), most)
        });
    let most = _mm256_max_ps(load(&padded(rest, f32::NEG_INFINITY)), most);
    let most = _mm_max_ps(
        _mm256_castps256_ps128(most),
        _mm256_extractf128_ps::<1>(most),
    );
    let most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    debug_assert!(x.len() == w.len() && x.len() == out.len());
    let n = x.len().min(out.len());
    let mean = dot_f32(x, x) / x.len().max(1) as f32;
    let inverse = _mm256_set1_ps(1.0 / (mean + eps).sqrt());
    out[..n].copy_from_slice(&x[..n]);
    let normed = |x, w| _mm256_mul_ps(_mm256_mul_ps(x, inverse), w);
    zip(&mut out[..n], w, |w| load(w), normed);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn f32_to_f16(from: &[f32], to: &mut [f16]) {
    debug_assert_eq!(from.len(), to.len());
    let n = from.len().min(to.len());
    let (from, from_rest) = from[..n].as_chunks::<8>();
    let (to, to_rest) = to[..n].as_chunks_mut::<8>();
    for (from, to) in from.iter().zip(to) {
        *to = narrowed(from);
    }
    to_rest.copy_from_slice(&narrowed(&padded(from_rest, 0.0))[..to_rest.len()]);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn narrowed(from: &[f32; 8]) -> [f16; 8] {
    let mut to = [f16::ZERO; 8];
    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load(from));
    // SAFETY: `f16` is two bytes, so `to` is 16 writable bytes; the store needs no alignment.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), halves) };
    to
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn f16_to_f32(from: &[f16], to: &mut [f32]) {
    zip(to, from, |from| load_f16(from), |_, from| from);
}
