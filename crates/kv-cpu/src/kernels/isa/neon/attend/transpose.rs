//! Transposes keys of a tile in squares of 8 × 8 `f32`.

use std::ops::Range;

use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::isa::neon::transpose as transpose_8x8;
use crate::kernels::isa::scalar::attend::transpose::{Square, transpose_squares};

/// See [`TileKernels::transpose`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "neon")]
pub(super) fn transpose(rows: &[f32], lanes: Range<usize>, k: &mut [[f32; KV_TILE]]) {
    transpose_squares::<8>(rows, lanes, k, |square: Square<'_, 8>| {
        let mut values = [[0.0; 8]; 8];
        for (i, row) in values.iter_mut().enumerate() {
            row.copy_from_slice(&square.rows[i * square.stride..][..8]);
        }
        for (column, values) in square.columns.iter_mut().zip(transpose_8x8(&values)) {
            column[square.lane..][..8].copy_from_slice(&values);
        }
    });
}
