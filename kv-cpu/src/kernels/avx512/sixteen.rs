//! [`Sixteen`]: the same block of sixteen weight rows, read 16 bytes of four rows at a time.
//!
//! A register holds the bytes of every fourth row, so that turning four of them within their quarters
//! gives words of sixteen rows in order. Knows no format.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use crate::kernels::WeightRows;
use crate::kernels::fetch::fetch_line;

/// Number of rows.
pub(super) const ROWS: usize = 16;

/// Block `b` of `BYTES` bytes of sixteen rows that lie one after another, all of them readable.
#[derive(Clone, Copy)]
pub(super) struct Sixteen<'a, const BYTES: usize> {
    start: *const u8,
    row_bytes: usize,
    weights: PhantomData<&'a [u8]>,
}

impl<'a, const BYTES: usize> Sixteen<'a, BYTES> {
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

    /// The words of 16 bytes from byte `at` of the block on, each of all rows.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn words(self, at: usize) -> [__m512i; 4] {
        turned([
            self.every_fourth(0, at),
            self.every_fourth(1, at),
            self.every_fourth(2, at),
            self.every_fourth(3, at),
        ])
    }

    /// 16 bytes from byte `at` of the block on, of every fourth row from `row` on: a row in each quarter.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn every_fourth(self, row: usize, at: usize) -> __m512i {
        assert!(row < 4 && at + 16 <= BYTES);
        let (start, row_bytes) = (self.start, self.row_bytes);
        // SAFETY: the bytes are inside the blocks of four of the sixteen rows; loads need no alignment.
        unsafe {
            let of_row = |i: usize| start.add((row + 4 * i) * row_bytes + at).cast::<__m128i>();
            let all = _mm512_castsi128_si512(_mm_loadu_si128(of_row(0)));
            let all = _mm512_inserti32x4::<1>(all, _mm_loadu_si128(of_row(1)));
            let all = _mm512_inserti32x4::<2>(all, _mm_loadu_si128(of_row(2)));
            _mm512_inserti32x4::<3>(all, _mm_loadu_si128(of_row(3)))
        }
    }

    /// Asks for what is so many bytes further in each row.
    #[inline(always)]
    pub(super) fn fetch(self, further: usize) {
        for row in 0..ROWS {
            fetch_line(self.start.wrapping_add(row * self.row_bytes + further));
        }
    }
}

/// Turns each quarter: from four words of four rows to four rows of four words.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn turned(r: [__m512i; 4]) -> [__m512i; 4] {
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
