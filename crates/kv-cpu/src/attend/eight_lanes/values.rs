//! Weighted values of a KV tile, `out += weights · v`, up to three queries at a time.

use super::{Lanes, N_LANES};
use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::{KV_TILE, ValueLanes};

/// Queries whose outputs are summed together at most.
const MAX_QUERIES: usize = 3;
/// Vectors of columns that are summed together: of three queries, 12 of AVX2's 16 registers or 24
/// of NEON's 32.
const MAX_VECTORS: usize = 4;
/// As [`MAX_VECTORS`], of a lone query: enough independent sums to fill the FMA pipes.
const MAX_VECTORS_ALONE: usize = 8;

/// See [`TileKernels::accumulate`](crate::attend::tile_kernels::TileKernels).
///
/// # Safety
/// The CPU has the features of `V`.
#[inline(always)]
pub(crate) unsafe fn accumulate<V: Lanes>(
    mut out: &mut [f32],
    mut weights: &[[f32; KV_TILE]],
    values: ValueLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    assert!(values.lanes.end <= KV_TILE && values.values.len() >= values.lanes.end * v_dim);
    while !weights.is_empty() {
        // Two and two, not three and one.
        let n = match weights.len() {
            4 => 2,
            left => left.min(MAX_QUERIES),
        };
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        // SAFETY: the CPU has the features, as the caller promises; each lane has its row of
        // `v_dim` values, as asserted.
        unsafe {
            match n {
                3 => accumulate_of::<V, 3>(out_now, now, &values, prefetch),
                2 => accumulate_of::<V, 2>(out_now, now, &values, prefetch),
                _ => accumulate_of::<V, 1>(out_now, now, &values, prefetch),
            }
        }
        (out, weights) = (out_later, later);
    }
}

/// All columns of `N` queries.
///
/// # Safety
/// The CPU has the features of `V`, no lane is beyond the tile, and each has a row of as many
/// values as a query's output.
#[inline(always)]
unsafe fn accumulate_of<V: Lanes, const N: usize>(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    values: &ValueLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / N;
    let mut first = 0;
    while first < v_dim {
        let columns = Columns {
            out: &mut *out,
            first,
            weights,
            values,
        };
        let n_vectors = (v_dim - first) / N_LANES;
        // SAFETY: as the caller promises; the columns are inside the rows.
        first += N_LANES
            * unsafe {
                match n_vectors {
                    MAX_VECTORS_ALONE.. if N == 1 => {
                        columns.accumulate::<V, N, MAX_VECTORS_ALONE>(prefetch)
                    }
                    MAX_VECTORS.. => columns.accumulate::<V, N, MAX_VECTORS>(prefetch),
                    3 => columns.accumulate::<V, N, 3>(prefetch),
                    2 => columns.accumulate::<V, N, 2>(prefetch),
                    1 => columns.accumulate::<V, N, 1>(prefetch),
                    _ => return columns.accumulate_last(),
                }
            };
    }
}

/// Some columns of the outputs of some queries.
struct Columns<'a> {
    /// `[queries, v_dim]`.
    out: &'a mut [f32],
    /// The first column.
    first: usize,
    weights: &'a [[f32; KV_TILE]],
    values: &'a ValueLanes<'a>,
}

impl Columns<'_> {
    /// `W` vectors of columns of `N` queries; returns `W`.
    ///
    /// # Safety
    /// As for [`accumulate_of`], and the rows have the columns.
    #[inline(always)]
    unsafe fn accumulate<V: Lanes, const N: usize, const W: usize>(
        self,
        prefetch: &mut KvPrefetcher<'_>,
    ) -> usize {
        let Self {
            out,
            first,
            weights,
            values: ValueLanes { lanes, values },
        } = self;
        let v_dim = out.len() / N;
        assert!(weights.len() == N && first + W * N_LANES <= v_dim);
        // SAFETY: the CPU has the features, as the caller promises.
        let zero = unsafe { V::splat(0.0) };
        let mut sums = [[zero; W]; N];
        for (i, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                let at = i * v_dim + first + w * N_LANES;
                // SAFETY: row `i < N` of the output has these columns, as asserted.
                *sum = unsafe { V::load(out.as_ptr().add(at)) };
            }
        }
        for lane in lanes.clone() {
            prefetch.prefetch_next();
            let mut weight = [zero; N];
            for (i, weight) in weight.iter_mut().enumerate() {
                // SAFETY: `i < N`, as asserted, and the lane is inside the tile.
                *weight = unsafe { V::splat(*weights.get_unchecked(i).get_unchecked(lane)) };
            }
            for w in 0..W {
                let at = lane * v_dim + first + w * N_LANES;
                // SAFETY: the lane has a row with these columns, as the caller promises.
                let v = unsafe { V::load(values.as_ptr().add(at)) };
                for (sums, weight) in sums.iter_mut().zip(weight) {
                    sums[w] = weight.multiply_add(v, sums[w]);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (w, sum) in sums.into_iter().enumerate() {
                let at = i * v_dim + first + w * N_LANES;
                // SAFETY: row `i < N` of the output has these columns, as asserted.
                unsafe { sum.store(out.as_mut_ptr().add(at)) };
            }
        }
        W
    }

    /// The columns that do not fill a vector, of all queries.
    #[inline(always)]
    fn accumulate_last(self) {
        let v_dim = self.out.len() / self.weights.len();
        for (out, weights) in self.out.chunks_exact_mut(v_dim).zip(self.weights) {
            for (column, out) in out.iter_mut().enumerate().skip(self.first) {
                for lane in self.values.lanes.clone() {
                    let v = self.values.values[lane * v_dim + column];
                    *out = weights[lane].mul_add(v, *out);
                }
            }
        }
    }
}
