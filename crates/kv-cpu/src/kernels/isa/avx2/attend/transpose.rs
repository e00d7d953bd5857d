//! Transposes keys of a tile in squares of 8 × 8 `f32`.

use core::arch::x86_64::*;
use std::ops::Range;

use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::isa::scalar::attend::transpose::{Square, transpose_squares};

/// See [`TileKernels::transpose`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "avx2")]
pub(super) fn transpose(rows: &[f32], lanes: Range<usize>, k: &mut [[f32; KV_TILE]]) {
    transpose_squares::<8>(rows, lanes, k, |square: Square<'_, 8>| {
        let row = |i: usize| {
            let values: &[f32] = &square.rows[i * square.stride..][..8];
            // SAFETY: 8 values are read from a slice of 8.
            unsafe { _mm256_loadu_ps(values.as_ptr()) }
        };
        let transposed = transpose_8x8(std::array::from_fn(row));
        for (column, values) in square.columns.iter_mut().zip(transposed) {
            let to: &mut [f32] = &mut column[square.lane..][..8];
            // SAFETY: 8 values are written to a slice of 8.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), values) };
        }
    });
}

/// Interleaves pairs of values, then pairs of pairs within 128-bit halves, then the halves.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8x8(r: [__m256; 8]) -> [__m256; 8] {
    let pairs: [__m256; 8] = std::array::from_fn(|i| match i % 2 {
        0 => _mm256_unpacklo_ps(r[i], r[i + 1]),
        _ => _mm256_unpackhi_ps(r[i - 1], r[i]),
    });
    let fours: [__m256; 8] = std::array::from_fn(|i| {
        let first = i / 4 * 4 + i % 4 / 2;
        let [a, b] = [pairs[first], pairs[first + 2]].map(|x| _mm256_castps_pd(x));
        _mm256_castpd_ps(match i % 2 {
            0 => _mm256_unpacklo_pd(a, b),
            _ => _mm256_unpackhi_pd(a, b),
        })
    });
    std::array::from_fn(|column| {
        let (a, b) = (fours[column % 4], fours[4 + column % 4]);
        match column / 4 {
            0 => _mm256_permute2f128_ps::<0x20>(a, b),
            _ => _mm256_permute2f128_ps::<0x31>(a, b),
        }
    })
}
