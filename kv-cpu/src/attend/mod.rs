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

mod decode;
mod plain;
mod spans;
mod split;
mod tile;
mod weigh;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kv_core::backend::BackendError;
use kv_core::graph::AttendSpec;
use kv_core::layers::{HeadBlocks, LayerRows};
use kv_core::{PosRange, Visibility, VisibleGroup};

use crate::kernels::Kernels;
use crate::kernels::fetch::fetch_bytes;
use crate::storage::Stored;
use crate::team::Lead;
use crate::values::SharedValues;
pub(crate) use decode::{Decoder, Heads};
pub(crate) use plain::Plain;
use spans::{Softmax, span_of};
use split::Split;
pub(crate) use tile::{TILE, TileKernels};

/// Query vectors that are attended together: their accumulators and a tile stay in the first-level
/// cache.
const QUERIES: usize = 64;

/// Cells of a run that is called short, and how many runs ahead such a one is asked for.
const SHORT_RUN: u32 = 4;
const SHORT_RUNS_AHEAD: usize = 12;
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
}

/// Attention of one layer.
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

/// The cells of a tile that have been loaded.
#[derive(Clone, Copy, Debug, Default)]
struct Loaded {
    base: u32,
    /// A bit for each place.
    mask: u32,
    last: u32,
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
        self.blocks.clear();
        self.blocks.reserve(n_tokens);
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
        // SAFETY: as the caller promises.
        return unsafe { split::attend(lead, attention, &mut work.split, scratch) };
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
        grow(&mut self.row, spec.k_dim.max(spec.v_dim) + 2 * TILE);
        grow(&mut self.keep, n);
        grow(&mut self.out, n * spec.v_dim);
        grow(&mut self.all_out, n * spec.v_dim);
        self.k.resize(self.k.len().max(spec.k_dim), [0.0; TILE]);
        self.weights.resize(self.weights.len().max(n), [0.0; TILE]);
        for softmax in [&mut self.softmax, &mut self.all_softmax] {
            softmax.resize(softmax.len().max(n), Softmax::EMPTY);
        }
    }

    /// Makes room for whole rows of a layer, as plain attention reads them.
    pub(crate) fn reserve_rows(&mut self, layer: &LayerRows) {
        let len = layer.k.len().max(layer.v.len());
        self.row.resize(self.row.len().max(len), 0.0);
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
        self.gather_queries(&rows, scratch);
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
    /// `span`; the results are [`Scratch::partial`].
    fn span(&self, group: &VisibleGroup, rows: &Rows<'_>, span: PosRange, scratch: &mut Scratch) {
        self.gather_queries(rows, scratch);
        let n = heads_per_kv(&self.spec) * rows.numbers.len();
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

    /// Queries, scaled: their products with keys are the scores.
    fn gather_queries(&self, rows: &Rows<'_>, scratch: &mut Scratch) {
        let width = heads_per_kv(&self.spec) * self.spec.k_dim;
        for (at, &row) in rows.numbers.iter().enumerate() {
            let start = (row as usize * self.spec.kv_heads + rows.kv_head) * width;
            let to = &mut scratch.q[at * width..][..width];
            to.copy_from_slice(&self.q[start..start + width]);
            // Products with rotated keys are those of the keys themselves.
            self.stored[0].shape.rotation.apply(to);
            (self.kernels.scale)(to, self.spec.scale);
        }
    }

    /// Takes the cells within `span` that any of the rows sees, tile by tile.
    fn walk(&self, group: &VisibleGroup, rows: &Rows<'_>, span: PosRange, scratch: &mut Scratch) {
        let hull = rows
            .limits
            .iter()
            .fold(PosRange::EMPTY, |all, &l| all.hull(l));
        let all = hull.intersection(span);
        if hull.is_empty() || all.is_empty() {
            return;
        }
        let n = heads_per_kv(&self.spec) * rows.numbers.len();
        let mut tile = Loaded::default();
        // Runs are sorted: skip those that end before anybody looks.
        let skipped = group.runs.partition_point(|r| r.last_pos() < all.first);
        let runs = &group.runs[skipped..];
        for (at, run) in runs.iter().enumerate() {
            if run.pos > all.last {
                break;
            }
            // Cells of short runs lie anywhere; the processor does not foresee them.
            if let Some(later) = runs
                .get(at + SHORT_RUNS_AHEAD)
                .filter(|r| r.len < SHORT_RUN)
            {
                self.fetch(later.cell.as_usize(), rows.kv_head);
            }
            let Some(run) = run.clip(all) else { continue };
            let (mut cell, mut pos, mut len) = (run.cell.as_usize(), run.pos.0, run.len);
            while len > 0 {
                let base = pos & !(TILE as u32 - 1);
                if tile.mask != 0 && (base != tile.base || pos <= tile.last) {
                    self.attend_tile(&tile, rows, scratch);
                    if span_of(base) != span_of(tile.base) {
                        scratch.close(self.kernels, n, self.spec.v_dim);
                    }
                    tile.mask = 0;
                }
                let lane = pos - base;
                let n = len.min(TILE as u32 - lane);
                let lanes = lane as usize..(lane + n) as usize;
                self.load(cell, lanes, rows.kv_head, scratch);
                tile.base = base;
                tile.mask |= ones(lane..lane + n);
                tile.last = pos + (n - 1);
                (cell, len) = (cell + n as usize, len - n);
                pos = pos.saturating_add(n);
            }
        }
        if tile.mask != 0 {
            self.attend_tile(&tile, rows, scratch);
        }
    }

    /// Asks for a head of a cell that is needed soon.
    fn fetch(&self, cell: usize, kv_head: usize) {
        for stored in &self.stored {
            let heads = stored.heads(cell..cell + 1, stored.shape.head(kv_head));
            fetch_bytes(heads.bytes.as_ptr(), heads.n_bytes);
        }
    }

    /// Brings neighbouring cells into neighbouring places of the tile.
    fn load(&self, cell: usize, lanes: Range<usize>, kv_head: usize, scratch: &mut Scratch) {
        let AttendSpec { k_dim, v_dim, .. } = self.spec;
        let Scratch { rows, row, v, .. } = scratch;
        let cells = cell..cell + lanes.len();
        let to = &mut rows[lanes.start * k_dim..lanes.end * k_dim];
        self.read(0, (cells.clone(), kv_head), (to, k_dim), row);
        let to = &mut v[lanes.start * v_dim..lanes.end * v_dim];
        self.read(1, (cells, kv_head), (to, v_dim), row);
    }

    /// Reads a head of K (0) or V (1) of neighbouring cells, `width` values of each: values may be the
    /// beginnings of keys.
    fn read(
        &self,
        kind: usize,
        (cells, kv_head): (Range<usize>, usize),
        (to, width): (&mut [f32], usize),
        whole: &mut [f32],
    ) {
        let (stored, decoder) = (&self.stored[kind], &self.decoders[kind]);
        let head: HeadBlocks = stored.shape.head(kv_head);
        if head.n_values == width {
            return decoder.decode(stored.heads(cells, head), to);
        }
        let whole = &mut whole[..head.n_values];
        for (cell, to) in cells.zip(to.chunks_exact_mut(width.max(1))) {
            decoder.decode(stored.heads(cell..cell + 1, head), whole);
            to.copy_from_slice(&whole[head.skip..][..width]);
        }
    }

    /// Adds a tile to the softmax of every row that sees some of it.
    fn attend_tile(&self, tile: &Loaded, rows: &Rows<'_>, scratch: &mut Scratch) {
        let AttendSpec { k_dim, v_dim, .. } = self.spec;
        let heads = heads_per_kv(&self.spec);
        let n = heads * rows.limits.len();
        // Places between cells hold what an earlier tile left: make it harmless.
        for lane in (0..TILE).filter(|lane| tile.mask != u32::MAX && tile.mask >> lane & 1 == 0) {
            scratch.v[lane * v_dim..][..v_dim].fill(0.0);
        }
        // Whole squares of keys are turned; what lies between cells is never looked at.
        let first = tile.mask.trailing_zeros() as usize / SQUARE * SQUARE;
        let end = (TILE - tile.mask.leading_zeros() as usize).next_multiple_of(SQUARE);
        let rows_of = &scratch.rows[first * k_dim..end * k_dim];
        (self.tiles.place)(rows_of, first..end, &mut scratch.k[..k_dim]);
        let (q, k) = (&scratch.q[..n * k_dim], &scratch.k[..k_dim]);
        (self.tiles.scores)(q, k, &mut scratch.weights[..n]);
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
                self.attend_alike(now, row * heads..end * heads, v_dim, scratch);
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

    /// Adds a tile to queries that see the same of its places.
    fn attend_alike(&self, seen: u32, queries: Range<usize>, v_dim: usize, scratch: &mut Scratch) {
        let keep = &mut scratch.keep[queries.clone()];
        let softmax = &mut scratch.softmax[queries.clone()];
        (self.tiles.weigh)(&mut scratch.weights[queries.clone()], seen, softmax, keep);
        let outs = scratch.out[queries.start * v_dim..].chunks_exact_mut(v_dim.max(1));
        for (&keep, out) in keep.iter().zip(outs) {
            if keep != 1.0 {
                (self.kernels.scale)(out, keep);
            }
        }
        let lanes = seen.trailing_zeros() as usize..TILE - seen.leading_zeros() as usize;
        let out = &mut scratch.out[queries.start * v_dim..queries.end * v_dim];
        (self.tiles.accumulate)(out, &scratch.weights[queries], lanes, &scratch.v);
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

/// A mask with these bits set; the range is within 32.
fn ones(lanes: Range<u32>) -> u32 {
    let below = |n: u32| if n >= 32 { u32::MAX } else { (1 << n) - 1 };
    below(lanes.end) & !below(lanes.start)
}

/// The places of the tile at `base` whose positions are within `limits`.
fn visible(limits: PosRange, base: u32) -> u32 {
    if limits.is_empty() || limits.last.0 < base {
        return 0;
    }
    let first = limits.first.0.saturating_sub(base).min(TILE as u32);
    let end = (limits.last.0 - base).min(TILE as u32 - 1) + 1;
    if first >= end { 0 } else { ones(first..end) }
}
