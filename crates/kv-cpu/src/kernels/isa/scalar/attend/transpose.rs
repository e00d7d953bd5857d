//! Transposes keys of a tile: rows `[lanes, k_dim]` become columns `[k_dim, KV_TILE]`.
//!
//! Only moves values. Knows nothing of KV types.

use std::ops::Range;

use crate::attend::tile_kernels::KV_TILE;

/// See [`TileKernels::transpose`](crate::attend::tile_kernels::TileKernels): value by value.
pub(crate) fn transpose(rows: &[f32], lanes: Range<usize>, k: &mut [[f32; KV_TILE]]) {
    let k_dim = k.len();
    for (row, lane) in rows.chunks_exact(k_dim.max(1)).zip(lanes) {
        for (column, value) in k.iter_mut().zip(row) {
            column[lane] = *value;
        }
    }
}

/// A square of `N` lanes and `N` dimensions to transpose.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) struct Square<'a, const N: usize> {
    /// From the first value of the first lane's row on.
    pub(crate) rows: &'a [f32],
    /// Values from one row to the next.
    pub(crate) stride: usize,
    pub(crate) columns: &'a mut [[f32; KV_TILE]; N],
    /// The first lane.
    pub(crate) lane: usize,
}

/// Transposes by `transpose_square` whatever fills squares of `N`, and the rest value by value.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(crate) fn transpose_squares<const N: usize>(
    rows: &[f32],
    lanes: Range<usize>,
    k: &mut [[f32; KV_TILE]],
    transpose_square: impl Fn(Square<'_, N>),
) {
    let k_dim = k.len();
    if !lanes.start.is_multiple_of(N) || !lanes.len().is_multiple_of(N) || lanes.end > KV_TILE {
        return transpose(rows, lanes, k);
    }
    let (squares, rest) = k.as_chunks_mut::<N>();
    let n_whole = squares.len() * N;
    for (i, lane) in lanes.clone().step_by(N).enumerate() {
        let rows = &rows[i * N * k_dim..(i + 1) * N * k_dim];
        for (s, columns) in squares.iter_mut().enumerate() {
            transpose_square(Square {
                rows: &rows[s * N..],
                stride: k_dim,
                columns,
                lane,
            });
        }
    }
    for (row, lane) in rows.chunks_exact(k_dim.max(1)).zip(lanes) {
        for (column, value) in rest.iter_mut().zip(&row[n_whole..]) {
            column[lane] = *value;
        }
    }
}
