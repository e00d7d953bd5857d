//! [`GroupBlock`]: the same block of sixteen weight rows, a row in each lane; and [`StoredGroup`],
//! which gathers it from stored rows, 16 bytes of four rows at a time.
//!
//! A register holds the bytes of every fourth row, so that a 4×4 transpose within each quarter
//! gives words of sixteen rows in order. Knows no format.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use crate::kernels::WeightRows;

/// Number of rows.
pub(super) const ROWS: usize = 16;

/// A block of `BYTES` bytes of sixteen rows. Its words are those of its first bytes on, or begin
/// after `BYTES % 4` bytes in blocks of 32 values; what is not in words are its last bytes or these
/// first ones.
///
/// All functions need AVX-512, which is what makes them unsafe to call.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(in crate::kernels) trait GroupBlock<const BYTES: usize>: Copy {
    /// The words of 16 bytes from byte `at` of the block on.
    unsafe fn words(self, at: usize) -> [__m512i; 4];
    /// The word at byte `at` of the block.
    unsafe fn word(self, at: usize) -> __m512i;
    /// The word at byte `at`, a bit for each of 32 columns, [`by_columns_of_four`].
    unsafe fn bits(self, at: usize) -> __m512i;
    /// The bytes before the words, one or two, f16_to_f32.
    unsafe fn before(self) -> __m512i;
    /// The bytes behind the words, f16_to_f32.
    unsafe fn behind(self) -> __m512i;
}

/// From a bit for each of 32 columns, bit `4 · k + j` of a word, to bit `k` of byte `j`: then a
/// shift brings the bits of a step, four neighbouring columns, to one place of all bytes.
///
/// This turns the five bits of a bit's number by two, exchanging two of them in each step (Warren,
/// Hacker's Delight, 7-3).
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn by_columns_of_four(bits: __m512i) -> __m512i {
    let x = exchanged::<14>(bits, 0x0000_cccc);
    let x = exchanged::<7>(x, 0x00aa_00aa);
    let x = exchanged::<2>(x, 0x0c0c_0c0c);
    exchanged::<1>(x, 0x2222_2222)
}

/// Bits of a mask and those `BY` further, exchanged.
#[inline]
#[target_feature(enable = "avx512f")]
fn exchanged<const BY: u32>(x: __m512i, mask: i32) -> __m512i {
    let differ = _mm512_xor_si512(_mm512_srli_epi32::<BY>(x), x);
    let differ = _mm512_and_si512(differ, _mm512_set1_epi32(mask));
    let x = _mm512_xor_si512(x, differ);
    _mm512_xor_si512(x, _mm512_slli_epi32::<BY>(differ))
}

/// Block `b` of `BYTES` bytes of sixteen rows that lie one after another, all of them readable.
#[derive(Clone, Copy)]
pub(super) struct StoredGroup<'a, const BYTES: usize> {
    start: *const u8,
    row_bytes: usize,
    weights: PhantomData<&'a [u8]>,
}

impl<'a, const BYTES: usize> StoredGroup<'a, BYTES> {
    /// Block `b` of the rows from `row` on.
    ///
    /// # Safety
    /// The weights have these rows, and they have that block.
    #[inline(always)]
    pub(super) unsafe fn of(weights: &WeightRows<'a>, row: usize, b: usize) -> Self {
        let row_bytes = weights.row_bytes;
        debug_assert!((row + ROWS) * row_bytes <= weights.bytes.len());
        debug_assert!((b + 1) * BYTES <= row_bytes);
        Self {
            // SAFETY: inside, as the caller promises.
            start: unsafe { weights.bytes.as_ptr().add(row * row_bytes + b * BYTES) },
            row_bytes,
            weights: PhantomData,
        }
    }

    /// 16 bytes from byte `at` of the block on, of every fourth row from `row` on: a row in each
    /// quarter.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn every_fourth(self, row: usize, at: usize) -> __m512i {
        assert!(row < 4 && at + 16 <= BYTES);
        let (start, row_bytes) = (self.start, self.row_bytes);
        // SAFETY: the bytes are inside the blocks of four of the sixteen rows; loads need no
        // alignment.
        unsafe {
            let of_row = |i: usize| start.add((row + 4 * i) * row_bytes + at).cast::<__m128i>();
            let all = _mm512_castsi128_si512(_mm_loadu_si128(of_row(0)));
            let all = _mm512_inserti32x4::<1>(all, _mm_loadu_si128(of_row(1)));
            let all = _mm512_inserti32x4::<2>(all, _mm_loadu_si128(of_row(2)));
            _mm512_inserti32x4::<3>(all, _mm_loadu_si128(of_row(3)))
        }
    }
}

impl<const BYTES: usize> GroupBlock<BYTES> for StoredGroup<'_, BYTES> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn words(self, at: usize) -> [__m512i; 4] {
        transpose_4x4([
            self.every_fourth(0, at),
            self.every_fourth(1, at),
            self.every_fourth(2, at),
            self.every_fourth(3, at),
        ])
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word(self, at: usize) -> __m512i {
        // Never bytes after the block.
        let back = (at + 16).saturating_sub(BYTES).div_ceil(4);
        // SAFETY: this function needs the same features.
        unsafe { self.words(at - 4 * back)[back] }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn bits(self, at: usize) -> __m512i {
        // SAFETY: this function needs the same features.
        by_columns_of_four(unsafe { self.word(at) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn before(self) -> __m512i {
        let mask = _mm512_set1_epi32((1 << (8 * (BYTES % 4))) - 1);
        // SAFETY: this function needs the same features.
        _mm512_and_si512(unsafe { self.words(0)[0] }, mask)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn behind(self) -> __m512i {
        let other_bits = _mm512_set1_epi32(32 - 8 * (BYTES as i32 % 4));
        // SAFETY: this function needs the same features.
        _mm512_srlv_epi32(unsafe { self.words(BYTES - 16)[3] }, other_bits)
    }
}

/// Turns each quarter: from four words of four rows to four rows of four words.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_4x4(r: [__m512i; 4]) -> [__m512i; 4] {
    let a = _mm512_unpacklo_epi32(r[0], r[1]);
    let b = _mm512_unpackhi_epi32(r[0], r[1]);
    let c = _mm512_unpacklo_epi32(r[2], r[3]);
    let d = _mm512_unpackhi_epi32(r[2], r[3]);
    [
        _mm512_unpacklo_epi64(a, c),
        _mm512_unpackhi_epi64(a, c),
        _mm512_unpacklo_epi64(b, d),
        _mm512_unpackhi_epi64(b, d),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn bits_of_columns_come_together_by_fours() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        for bit in 0..32 {
            let mut words = [0u32; ROWS];
            // SAFETY: AVX-512 is available; 64 readable and writable bytes.
            unsafe {
                let transpose_4x4 = by_columns_of_four(_mm512_set1_epi32((1u32 << bit) as i32));
                _mm512_storeu_si512(words.as_mut_ptr().cast(), transpose_4x4);
            }
            assert_eq!(words, [1 << (8 * (bit % 4) + bit / 4); ROWS], "bit {bit}");
        }
    }
}
