//! Dequantizes stored K and V with AVX-512: F16 and `Q8_0` sixteen values at a time, `IQ4_NL` as
//! AVX2 does, the rest by the scalar functions.

use core::arch::x86_64::*;

use crate::kernels::isa::avx2::attend::dequantize::{half, iq4_nl};
use crate::kernels::isa::scalar::attend::dequantize::{
    self as scalar, BLOCK_LEN, dequantize_table,
};

dequantize_table!(
    "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq",
    f16,
    direct q8_0,
    iq4_nl
);

#[target_feature(enable = "f16c,avx512f")]
#[inline]
fn f16(bytes: &[u8], values: &mut [f32]) {
    let (bytes, bytes_left) = bytes.as_chunks::<32>();
    let (values, values_left) = values.as_chunks_mut::<16>();
    for (bytes, values) in bytes.iter().zip(values) {
        // SAFETY: 32 bytes are read and 16 values written; neither needs alignment.
        unsafe {
            let wide = _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast()));
            _mm512_storeu_ps(values.as_mut_ptr(), wide);
        }
    }
    scalar::f16(bytes_left, values_left);
}

#[target_feature(enable = "f16c,avx512f")]
#[inline]
fn q8_0(bytes: &[u8], values: &mut [f32]) {
    let (blocks, _) = bytes.as_chunks::<34>();
    for ([d0, d1, qs @ ..], values) in blocks.iter().zip(values.as_chunks_mut::<BLOCK_LEN>().0) {
        let d = _mm512_set1_ps(half([*d0, *d1]));
        let (qs, _) = qs.as_chunks::<16>();
        let (values, _) = values.as_chunks_mut::<16>();
        for (qs, values) in qs.iter().zip(values) {
            // SAFETY: 16 bytes are read and 16 values written; neither needs alignment.
            unsafe {
                let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(qs.as_ptr().cast()));
                let wide = _mm512_mul_ps(d, _mm512_cvtepi32_ps(wide));
                _mm512_storeu_ps(values.as_mut_ptr(), wide);
            }
        }
    }
}
