//! Scores of a KV tile: `q · k` with keys as columns, up to three queries at a time.

use super::{Lanes, N_LANES, N_VECTORS};
use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::KV_TILE;

/// Queries whose scores are summed together: with four vectors of sums each, 12 of AVX2's 16
/// registers or 24 of NEON's 32.
const MAX_QUERIES: usize = 3;

/// See [`TileKernels::scores`](crate::attend::tile_kernels::TileKernels).
///
/// # Safety
/// The CPU has the features of `V`.
#[inline(always)]
pub(crate) unsafe fn scores<V: Lanes>(
    mut q: &[f32],
    k: &[[f32; KV_TILE]],
    mut out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    while !out.is_empty() {
        // Two and two, not three and one: a lone query waits for its own sums.
        let n = match out.len() {
            4 => 2,
            left => left.min(MAX_QUERIES),
        };
        let (q_now, q_later) = q.split_at(n * k.len());
        let (now, later) = out.split_at_mut(n);
        // SAFETY: the CPU has the features, as the caller promises.
        unsafe {
            match n {
                3 => scores_of::<V, 3>(q_now, k, now, prefetch),
                2 => scores_of::<V, 2>(q_now, k, now, prefetch),
                _ => scores_of::<V, 1>(q_now, k, now, prefetch),
            }
        }
        (q, out) = (q_later, later);
    }
}

/// Scores of `N` queries.
///
/// # Safety
/// The CPU has the features of `V`.
#[inline(always)]
unsafe fn scores_of<V: Lanes, const N: usize>(
    q: &[f32],
    k: &[[f32; KV_TILE]],
    out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    let k_dim = k.len();
    assert!(q.len() == N * k_dim && out.len() == N);
    // SAFETY: the CPU has the features, as the caller promises.
    let zero = unsafe { V::splat(0.0) };
    let mut sums = [[zero; N_VECTORS]; N];
    let dims_per_prefetch = (k_dim / KV_TILE).max(1);
    let mut d = 0;
    for chunk in k.chunks(dims_per_prefetch) {
        prefetch.prefetch_next();
        for column in chunk {
            let mut q_of = [zero; N];
            for (i, q_of) in q_of.iter_mut().enumerate() {
                // SAFETY: the CPU has the features; `i < N` and `d < k_dim`, and `q` has
                // `N * k_dim` values, as asserted.
                *q_of = unsafe { V::splat(*q.get_unchecked(i * k_dim + d)) };
            }
            for at in 0..N_VECTORS {
                // SAFETY: the CPU has the features; a column is `N_VECTORS` vectors.
                let k = unsafe { V::load(column.as_ptr().add(at * N_LANES)) };
                for (sums, q) in sums.iter_mut().zip(q_of) {
                    sums[at] = q.multiply_add(k, sums[at]);
                }
            }
            d += 1;
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (at, sum) in sums.into_iter().enumerate() {
            // SAFETY: a query's scores are `N_VECTORS` vectors.
            unsafe { sum.store(out.as_mut_ptr().add(at * N_LANES)) };
        }
    }
}
