//! [`Avx2`]: eight `f32` in one register. Knows no operation.

use std::arch::x86_64::*;

use half::f16;

use crate::kernels::vector::{Transpose, Vector, Vector8};

/// AVX2, FMA and F16C are available.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The proof.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn new() -> Self {
        Self(())
    }
}

impl Vector<8> for Avx2 {
    type F = __m256;

    intrinsics! { proof;
        splat(self, x: f32) -> __m256 = _mm256_set1_ps(x);
        load(self, from: &[f32; 8]) -> __m256 = _mm256_loadu_ps(from.as_ptr());
        load_f16(self, from: &[f16; 8]) -> __m256 =
            _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
        store(self, to: &mut [f32; 8], x: __m256) -> () = _mm256_storeu_ps(to.as_mut_ptr(), x);
        store_f16(self, to: &mut [f16; 8], x: __m256) -> () = {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm_storeu_si128(to.as_mut_ptr().cast(), halves)
        };
        add(self, a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(self, a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(self, a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(self, a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        max(self, a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        min(self, a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        abs(self, x: __m256) -> __m256 = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
        round(self, x: __m256) -> __m256 =
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        times_power_of_two(self, x: __m256, n: __m256) -> __m256 = {
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            // Two factors: neither is subnormal or infinite where the result is not.
            let x = _mm256_mul_ps(x, power_of_two(half));
            _mm256_mul_ps(x, power_of_two(_mm256_sub_epi32(n, half)))
        };
    }
}

impl Vector8 for Avx2 {
    intrinsics! { proof;
        sum(self, x: __m256) -> f32 = sum(x);
        power_of_two(self, n: __m256) -> __m256 = power_of_two(_mm256_cvtps_epi32(n));
    }
}

impl Transpose<8> for Avx2 {
    intrinsics! { proof;
        transpose(self, rows: [__m256; 8]) -> [__m256; 8] = transpose(rows);
    }
}

/// `2^n` for `n` in −126..=127, 0 for −127.
#[inline]
#[target_feature(enable = "avx2")]
fn power_of_two(n: __m256i) -> __m256 {
    let exponent = _mm256_add_epi32(n, _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
}

/// The sum of all lanes: those four apart first, then two, then one.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Rows as columns.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(r: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d] = [0, 2, 4, 6].map(|i: usize| {
        (
            _mm256_unpacklo_ps(r[i], r[i + 1]),
            _mm256_unpackhi_ps(r[i], r[i + 1]),
        )
    });
    // Four rows of columns j and j + 4.
    let four = |a: (__m256, __m256), b: (__m256, __m256)| {
        [
            _mm256_shuffle_ps::<0x44>(a.0, b.0),
            _mm256_shuffle_ps::<0xee>(a.0, b.0),
            _mm256_shuffle_ps::<0x44>(a.1, b.1),
            _mm256_shuffle_ps::<0xee>(a.1, b.1),
        ]
    };
    let (upper, lower) = (four(a, b), four(c, d));
    let mut columns = r;
    for j in 0..4 {
        columns[j] = _mm256_permute2f128_ps::<0x20>(upper[j], lower[j]);
        columns[j + 4] = _mm256_permute2f128_ps::<0x31>(upper[j], lower[j]);
    }
    columns
}
