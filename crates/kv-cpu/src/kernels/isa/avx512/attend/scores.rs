//! Scores of a KV tile: `q · k` with keys as columns, up to eight queries at a time.

use core::arch::x86_64::*;

use super::F32_LANES;
use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::KV_TILE;

/// Queries whose scores are summed together: two ZMM accumulators each.
const MAX_QUERIES: usize = 8;

/// See [`TileKernels::scores`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "avx512f")]
pub(super) fn scores(
    mut q: &[f32],
    k: &[[f32; KV_TILE]],
    mut out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    while !out.is_empty() {
        let n = out.len().min(MAX_QUERIES);
        let (q_now, q_later) = q.split_at(n * k.len());
        let (now, later) = out.split_at_mut(n);
        match n {
            8 => scores_of::<8>(q_now, k, now, prefetch),
            7 => scores_of::<7>(q_now, k, now, prefetch),
            6 => scores_of::<6>(q_now, k, now, prefetch),
            5 => scores_of::<5>(q_now, k, now, prefetch),
            4 => scores_of::<4>(q_now, k, now, prefetch),
            3 => scores_of::<3>(q_now, k, now, prefetch),
            2 => scores_of::<2>(q_now, k, now, prefetch),
            _ => scores_of::<1>(q_now, k, now, prefetch),
        }
        (q, out) = (q_later, later);
    }
}

/// Scores of `N` queries.
#[inline]
#[target_feature(enable = "avx512f")]
fn scores_of<const N: usize>(
    q: &[f32],
    k: &[[f32; KV_TILE]],
    out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    let k_dim = k.len();
    assert!(q.len() == N * k_dim && out.len() == N);
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    let dims_per_prefetch = (k_dim / KV_TILE).max(1);
    let mut d = 0;
    for chunk in k.chunks(dims_per_prefetch) {
        prefetch.prefetch_next();
        for column in chunk {
            // SAFETY: a column is two registers of `f32`.
            let k = unsafe {
                let k = column.as_ptr();
                [_mm512_loadu_ps(k), _mm512_loadu_ps(k.add(F32_LANES))]
            };
            for (i, [low, high]) in sums.iter_mut().enumerate() {
                // SAFETY: `i < N` and `d < k_dim`, and `q` has `N * k_dim` values, as asserted.
                let q = _mm512_set1_ps(unsafe { *q.get_unchecked(i * k_dim + d) });
                *low = _mm512_fmadd_ps(q, k[0], *low);
                *high = _mm512_fmadd_ps(q, k[1], *high);
            }
            d += 1;
        }
    }
    for (out, [low, high]) in out.iter_mut().zip(sums) {
        // SAFETY: a query's scores are two registers of `f32`.
        unsafe {
            _mm512_storeu_ps(out.as_mut_ptr(), low);
            _mm512_storeu_ps(out.as_mut_ptr().add(F32_LANES), high);
        }
    }
}
