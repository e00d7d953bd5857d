//! Scores of a KV tile: `q · k` with keys as columns.
//!
//! Invariant: each score is one accumulator over the dimensions in order. Knows nothing of
//! visibility.

use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::KV_TILE;

/// See [`TileKernels::scores`](crate::attend::tile_kernels::TileKernels). Takes two queries
/// together: a row of `k` is loaded once for both, and there are enough independent sums to fill
/// the FMA pipes.
#[inline(always)]
pub(crate) fn scores(
    mut q: &[f32],
    k: &[[f32; KV_TILE]],
    mut scores: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    let k_dim = k.len();
    if k_dim == 0 {
        return scores.as_flattened_mut().fill(0.0);
    }
    while !scores.is_empty() {
        let n = scores.len().min(2);
        let (q_now, q_later) = q.split_at(n * k_dim);
        let (now, later) = scores.split_at_mut(n);
        match n {
            2 => scores_of::<2>(q_now, k, now, prefetch),
            _ => scores_of::<1>(q_now, k, now, prefetch),
        }
        (q, scores) = (q_later, later);
    }
}

/// Scores of `N` queries.
#[inline(always)]
fn scores_of<const N: usize>(
    q: &[f32],
    k: &[[f32; KV_TILE]],
    out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    let mut sums = [[0.0; KV_TILE]; N];
    let k_dim = k.len();
    assert_eq!(q.len(), N * k_dim);
    let dims_per_prefetch = (k_dim / KV_TILE).max(1);
    for (chunk, k) in k.chunks(dims_per_prefetch).enumerate() {
        prefetch.prefetch_next();
        for (d, k) in (chunk * dims_per_prefetch..).zip(k) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `i < N` and `d < k_dim`, and `q` has `N * k_dim` values, as asserted. (A
                // bounds check would take longer than the multiply-add.)
                let q = unsafe { *q.get_unchecked(i * k_dim + d) };
                for (s, &k) in sum.iter_mut().zip(k) {
                    *s += q * k;
                }
            }
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = sum;
    }
}
