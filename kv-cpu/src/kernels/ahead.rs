//! Which bytes to ask for while some rows are read side by side.
//!
//! Rows of a tile are read in step: some blocks of every row, then the next blocks of every row. Memory
//! gives most where it is asked for in order, so while a small tile is read the next one is asked for
//! from its beginning to its end. What would not stay in the first-level cache for so long is asked
//! for [`AHEAD`] bytes before it is read: it is further on in the same row, or in the next tile.

use super::WeightRows;
use super::fetch::{fetch_line, fetch_to_second};
use super::panel::ROWS;

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

/// Weight rows that are asked for in order, a part at a time, while others are multiplied.
pub(in crate::kernels) struct InOrder {
    from: *const u8,
    lines: usize,
    /// Lines of each part, in 256ths, and of what was asked for.
    each: usize,
    asked: usize,
}

impl InOrder {
    /// [`ROWS`](super::panel::ROWS) rows from `row` on, in `n_parts`.
    pub(in crate::kernels) fn of(weights: &WeightRows<'_>, row: usize, n_parts: usize) -> Self {
        let from = weights.bytes.as_ptr().wrapping_add(row * weights.row_bytes);
        let lines = (ROWS * weights.row_bytes).div_ceil(64);
        Self {
            from,
            lines,
            each: (256 * lines).div_ceil(n_parts.max(1)),
            asked: 0,
        }
    }

    /// Asks for the next part; past the end of the weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn fetch(&mut self) {
        let end = self.asked + self.each;
        for line in self.asked / 256..(end / 256).min(self.lines) {
            fetch_to_second(self.from.wrapping_add(64 * line));
        }
        self.asked = end;
    }
}
