//! Attention over the visible runs of cells with an online softmax (Milakov and Gimelshein,
//! arXiv 1805.02867), some query rows and all heads of one key/value head at a time.
//!
//! Invariant: the result of a row depends on the row and on what it sees alone, bit for bit: not on
//! where cells lie, which rows are attended beside it, or on threads. Cells are walked in the order
//! of positions and taken in tiles that begin at multiples of [`TILE`] *positions*; a cell's place
//! in its tile is its position's; two cells at one position go to different tiles. So neither what
//! other rows see nor how cells are stored can move a boundary between tiles.
//!
//! Each K and V value is read from memory once for all heads and rows of a block. Work is divided
//! by key/value heads and blocks of rows; where rows are few, by [`spans`] of positions as well, and
//! there rows of several sequences share what they see alike ([`split`]).

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bytes;
#[cfg(target_arch = "x86_64")]
mod avx512_weigh;
mod bytes;
mod decode;
mod plain;
mod spans;
mod split;
mod tile;
mod walk;
mod weigh;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod widen;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kv_core::backend::BackendError;
use kv_core::graph::AttendSpec;
use kv_core::layers::LayerRows;
use kv_core::{PosRange, Visibility, VisibleGroup};

use crate::kernels::Kernels;
use crate::storage::Stored;
use crate::team::Lead;
use crate::values::SharedValues;
use bytes::{BLOCK, QueryBlock};
pub(crate) use decode::{Decoder, Heads};
pub(crate) use plain::Plain;
use spans::{Softmax, span_of};
use split::Split;
pub(crate) use tile::{TILE, TileKernels};
use walk::{Ahead, Tile, Tiles, ones};

/// Query vectors that are attended together: their accumulators and a tile stay in the first-level
/// cache.
const QUERIES: usize = 64;

/// Cells whose keys are turned at once.
const SQUARE: usize = 16;

/// Rows of one group that are attended together.
#[derive(Clone, Copy, Debug)]
struct Block {
    group: usize,
    first: usize,
    len: usize,
}

/// How the rows of one call are divided, and memory for what is between their parts.
#[derive(Debug, Default)]
pub(crate) struct Work {
    blocks: Vec<Block>,
    split: Split,
    /// Queries of few rows, prepared once for all spans.
    q: Vec<f32>,
}

/// Attention of one layer.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) tiles: TileKernels,
    pub(crate) spec: AttendSpec,
    /// `[cells, kv_heads, k_dim]` and `[cells, kv_heads, v_dim]`.
    pub(crate) stored: [Stored<'a>; 2],
    /// How to read these.
    pub(crate) decoders: [Decoder; 2],
    /// `[tokens, n_heads, k_dim]`.
    pub(crate) q: &'a [f32],
    pub(crate) visibility: &'a Visibility,
    pub(crate) beside: Beside<'a>,
    /// `[tokens, n_heads, v_dim]`.
    pub(crate) out: SharedValues<'a>,
}

/// What takes part in the scores beside queries and keys, where a layer has it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Beside<'a> {
    /// `[n_heads]`.
    pub(crate) sinks: Option<&'a [f32]>,
    /// How much a score falls with the distance, `[n_heads]`.
    pub(crate) slopes: Option<&'a [f32]>,
    /// Position of each token, where there are slopes.
    pub(crate) positions: &'a [u32],
}

/// One thread's memory for attention.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    q: Vec<f32>,
    /// The same as bytes, where scores are computed from them.
    q_blocks: Vec<QueryBlock>,
    /// K of a tile, `[TILE, k_dim]` as it was stored and `[k_dim, TILE]`.
    rows: Vec<f32>,
    k: Vec<[f32; TILE]>,
    /// V of a tile, `[TILE, v_dim]`.
    v: Vec<f32>,
    /// Blocks that hold a head and more.
    row: Vec<f32>,
    weights: Vec<[f32; TILE]>,
    /// By how much what was added before a tile shrinks, for each query vector.
    keep: Vec<f32>,
    /// Of each query vector within the present span.
    softmax: Vec<Softmax>,
    out: Vec<f32>,
    /// The same over all spans before.
    all_softmax: Vec<Softmax>,
    all_out: Vec<f32>,
}

/// The rows of a task, and the head that they look at.
struct Rows<'a> {
    numbers: &'a [u32],
    limits: &'a [PosRange],
    kv_head: usize,
}

/// Whether heads and widths are those of the layer's rows.
pub(crate) fn check_shape(spec: &AttendSpec, layer: &LayerRows) -> Result<(), BackendError> {
    let AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        ..
    } = *spec;
    let grouped = kv_heads > 0 && n_heads.is_multiple_of(kv_heads);
    let same = [layer.k.heads, layer.v.heads, layer.k.dim, layer.v.dim]
        == [kv_heads, kv_heads, k_dim, v_dim];
    if grouped && same {
        return Ok(());
    }
    Err(BackendError::RowShape {
        layer: layer.layer,
        wanted: format!("{n_heads} heads on {kv_heads} of {k_dim}/{v_dim}"),
        got: format!("{} heads of {}/{}", layer.k.heads, layer.k.dim, layer.v.dim),
    })
}

fn heads_per_kv(spec: &AttendSpec) -> usize {
    (spec.n_heads / spec.kv_heads.max(1)).max(1)
}

impl Work {
    /// Makes room for `n_tokens` rows.
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_tokens: usize) {
        self.split.reserve(spec, n_tokens);
        let n_few = n_tokens.min(split::MAX_ROWS);
        self.reserve_queries(n_few * spec.n_heads * spec.k_dim);
        self.blocks.clear();
        self.blocks.reserve(n_tokens);
    }

    fn reserve_queries(&mut self, n_values: usize) {
        self.q.resize(self.q.len().max(n_values), 0.0);
    }

    /// Divides the rows into blocks; the last rows, which see most, come first.
    fn divide(&mut self, spec: &AttendSpec, visibility: &Visibility) {
        self.blocks.clear();
        let at_once = (QUERIES / heads_per_kv(spec)).max(1);
        for (group, seen) in visibility.groups.iter().enumerate().rev() {
            let rows = seen.rows.len();
            for first in (0..rows).step_by(at_once).rev() {
                self.blocks.push(Block {
                    group,
                    first,
                    len: at_once.min(rows - first),
                });
            }
        }
    }
}

/// Attention of all rows.
///
/// # Safety
/// The visibility is sound for the queries and the stored cells.
pub(crate) unsafe fn attend(
    lead: &mut Lead<'_>,
    attention: &Attention<'_>,
    work: &mut Work,
    scratch: &[Mutex<Scratch>],
) -> Result<(), BackendError> {
    let (spec, visibility) = (&attention.spec, attention.visibility);
    if work.split.suits(spec, visibility) {
        let n_values = visibility.n_rows as usize * spec.n_heads * spec.k_dim;
        work.reserve_queries(n_values);
        let q = &mut work.q[..n_values];
        q.copy_from_slice(&attention.q[..n_values]);
        attention.prepare(q);
        let prepared = Attention { q, ..*attention };
        // SAFETY: as the caller promises.
        return unsafe { split::attend(lead, &prepared, &mut work.split, scratch) };
    }
    work.divide(spec, visibility);
    let (kv_heads, blocks) = (spec.kv_heads, &work.blocks);
    lead.each(blocks.len() * kv_heads, &|thread, task| {
        let mut scratch = scratch[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (block, kv_head) = (blocks[task / kv_heads], task % kv_heads);
        // SAFETY: the caller promises a sound visibility; each block and head is one task.
        unsafe { attention.block(block, kv_head, &mut scratch) };
        Ok(())
    })
}

impl Scratch {
    /// Makes room for blocks of at most `n_tokens` rows.
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_tokens: usize) {
        let heads = heads_per_kv(spec);
        let n = heads * (split::QUERIES / heads).max(1).min(n_tokens.max(1));
        let grow = |v: &mut Vec<f32>, len: usize| v.resize(v.len().max(len), 0.0);
        grow(&mut self.q, n * spec.k_dim);
        grow(&mut self.rows, TILE * spec.k_dim);
        grow(&mut self.v, TILE * spec.v_dim);
        // A head may begin and end inside blocks of 32 values.
        grow(
            &mut self.row,
            TILE * (spec.k_dim.max(spec.v_dim) + 2 * TILE),
        );
        grow(&mut self.keep, n);
        grow(&mut self.out, n * spec.v_dim);
        grow(&mut self.all_out, n * spec.v_dim);
        self.k.resize(self.k.len().max(spec.k_dim), [0.0; TILE]);
        let n_blocks = self.q_blocks.len().max(n * spec.k_dim / BLOCK);
        self.q_blocks.resize(n_blocks, QueryBlock::default());
        self.weights.resize(self.weights.len().max(n), [0.0; TILE]);
        for softmax in [&mut self.softmax, &mut self.all_softmax] {
            softmax.resize(softmax.len().max(n), Softmax::EMPTY);
        }
    }

    /// Makes room for whole rows of a layer, as plain attention reads them.
    pub(crate) fn reserve_rows(&mut self, layer: &LayerRows) {
        self.reserve_row(layer.k.len().max(layer.v.len()));
    }

    /// Makes room for [`Scratch::row`] of so many values.
    pub(crate) fn reserve_row(&mut self, len: usize) {
        self.row.resize(self.row.len().max(len), 0.0);
    }

    /// Room for one row, for whoever computes one.
    pub(crate) fn row(&mut self, len: usize) -> &mut [f32] {
        &mut self.row[..len]
    }

    /// Begins a span for `n` queries.
    fn begin(&mut self, n: usize, v_dim: usize) {
        self.softmax[..n].fill(Softmax::EMPTY);
        self.out[..n * v_dim].fill(0.0);
    }

    /// What the present span gave for one query.
    fn partial(&self, query: usize, v_dim: usize) -> (Softmax, &[f32]) {
        (self.softmax[query], &self.out[query * v_dim..][..v_dim])
    }

    /// Adds the present span of `n` queries to those before, and begins the next.
    fn close(&mut self, kernels: &Kernels, n: usize, v_dim: usize) {
        for query in 0..n {
            let values = query * v_dim..(query + 1) * v_dim;
            let later = (self.softmax[query], &self.out[values.clone()]);
            self.all_softmax[query].merge(kernels, &mut self.all_out[values], later);
        }
        self.begin(n, v_dim);
    }
}

impl Attention<'_> {
    /// What each query of a head knows before the first cell: a sink is a score that was there
    /// before any key, and its weight is 1 so far.
    fn before_all(&self, head: usize) -> Softmax {
        match self.beside.sinks {
            Some(sinks) => Softmax {
                max: sinks[head],
                sum: 1.0,
            },
            None => Softmax::EMPTY,
        }
    }

    /// All heads of one key/value head for the rows of `block`.
    ///
    /// # Safety
    /// `visibility` is sound for the tokens of `q` and the cells of `stored`, and no other thread
    /// works on the same block and head.
    unsafe fn block(&self, block: Block, kv_head: usize, scratch: &mut Scratch) {
        let Some(group) = self.visibility.groups.get(block.group) else {
            return;
        };
        let range = block.first..block.first + block.len;
        let rows = Rows {
            numbers: &group.rows[range.clone()],
            limits: &group.limits[range],
            kv_head,
        };
        let (heads, v_dim) = (heads_per_kv(&self.spec), self.spec.v_dim);
        let n = heads * block.len;
        let q = &mut scratch.q[..n * self.spec.k_dim];
        self.gather_queries(&rows, q);
        self.prepare(q);
        scratch.begin(n, v_dim);
        for query in 0..n {
            scratch.all_softmax[query] = self.before_all(kv_head * heads + query % heads);
        }
        scratch.all_out[..n * v_dim].fill(0.0);
        self.walk(group, &rows, PosRange::ALL, scratch);
        scratch.close(self.kernels, n, v_dim);
        for (at, &row) in rows.numbers.iter().enumerate() {
            let width = heads * v_dim;
            let start = (row as usize * self.spec.kv_heads + kv_head) * width;
            // SAFETY: a sound visibility has each row in one group once, so this row and head
            // belong to this call alone.
            let out = unsafe { self.out.range(start..start + width) };
            for (head, out) in out.chunks_mut(v_dim.max(1)).enumerate() {
                let query = at * heads + head;
                let values = &scratch.all_out[query * v_dim..][..v_dim];
                self.finish(scratch.all_softmax[query].sum, values, out);
            }
        }
    }

    /// All heads of one key/value head for some rows, of which each sees the cells of `group` within
    /// `span`; the results are [`Scratch::partial`]. Queries are prepared.
    fn span(&self, group: &VisibleGroup, rows: &Rows<'_>, span: PosRange, scratch: &mut Scratch) {
        let n = heads_per_kv(&self.spec) * rows.numbers.len();
        self.gather_queries(rows, &mut scratch.q[..n * self.spec.k_dim]);
        scratch.begin(n, self.spec.v_dim);
        self.walk(group, rows, span, scratch);
    }

    /// Weighted values become the output of a head.
    fn finish(&self, sum: f32, values: &[f32], out: &mut [f32]) {
        // A row that sees nothing has the sum 0 and gives zeros.
        let by = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        out.iter_mut().zip(values).for_each(|(o, v)| *o = v * by);
        self.stored[1].shape.rotation.apply(out);
    }

    /// Rotates queries as keys were, and scales them: their products with keys are the scores.
    fn prepare(&self, q: &mut [f32]) {
        // Products with rotated keys are those of the keys themselves.
        self.stored[0].shape.rotation.apply(q);
        (self.kernels.scale)(q, self.spec.scale);
    }

    /// The queries of some rows, one after the other.
    fn gather_queries(&self, rows: &Rows<'_>, q: &mut [f32]) {
        let width = heads_per_kv(&self.spec) * self.spec.k_dim;
        for (to, &row) in q.chunks_exact_mut(width.max(1)).zip(rows.numbers) {
            let start = (row as usize * self.spec.kv_heads + rows.kv_head) * width;
            to.copy_from_slice(&self.q[start..start + width]);
        }
    }

    /// Takes the cells within `span` that any of the rows sees, tile by tile.
    fn walk(&self, group: &VisibleGroup, rows: &Rows<'_>, span: PosRange, scratch: &mut Scratch) {
        let hull = rows
            .limits
            .iter()
            .fold(PosRange::EMPTY, |all, &l| all.hull(l));
        // Beyond the span as well: what comes next is asked for, and most likely attended next.
        let all = hull.intersection(PosRange::from(span.first..));
        if hull.is_empty() || all.is_empty() {
            return;
        }
        let n = heads_per_kv(&self.spec) * rows.numbers.len();
        let heads = [0, 1].map(|kind| self.stored[kind].heads(rows.kv_head));
        if let Some((quantise, _)) = self.decoders[0].byte_scores(&heads[0], self.spec.k_dim) {
            let n_values = n * self.spec.k_dim;
            let blocks = &mut scratch.q_blocks[..n_values / BLOCK];
            quantise(&scratch.q[..n_values], blocks);
        }
        let mut tiles = Tiles::new(&group.runs, all);
        let (mut tile, mut next) = (Tile::default(), Tile::default());
        let mut more = tiles.next_into(&mut tile);
        Ahead::new(&tile, &heads).rest();
        while more && tile.base <= span.last.0 {
            more = tiles.next_into(&mut next);
            let mut ahead = Ahead::new(&next, &heads);
            self.attend_tile((&tile, &heads), rows, &mut ahead, scratch);
            ahead.rest();
            if more && next.base <= span.last.0 && span_of(next.base) != span_of(tile.base) {
                scratch.close(self.kernels, n, self.spec.v_dim);
            }
            std::mem::swap(&mut tile, &mut next);
        }
    }

    /// Reads a head of K (0) or V (1) of the cells of a tile to their places in `to`, `[TILE, width]`:
    /// values may be the beginnings of keys, and heads may begin inside blocks.
    fn read(
        &self,
        kind: usize,
        (tile, heads): (&Tile, &[Heads<'_>; 2]),
        (to, width): (&mut [f32], usize),
        whole: &mut [f32],
    ) {
        let (heads, decoder) = (&heads[kind], &self.decoders[kind]);
        if heads.n_values == width {
            return decoder.decode(heads, tile, to);
        }
        decoder.decode(heads, tile, whole);
        for (place, _) in tile.places() {
            let whole = &whole[place * heads.n_values + heads.skip..][..width];
            to[place * width..][..width].copy_from_slice(whole);
        }
    }

    /// Reads the keys of a tile as columns; what lies between cells is never looked at.
    fn keys(&self, (tile, stored): (&Tile, &[Heads<'_>; 2]), scratch: &mut Scratch) {
        let k_dim = self.spec.k_dim;
        let Scratch { rows, row, k, .. } = scratch;
        let k = &mut k[..k_dim];
        if self.decoders[0].columns(&stored[0], tile, k) {
            return;
        }
        self.read(0, (tile, stored), (rows, k_dim), row);
        // Whole squares are turned.
        let first = tile.mask.trailing_zeros() as usize / SQUARE * SQUARE;
        let end = (TILE - tile.mask.leading_zeros() as usize).next_multiple_of(SQUARE);
        (self.tiles.place)(&rows[first * k_dim..end * k_dim], first..end, k);
    }

    /// Adds a tile to the softmax of every row that sees some of it.
    fn attend_tile(
        &self,
        (tile, stored): (&Tile, &[Heads<'_>; 2]),
        rows: &Rows<'_>,
        ahead: &mut Ahead<'_>,
        scratch: &mut Scratch,
    ) {
        let AttendSpec { k_dim, v_dim, .. } = self.spec;
        let heads = heads_per_kv(&self.spec);
        let n = heads * rows.limits.len();
        if let Some((_, scores)) = self.decoders[0].byte_scores(&stored[0], k_dim) {
            let q = &scratch.q_blocks[..n * k_dim / BLOCK];
            scores(q, (&stored[0], tile), &mut scratch.weights[..n], ahead);
        } else {
            self.keys((tile, stored), scratch);
            let (q, k) = (&scratch.q[..n * k_dim], &scratch.k[..k_dim]);
            (self.tiles.scores)(q, k, &mut scratch.weights[..n], ahead);
        }
        let add = self.decoders[1].adds(&stored[1], (v_dim, n));
        if add.is_none() {
            let Scratch { row, v, .. } = scratch;
            self.read(1, (tile, stored), (v, v_dim), row);
            // Places between cells hold what an earlier tile left: make it harmless.
            for lane in (0..TILE).filter(|lane| tile.mask >> lane & 1 == 0) {
                v[lane * v_dim..][..v_dim].fill(0.0);
            }
        }
        let seen = |row: usize| tile.mask & visible(rows.limits[row], tile.base);
        let mut row = 0;
        // Rows that see the same cells go together.
        while row < rows.limits.len() {
            let now = seen(row);
            let mut end = row + 1;
            while end < rows.limits.len() && seen(end) == now {
                end += 1;
            }
            if now != 0 {
                self.add_biases((rows, row..end), tile.base, scratch);
                let (queries, lanes) = (row * heads..end * heads, lanes(now));
                self.weigh(now, queries.clone(), scratch);
                let out = &mut scratch.out[queries.start * v_dim..queries.end * v_dim];
                let weights = &scratch.weights[queries];
                match add {
                    Some(add) => add(out, weights, (lanes, (&stored[1], tile)), ahead),
                    None => (self.tiles.accumulate)(out, weights, (lanes, &scratch.v), ahead),
                }
            }
            row = end;
        }
    }

    /// Caps the scores of some rows, and lowers them by distances.
    fn add_biases(
        &self,
        (rows, some): (&Rows<'_>, Range<usize>),
        base: u32,
        scratch: &mut Scratch,
    ) {
        if self.spec.soft_cap.is_none() && self.beside.slopes.is_none() {
            return;
        }
        let heads = heads_per_kv(&self.spec);
        for query in some.start * heads..some.end * heads {
            let scores = &mut scratch.weights[query];
            if let Some(cap) = self.spec.soft_cap {
                (self.kernels.soft_cap)(scores, cap);
            }
            let head = rows.kv_head * heads + query % heads;
            self.bias(scores, (head, rows.numbers[query / heads]), base);
        }
    }

    /// Scores of queries that see the same places become weights; what was added before shrinks.
    fn weigh(&self, seen: u32, queries: Range<usize>, scratch: &mut Scratch) {
        let v_dim = self.spec.v_dim;
        let keep = &mut scratch.keep[queries.clone()];
        let softmax = &mut scratch.softmax[queries.clone()];
        (self.tiles.weigh)(&mut scratch.weights[queries.clone()], seen, softmax, keep);
        let outs = scratch.out[queries.start * v_dim..].chunks_exact_mut(v_dim.max(1));
        for (&keep, out) in keep.iter().zip(outs) {
            if keep != 1.0 {
                (self.kernels.scale)(out, keep);
            }
        }
    }

    /// Lowers the scores of a head by the distance of their keys, which are at `base`, `base + 1`, …
    fn bias(&self, scores: &mut [f32; TILE], (head, row): (usize, u32), base: u32) {
        let Some(slopes) = self.beside.slopes else {
            return;
        };
        let (slope, query) = (slopes[head], self.beside.positions[row as usize]);
        for (score, lane) in scores.iter_mut().zip(0..) {
            *score -= slope * query.abs_diff(base + lane) as f32;
        }
    }
}

/// From the first place that is seen to the last.
fn lanes(seen: u32) -> Range<usize> {
    seen.trailing_zeros() as usize..TILE - seen.leading_zeros() as usize
}

/// The places of the tile at `base` whose positions are within `limits`.
fn visible(limits: PosRange, base: u32) -> u32 {
    if limits.is_empty() || limits.last.0 < base {
        return 0;
    }
    let first = limits.first.0.saturating_sub(base).min(TILE as u32);
    let end = (limits.last.0 - base).min(TILE as u32 - 1) + 1;
    if first >= end { 0 } else { ones(first, end) }
}
