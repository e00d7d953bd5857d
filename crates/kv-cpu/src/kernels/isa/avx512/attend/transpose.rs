//! Transposes keys of a tile: `f32` in squares of 16 × 16, stored `F16` in squares of 8 × 8 16-bit
//! values within 128-bit quarters.
//!
//! Only moves values (and widens `F16`, exactly).

use core::arch::x86_64::*;
use std::ops::Range;

use super::F32_LANES;
use crate::attend::kv_tiles::StoredTile;
use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::isa::scalar::attend::transpose::{Square, transpose_squares};

/// Columns that [`columns_f16`] makes at a time.
pub(crate) const F16_COLUMNS: usize = 8;

/// See [`TileKernels::transpose`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(rows: &[f32], lanes: Range<usize>, k: &mut [[f32; KV_TILE]]) {
    transpose_squares::<16>(rows, lanes, k, |square: Square<'_, 16>| {
        let row = |i: usize| {
            let values: &[f32] = &square.rows[i * square.stride..][..16];
            // SAFETY: 16 values are read from a slice of 16.
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        };
        let transposed = transpose_16x16(std::array::from_fn(row));
        for (column, values) in square.columns.iter_mut().zip(transposed) {
            let to: &mut [f32] = &mut column[square.lane..][..16];
            // SAFETY: 16 values are written to a slice of 16.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) };
        }
    });
}

/// Interleaves pairs of values, then pairs of pairs within 128-bit quarters, then the quarters.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_16x16(r: [__m512; 16]) -> [__m512; 16] {
    let pairs: [__m512; 16] = std::array::from_fn(|i| match i % 2 {
        0 => _mm512_unpacklo_ps(r[i], r[i + 1]),
        _ => _mm512_unpackhi_ps(r[i - 1], r[i]),
    });
    // Quarter `l` of `fours[4 * g + c]` is column `4 * l + c` of rows `4 * g ..`.
    let fours: [__m512; 16] = std::array::from_fn(|i| {
        let first = i / 4 * 4 + i % 4 / 2;
        let [a, b] = [pairs[first], pairs[first + 2]].map(|x| _mm512_castps_pd(x));
        _mm512_castpd_ps(match i % 2 {
            0 => _mm512_unpacklo_pd(a, b),
            _ => _mm512_unpackhi_pd(a, b),
        })
    });
    std::array::from_fn(|column| {
        let [a, b, c, d] = std::array::from_fn(|g| fours[4 * g + column % 4]);
        // Even or odd quarters of two registers; of these the first or the second.
        let [ab, cd] = match column / 4 % 2 {
            0 => [
                _mm512_shuffle_f32x4::<0x88>(a, b),
                _mm512_shuffle_f32x4::<0x88>(c, d),
            ],
            _ => [
                _mm512_shuffle_f32x4::<0xdd>(a, b),
                _mm512_shuffle_f32x4::<0xdd>(c, d),
            ],
        };
        match column / 8 {
            0 => _mm512_shuffle_f32x4::<0x88>(ab, cd),
            _ => _mm512_shuffle_f32x4::<0xdd>(ab, cd),
        }
    })
}

/// Stored `F16` keys as `f32` columns, eight dimensions of 32 cells at a time. Each register loads
/// four cells that are eight lanes apart, so that transposing 8 × 8 squares within its quarters
/// leaves the cells in order.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn columns_f16(keys: StoredTile<'_>, k: &mut [[f32; KV_TILE]]) {
    let rows = keys.row_pointers();
    assert!(keys.head.n_bytes >= k.len() * size_of::<u16>());
    for (chunk, columns) in k.as_chunks_mut::<F16_COLUMNS>().0.iter_mut().enumerate() {
        let at = chunk * F16_COLUMNS * size_of::<u16>();
        let mut eight = [_mm512_setzero_si512(); F16_COLUMNS];
        for (row, eight) in eight.iter_mut().enumerate() {
            // SAFETY: rows have as many values as there are columns, so these eight are inside.
            *eight = unsafe { load_quarters::<8>(&rows, row, at) };
        }
        for (column, halves) in columns.iter_mut().zip(transpose_8x8_u16(eight)) {
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
            let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves));
            // SAFETY: a column is two registers of `f32`.
            unsafe {
                _mm512_storeu_ps(column.as_mut_ptr(), low);
                _mm512_storeu_ps(column.as_mut_ptr().add(F32_LANES), high);
            }
        }
    }
}

/// Loads the 16 bytes at offset `at` of four rows, `first` and those `STRIDE` lanes further on.
///
/// # Safety
/// The rows have these bytes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_quarters<const STRIDE: usize>(
    rows: &[*const u8; KV_TILE],
    first: usize,
    at: usize,
) -> __m512i {
    // SAFETY: as the caller promises.
    let [a, b, c, d] = unsafe {
        [
            _mm_loadu_si128(rows[first].add(at).cast()),
            _mm_loadu_si128(rows[first + STRIDE].add(at).cast()),
            _mm_loadu_si128(rows[first + 2 * STRIDE].add(at).cast()),
            _mm_loadu_si128(rows[first + 3 * STRIDE].add(at).cast()),
        ]
    };
    let all = _mm512_castsi128_si512(a);
    let all = _mm512_mask_broadcast_i32x4(all, 0x00f0, b);
    let all = _mm512_mask_broadcast_i32x4(all, 0x0f00, c);
    _mm512_mask_broadcast_i32x4(all, 0xf000, d)
}

/// Transposes 8 × 8 squares of 16-bit values within the 128-bit quarters of eight registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transpose_8x8_u16(r: [__m512i; 8]) -> [__m512i; 8] {
    let mut twos = r;
    for i in [0, 2, 4, 6] {
        twos[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
    }
    let mut fours = twos;
    for (i, a) in [(0, 0), (2, 1), (4, 4), (6, 5)] {
        fours[i] = _mm512_unpacklo_epi32(twos[a], twos[a + 2]);
        fours[i + 1] = _mm512_unpackhi_epi32(twos[a], twos[a + 2]);
    }
    let mut eights = fours;
    for (i, a) in [(0, 0), (2, 1), (4, 2), (6, 3)] {
        eights[i] = _mm512_unpacklo_epi64(fours[a], fours[a + 4]);
        eights[i + 1] = _mm512_unpackhi_epi64(fours[a], fours[a + 4]);
    }
    eights
}
