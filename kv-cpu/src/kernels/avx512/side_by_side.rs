//! Sixteen weight rows side by side: where they begin, and where their sums go.
//!
//! Knows no format.

use std::arch::x86_64::*;

use super::ahead::ROWS;
use crate::kernels::WeightRows;

/// All weight rows, sixteen at a time: `sums` gives those of the rows that begin with these blocks.
/// The last row stands in for those that are missing.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn by_sixteen<const BYTES: usize>(
    weights: &WeightRows<'_>,
    out: &mut [f32],
    sums: impl Fn(&[*const [u8; BYTES]; ROWS]) -> __m512,
) {
    let row_bytes = weights.row_bytes.max(1);
    let tiles = weights.bytes.chunks(ROWS * row_bytes);
    for (bytes, out) in tiles.zip(out.chunks_mut(ROWS)) {
        if bytes.len() < row_bytes {
            return;
        }
        let last = bytes.len() / row_bytes - 1;
        let rows: [*const [u8; BYTES]; ROWS] =
            std::array::from_fn(|r| bytes[r.min(last) * row_bytes..].as_ptr().cast());
        let mut values = [0.0; ROWS];
        // SAFETY: 64 writable bytes; the store needs no alignment.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), sums(&rows)) };
        let n = out.len();
        out.copy_from_slice(&values[..n]);
    }
}
