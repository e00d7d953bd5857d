//! Which bytes to ask for while some rows are read side by side.
//!
//! Rows of a tile are read in step: some blocks of every row, then the next blocks of every row. Memory
//! gives most where it is asked for in order, so while a small tile is read the next one is asked for
//! from its beginning to its end. What would not stay in the first-level cache for so long is asked
//! for [`AHEAD`] bytes before it is read: it is further on in the same row, or in the next tile.

use std::ops::Range;

use super::WeightRows;
use super::fetch::{fetch_line, fetch_to_second};
use super::panel::ROWS as PANEL_ROWS;

/// Bytes between asking and reading: some 300 ns of one core's share of the memory's bandwidth.
const AHEAD: usize = 8 * 1024;
/// Bytes of a tile that may be asked for as a whole.
const IN_ORDER: usize = 30 * 1024;

/// Whether a tile of so many rows is asked for in order.
#[inline(always)]
pub(in crate::kernels) fn in_order(n_rows: usize, row_bytes: usize) -> bool {
    n_rows * row_bytes <= IN_ORDER
}

/// Where what is asked for lies, as seen from a piece of a row.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Ahead {
    /// From the first row's piece.
    bytes: usize,
    /// What is added to that from row to row (perhaps negative, wrapped).
    each_row: usize,
}

impl Ahead {
    /// For a piece of `piece` bytes at byte `at` of `N` rows of `row_bytes`.
    #[inline(always)]
    pub(in crate::kernels) fn of<const N: usize>(
        at: usize,
        piece: usize,
        row_bytes: usize,
    ) -> Self {
        let tile = N * row_bytes;
        if in_order(N, row_bytes) {
            return Self {
                bytes: tile + (N - 1) * at,
                each_row: piece.wrapping_sub(row_bytes),
            };
        }
        let further = AHEAD.div_ceil(N * piece.max(1)) * piece;
        let in_row = at + further < row_bytes;
        let next_tile = tile - row_bytes + further.min(row_bytes);
        Self {
            bytes: if in_row { further } else { next_tile },
            each_row: 0,
        }
    }

    /// Asks for what comes after `piece` of row `row` of the tile; past the end of the weights this
    /// does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn fetch<const BYTES: usize>(
        self,
        piece: *const [u8; BYTES],
        row: usize,
        n_pieces: usize,
    ) {
        let bytes = self.bytes.wrapping_add(row.wrapping_mul(self.each_row));
        let ahead = piece.cast::<u8>().wrapping_add(bytes);
        // Neighbouring pieces share lines, so whole lines of one are enough.
        for line in 0..(n_pieces * BYTES).div_ceil(64).max(1) {
            fetch_line(ahead.wrapping_add(64 * line));
        }
    }
}

/// The same for some rows that are read in step, a few bytes of each at a time.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct RowsAhead {
    row_bytes: usize,
    /// Bytes of the rows that are read together.
    tile_bytes: usize,
    /// How much further on in a row: whole tiles, and the rest.
    tiles: usize,
    rest: usize,
}

impl RowsAhead {
    /// For `n_rows` rows of `row_bytes`.
    #[inline(always)]
    pub(in crate::kernels) fn new(n_rows: usize, row_bytes: usize) -> Self {
        let (in_rows, row_bytes) = (AHEAD / n_rows.max(1), row_bytes.max(1));
        let tile_bytes = n_rows * row_bytes;
        Self {
            row_bytes,
            tile_bytes,
            tiles: in_rows / row_bytes * tile_bytes,
            rest: in_rows % row_bytes,
        }
    }

    /// Asks for the line that comes after byte `at` of a row, which is at `from`; past the end of the
    /// weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn fetch_line(self, from: *const u8, at: usize) {
        let mut further = self.tiles + self.rest;
        if at + self.rest >= self.row_bytes {
            further = further + self.tile_bytes - self.row_bytes;
        }
        fetch_line(from.wrapping_add(further));
    }
}

/// What comes after a panel: the next one, which is asked for while this one is unpacked.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct NextPanel {
    /// From a block to the one in its place in the next panel.
    bytes: usize,
}

impl NextPanel {
    /// After a panel that holds the given part of its rows' bytes.
    pub(in crate::kernels) fn after(part: Range<usize>, row_bytes: usize) -> Self {
        let bytes = match part.end < row_bytes {
            true => part.len(),
            false => PANEL_ROWS * row_bytes - part.start,
        };
        Self { bytes }
    }

    /// From each row's `BYTES` bytes at byte `at` to the lines to be asked for instead of them, each
    /// line but once; what lies past the end of the weights does no harm.
    #[inline(always)]
    pub(in crate::kernels) fn lines<const BYTES: usize>(
        self,
        at: usize,
    ) -> impl Iterator<Item = usize> {
        let first = at.next_multiple_of(64) - at;
        (first..BYTES)
            .step_by(64)
            .map(move |line| self.bytes + line)
    }
}

/// The rows that come after a panel's: asked for in order, to the second-level cache, while tokens
/// pass the panels before.
pub(in crate::kernels) struct NextRows {
    from: *const u8,
    n_lines: usize,
    lines_each: usize,
}

impl NextRows {
    /// What is to be asked for beside the panel that holds the given part of the bytes of the rows
    /// from `row` on, in so many steps.
    pub(in crate::kernels) fn of(
        weights: &WeightRows<'_>,
        row: usize,
        part: Range<usize>,
        n_steps: usize,
    ) -> Self {
        let next = (row + PANEL_ROWS) * weights.row_bytes;
        let n_lines = (PANEL_ROWS * part.len()).div_ceil(64);
        Self {
            // What belongs to the parts before has been asked for.
            from: weights
                .bytes
                .as_ptr()
                .wrapping_add(next + PANEL_ROWS * part.start),
            n_lines,
            lines_each: n_lines.div_ceil(n_steps.max(1)),
        }
    }

    /// Asks for what belongs to one step; past the end of the weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn step(&mut self) {
        let n_lines = self.lines_each.min(self.n_lines);
        for line in 0..n_lines {
            fetch_to_second(self.from.wrapping_add(64 * line));
        }
        self.from = self.from.wrapping_add(64 * n_lines);
        self.n_lines -= n_lines;
    }
}
