//! [`Ymm`]: eight lanes in a YMM register. Made by code that was compiled for AVX2 and FMA only.

use core::arch::x86_64::*;

use crate::attend::eight_lanes::{Fold, Lanes, N_LANES};
use crate::kernels::isa::scalar::attend::softmax::ROUND_TO_INT;

/// A register; it exists only where the CPU has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(super) struct Ymm(__m256);

impl Ymm {
    /// Four lanes of each of two registers.
    #[inline(always)]
    fn fours(self, other: Self, how: Fold) -> Self {
        let (a, b) = (self.0, other.0);
        // SAFETY: the CPU has AVX2, since `self` exists.
        let [upper, lower] = unsafe {
            [
                _mm256_permute2f128_ps::<0x31>(a, b),
                _mm256_permute2f128_ps::<0x20>(a, b),
            ]
        };
        Self(upper).fold_with(Self(lower), how)
    }

    /// Two lanes of each of four registers, of which two have four each.
    #[inline(always)]
    fn twos(self, other: Self, how: Fold) -> Self {
        // SAFETY: the CPU has AVX2, since `self` exists.
        let [upper, lower] = unsafe {
            let (a, b) = (_mm256_castps_pd(self.0), _mm256_castps_pd(other.0));
            let (upper, lower) = (_mm256_unpackhi_pd(a, b), _mm256_unpacklo_pd(a, b));
            [_mm256_castpd_ps(upper), _mm256_castpd_ps(lower)]
        };
        Self(upper).fold_with(Self(lower), how)
    }

    /// One lane of each of eight registers, of which four have two each.
    #[inline(always)]
    fn ones(self, other: Self, how: Fold) -> Self {
        let (a, b) = (self.0, other.0);
        // SAFETY: the CPU has AVX2, since `self` exists.
        let [upper, lower] = unsafe {
            [
                _mm256_shuffle_ps::<0xdd>(a, b),
                _mm256_shuffle_ps::<0x88>(a, b),
            ]
        };
        Self(upper).fold_with(Self(lower), how)
    }

    /// All lanes with those of `lower`.
    #[inline(always)]
    fn fold_with(self, lower: Self, how: Fold) -> Self {
        match how {
            Fold::Larger => self.larger(lower),
            Fold::Sum => self.add(lower),
        }
    }
}

impl Lanes for Ymm {
    type Mask = Self;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the CPU has AVX2, as the caller promises.
        Self(unsafe { _mm256_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        Self(unsafe { _mm256_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises; the CPU has AVX2, since `self` exists.
        unsafe { _mm256_storeu_ps(to, self.0) };
    }

    #[inline(always)]
    unsafe fn mask(bits: u32) -> Self {
        // SAFETY: the CPU has AVX2, as the caller promises.
        Self(unsafe {
            let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), each);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each))
        })
    }

    #[inline(always)]
    fn or_else(self, mask: Self, others: Self) -> Self {
        // SAFETY: the CPU has AVX2, since `self` exists.
        Self(unsafe { _mm256_blendv_ps(others.0, self.0, mask.0) })
    }

    #[inline(always)]
    fn multiply_add(self, by: Self, to: Self) -> Self {
        // SAFETY: the CPU has FMA, since `self` exists.
        Self(unsafe { _mm256_fmadd_ps(self.0, by.0, to.0) })
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the CPU has AVX2, since `self` exists.
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        // SAFETY: the CPU has AVX2, since `self` exists.
        Self(unsafe { _mm256_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        // `vmaxps` returns its second operand if one is NaN.
        // SAFETY: the CPU has AVX2, since `self` exists.
        Self(unsafe { _mm256_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn times_power(self, rounded: Self) -> Self {
        // SAFETY: the CPU has AVX2, since `self` exists.
        Self(unsafe {
            let zero = _mm256_set1_epi32(ROUND_TO_INT.to_bits() as i32);
            let n = _mm256_sub_epi32(_mm256_castps_si256(rounded.0), zero);
            let power = |n: __m256i| {
                let exponent = _mm256_add_epi32(n, _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            };
            let half = _mm256_srai_epi32::<1>(n);
            let first = _mm256_mul_ps(self.0, power(half));
            _mm256_mul_ps(first, power(_mm256_sub_epi32(n, half)))
        })
    }

    #[inline(always)]
    fn fold(r: [Self; N_LANES], how: Fold) -> Self {
        let a = r[0].fours(r[4], how).twos(r[1].fours(r[5], how), how);
        let b = r[2].fours(r[6], how).twos(r[3].fours(r[7], how), how);
        a.ones(b, how)
    }
}
