//! Eight `f32` lanes: loads, stores, sums, and loops over slices.
//!
//! Invariant: the last few elements of a slice go through the same instructions as the others, in
//! a padded copy, so an element's bits do not depend on where it stands. Knows no operation.

use std::arch::x86_64::*;

use half::f16;

/// Eight values.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn load(x: &[f32; 8]) -> __m256 {
    // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

/// Eight values in half precision, widened.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(in crate::kernels) fn load_f16(x: &[f16; 8]) -> __m256 {
    // SAFETY: `f16` is two bytes, so `x` is 16 readable bytes; the load needs no alignment.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(x.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store(x: &mut [f32; 8], v: __m256) {
    // SAFETY: `x` is 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) }
}

/// The sum of all lanes: neighbours four apart first, then two, then one.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// The first `x.len()` (at most eight) values, then `fill`.
#[inline]
pub(super) fn padded<A: Copy>(x: &[A], fill: A) -> [A; 8] {
    let mut all = [fill; 8];
    for (all, x) in all.iter_mut().zip(x) {
        *all = *x;
    }
    all
}

/// `x[i] = f(x[i])`; lanes beyond the end are `fill`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn map(x: &mut [f32], fill: f32, mut f: impl FnMut(__m256) -> __m256) {
    let (whole, rest) = x.as_chunks_mut::<8>();
    for x in whole {
        store(x, f(load(x)));
    }
    if !rest.is_empty() {
        let mut last = padded(rest, fill);
        let results = f(load(&last));
        store(&mut last, results);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// `a[i] = f(a[i], b[i])`, where `load_b` brings eight of `b` into lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn zip<B: Copy + Default>(
    a: &mut [f32],
    b: &[B],
    load_b: impl Fn(&[B; 8]) -> __m256,
    f: impl Fn(__m256, __m256) -> __m256,
) {
    debug_assert_eq!(a.len(), b.len());
    let n = a.len().min(b.len());
    let (a, a_rest) = a[..n].as_chunks_mut::<8>();
    let (b, b_rest) = b[..n].as_chunks::<8>();
    for (a, b) in a.iter_mut().zip(b) {
        store(a, f(load(a), load_b(b)));
    }
    if !a_rest.is_empty() {
        let mut last = padded(a_rest, 0.0);
        let results = f(load(&last), load_b(&padded(b_rest, B::default())));
        store(&mut last, results);
        a_rest.copy_from_slice(&last[..a_rest.len()]);
    }
}
