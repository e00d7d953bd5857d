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

    /// Every fourth row from `row` on.
    #[inline(always)]
    pub(super) fn four(self, row: usize) -> Four<'a, BYTES> {
        assert!(row < 4);
        Four(Self {
            // SAFETY: one of the sixteen rows.
            start: unsafe { self.start.add(row * self.row_bytes) },
            ..self
        })
    }

    /// The words of 16 bytes from byte `at` of the block on, each of all rows.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn words(self, at: usize) -> [__m512i; 4] {
        turned([
            self.four(0).load(at),
            self.four(1).load(at),
            self.four(2).load(at),
            self.four(3).load(at),
        ])
    }

    /// Asks for what is so many bytes further in each row.
    #[inline(always)]
    pub(super) fn fetch(self, further: usize) {
        for row in 0..ROWS {
            fetch_line(self.start.wrapping_add(row * self.row_bytes + further));
        }
    }
}

/// The same block of every fourth row of [`Sixteen`].
#[derive(Clone, Copy)]
pub(super) struct Four<'a, const BYTES: usize>(Sixteen<'a, BYTES>);

impl<const BYTES: usize> Four<'_, BYTES> {
    /// 16 bytes from byte `at` of the block on, a row in each quarter.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn load(self, at: usize) -> __m512i {
        assert!(at + 16 <= BYTES);
        let Sixteen {
            start, row_bytes, ..
        } = self.0;
        // SAFETY: the bytes are inside the blocks of four of the sixteen rows; loads need no alignment.
        unsafe {
            let of_row = |row: usize| start.add(4 * row * row_bytes + at).cast::<__m128i>();
            let all = _mm512_castsi128_si512(_mm_loadu_si128(of_row(0)));
            let all = _mm512_inserti32x4::<1>(all, _mm_loadu_si128(of_row(1)));
            let all = _mm512_inserti32x4::<2>(all, _mm_loadu_si128(of_row(2)));
            _mm512_inserti32x4::<3>(all, _mm_loadu_si128(of_row(3)))
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
