//! [`FusedAttention`]: online softmax over KV tiles, for some tokens and all query heads of one KV
//! head at a time.
//!
//! Each K and V value is read from memory once for all queries of a task. For every tile: scores,
//! score mods (soft cap, ALiBi), softmax step, weighted values; the next tile is prefetched
//! meanwhile. Knows nothing of how tasks are divided among threads.

use std::ops::Range;

use kv_core::{PosRange, VisibleGroup};
use kv_graph::AttendSpec;

use super::kv_reader::{KvReader, StoredLanes};
use super::kv_tiles::{KvPrefetcher, KvTile, KvTiles, StoredTile, lane_mask};
use super::partial::{SoftmaxState, split_start};
use super::query_i24::BLOCK_LEN;
use super::tile_kernels::{KV_TILE, TileKernels, ValueLanes};
use super::{Attention, ByDistance, Scratch, heads_per_kv};
use crate::kv_rows::HeadRows;

/// Keys are transposed in squares of this many lanes.
const TRANSPOSE_LANES: usize = 16;

/// Tokens of one visibility group that are attended together.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryTile {
    pub(super) group: usize,
    /// The first of the group's tokens.
    pub(super) first: usize,
    pub(super) len: usize,
}

/// The tokens of a task and the KV head that they attend to.
pub(super) struct QueryTokens<'a> {
    /// Rows of the query and output matrices.
    pub(super) rows: &'a [u32],
    /// Positions that each token sees.
    pub(super) limits: &'a [PosRange],
    pub(super) kv_head: usize,
}

/// K and V of one KV head of the cells of a tile, as stored.
struct KvHeadTile<'a> {
    tile: &'a KvTile,
    heads: &'a [HeadRows<'a>; 2],
}

impl<'a> KvHeadTile<'a> {
    fn k(&self) -> StoredTile<'a> {
        let [head, _] = self.heads;
        let tile = self.tile;
        StoredTile { tile, head }
    }

    fn v(&self) -> StoredTile<'a> {
        let [_, head] = self.heads;
        let tile = self.tile;
        StoredTile { tile, head }
    }
}

/// Attention of one layer with the functions for its ISA and KV types.
#[derive(Clone, Copy)]
pub(super) struct FusedAttention<'a> {
    pub(super) of: Attention<'a>,
    tiles: TileKernels,
    k_reader: KvReader,
    v_reader: KvReader,
}

impl<'a> FusedAttention<'a> {
    pub(super) fn new(of: Attention<'a>) -> Self {
        let isa = of.kernels.isa;
        let [k, v] = &of.kv;
        Self {
            tiles: TileKernels::for_isa(isa),
            k_reader: KvReader::new(isa, k.shape.kv_type),
            v_reader: KvReader::new(isa, v.shape.kv_type),
            of,
        }
    }

    fn spec(&self) -> &AttendSpec {
        &self.of.spec
    }

    /// Queries of a task.
    fn n_queries(&self, tokens: &QueryTokens<'_>) -> usize {
        heads_per_kv(self.spec()) * tokens.rows.len()
    }

    /// The softmax state of a query head before the first cell: an attention sink is a score
    /// without a value, of weight 1 so far.
    pub(super) fn initial_state(&self, head: usize) -> SoftmaxState {
        match self.of.score_mods.sinks {
            Some(sinks) => SoftmaxState {
                max: sinks[head],
                sum: 1.0,
            },
            None => SoftmaxState::EMPTY,
        }
    }

    /// Attention of the tokens of `tile` for all query heads of `kv_head`.
    ///
    /// # Safety
    /// The visibility is sound for the queries and the stored cells, and no other thread works on
    /// the same tile and KV head.
    pub(super) unsafe fn attend_query_tile(
        &self,
        tile: QueryTile,
        kv_head: usize,
        scratch: &mut Scratch,
    ) {
        let Some(group) = self.of.visibility.groups.get(tile.group) else {
            return;
        };
        let range = tile.first..tile.first + tile.len;
        let tokens = QueryTokens {
            rows: &group.rows[range.clone()],
            limits: &group.limits[range],
            kv_head,
        };
        let AttendSpec {
            kv_heads,
            k_dim,
            v_dim,
            ..
        } = *self.spec();
        let (heads, n) = (heads_per_kv(self.spec()), self.n_queries(&tokens));
        let q = &mut scratch.q[..n * k_dim];
        self.gather_queries(&tokens, q);
        self.prepare_queries(q);
        scratch.begin_split(n, v_dim);
        for query in 0..n {
            scratch.total_softmax[query] = self.initial_state(kv_head * heads + query % heads);
        }
        scratch.total_out[..n * v_dim].fill(0.0);
        self.attend_tiles(group, &tokens, PosRange::ALL, scratch);
        scratch.end_split(self.of.kernels, n, v_dim);
        for (at, &row) in tokens.rows.iter().enumerate() {
            let len = self.of.form.len(v_dim);
            let width = heads * len;
            let start = (row as usize * kv_heads + kv_head) * width;
            // SAFETY: a sound visibility has each row in one group once, so this row and KV head
            // belong to this call alone.
            let out = unsafe { self.of.out.range(start..start + width) };
            for (head, out) in out.chunks_mut(len.max(1)).enumerate() {
                let query = at * heads + head;
                let values = &scratch.total_out[query * v_dim..][..v_dim];
                self.finish(scratch.total_softmax[query], values, out);
            }
        }
    }

    /// The part of the attention of `tokens` that `split` contains, for all query heads of their
    /// KV head: results are [`Scratch::partial`]. Queries are prepared.
    pub(super) fn attend_split(
        &self,
        group: &VisibleGroup,
        tokens: &QueryTokens<'_>,
        split: PosRange,
        scratch: &mut Scratch,
    ) {
        let n = self.n_queries(tokens);
        self.gather_queries(tokens, &mut scratch.q[..n * self.spec().k_dim]);
        scratch.begin_split(n, self.spec().v_dim);
        self.attend_tiles(group, tokens, split, scratch);
    }

    /// Divides weighted values by the sum of weights, undoes the rotation of V and writes the
    /// logarithm of the sum where `out` has room for it, as it does in partial results.
    pub(super) fn finish(&self, softmax: SoftmaxState, values: &[f32], out: &mut [f32]) {
        let sum = softmax.sum;
        // A token that sees nothing has the sum 0 and gets zeros.
        let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        let (out, logarithm) = out.split_at_mut(values.len());
        out.iter_mut()
            .zip(values)
            .for_each(|(o, v)| *o = v * factor);
        let [_, v] = &self.of.kv;
        v.shape.rotation.apply(out);
        if let [logarithm] = logarithm {
            *logarithm = softmax.logarithm();
        }
    }

    /// Rotates queries as keys were when stored (dot products are the same) and scales them.
    pub(super) fn prepare_queries(&self, q: &mut [f32]) {
        let [k, _] = &self.of.kv;
        k.shape.rotation.apply(q);
        (self.of.kernels.scale)(q, self.spec().scale);
    }

    /// Copies the queries of `tokens` to `q`, `[queries, k_dim]`.
    fn gather_queries(&self, tokens: &QueryTokens<'_>, q: &mut [f32]) {
        let width = heads_per_kv(self.spec()) * self.spec().k_dim;
        for (to, &row) in q.chunks_exact_mut(width.max(1)).zip(tokens.rows) {
            let start = (row as usize * self.spec().kv_heads + tokens.kv_head) * width;
            to.copy_from_slice(&self.of.q[start..start + width]);
        }
    }

    /// Attends to the cells in `range` that any of the tokens sees, tile by tile.
    fn attend_tiles(
        &self,
        group: &VisibleGroup,
        tokens: &QueryTokens<'_>,
        range: PosRange,
        scratch: &mut Scratch,
    ) {
        let limits = tokens.limits.iter();
        let hull = limits.fold(PosRange::EMPTY, |all, &l| all.hull(l));
        // Tiles beyond `range` as well: the first of them is prefetched, as this thread most likely
        // attends to it next.
        let visited = hull.intersection(PosRange::from(range.first..));
        if hull.is_empty() || visited.is_empty() {
            return;
        }
        let n = self.n_queries(tokens);
        let AttendSpec { k_dim, v_dim, .. } = *self.spec();
        let heads = self.of.kv.map(|rows| rows.head(tokens.kv_head));
        if let Some(integer) = self.k_reader.integer_scores(&heads[0], k_dim) {
            let n_values = n * k_dim;
            let blocks = &mut scratch.q_blocks[..n_values / BLOCK_LEN];
            (integer.quantize)(&scratch.q[..n_values], blocks);
        }
        let mut tiles = KvTiles::new(&group.runs, visited);
        let (mut tile, mut next) = (KvTile::default(), KvTile::default());
        let mut has_next = tiles.next_into(&mut tile);
        KvPrefetcher::new(&tile, &heads).prefetch_rest();
        while has_next && tile.base <= range.last.0 {
            has_next = tiles.next_into(&mut next);
            let mut prefetch = KvPrefetcher::new(&next, &heads);
            let kv = KvHeadTile {
                tile: &tile,
                heads: &heads,
            };
            self.attend_tile(&kv, tokens, &mut prefetch, scratch);
            prefetch.prefetch_rest();
            let is_in_range = has_next && next.base <= range.last.0;
            if is_in_range && split_start(next.base) != split_start(tile.base) {
                scratch.end_split(self.of.kernels, n, v_dim);
            }
            std::mem::swap(&mut tile, &mut next);
        }
    }

    /// Reads the keys of a tile as columns; lanes without a cell get any value.
    fn read_keys(&self, keys: StoredTile<'_>, scratch: &mut Scratch) {
        let k_dim = self.spec().k_dim;
        let Scratch {
            k_rows, temp, k, ..
        } = scratch;
        let k = &mut k[..k_dim];
        if self.k_reader.read_columns(keys, k) {
            return;
        }
        dequantize_head(&self.k_reader, keys, k_dim, k_rows, temp);
        // Whole squares around the lanes that have cells.
        let first = keys.tile.mask.trailing_zeros() as usize / TRANSPOSE_LANES * TRANSPOSE_LANES;
        let end =
            (KV_TILE - keys.tile.mask.leading_zeros() as usize).next_multiple_of(TRANSPOSE_LANES);
        (self.tiles.transpose)(&k_rows[first * k_dim..end * k_dim], first..end, k);
    }

    /// Scores of all queries of a task with the keys of a tile, to [`Scratch::weights`].
    fn score_tile(
        &self,
        keys: StoredTile<'_>,
        n_queries: usize,
        prefetch: &mut KvPrefetcher<'_>,
        scratch: &mut Scratch,
    ) {
        let n_values = n_queries * self.spec().k_dim;
        if let Some(integer) = self.k_reader.integer_scores(keys.head, self.spec().k_dim) {
            let q = &scratch.q_blocks[..n_values / BLOCK_LEN];
            return (integer.scores)(q, keys, &mut scratch.weights[..n_queries], prefetch);
        }
        self.read_keys(keys, scratch);
        let (q, k) = (&scratch.q[..n_values], &scratch.k[..self.spec().k_dim]);
        (self.tiles.scores)(q, k, &mut scratch.weights[..n_queries], prefetch);
    }

    /// Adds a tile to the softmax and the weighted values of every token that sees some of it.
    fn attend_tile(
        &self,
        kv: &KvHeadTile<'_>,
        tokens: &QueryTokens<'_>,
        prefetch: &mut KvPrefetcher<'_>,
        scratch: &mut Scratch,
    ) {
        let v_dim = self.spec().v_dim;
        let heads = heads_per_kv(self.spec());
        let n = self.n_queries(tokens);
        let tile = kv.tile;
        self.score_tile(kv.k(), n, prefetch, scratch);
        let accumulate_stored = self.v_reader.accumulate(kv.v().head, v_dim, n);
        if accumulate_stored.is_none() {
            let Scratch { temp, v, .. } = scratch;
            dequantize_head(&self.v_reader, kv.v(), v_dim, v, temp);
            // Lanes without a cell hold what an earlier tile left, which may be infinite.
            for lane in (0..KV_TILE).filter(|lane| tile.mask >> lane & 1 == 0) {
                v[lane * v_dim..][..v_dim].fill(0.0);
            }
        }
        let visible_lanes =
            |token: usize| tile.mask & lanes_within(tokens.limits[token], tile.base);
        let mut token = 0;
        // Tokens that see the same lanes are computed together.
        while token < tokens.limits.len() {
            let visible = visible_lanes(token);
            let mut end = token + 1;
            while end < tokens.limits.len() && visible_lanes(end) == visible {
                end += 1;
            }
            if visible != 0 {
                let queries = token * heads..end * heads;
                self.apply_score_mods(tokens, queries.clone(), tile, scratch);
                self.softmax(visible, queries.clone(), scratch);
                let out = &mut scratch.out[queries.start * v_dim..queries.end * v_dim];
                let weights = &scratch.weights[queries];
                let lanes = lane_hull(visible);
                if let Some(accumulate) = accumulate_stored {
                    let stored = kv.v();
                    accumulate(out, weights, StoredLanes { lanes, stored }, prefetch);
                } else {
                    let values = &scratch.v;
                    let values = ValueLanes { lanes, values };
                    (self.tiles.accumulate)(out, weights, values, prefetch);
                }
            }
            token = end;
        }
    }

    /// Applies soft cap, ALiBi and what distances add to the scores of some queries.
    fn apply_score_mods(
        &self,
        tokens: &QueryTokens<'_>,
        queries: Range<usize>,
        tile: &KvTile,
        scratch: &mut Scratch,
    ) {
        let (soft_cap, mods) = (self.spec().soft_cap, &self.of.score_mods);
        if soft_cap.is_none() && mods.slopes.is_none() && mods.by_distance.is_none() {
            return;
        }
        let heads = heads_per_kv(self.spec());
        for query in queries {
            let scores = &mut scratch.weights[query];
            if let Some(cap) = soft_cap {
                (self.of.kernels.soft_cap)(scores, cap);
            }
            let head = tokens.kv_head * heads + query % heads;
            let row = tokens.rows[query / heads] as usize;
            if let Some(slopes) = mods.slopes {
                let (slope, pos) = (slopes[head], mods.positions[row]);
                for (score, lane) in scores.iter_mut().zip(0..) {
                    *score -= slope * pos.abs_diff(tile.base + lane) as f32;
                }
            }
            if let Some(by_distance) = mods.by_distance {
                self.add_by_distance(by_distance, (row, head), tile, scores);
            }
        }
    }

    /// Adds to the scores of a head of a token what its distances from the cells of a tile add.
    fn add_by_distance(
        &self,
        by_distance: ByDistance<'_>,
        (row, head): (usize, usize),
        tile: &KvTile,
        scores: &mut [f32; KV_TILE],
    ) {
        let ByDistance { buckets, tables } = by_distance;
        let AttendSpec {
            n_heads, kv_heads, ..
        } = *self.spec();
        let pos = self.of.score_mods.positions[row];
        let Some([of_queries, of_keys]) = tables else {
            let reach = i64::from(buckets.table.reach());
            let width = 2 * buckets.table.reach() as usize + 1;
            let of_head = &buckets.by_distance[head * width..][..width];
            for (score, lane) in scores.iter_mut().zip(0..) {
                let distance = i64::from(pos) - i64::from(tile.base + lane);
                *score += of_head[(distance.clamp(-reach, reach) + reach) as usize];
            }
            return;
        };
        let kv_head = head / heads_per_kv(self.spec());
        let of_query = &of_queries[(row * n_heads + head) * buckets.n..][..buckets.n];
        for (lane, cell) in tile.lanes() {
            let bucket = buckets.table.of(pos, tile.base + lane as u32);
            let of_key = &of_keys[(cell * kv_heads + kv_head) * buckets.n..][..buckets.n];
            scores[lane] += of_query[bucket] + of_key[bucket];
        }
    }

    /// Scores of queries that see the same lanes become weights; what they accumulated is rescaled.
    fn softmax(&self, visible: u32, queries: Range<usize>, scratch: &mut Scratch) {
        let v_dim = self.spec().v_dim;
        let rescale = &mut scratch.rescale[queries.clone()];
        let states = &mut scratch.softmax[queries.clone()];
        let scores = &mut scratch.weights[queries.clone()];
        (self.tiles.softmax)(scores, visible, states, rescale);
        let outs = scratch.out[queries.start * v_dim..].chunks_exact_mut(v_dim.max(1));
        for (&rescale, out) in rescale.iter().zip(outs) {
            if rescale != 1.0 {
                (self.of.kernels.scale)(out, rescale);
            }
        }
    }
}

/// Dequantizes a head of the cells of a tile to `to`, `[KV_TILE, dim]`. The stored blocks may hold
/// more than the head: other heads before it, or keys of which the values are the first part
/// (MLA); then they are dequantized to `blocks` and cut.
fn dequantize_head(
    reader: &KvReader,
    stored: StoredTile<'_>,
    dim: usize,
    to: &mut [f32],
    blocks: &mut [f32],
) {
    let head = stored.head;
    if head.n_values == dim {
        return reader.dequantize(stored, to);
    }
    reader.dequantize(stored, blocks);
    for (lane, _) in stored.tile.lanes() {
        let values = &blocks[lane * head.n_values + head.skip..][..dim];
        to[lane * dim..][..dim].copy_from_slice(values);
    }
}

/// From the first visible lane to the last.
fn lane_hull(visible: u32) -> Range<usize> {
    visible.trailing_zeros() as usize..KV_TILE - visible.leading_zeros() as usize
}

/// A mask of the lanes of the tile at `base` whose positions are within `limits`.
fn lanes_within(limits: PosRange, base: u32) -> u32 {
    if limits.is_empty() || limits.last.0 < base {
        return 0;
    }
    let first = limits.first.0.saturating_sub(base).min(KV_TILE as u32);
    let end = (limits.last.0 - base).min(KV_TILE as u32 - 1) + 1;
    lane_mask(first, end)
}

#[cfg(test)]
mod tests {
    use kv_core::Pos;

    use super::*;

    #[test]
    fn lanes_are_within_limits_at_any_position() {
        let lanes = |first: u32, last: u32, base: u32| {
            lanes_within(PosRange::new(Pos(first), Pos(last)), base)
        };
        assert_eq!(lanes(0, u32::MAX, 64), u32::MAX);
        assert_eq!(lanes(64, 95, 64), u32::MAX);
        assert_eq!(lanes(67, 69, 64), 0b11_1000);
        assert_eq!(lanes(95, 96, 64), 1 << 31);
        assert_eq!(lanes(0, 64, 64), 1);
        assert_eq!((lanes(0, 63, 64), lanes(96, 200, 64)), (0, 0));
        assert_eq!(lanes(u32::MAX, u32::MAX, u32::MAX - 31), 1 << 31);
        assert_eq!((lanes_within(PosRange::EMPTY, 0), lanes(9, 8, 0)), (0, 0));
    }

    #[test]
    fn a_hull_is_from_the_first_visible_lane_to_the_last() {
        assert_eq!(lane_hull(0b1001_0100), 2..8);
        assert_eq!((lane_hull(1), lane_hull(u32::MAX)), (0..1, 0..32));
    }
}
