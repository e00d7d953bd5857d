//! Products with unquantized weights ([`gemm_float`]), eight columns at a time, in AVX2.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::kernels::WeightRows;
use crate::kernels::gemm_float::{self, F32Isa, FloatIsa};
use crate::output::OutputColumns;

/// Weight rows that are multiplied with several tokens at a time.
const ROWS: usize = 3;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn matmul(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    // SAFETY: this function has the features of its registers.
    unsafe { gemm_float::matmul::<Avx2Float, ROWS>(weights, acts, tokens, out) }
}

struct Avx2Float;

impl FloatIsa for Avx2Float {
    type Float = __m256;
    type Act = f32;
    const LANES: usize = 8;

    intrinsics! { unsafe;
        zero() -> __m256 = _mm256_setzero_ps();
        load(from: *const f32) -> __m256 = _mm256_loadu_ps(from);
        load_bf16(from: *const u8) -> __m256 = {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        sum(x: __m256) -> f32 = super::vector::sum(x);
    }
}

impl F32Isa for Avx2Float {
    intrinsics! { unsafe;
        load_f16(from: *const u8) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
    }
}
