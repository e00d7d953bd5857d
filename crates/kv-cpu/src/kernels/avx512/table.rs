//! Tables of sixteen values, to which weights are indices.

use std::arch::x86_64::*;

/// The values with these indices, plus the offset that makes them unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn entries(table: &[i8; 16], offset: i32, indices: __m512i) -> __m512i {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let table = _mm_add_epi8(table, _mm_set1_epi8(offset as i8));
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), indices)
}
