//! Tiles of neighbouring stored weight rows, for GEMV: where the rows begin, and where their sums
//! go.
//!
//! Knows no format.

use crate::kernels::WeightRows;

/// All weight rows in tiles of `ROWS`: where each row begins, and where the tile's sums go. In the
/// last tile the last row stands in for missing ones.
#[inline(always)]
pub(in crate::kernels) fn row_tiles<'a, const ROWS: usize, const BYTES: usize>(
    weights: &WeightRows<'a>,
    out: &'a mut [f32],
) -> impl Iterator<Item = ([*const [u8; BYTES]; ROWS], &'a mut [f32])> {
    let row_bytes = weights.row_bytes.max(1);
    let tiles = weights.bytes.chunks(ROWS * row_bytes);
    let whole = tiles.filter(move |bytes| bytes.len() >= row_bytes);
    whole.zip(out.chunks_mut(ROWS)).map(move |(bytes, out)| {
        let last = bytes.len() / row_bytes - 1;
        let rows = std::array::from_fn(|r| bytes[r.min(last) * row_bytes..].as_ptr().cast());
        (rows, out)
    })
}

/// Writes as many of the sums as `out` has room for.
#[inline(always)]
pub(in crate::kernels) fn write_sums<const ROWS: usize>(sums: &[f32; ROWS], out: &mut [f32]) {
    let n = out.len().min(ROWS);
    out[..n].copy_from_slice(&sums[..n]);
}
