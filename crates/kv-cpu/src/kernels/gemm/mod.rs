//! GEMM on int8 activations: panels of weight rows, unpacked once for all tokens.
//!
//! A [`Panel`] is [`ROWS`] weight rows by at most [`COLUMNS`] columns, unpacked to int8 and
//! interleaved so that one register holds neighbouring columns of several rows. It stays in the
//! first-level cache, or near it, while all tokens pass, a few at a time ([`tile`]). Sums of a
//! block are exact integers; scales are applied in `f32`, block after block. The order of additions
//! is the same for any number of tokens, and GEMV follows it, so prefill and decode give the same
//! bits.
//!
//! Knows nothing of threads, nor of where the bits of a value are ([`unpack_panel`] does).

pub(super) mod block_scales;
pub(super) mod dispatch;
pub(super) mod prefetch;
pub(super) mod tile;
pub(super) mod tile_isa;
pub(super) mod unpack_panel;

use std::cell::RefCell;
use std::ops::Range;

use prefetch::RowPrefetch;

use crate::kernels::WeightRows;
use crate::operands::{BLOCK, Int8Acts, Int8Rows, SUPER_BLOCK};
use crate::output::OutputColumns;

/// Weight rows of a panel.
pub(super) const ROWS: usize = 32;
/// Columns of a panel: the fixed cost of a tile is paid once for all of them.
pub(super) const COLUMNS: usize = 1024;
/// Up to this many tokens take panels of a quarter of the columns: they pass a panel soon, and this
/// leaves room in the cache for prefetches.
const MAX_SMALL_BATCH: usize = 32;
/// Blocks of activations across a panel.
pub(super) const BLOCKS: usize = COLUMNS / BLOCK;
/// Super-blocks across a panel.
pub(super) const SUPERS: usize = BLOCKS / SUPER_BLOCK;
/// Neighbouring columns of a row: what one lane of a dot product takes.
pub(super) const STEP: usize = 4;

/// True if quants are multiplied as they are, signed; else as unsigned bytes, with the format's
/// offset.
pub(super) const SIGNED: bool = cfg!(target_arch = "aarch64");

/// The scales of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// A scale for each block.
    Blocks,
    /// A power of two for each block.
    BlocksByPowers,
    /// A scale and a minimum for each block.
    BlocksWithMinima,
    /// Super-blocks with an integer factor for each block.
    Supers,
    /// Super-blocks with an integer factor and minimum for each block.
    SupersWithMinima,
    /// Super-blocks with an integer factor for each half block.
    SuperHalves,
    /// Super-blocks with an integer factor and minimum for each half block.
    SuperHalvesWithMinima,
}

impl Layout {
    /// Factors of a block: of the whole, or of its halves.
    pub(super) const fn parts(self) -> usize {
        match self {
            Self::SuperHalves | Self::SuperHalvesWithMinima => 2,
            _ => 1,
        }
    }

    /// True if there are minima.
    pub(super) const fn has_minima(self) -> bool {
        match self {
            Self::Blocks | Self::BlocksByPowers | Self::Supers | Self::SuperHalves => false,
            Self::BlocksWithMinima | Self::SupersWithMinima | Self::SuperHalvesWithMinima => true,
        }
    }

    /// True if there are super-blocks.
    pub(super) const fn has_supers(self) -> bool {
        match self {
            Self::Blocks | Self::BlocksByPowers | Self::BlocksWithMinima => false,
            Self::Supers
            | Self::SupersWithMinima
            | Self::SuperHalves
            | Self::SuperHalvesWithMinima => true,
        }
    }

    /// As [`TileArgs::steps`].
    pub(super) const fn steps(self) -> usize {
        BLOCK / STEP / self.parts()
    }
}

/// Unpacked weights; what a layout does not have is left as it was.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct Panel {
    /// `[columns / 4][rows][4]`: quants plus the format's offset, never negative, or as they are
    /// where [`SIGNED`]; each eight rows of each block as [`unpack_panel::Interleave`] has them.
    pub(super) quants: [[[u8; STEP]; ROWS]; COLUMNS / STEP],
    /// Scales of blocks.
    pub(super) scales: [[f32; ROWS]; BLOCKS],
    /// Minima of blocks, to be added.
    pub(super) minima: [[f32; ROWS]; BLOCKS],
    /// Factors of blocks, or of half blocks.
    pub(super) factors: [[i32; ROWS]; 2 * BLOCKS],
    /// Minima of pairs of blocks, or of the two halves of a block.
    pub(super) int_minima: [[[i16; 2]; ROWS]; BLOCKS],
    /// Scales of super-blocks.
    pub(super) super_scales: [[f32; ROWS]; SUPERS],
    /// Scales of the integer minima of super-blocks, to be subtracted.
    pub(super) super_minima: [[f32; ROWS]; SUPERS],
}

impl Panel {
    pub(super) const fn new() -> Self {
        Self {
            quants: [[[0; STEP]; ROWS]; COLUMNS / STEP],
            scales: [[0.0; ROWS]; BLOCKS],
            minima: [[0.0; ROWS]; BLOCKS],
            factors: [[0; ROWS]; 2 * BLOCKS],
            int_minima: [[[0; 2]; ROWS]; BLOCKS],
            super_scales: [[0.0; ROWS]; SUPERS],
            super_minima: [[0.0; ROWS]; SUPERS],
        }
    }
}

/// Some tokens against one panel.
pub(super) struct TileArgs<'a> {
    pub(super) panel: &'a Panel,
    /// As [`PanelGemm::offset_bits`].
    pub(super) offset_bits: i32,
    /// The first of the panel's rows.
    pub(super) row: usize,
    pub(super) acts: Int8Acts,
    /// The first token.
    pub(super) token: usize,
    /// The panel's blocks in the activations' rows.
    pub(super) blocks: Range<usize>,
    /// Sums of the first token; they are continued unless the panel is a row's first.
    pub(super) out: *mut f32,
    /// From one token's sums to the next one's.
    pub(super) stride: usize,
    /// Columns of a block (or half block) that has a scale of its own, divided by [`STEP`].
    pub(super) steps: usize,
    /// Of these, how many have products that fit into 16 bits when they are added in pairs.
    pub(super) narrow_steps: usize,
    /// As [`PanelGemm::max_magnitude`].
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // as above
    pub(super) max_magnitude: u16,
}

/// Multiplies some tokens with some of a panel's rows.
///
/// # Safety
/// The instruction set is available; all tokens and blocks exist; `out` has room for the sums.
pub(super) type TileFn = unsafe fn(&TileArgs<'_>);

/// Unpacks the given blocks of the given rows, at most [`ROWS`].
pub(super) type UnpackPanelFn = fn(&WeightRows<'_>, Range<usize>, Range<usize>, &mut Panel);

thread_local! {
    /// A thread's panel: initializing one for each task would take long.
    static PANEL: RefCell<Panel> = const { RefCell::new(Panel::new()) };
}

/// The way one format is multiplied on one instruction set.
pub(super) struct PanelGemm<'a> {
    pub(super) pack: UnpackPanelFn,
    /// Log2 of what was added to the quants to make them unsigned; 32 for nothing.
    pub(super) offset_bits: i32,
    /// As [`TileArgs::steps`] and [`TileArgs::narrow_steps`].
    pub(super) steps: usize,
    pub(super) narrow_steps: usize,
    /// Where the magnitudes of half a block of activations sum up to no more than this, the
    /// products of a block (or half block) that has a factor of its own sum up to 16 bits.
    pub(super) max_magnitude: u16,
    /// For 1, 2, … tokens.
    pub(super) tiles: &'a [TileFn],
    /// Weight rows that a tile takes.
    pub(super) tile_rows: usize,
}

impl PanelGemm<'_> {
    /// All rows times some tokens.
    ///
    /// # Safety
    /// The instruction set of the tiles is available.
    pub(super) unsafe fn run(
        &self,
        weights: &WeightRows<'_>,
        acts: &Int8Rows<'_>,
        tokens: Range<usize>,
        out: &mut OutputColumns<'_>,
    ) {
        // SAFETY: as the caller promises.
        PANEL.with_borrow_mut(|panel| unsafe { self.rows(weights, acts, tokens, panel, out) });
    }

    /// All rows times some tokens, by way of a panel.
    ///
    /// # Safety
    /// As for [`PanelGemm::run`].
    unsafe fn rows(
        &self,
        weights: &WeightRows<'_>,
        acts: &Int8Rows<'_>,
        tokens: Range<usize>,
        panel: &mut Panel,
        out: &mut OutputColumns<'_>,
    ) {
        let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
        let n_blocks = weights.n_columns.div_ceil(BLOCK);
        let inside = acts.n_columns() == weights.n_columns
            && tokens.end <= acts.n_tokens().min(out.n_tokens());
        debug_assert!(inside);
        if !inside {
            return;
        }
        let at_once = match tokens.len() {
            ..=MAX_SMALL_BATCH => BLOCKS / 4,
            _ => BLOCKS,
        };
        let n_tiles = tokens.len().div_ceil(self.tiles.len()) * ROWS / self.tile_rows;
        for first in (0..n_rows).step_by(ROWS) {
            let rows = first..n_rows.min(first + ROWS);
            for start in (0..n_blocks).step_by(at_once) {
                let blocks = start..n_blocks.min(start + at_once);
                (self.pack)(weights, rows.clone(), blocks.clone(), panel);
                let bytes_to = |block| weights.row_bytes * block / n_blocks;
                let part = bytes_to(blocks.start)..bytes_to(blocks.end);
                let next = RowPrefetch::of(weights, first, part, n_tiles);
                let columns = weights.first + rows.start..weights.first + rows.end;
                let (acts, out) = ((acts, tokens.clone(), blocks), (columns, &mut *out));
                // SAFETY: as the caller promises; tokens and blocks were checked above.
                unsafe { self.tokens(panel, next, acts, out) };
            }
        }
    }

    /// One panel against all tokens.
    ///
    /// # Safety
    /// As for [`PanelGemm::run`]; tokens and blocks exist.
    unsafe fn tokens(
        &self,
        panel: &Panel,
        mut next: RowPrefetch,
        (acts, tokens, blocks): (&Int8Rows<'_>, Range<usize>, Range<usize>),
        (columns, out): (Range<usize>, &mut OutputColumns<'_>),
    ) {
        let mut token = tokens.start;
        while token < tokens.end {
            let n = (tokens.end - token).min(self.tiles.len());
            let Some(tile) = self.tiles.get(n - 1) else {
                return;
            };
            let mut args = TileArgs {
                panel,
                offset_bits: self.offset_bits,
                row: 0,
                acts: acts.pointers(),
                token,
                blocks: blocks.clone(),
                out: std::ptr::null_mut(),
                stride: 0,
                steps: self.steps,
                narrow_steps: self.narrow_steps,
                max_magnitude: self.max_magnitude,
            };
            if columns.len() == ROWS {
                let Some((start, stride)) = out.block(token..token + n, columns.clone()) else {
                    return;
                };
                for row in (0..ROWS).step_by(self.tile_rows) {
                    next.step();
                    // SAFETY: `row` is inside the block of this output.
                    (args.row, args.out, args.stride) = (row, unsafe { start.add(row) }, stride);
                    // SAFETY: `n` tokens of `ROWS` columns from `start` on belong to `out`.
                    unsafe { tile(&args) };
                }
            } else {
                let mut sums = [[0.0; ROWS]; MAX_TILE_TOKENS];
                for (sums, token) in sums.iter_mut().zip(token..token + n) {
                    if let Some(values) = out.values(token, columns.clone()) {
                        sums[..columns.len()].copy_from_slice(values);
                    }
                }
                for row in (0..ROWS).step_by(self.tile_rows) {
                    args.row = row;
                    (args.out, args.stride) = (sums.as_flattened_mut()[row..].as_mut_ptr(), ROWS);
                    // SAFETY: `sums` has room for `MAX_TILE_TOKENS` tokens of `ROWS` columns.
                    unsafe { tile(&args) };
                }
                for (sums, token) in sums.iter().zip(token..token + n) {
                    if let Some(values) = out.values(token, columns.clone()) {
                        values.copy_from_slice(&sums[..columns.len()]);
                    }
                }
            }
            token += n;
        }
    }
}

/// Tokens of the largest tile.
pub(super) const MAX_TILE_TOKENS: usize = 8;
