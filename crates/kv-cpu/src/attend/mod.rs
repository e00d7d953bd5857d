//! Attention over visibility runs: FlashAttention on the CPU, for all KV types and ISAs.
//!
//! [`attend`] computes one layer. In reading order: [`fused`] (online softmax over KV tiles:
//! Milakov and Gimelshein, arXiv 1805.02867), [`kv_tiles`] (visible cells in tiles, prefetch),
//! [`tile_kernels`] (the inner loops, one folder per ISA), [`kv_reader`] (KV types),
//! [`split_k`] and [`partial`] (flash-decoding: positions as tasks). [`plain`] is the unfused
//! reference; [`index`] chooses what sparse attention reads.
//!
//! Invariant: the result of a query depends on the query and on what it sees only, bit for bit:
//! not on where cells are, on other queries of the batch, or on threads. Cells are visited in order
//! of position and tiled at multiples of [`KV_TILE`](tile_kernels::KV_TILE) *positions*, so neither
//! other queries nor cell placement can move a tile boundary.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod eight_lanes;
mod fused;
mod index;
pub(crate) mod kv_reader;
pub(crate) mod kv_tiles;
pub(crate) mod partial;
mod plain;
pub(crate) mod query_i24;
pub(crate) mod scratch;
mod split_k;
pub(crate) mod tile_kernels;

use std::sync::{Mutex, PoisonError};

use kv_backend::BackendError;
use kv_core::Visibility;
use kv_graph::{AttendSpec, ResultForm};
use kv_rows::LayerRows;

use crate::kernels::Kernels;
use crate::kv_rows::KvRows;
use crate::plan::HeadBuckets;
use crate::team::TeamGuard;
use crate::values::SharedValues;
use fused::{FusedAttention, QueryTile};
pub(crate) use index::{IndexWorkspace, Indexer};
pub(crate) use partial::merge_results;
pub(crate) use plain::{PlainAttention, SoftmaxRow};
pub(crate) use scratch::Scratch;
use split_k::SplitK;

/// The largest number of queries (tokens × heads) of a query tile: their accumulators and a KV tile
/// stay in the L1 cache.
const MAX_TILE_QUERIES: usize = 64;

/// Attention of one layer: what is read and written.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) spec: AttendSpec,
    /// K `[cells, kv_heads, k_dim]` and V `[cells, kv_heads, v_dim]`.
    pub(crate) kv: [KvRows<'a>; 2],
    /// `[tokens, n_heads, k_dim]`.
    pub(crate) q: &'a [f32],
    pub(crate) visibility: &'a Visibility,
    pub(crate) score_mods: ScoreMods<'a>,
    pub(crate) form: ResultForm,
    /// `[tokens, n_heads, v_dim]`, or wider by one, as the form says.
    pub(crate) out: SharedValues<'a>,
}

/// Per-head modifications of scores, if a layer has them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScoreMods<'a> {
    /// Attention sinks, `[n_heads]`.
    pub(crate) sinks: Option<&'a [f32]>,
    /// ALiBi slopes, `[n_heads]`.
    pub(crate) slopes: Option<&'a [f32]>,
    /// Position of each token, `[tokens]`; read if there are slopes or buckets.
    pub(crate) positions: &'a [u32],
    /// The bias by distance.
    pub(crate) by_distance: Option<ByDistance<'a>>,
}

/// The bias on scores by the distance of query and key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByDistance<'a> {
    pub(crate) buckets: &'a HeadBuckets,
    /// Of queries `[tokens, n_heads, buckets]` and of keys `[tokens, kv_heads, buckets]`, where
    /// these have tables.
    pub(crate) tables: Option<[&'a [f32]; 2]>,
}

/// Task lists and buffers of one [`attend`] call, kept for the next one.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    tiles: Vec<QueryTile>,
    split_k: SplitK,
    /// Rotated and scaled queries of a split-K call, shared by all splits.
    q: Vec<f32>,
    /// Those of indexers.
    pub(crate) index: IndexWorkspace,
    /// The visibility of the cells that indexers chose.
    pub(crate) kept: Visibility,
}

/// Checks that `spec` has the heads and dimensions of a layer's rows.
///
/// # Errors
/// [`BackendError::RowShape`] if it has others.
pub(crate) fn check_shape(spec: &AttendSpec, layer: &LayerRows) -> Result<(), BackendError> {
    let AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        ..
    } = *spec;
    let is_grouped = kv_heads > 0 && n_heads.is_multiple_of(kv_heads);
    let is_same = [layer.k.heads, layer.v.heads, layer.k.dim, layer.v.dim]
        == [kv_heads, kv_heads, k_dim, v_dim];
    if is_grouped && is_same {
        return Ok(());
    }
    Err(BackendError::RowShape {
        layer: layer.layer,
        wanted: format!("{n_heads} heads on {kv_heads} of {k_dim}/{v_dim}"),
        got: format!("{} heads of {}/{}", layer.k.heads, layer.k.dim, layer.v.dim),
    })
}

/// Query heads that share one KV head (GQA group size).
fn heads_per_kv(spec: &AttendSpec) -> usize {
    (spec.n_heads / spec.kv_heads.max(1)).max(1)
}

impl Workspace {
    /// Bytes of queries and partials; the lists of tasks are small.
    pub(crate) fn n_bytes(&self) -> usize {
        self.split_k.n_bytes() + self.q.capacity() * size_of::<f32>() + self.index.n_bytes()
    }

    /// Makes room for `n_tokens` tokens or fewer.
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_tokens: usize) {
        let n_split = n_tokens.min(split_k::MAX_SPLIT_TOKENS);
        // Of fewer tokens, a round has more splits.
        (1..=n_split).for_each(|n_tokens| self.split_k.reserve(spec, n_tokens));
        self.reserve_queries(n_split * spec.n_heads * spec.k_dim);
        self.tiles.clear();
        self.tiles.reserve(n_tokens);
    }

    fn reserve_queries(&mut self, n_values: usize) {
        self.q.resize(self.q.len().max(n_values), 0.0);
    }

    /// Divides the tokens into query tiles; the last tokens, which see most, come first.
    fn plan_tiles(&mut self, spec: &AttendSpec, visibility: &Visibility) {
        self.tiles.clear();
        let max_tokens = (MAX_TILE_QUERIES / heads_per_kv(spec)).max(1);
        for (group, visible) in visibility.groups.iter().enumerate().rev() {
            let n_tokens = visible.rows.len();
            for first in (0..n_tokens).step_by(max_tokens).rev() {
                self.tiles.push(QueryTile {
                    group,
                    first,
                    len: max_tokens.min(n_tokens - first),
                });
            }
        }
    }
}

/// Attention of all tokens of `attention`, divided among the team: by query tiles and KV heads, or
/// by splits of positions (split-K) if there are few tokens and long contexts.
///
/// # Safety
/// The visibility is sound for the queries and the stored cells.
pub(crate) unsafe fn attend(
    lead: &mut TeamGuard<'_>,
    attention: &Attention<'_>,
    workspace: &mut Workspace,
    scratch: &[Mutex<Scratch>],
) -> Result<(), BackendError> {
    let (spec, visibility) = (&attention.spec, attention.visibility);
    let fused = FusedAttention::new(*attention);
    if workspace.split_k.plan(spec, visibility) {
        let n_values = visibility.n_rows as usize * spec.n_heads * spec.k_dim;
        workspace.reserve_queries(n_values);
        let q = &mut workspace.q[..n_values];
        q.copy_from_slice(&attention.q[..n_values]);
        fused.prepare_queries(q);
        let prepared = FusedAttention::new(Attention { q, ..*attention });
        // SAFETY: as the caller promises.
        return unsafe { split_k::attend(lead, &prepared, &mut workspace.split_k, scratch) };
    }
    workspace.plan_tiles(spec, visibility);
    let (kv_heads, tiles) = (spec.kv_heads, &workspace.tiles);
    lead.each(tiles.len() * kv_heads, &|thread, task| {
        let mut scratch = scratch[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (tile, kv_head) = (tiles[task / kv_heads], task % kv_heads);
        // SAFETY: the caller promises a sound visibility; each tile and KV head is one task.
        unsafe { fused.attend_query_tile(tile, kv_head, &mut scratch) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use kv_core::{PosRange, VisibleGroup};

    use super::*;

    #[test]
    fn tiles_have_so_many_queries_and_every_token_once() {
        let group = |rows: std::ops::Range<u32>| {
            let limits = vec![PosRange::ALL; rows.len()];
            VisibleGroup::new(rows.collect(), vec![], limits)
        };
        let visibility = Visibility::new(41, vec![group(0..33), group(33..41)]);
        let tiles = |n_heads, kv_heads| -> Vec<(usize, usize, usize)> {
            let spec = AttendSpec {
                n_heads,
                kv_heads,
                k_dim: 8,
                v_dim: 8,
                scale: 1.0,
                soft_cap: None,
                alibi: None,
            };
            let mut workspace = Workspace::default();
            for _ in 0..2 {
                workspace.plan_tiles(&spec, &visibility);
            }
            let tiles = workspace.tiles.iter();
            tiles.map(|t| (t.group, t.first, t.len)).collect()
        };
        // The last tokens see most.
        assert_eq!(
            tiles(8, 2),
            [(1, 0, 8), (0, 32, 1), (0, 16, 16), (0, 0, 16)]
        );
        assert_eq!(tiles(3, 3), [(1, 0, 8), (0, 0, 33)]);
        assert_eq!(tiles(65, 1).len(), 41);
    }

    #[test]
    fn memory_for_many_tokens_is_enough_for_fewer() {
        let spec = AttendSpec {
            n_heads: 6,
            kv_heads: 2,
            k_dim: 16,
            v_dim: 8,
            scale: 1.0,
            soft_cap: None,
            alibi: None,
        };
        let mut workspace = Workspace::default();
        workspace.reserve(&spec, 1);
        // Queries, and partials of 2 + 8 values: of 128 splits, and their total.
        let n_values = 6 * 16 + 6 * 10 * (128 + 1);
        assert_eq!(workspace.n_bytes(), n_values * size_of::<f32>());
        workspace.reserve(&spec, 70);
        let n_bytes = workspace.n_bytes();
        assert!(workspace.q.len() == 64 * 6 * 16 && workspace.tiles.capacity() >= 70);
        for n_tokens in 1..=70 {
            workspace.reserve(&spec, n_tokens);
            assert_eq!(workspace.n_bytes(), n_bytes, "{n_tokens} tokens");
        }
    }
}
