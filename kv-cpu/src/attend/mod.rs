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
//! by key/value heads and blocks of rows, and not by positions: one row over a long context uses as
//! many threads as there are key/value heads.

mod decode;
mod plain;
mod tile;

use std::ops::Range;

use kv_core::backend::BackendError;
use kv_core::graph::AttendSpec;
use kv_core::layers::LayerRows;
use kv_core::{PosRange, Visibility, VisibleGroup};

use crate::kernels::Kernels;
use crate::storage::Stored;
use crate::values::SharedValues;
pub(crate) use decode::Decoder;
pub(crate) use plain::Plain;
pub(crate) use tile::{TILE, TileKernels};

/// Query vectors that are attended together: their accumulators and a tile stay in the first-level
/// cache.
const QUERIES: usize = 64;

/// Rows of one group that are attended together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    group: usize,
    first: usize,
    len: usize,
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
    /// K of a tile, `[k_dim, TILE]`.
    k: Vec<[f32; TILE]>,
    /// V of a tile, `[TILE, v_dim]`.
    v: Vec<f32>,
    row: Vec<f32>,
    weights: Vec<[f32; TILE]>,
    /// Largest score and sum of weights of each query vector.
    softmax: Vec<(f32, f32)>,
    out: Vec<f32>,
}

/// The rows of a block, and the head that they look at.
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

/// Divides the rows into blocks; the last rows, which see most, come first.
pub(crate) fn blocks(spec: &AttendSpec, visibility: &Visibility, out: &mut Vec<Block>) {
    out.clear();
    let at_once = (QUERIES / heads_per_kv(spec)).max(1);
    for (group, rows) in visibility
        .groups
        .iter()
        .map(|g| g.rows.len())
        .enumerate()
        .rev()
    {
        for first in (0..rows).step_by(at_once).rev() {
            out.push(Block {
                group,
                first,
                len: at_once.min(rows - first),
            });
        }
    }
}

fn heads_per_kv(spec: &AttendSpec) -> usize {
    (spec.n_heads / spec.kv_heads.max(1)).max(1)
}

impl Scratch {
    /// Makes room for blocks of at most `n_tokens` rows.
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_tokens: usize) {
        let heads = heads_per_kv(spec);
        let n = heads * (QUERIES / heads).max(1).min(n_tokens.max(1));
        let grow = |v: &mut Vec<f32>, len: usize| v.resize(v.len().max(len), 0.0);
        grow(&mut self.q, n * spec.k_dim);
        grow(&mut self.v, TILE * spec.v_dim);
        // A head may begin and end inside blocks of 32 values.
        grow(&mut self.row, spec.k_dim.max(spec.v_dim) + 2 * TILE);
        grow(&mut self.out, n * spec.v_dim);
        self.k.resize(self.k.len().max(spec.k_dim), [0.0; TILE]);
        self.weights.resize(self.weights.len().max(n), [0.0; TILE]);
        self.softmax.resize(self.softmax.len().max(n), (0.0, 0.0));
    }
}

impl Attention<'_> {
    /// All heads of one key/value head for the rows of `block`.
    ///
    /// # Safety
    /// `visibility` is sound for the tokens of `q` and the cells of `stored`, and no other thread
    /// works on the same block and head.
    pub(crate) unsafe fn block(&self, block: Block, kv_head: usize, scratch: &mut Scratch) {
        let Some(group) = self.visibility.groups.get(block.group) else {
            return;
        };
        let rows = block.first..block.first + block.len;
        let limits = &group.limits[rows.clone()];
        let heads = heads_per_kv(&self.spec);
        self.gather_queries(&group.rows[rows.clone()], kv_head, scratch);
        let n = heads * block.len;
        let head = kv_head * heads;
        for (query, state) in scratch.softmax[..n].iter_mut().enumerate() {
            // A sink is a score that was there before any key, and its weight is 1 so far.
            *state = match self.beside.sinks {
                Some(sinks) => (sinks[head + query % heads], 1.0),
                None => (f32::NEG_INFINITY, 0.0),
            };
        }
        scratch.out[..n * self.spec.v_dim].fill(0.0);
        let rows_of = Rows {
            numbers: &group.rows[rows.clone()],
            limits,
            kv_head,
        };
        self.walk(group, &rows_of, scratch);
        for (at, &row) in group.rows[rows].iter().enumerate() {
            let width = heads * self.spec.v_dim;
            let start = (row as usize * self.spec.kv_heads + kv_head) * width;
            // SAFETY: a sound visibility has each row in one group once, so this row and head
            // belong to this call alone.
            let out = unsafe { self.out.range(start..start + width) };
            let from = &scratch.out[at * width..][..width];
            let sums = &scratch.softmax[at * heads..][..heads];
            let dim = self.spec.v_dim.max(1);
            for ((o, v), &(_, sum)) in out.chunks_mut(dim).zip(from.chunks(dim)).zip(sums) {
                // A row that sees nothing has the sum 0 and gives zeros.
                let by = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                o.iter_mut().zip(v).for_each(|(o, v)| *o = v * by);
                self.stored[1].shape.rotation.apply(o);
            }
        }
    }

    fn gather_queries(&self, rows: &[u32], kv_head: usize, scratch: &mut Scratch) {
        let width = heads_per_kv(&self.spec) * self.spec.k_dim;
        for (at, &row) in rows.iter().enumerate() {
            let start = (row as usize * self.spec.kv_heads + kv_head) * width;
            let to = &mut scratch.q[at * width..][..width];
            to.copy_from_slice(&self.q[start..start + width]);
            // Products with rotated keys are those of the keys themselves.
            self.stored[0].shape.rotation.apply(to);
        }
    }

    /// Takes the cells that any of the rows sees, tile by tile.
    fn walk(&self, group: &VisibleGroup, rows: &Rows<'_>, scratch: &mut Scratch) {
        let all = rows
            .limits
            .iter()
            .fold(PosRange::EMPTY, |all, &l| all.hull(l));
        let mut tile = Loaded::default();
        // Runs are sorted: skip those that end before anybody looks.
        let skipped = group.runs.partition_point(|r| r.last_pos() < all.first);
        for run in group.runs[skipped..]
            .iter()
            .take_while(|r| r.pos <= all.last)
        {
            let Some(run) = run.clip(all) else { continue };
            let (mut cell, mut pos, mut len) = (run.cell.as_usize(), run.pos.0, run.len);
            while len > 0 {
                let base = pos & !(TILE as u32 - 1);
                if tile.mask != 0 && (base != tile.base || pos <= tile.last) {
                    self.attend_tile(&tile, rows, scratch);
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

    /// Brings neighbouring cells into neighbouring places of the tile.
    fn load(&self, cell: usize, lanes: Range<usize>, kv_head: usize, scratch: &mut Scratch) {
        let AttendSpec { k_dim, v_dim, .. } = self.spec;
        let ([k, v], [k_decoder, v_decoder]) = (&self.stored, &self.decoders);
        let (k_head, v_head) = (k.shape.head(kv_head), v.shape.head(kv_head));
        for (cell, lane) in (cell..).zip(lanes) {
            let row = &mut scratch.row[..k_head.n_values];
            k_decoder.decode(k.head(cell, k_head), row);
            let places = scratch.k.iter_mut().zip(&row[k_head.skip..][..k_dim]);
            places.for_each(|(places, value)| places[lane] = *value);
            let to = &mut scratch.v[lane * v_dim..][..v_dim];
            if v_head.n_values == v_dim {
                v_decoder.decode(v.head(cell, v_head), to);
            } else {
                let row = &mut scratch.row[..v_head.n_values];
                v_decoder.decode(v.head(cell, v_head), row);
                to.copy_from_slice(&row[v_head.skip..][..v_dim]);
            }
        }
    }

    /// Adds a tile to the softmax of every row that sees some of it.
    fn attend_tile(&self, tile: &Loaded, rows: &Rows<'_>, scratch: &mut Scratch) {
        let AttendSpec { k_dim, v_dim, .. } = self.spec;
        let heads = heads_per_kv(&self.spec);
        let n = heads * rows.limits.len();
        // Places between cells hold what an earlier tile left: make it harmless.
        for lane in (0..TILE).filter(|lane| tile.mask >> lane & 1 == 0) {
            scratch.v[lane * v_dim..][..v_dim].fill(0.0);
        }
        let (q, k) = (&scratch.q[..n * k_dim], &scratch.k[..k_dim]);
        (self.tiles.scores)(q, k, &mut scratch.weights[..n]);
        for (row, limits) in rows.limits.iter().enumerate() {
            let seen = tile.mask & visible(*limits, tile.base);
            if seen == 0 {
                continue;
            }
            let lanes = seen.trailing_zeros() as usize..TILE - seen.leading_zeros() as usize;
            for query in row * heads..(row + 1) * heads {
                let weights = &mut scratch.weights[query];
                self.prepare(weights);
                let head = rows.kv_head * heads + query - row * heads;
                self.bias(weights, (head, rows.numbers[row]), tile.base);
                let state = &mut scratch.softmax[query];
                let Some(correction) = self.softmax(weights, seen, state) else {
                    continue;
                };
                let out = &mut scratch.out[query * v_dim..][..v_dim];
                if correction != 1.0 {
                    (self.kernels.scale)(out, correction);
                }
                (self.tiles.accumulate)(out, weights, lanes.clone(), &scratch.v);
            }
        }
    }

    /// Scales and caps dot products.
    fn prepare(&self, scores: &mut [f32; TILE]) {
        (self.kernels.scale)(scores, self.spec.scale);
        if let Some(cap) = self.spec.soft_cap {
            (self.kernels.soft_cap)(scores, cap);
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

    /// Turns scores into weights relative to the largest score so far; gives the factor by which
    /// what was added before must shrink, or `None` where every score is `-∞`.
    fn softmax(
        &self,
        scores: &mut [f32; TILE],
        seen: u32,
        (max, sum): &mut (f32, f32),
    ) -> Option<f32> {
        for (lane, score) in scores.iter_mut().enumerate() {
            if seen >> lane & 1 == 0 {
                *score = f32::NEG_INFINITY;
            }
        }
        let now = max.max((self.kernels.max)(scores));
        if now == f32::NEG_INFINITY {
            return None;
        }
        let correction = (*max - now).exp();
        *sum = *sum * correction + (self.kernels.exp_sum)(scores, now);
        *max = now;
        Some(correction)
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
