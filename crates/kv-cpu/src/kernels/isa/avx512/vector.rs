//! [`Avx512`]: sixteen `f32` in one register. Knows no operation.

use std::arch::x86_64::*;

use half::f16;

use crate::kernels::isa::avx2::vector::operations;
use crate::kernels::vector::Vector;

/// AVX-512 is available.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The proof.
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    pub(super) fn new() -> Self {
        Self(())
    }
}

impl Vector<16> for Avx512 {
    type F = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: the features are available, as for all functions here.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m512 {
        // SAFETY: as above; 64 readable bytes, and the load needs no alignment.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; 16]) -> __m512 {
        // SAFETY: as above; `f16` is two bytes, so 32 bytes can be read.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16], x: __m512) {
        // SAFETY: as above; 64 writable bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16], x: __m512) {
        // SAFETY: as above; `f16` is two bytes, so 32 bytes can be written.
        unsafe {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
    }

    operations! { __m512:
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        mul_add(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_abs_ps(x) }
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }

    #[inline(always)]
    fn times_power_of_two(self, x: __m512, n: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_scalef_ps(x, n) }
    }
}
