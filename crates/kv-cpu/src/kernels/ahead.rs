//! Which bytes to ask for while some rows are read side by side.
//!
//! Rows of a tile are read in step: some blocks of every row, then the next blocks of every row. Memory
//! gives most where it is asked for in order, so while a small tile is read the next one is asked for
//! from its beginning to its end. What would not stay in the first-level cache for so long is asked
//! for [`AHEAD`] bytes before it is read: it is further on in the same row, or in the next tile. Into which
//! cache depends on the processor ([`Level`]).

#[cfg(target_arch = "x86_64")]
use super::fetch::fetch_line;
use super::fetch::{Level, fetch_to_second};

/// Bytes between asking and reading: some 300 ns of one core's share of the memory's bandwidth.
pub(in crate::kernels) const AHEAD: usize = 8 * 1024;
const LINE: usize = 64;
/// Bytes of a tile that may be asked for as a whole into the first-level cache, and into the second one.
const IN_ORDER: usize = 30 * 1024;
const IN_ORDER_SECOND: usize = 256 * 1024;

/// Bytes between asking the second-level cache for what is read from beginning to end and reading it. Each line is asked
/// for twice: when memory is busy, processors drop requests (one core of Zen 4 multiplies 24 GB/s so and 20 when each
/// is asked for once, of 29 that it reads).
const IN_ORDER_AHEAD: [usize; 2] = [12 * 1024, 6 * 1024];

/// Asks for what comes after a line of bytes that are read from beginning to end.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(in crate::kernels) fn ask_in_order<const SECOND: bool>(line: *const u8) {
    if SECOND {
        for ahead in IN_ORDER_AHEAD {
            fetch_to_second(line.wrapping_add(ahead));
        }
    } else {
        fetch_line(line.wrapping_add(AHEAD));
    }
}

/// The same for a line at byte `at` of row `row` of a tile of `N` rows that begins at `first` and is read in step, with
/// the second-level cache.
#[inline(always)]
pub(in crate::kernels) fn ask_next_tile<const N: usize>(
    first: *const u8,
    (at, row): (usize, usize),
    row_bytes: usize,
) {
    let [far, near] = IN_ORDER_AHEAD;
    // Not nearer than the next tile: all rows of this one are being read.
    let line = first.wrapping_add(N * at + row * LINE + far.max(N * row_bytes));
    fetch_to_second(line);
    fetch_to_second(line.wrapping_sub(far - near));
}

/// Whether they are for the cache into which this processor is best asked ([`Level`]): then tiles are asked for in order.
#[inline(always)]
pub(in crate::kernels) fn in_order_somewhere(n_rows: usize, row_bytes: usize) -> bool {
    let tile = n_rows * row_bytes;
    tile <= match Level::of_tile(tile) {
        Level::First => IN_ORDER,
        Level::Second => IN_ORDER_SECOND,
    }
}

/// Where what is asked for lies, as seen from a piece of a row.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Ahead {
    /// From the first row's piece.
    bytes: usize,
    /// What is added to that from row to row (perhaps negative, wrapped).
    each_row: usize,
    /// How much is asked for.
    piece: usize,
    /// Where to.
    pub(in crate::kernels) level: Level,
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
        let level = Level::of_tile(tile);
        if in_order_somewhere(N, row_bytes) {
            return Self {
                bytes: tile + (N - 1) * at,
                each_row: piece.wrapping_sub(row_bytes),
                piece,
                level,
            };
        }
        let further = AHEAD.div_ceil(N * piece.max(1)) * piece;
        let in_row = at + further < row_bytes;
        let next_tile = tile - row_bytes + further.min(row_bytes);
        Self {
            bytes: if in_row { further } else { next_tile },
            each_row: 0,
            piece,
            level,
        }
    }

    /// Asks for what comes after the piece at `from`, which is in row `row` of the tile; past the end
    /// of the weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn fetch<T>(self, from: *const T, row: usize) {
        let bytes = self.bytes.wrapping_add(row.wrapping_mul(self.each_row));
        // Neighbouring pieces share lines, so whole lines of one are enough.
        self.level
            .fetch(from.cast::<u8>().wrapping_add(bytes), self.piece);
    }
}
