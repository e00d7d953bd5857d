//! Which bytes to ask for while some rows are read side by side.
//!
//! Rows of a tile are read in step: some blocks of every row, then the next blocks of every row.
//! What comes [`AHEAD`] bytes later is further on in the same row, or in the next tile.

use super::fetch::fetch_line;

/// Bytes between asking and reading: some 300 ns of one core's share of the memory's bandwidth.
const AHEAD: usize = 8 * 1024;

/// How far ahead of a piece of a row lies what is asked for.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Ahead {
    bytes: usize,
}

impl Ahead {
    /// For a piece of `piece` bytes at byte `at` of `ROWS` rows of `row_bytes`.
    #[inline(always)]
    pub(in crate::kernels) fn of<const ROWS: usize>(
        at: usize,
        piece: usize,
        row_bytes: usize,
    ) -> Self {
        let further = AHEAD.div_ceil(ROWS * piece.max(1)) * piece;
        let in_row = at + further < row_bytes;
        let next_tile = (ROWS - 1) * row_bytes + further.min(row_bytes);
        Self {
            bytes: if in_row { further } else { next_tile },
        }
    }

    /// Asks for what comes after `piece`; past the end of the weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn fetch<const BYTES: usize>(
        self,
        piece: *const [u8; BYTES],
        n_pieces: usize,
    ) {
        let ahead = piece.cast::<u8>().wrapping_add(self.bytes);
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
