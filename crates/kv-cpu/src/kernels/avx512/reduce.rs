//! Sums over the lanes of several registers at once: one result for each register.

use std::arch::x86_64::*;

use crate::kernels::side_by_side::write;

/// Weight rows whose sums fill a register.
pub(super) const ROWS: usize = 16;
/// Weight rows that are taken together where so many would be too long to be read in order.
pub(super) const FEW: usize = 4;

/// In each quarter of the result, the sums of that quarter of four registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn quarters(r: [__m512i; 4]) -> __m512i {
    let a = _mm512_add_epi32(
        _mm512_unpacklo_epi32(r[0], r[1]),
        _mm512_unpackhi_epi32(r[0], r[1]),
    );
    let b = _mm512_add_epi32(
        _mm512_unpacklo_epi32(r[2], r[3]),
        _mm512_unpackhi_epi32(r[2], r[3]),
    );
    _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
}

/// From the [`quarters`] of sixteen registers, the sums of their lower and of their upper halves.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn halves(q: [__m512i; 4]) -> [__m512i; 2] {
    let a = _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(q[0], q[1]),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(q[0], q[1]),
    );
    let b = _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(q[2], q[3]),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(q[2], q[3]),
    );
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
    ]
}

/// Sixteen half-precision numbers, widened.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn widened(numbers: &[u16; 16]) -> __m512 {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(numbers.as_ptr().cast()) })
}

/// Writes as many of the sums as there is room for.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(sums: __m512, out: &mut [f32]) {
    let mut values = [0.0; ROWS];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), sums) };
    write(&values, out);
}
