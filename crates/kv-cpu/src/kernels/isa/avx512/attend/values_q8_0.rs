//! Weighted values of a KV tile of stored `Q8_0`: each value is dequantized in registers once for
//! up to eight queries.
//!
//! Invariant: the bits of values that were dequantized first.

use core::arch::x86_64::*;
use std::ops::Range;

use super::F32_LANES;
use super::scores_q8_0::{BLOCK_BYTES, SCALE_BYTES, load_scales};
use crate::attend::kv_reader::StoredLanes;
use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::isa::scalar::attend::dequantize::BLOCK_LEN;

/// Queries whose outputs are summed together.
const MAX_QUERIES: usize = 8;

/// See [`TileKernels::accumulate`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn accumulate(
    mut out: &mut [f32],
    mut weights: &[[f32; KV_TILE]],
    values: StoredLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let StoredLanes { lanes, stored } = values;
    let v_dim = out.len() / weights.len().max(1);
    assert!(lanes.end <= KV_TILE && v_dim.is_multiple_of(BLOCK_LEN));
    assert!(stored.head.n_bytes >= v_dim / BLOCK_LEN * BLOCK_BYTES);
    let rows = stored.row_pointers();
    while !weights.is_empty() {
        let n = weights.len().min(MAX_QUERIES);
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        for block in 0..v_dim / BLOCK_LEN {
            let of = ValueBlock {
                rows: &rows,
                lanes: lanes.clone(),
                block,
            };
            // SAFETY: each row has this block, as asserted, and there are weights and outputs of
            // `n` queries, which have this block too.
            unsafe {
                match n {
                    8 => accumulate_block::<8>(out_now, now, of, prefetch),
                    7 => accumulate_block::<7>(out_now, now, of, prefetch),
                    6 => accumulate_block::<6>(out_now, now, of, prefetch),
                    5 => accumulate_block::<5>(out_now, now, of, prefetch),
                    4 => accumulate_block::<4>(out_now, now, of, prefetch),
                    3 => accumulate_block::<3>(out_now, now, of, prefetch),
                    2 => accumulate_block::<2>(out_now, now, of, prefetch),
                    _ => accumulate_block::<1>(out_now, now, of, prefetch),
                }
            }
        }
        (out, weights) = (out_later, later);
    }
}

/// One block of the values of some lanes.
struct ValueBlock<'a> {
    rows: &'a [*const u8; KV_TILE],
    lanes: Range<usize>,
    block: usize,
}

/// One block of values for `N` queries.
///
/// # Safety
/// The rows have the block, `weights` and `out` have `N` queries, `out` has the block, and no lane
/// is beyond the tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn accumulate_block<const N: usize>(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    of: ValueBlock<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let ValueBlock { rows, lanes, block } = of;
    let v_dim = out.len() / N;
    let out = out.as_mut_ptr().wrapping_add(block * BLOCK_LEN);
    let mut scales = [0.0f32; KV_TILE];
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    // SAFETY: as the caller promises; the scales are two registers of `f32`.
    unsafe {
        let [low, high] = load_scales(rows, block * BLOCK_BYTES);
        _mm512_storeu_ps(scales.as_mut_ptr(), low);
        _mm512_storeu_ps(scales.as_mut_ptr().add(F32_LANES), high);
        for (i, sums) in sums.iter_mut().enumerate() {
            let from = out.add(i * v_dim);
            *sums = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(F32_LANES))];
        }
    }
    for lane in lanes {
        prefetch.prefetch_next();
        // SAFETY: as the caller promises.
        let v = unsafe {
            let from = rows
                .get_unchecked(lane)
                .add(block * BLOCK_BYTES + SCALE_BYTES);
            let scale = _mm512_set1_ps(*scales.get_unchecked(lane));
            [
                _mm512_mul_ps(scale, load_i8(from)),
                _mm512_mul_ps(scale, load_i8(from.add(F32_LANES))),
            ]
        };
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as the caller promises.
            let weight = _mm512_set1_ps(unsafe { *weights.get_unchecked(i).get_unchecked(lane) });
            sums[0] = _mm512_fmadd_ps(weight, v[0], sums[0]);
            sums[1] = _mm512_fmadd_ps(weight, v[1], sums[1]);
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe {
            let to = out.add(i * v_dim);
            _mm512_storeu_ps(to, sums[0]);
            _mm512_storeu_ps(to.add(F32_LANES), sums[1]);
        }
    }
}

/// Sixteen signed bytes as `f32`.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_i8(from: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe {
        _mm_loadu_si128(from.cast())
    }))
}
