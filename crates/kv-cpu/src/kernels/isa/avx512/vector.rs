//! [`Avx512`]: sixteen `f32` in one register. Knows no operation.

use std::arch::x86_64::*;

use half::f16;

use crate::kernels::vector::{Transpose, Vector};

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

    intrinsics! { proof;
        splat(self, x: f32) -> __m512 = _mm512_set1_ps(x);
        load(self, from: &[f32; 16]) -> __m512 = _mm512_loadu_ps(from.as_ptr());
        load_f16(self, from: &[f16; 16]) -> __m512 =
            _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
        store(self, to: &mut [f32; 16], x: __m512) -> () = _mm512_storeu_ps(to.as_mut_ptr(), x);
        store_f16(self, to: &mut [f16; 16], x: __m512) -> () = {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves)
        };
        add(self, a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(self, a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(self, a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(self, a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        max(self, a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(self, a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        abs(self, x: __m512) -> __m512 = _mm512_abs_ps(x);
        round(self, x: __m512) -> __m512 =
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        times_power_of_two(self, x: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(x, n);
    }
}

impl Transpose<16> for Avx512 {
    intrinsics! { proof;
        transpose(self, rows: [__m512; 16]) -> [__m512; 16] = super::scan::transpose(rows);
    }
}
