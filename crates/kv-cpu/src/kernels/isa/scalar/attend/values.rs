//! Weighted values of a KV tile: `out += weights · v`.
//!
//! Invariant: each output is one accumulator over the cells in order. Knows nothing of scores.

use std::ops::Range;

use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::{KV_TILE, ValueLanes};

/// Columns of an output that are summed together.
const N_COLUMNS: usize = 16;

/// See [`TileKernels::accumulate`](crate::attend::tile_kernels::TileKernels). Takes two queries and
/// [`N_COLUMNS`] columns together.
#[inline(always)]
pub(crate) fn accumulate(
    mut out: &mut [f32],
    mut weights: &[[f32; KV_TILE]],
    values: ValueLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    while !weights.is_empty() {
        let n = weights.len().min(2);
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        match n {
            2 => accumulate_of::<2>(out_now, now, &values, prefetch),
            _ => accumulate_of::<1>(out_now, now, &values, prefetch),
        }
        (out, weights) = (out_later, later);
    }
}

/// All columns of `N` queries.
#[inline(always)]
fn accumulate_of<const N: usize>(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    values: &ValueLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / N;
    let mut sum = Columns {
        out,
        v_dim,
        weights,
        lanes: values.lanes.clone(),
        v: values.values,
    };
    let mut at = 0;
    while at + N_COLUMNS <= v_dim {
        sum.accumulate::<N, N_COLUMNS>(at, prefetch);
        at += N_COLUMNS;
    }
    while at < v_dim {
        sum.accumulate::<N, 1>(at, prefetch);
        at += 1;
    }
}

/// Operands of [`accumulate_of`].
struct Columns<'a> {
    out: &'a mut [f32],
    v_dim: usize,
    weights: &'a [[f32; KV_TILE]],
    lanes: Range<usize>,
    v: &'a [f32],
}

impl Columns<'_> {
    /// `W` columns from column `at` on, of `N` queries.
    #[inline(always)]
    fn accumulate<const N: usize, const W: usize>(
        &mut self,
        at: usize,
        prefetch: &mut KvPrefetcher<'_>,
    ) {
        let v_dim = self.v_dim;
        // As an array: `N` is then known to the compiler, which else keeps the sums in memory.
        let Some(weights) = self.weights.first_chunk::<N>() else {
            return;
        };
        let mut sums = [[0.0; W]; N];
        for (i, sum) in sums.iter_mut().enumerate() {
            sum.copy_from_slice(&self.out[i * v_dim + at..][..W]);
        }
        for lane in self.lanes.clone() {
            prefetch.prefetch_next();
            let v = &self.v[lane * v_dim + at..][..W];
            for (sum, weights) in sums.iter_mut().zip(weights) {
                let weight = weights[lane];
                for (s, &v) in sum.iter_mut().zip(v) {
                    *s += weight * v;
                }
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            self.out[i * v_dim + at..][..W].copy_from_slice(sum);
        }
    }
}
