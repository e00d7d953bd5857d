//! Dequantizes stored K and V with AVX2: F16 by `vcvtph2ps`, `IQ4_NL` by a byte shuffle, the rest
//! by the scalar functions.

use core::arch::x86_64::*;

use crate::kernels::isa::avx2::iq4_entries;
use crate::kernels::isa::scalar::attend::dequantize::{self as scalar, blocks, dequantize_table};

dequantize_table!("avx2,f16c", f16, outlined scalar::q8_0, iq4_nl);

#[target_feature(enable = "f16c")]
#[inline]
pub(crate) fn half(bytes: [u8; 2]) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(
        u16::from_le_bytes(bytes),
    ))))
}

#[target_feature(enable = "f16c")]
#[inline]
fn f16(bytes: &[u8], values: &mut [f32]) {
    let (bytes, bytes_left) = bytes.as_chunks::<16>();
    let (values, values_left) = values.as_chunks_mut::<8>();
    for (bytes, values) in bytes.iter().zip(values) {
        // SAFETY: 16 bytes are read and 8 values written; neither needs alignment.
        unsafe {
            let wide = _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast()));
            _mm256_storeu_ps(values.as_mut_ptr(), wide);
        }
    }
    scalar::f16(bytes_left, values_left);
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
pub(crate) fn iq4_nl(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |block: &[u8; 18], values| {
        let d = half([block[0], block[1]]);
        for (entry, v) in iq4_entries(block).iter().zip(values) {
            *v = d * f32::from(*entry);
        }
    });
}
