//! [`TileKernels`]: the inner loops of fused attention over one KV tile, one table per ISA.
//!
//! Four loops in the order of use: keys are transposed to columns, `q · k` gives scores, the online
//! softmax makes weights of them, weighted values are accumulated. `scalar` specifies them; AVX2
//! and NEON have them from `eight_lanes`, AVX-512 its own.
//!
//! Invariant: a score is summed over the dimensions in order and an output over the cells in
//! order, in one accumulator each, whatever the ISA and however many queries are computed
//! together; multiply-adds are fused on every ISA but plain scalar code.

use std::ops::Range;

use super::kv_tiles::KvPrefetcher;
use super::partial::SoftmaxState;
use crate::isa::Isa;
#[cfg(target_arch = "aarch64")]
use crate::kernels::isa::neon;
use crate::kernels::isa::scalar;
#[cfg(target_arch = "x86_64")]
use crate::kernels::isa::{avx2, avx512};

/// Cells of a KV tile.
pub(crate) const KV_TILE: usize = 32;

/// `scores[q][lane] = Σ_d q[q][d] · k[d][lane]` with `q` `[queries, k_dim]` and `k`
/// `[k_dim, KV_TILE]`: `(q, k, scores)`. Prefetches the next tile meanwhile.
type Scores = fn(&[f32], &[[f32; KV_TILE]], &mut [[f32; KV_TILE]], &mut KvPrefetcher<'_>);

/// One step of the online softmax: `(scores, visible, states, rescale)`. Scores of the lanes in
/// `visible` become weights relative to the largest score so far, other lanes get 0, and `rescale`
/// is the factor for what each query accumulated before.
type Softmax = fn(&mut [[f32; KV_TILE]], u32, &mut [SoftmaxState], &mut [f32]);

/// `out[q][j] += Σ_lane weights[q][lane] · v[lane][j]`: `(out, weights, values)`. Prefetches the
/// next tile meanwhile.
type Accumulate = fn(&mut [f32], &[[f32; KV_TILE]], ValueLanes<'_>, &mut KvPrefetcher<'_>);

/// `k[d][lane] = rows[lane - lanes.start][d]`: `(rows, lanes, k)`.
type Transpose = fn(&[f32], Range<usize>, &mut [[f32; KV_TILE]]);

/// Dequantized values of a tile and the lanes to add.
#[derive(Clone, Debug)]
pub(crate) struct ValueLanes<'a> {
    pub(crate) lanes: Range<usize>,
    /// `[KV_TILE, v_dim]`.
    pub(crate) values: &'a [f32],
}

/// The loops for one ISA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKernels {
    pub(crate) scores: Scores,
    pub(crate) softmax: Softmax,
    pub(crate) accumulate: Accumulate,
    pub(crate) transpose: Transpose,
}

impl TileKernels {
    /// The loops for `isa`; the scalar ones if this machine does not have it.
    pub(crate) fn for_isa(isa: Isa) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni if isa.is_available() => avx2::attend::KERNELS,
            #[cfg(target_arch = "x86_64")]
            _ if isa.is_avx512() && isa.is_available() => avx512::attend::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm if isa.is_available() => neon::attend::KERNELS,
            _ => scalar::attend::KERNELS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::kv_tiles::KvTile;
    use crate::kv_rows::HeadRows;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
    }

    #[test]
    fn keys_are_transposed_as_by_plain_code() {
        for (k_dim, lanes) in [
            (64, 0..32),
            (64, 16..32),
            (80, 0..16),
            (20, 8..24),
            (5, 0..32),
            (16, 3..17),
            (256, 8..16),
        ] {
            let rows = wave(lanes.len() * k_dim);
            let mut wanted = vec![[7.0; KV_TILE]; k_dim];
            (scalar::attend::KERNELS.transpose)(&rows, lanes.clone(), &mut wanted);
            for isa in Isa::all_available() {
                let mut got = vec![[7.0; KV_TILE]; k_dim];
                (TileKernels::for_isa(isa).transpose)(&rows, lanes.clone(), &mut got);
                assert_eq!(got, wanted, "{isa}: {k_dim} values of lanes {lanes:?}");
            }
        }
    }

    /// A query's scores and outputs depend neither on how many queries are computed together nor
    /// on which ISA with fused multiply-adds computes them.
    #[test]
    fn queries_computed_together_give_the_bits_of_one_alone() {
        let (k_dim, v_dim) = (40, 93);
        let k: Vec<[f32; KV_TILE]> = wave(k_dim * KV_TILE).as_chunks().0.to_vec();
        let v = wave(KV_TILE * v_dim);
        let values = || ValueLanes {
            lanes: 3..29,
            values: &v,
        };
        let (empty, heads) = (KvTile::default(), [HeadRows::default(); 2]);
        let mut prefetch = KvPrefetcher::new(&empty, &heads);
        let mut of_fused: Option<(Vec<[f32; KV_TILE]>, Vec<f32>)> = None;
        for isa in Isa::all_available() {
            let kernels = TileKernels::for_isa(isa);
            for n in 1..=21 {
                let q = wave(n * k_dim);
                let mut all = vec![[0.0; KV_TILE]; n];
                (kernels.scores)(&q, &k, &mut all, &mut prefetch);
                let mut out = wave(n * v_dim);
                (kernels.accumulate)(&mut out, &all, values(), &mut prefetch);
                for (i, (q, scores)) in q.chunks(k_dim).zip(&all).enumerate() {
                    let mut alone = [[0.0; KV_TILE]];
                    (kernels.scores)(q, &k, &mut alone, &mut prefetch);
                    assert_eq!(alone[0], *scores, "{isa}: query {i} of {n}");
                    let mut own = wave(n * v_dim)[i * v_dim..][..v_dim].to_vec();
                    (kernels.accumulate)(&mut own, &alone, values(), &mut prefetch);
                    assert_eq!(own, out[i * v_dim..][..v_dim], "{isa}: query {i} of {n}");
                }
                if n == 21 && isa != Isa::Scalar {
                    let wanted = of_fused.get_or_insert_with(|| (all.clone(), out.clone()));
                    assert_eq!((&all, &out), (&wanted.0, &wanted.1), "{isa}");
                }
            }
        }
    }
}
