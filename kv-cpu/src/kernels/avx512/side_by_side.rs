//! Sixteen weight rows side by side: where they begin, and where their sums go.
//!
//! Knows no format.

use std::arch::x86_64::*;

use super::ahead::ROWS;
use crate::kernels::WeightRows;

/// All weight rows, sixteen at a time: where each begins, and where the sums go. The last row stands
/// in for those that are missing.
#[inline(always)]
pub(super) fn by_sixteen<'a, const BYTES: usize>(
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

/// Writes as many of the sums as there is room for.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(sums: __m512, out: &mut [f32]) {
    let mut values = [0.0; ROWS];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), sums) };
    let n = out.len().min(ROWS);
    out[..n].copy_from_slice(&values[..n]);
}
