//! [`Scratch`]: one thread's buffers for attention, reserved once so that runs do not allocate.

use kv_graph::AttendSpec;
use kv_rows::LayerRows;

use super::heads_per_kv;
use super::partial::{Partial, SoftmaxState};
use super::query_i24::{BLOCK_LEN, QueryBlockI24};
use super::split_k::MAX_TASK_QUERIES;
use super::tile_kernels::KV_TILE;
use crate::kernels::Kernels;

/// One thread's buffers. *Queries* are the query heads of the tokens of a task.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// `[queries, k_dim]`, rotated and scaled.
    pub(super) q: Vec<f32>,
    /// The same in 24 bits, if scores are integer products.
    pub(super) q_blocks: Vec<QueryBlockI24>,
    /// K of a tile, dequantized, `[KV_TILE, k_dim]`.
    pub(super) k_rows: Vec<f32>,
    /// K of a tile as columns, `[k_dim, KV_TILE]`.
    pub(super) k: Vec<[f32; KV_TILE]>,
    /// V of a tile, dequantized, `[KV_TILE, v_dim]`.
    pub(super) v: Vec<f32>,
    /// Any temporary values: whole blocks around a head, or one row of whatever a task computes.
    pub(super) temp: Vec<f32>,
    /// Scores of a tile, then weights, `[queries, KV_TILE]`.
    pub(super) weights: Vec<[f32; KV_TILE]>,
    /// Factors for what was accumulated before the tile, `[queries]`.
    pub(super) rescale: Vec<f32>,
    /// Softmax states within the present split, `[queries]`.
    pub(super) softmax: Vec<SoftmaxState>,
    /// Weighted values within the present split, `[queries, v_dim]`.
    pub(super) out: Vec<f32>,
    /// Softmax states of all splits before, `[queries]`.
    pub(super) total_softmax: Vec<SoftmaxState>,
    /// Weighted values of all splits before, `[queries, v_dim]`.
    pub(super) total_out: Vec<f32>,
    /// Ranks of the keys that an indexer scored.
    pub(super) order: Vec<u32>,
}

impl Scratch {
    /// Makes room for tasks of at most `n_tokens` tokens.
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_tokens: usize) {
        let heads = heads_per_kv(spec);
        let n = heads * (MAX_TASK_QUERIES / heads).max(1).min(n_tokens.max(1));
        let grow = |v: &mut Vec<f32>, len: usize| v.resize(v.len().max(len), 0.0);
        grow(&mut self.q, n * spec.k_dim);
        grow(&mut self.k_rows, KV_TILE * spec.k_dim);
        grow(&mut self.v, KV_TILE * spec.v_dim);
        // A head may begin and end inside a block.
        let head_len = spec.k_dim.max(spec.v_dim) + 2 * BLOCK_LEN;
        grow(&mut self.temp, KV_TILE * head_len);
        grow(&mut self.rescale, n);
        grow(&mut self.out, n * spec.v_dim);
        grow(&mut self.total_out, n * spec.v_dim);
        self.k.resize(self.k.len().max(spec.k_dim), [0.0; KV_TILE]);
        let n_blocks = self.q_blocks.len().max(n * spec.k_dim / BLOCK_LEN);
        self.q_blocks.resize(n_blocks, QueryBlockI24::default());
        self.weights
            .resize(self.weights.len().max(n), [0.0; KV_TILE]);
        for softmax in [&mut self.softmax, &mut self.total_softmax] {
            softmax.resize(softmax.len().max(n), SoftmaxState::EMPTY);
        }
    }

    /// Bytes that are allocated.
    pub(crate) fn n_bytes(&self) -> usize {
        let floats = [
            &self.q,
            &self.k_rows,
            &self.v,
            &self.temp,
            &self.rescale,
            &self.out,
            &self.total_out,
        ];
        let n_floats: usize = floats.iter().map(|values| values.capacity()).sum();
        let n_tiles = self.k.capacity() + self.weights.capacity();
        let n_softmax = self.softmax.capacity() + self.total_softmax.capacity();
        (n_floats + n_tiles * KV_TILE) * size_of::<f32>()
            + self.q_blocks.capacity() * size_of::<QueryBlockI24>()
            + n_softmax * size_of::<SoftmaxState>()
            + self.order.capacity() * size_of::<u32>()
    }

    /// Makes room for a layer's whole K or V rows, as plain attention reads them.
    pub(crate) fn reserve_rows(&mut self, layer: &LayerRows) {
        self.reserve_row(layer.k.len().max(layer.v.len()));
    }

    /// Makes room for [`Scratch::row`] of `len` values.
    pub(crate) fn reserve_row(&mut self, len: usize) {
        self.temp.resize(self.temp.len().max(len), 0.0);
    }

    /// `len` temporary values for whatever row a task computes.
    pub(crate) fn row(&mut self, len: usize) -> &mut [f32] {
        &mut self.temp[..len]
    }

    /// Begins a split for `n` queries.
    pub(super) fn begin_split(&mut self, n: usize, v_dim: usize) {
        self.softmax[..n].fill(SoftmaxState::EMPTY);
        self.out[..n * v_dim].fill(0.0);
    }

    /// The present split's result for one query.
    pub(super) fn partial(&self, query: usize, v_dim: usize) -> Partial<'_> {
        Partial {
            softmax: self.softmax[query],
            values: &self.out[query * v_dim..][..v_dim],
        }
    }

    /// Merges the present split of `n` queries into the totals and begins the next one.
    pub(super) fn end_split(&mut self, kernels: &Kernels, n: usize, v_dim: usize) {
        for query in 0..n {
            let values = query * v_dim..(query + 1) * v_dim;
            let later = Partial {
                softmax: self.softmax[query],
                values: &self.out[values.clone()],
            };
            self.total_softmax[query].merge(kernels, &mut self.total_out[values], later);
        }
        self.begin_split(n, v_dim);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// Three query heads on each KV head.
    const SPEC: AttendSpec = AttendSpec {
        n_heads: 6,
        kv_heads: 2,
        k_dim: 96,
        v_dim: 40,
        scale: 1.0,
        soft_cap: None,
        alibi: None,
    };

    /// Bytes of buffers for so many queries of a KV head.
    fn wanted(n: usize) -> usize {
        let of_tile = KV_TILE * (96 + 40 + (96 + 64) + 96);
        let of_query = 96 + KV_TILE + 1 + 2 * 40;
        (of_tile + n * of_query) * 4 + n * 3 * size_of::<QueryBlockI24>() + 2 * n * 8
    }

    #[test]
    fn there_is_room_for_the_queries_of_a_task() {
        let n_bytes = |n_tokens: usize| {
            let mut scratch = Scratch::default();
            scratch.reserve(&SPEC, n_tokens);
            scratch.n_bytes()
        };
        assert_eq!((n_bytes(5), n_bytes(4)), (wanted(15), wanted(12)));
        // 128 queries at most, of whole tokens.
        assert_eq!((n_bytes(42), n_bytes(1000)), (wanted(126), wanted(126)));
    }

    #[test]
    fn room_for_more_is_kept_and_ranks_count() {
        let mut scratch = Scratch::default();
        scratch.reserve(&SPEC, 5);
        scratch.reserve(&SPEC, 2);
        scratch.reserve_row(KV_TILE * (96 + 64));
        assert_eq!(scratch.n_bytes(), wanted(15));
        scratch.order.reserve_exact(10);
        assert_eq!(scratch.n_bytes(), wanted(15) + 40);
    }

    /// A task of a token with more heads than that has all of them.
    #[test]
    fn a_token_with_many_heads_has_room() {
        let mut scratch = Scratch::default();
        let n_heads = 200;
        scratch.reserve(
            &AttendSpec {
                n_heads,
                kv_heads: 1,
                ..SPEC
            },
            9,
        );
        assert_eq!((scratch.weights.len(), scratch.softmax.len()), (200, 200));
    }

    /// What was infinite in another task does not stay behind.
    #[test]
    fn a_split_begins_with_nothing() {
        let kernels = Kernels::for_isa(Isa::Scalar).unwrap();
        let is_empty = |scratch: &Scratch, query| {
            let partial = scratch.partial(query, 3);
            partial.softmax == SoftmaxState::EMPTY && partial.values == [0.0; 3]
        };
        let mut scratch = Scratch::default();
        scratch.reserve(&SPEC, 1);
        scratch.out.fill(f32::INFINITY);
        scratch.begin_split(3, 3);
        assert!((0..3).all(|query| is_empty(&scratch, query)));
        for query in 0..3 {
            scratch.softmax[query] = SoftmaxState { max: 0.0, sum: 1.0 };
            scratch.out[query * 3..][..3].fill(query as f32);
        }
        assert_eq!(scratch.partial(2, 3).values, [2.0; 3]);
        scratch.end_split(kernels, 3, 3);
        assert!((0..3).all(|query| is_empty(&scratch, query)));
        let totals: Vec<f32> = (0..9u8).map(|at| f32::from(at / 3)).collect();
        assert_eq!(scratch.total_out[..9], totals);
    }
}
