//! Dequantizes stored K and V with AVX2: F16 by `vcvtph2ps`, `IQ4_NL` by a byte shuffle, the rest
//! by the portable functions.

use core::arch::x86_64::*;

use kv_core::block::IQ4_VALUES;

use crate::attend::portable::dequantize::{self as portable, BLOCK_LEN, blocks, dequantize_table};

dequantize_table!("avx2,f16c", f16, outlined portable::q8_0, iq4_nl);

#[target_feature(enable = "f16c")]
#[inline]
pub(in crate::attend) fn half(bytes: [u8; 2]) -> f32 {
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
    portable::f16(bytes_left, values_left);
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
pub(in crate::attend) fn iq4_nl(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |[d0, d1, qs @ ..]: &[u8; 18], values| {
        let d = half([*d0, *d1]);
        let entries = iq4_entries(qs);
        for (entry, v) in entries.iter().zip(values) {
            *v = d * f32::from(*entry);
        }
    });
}

/// The table entries of an `IQ4_NL` block, looked up by a byte shuffle.
#[target_feature(enable = "ssse3")]
#[inline]
fn iq4_entries(qs: &[u8; 16]) -> [i8; BLOCK_LEN] {
    let mut entries = [0; BLOCK_LEN];
    let (low, high) = entries.split_at_mut(16);
    // SAFETY: 16 bytes are read from each of two arrays of 16 bytes.
    let (table, qs) = unsafe {
        (
            _mm_loadu_si128(IQ4_VALUES.as_ptr().cast()),
            _mm_loadu_si128(qs.as_ptr().cast()),
        )
    };
    let mask = _mm_set1_epi8(15);
    let indices = [
        (low, _mm_and_si128(qs, mask)),
        (high, _mm_and_si128(_mm_srli_epi16::<4>(qs), mask)),
    ];
    for (to, indices) in indices {
        // SAFETY: each half of the entries has 16 bytes.
        unsafe {
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_shuffle_epi8(table, indices));
        }
    }
    entries
}
