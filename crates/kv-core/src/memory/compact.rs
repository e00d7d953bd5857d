//! Closing holes: the cells in use become the first ones of their stream.
//!
//! Cells behind the place where the cells in use would end move into the holes before it, in order
//! of sequence and position. So no more rows are copied than there are holes, and no copy writes a
//! row that another reads. A slot need not be contiguous, so compaction never makes room: it
//! shortens what a dense mask spans and makes runs longer.

use super::copy::add_row_copy;
use super::edit::Edited;
use super::stream::Stream;
use crate::backend::RowCopy;
use crate::cells::Cell;
use crate::ids::{CellIdx, PartIdx};

/// Cells that [`compact`] would move.
pub(super) fn n_holes(stream: &Stream) -> u32 {
    holes(stream).count() as u32
}

/// Closes the holes of one stream.
pub(super) fn compact(stream: &mut Stream, part: PartIdx) -> Edited {
    let holes: Vec<CellIdx> = holes(stream).collect();
    let n_used = stream.cells.n_used();
    let mut moved: Vec<(CellIdx, Cell)> = (n_used..stream.cells.n_cells())
        .map(|i| stream.cells.first_cell().offset(i))
        .filter_map(|cell| Some((cell, stream.cells.get(cell)?)))
        .collect();
    moved.sort_by_key(|&(cell, held)| (held.seqs.first(), held.pos, cell));
    let mut row_copies: Vec<RowCopy> = Vec::new();
    for (&(from, held), &to) in moved.iter().zip(&holes) {
        stream.cells.take(from);
        stream.cells.put(to, held);
        add_row_copy(&mut row_copies, part, from, to);
    }
    if !holes.is_empty() {
        stream.head = n_used;
    }
    Edited {
        n_cells: holes.len() as u32,
        row_copies,
        ..Edited::default()
    }
}

/// The free cells before the place where the cells in use would end; as many as there are cells in
/// use behind it.
fn holes(stream: &Stream) -> impl Iterator<Item = CellIdx> {
    let (free, n_used) = (stream.cells.free(), stream.cells.n_used());
    let first = stream.cells.first_cell();
    let next = move |from| free.next_free(from).filter(|&i| i < n_used);
    std::iter::successors(next(0), move |&i| next(i + 1)).map(move |i| first.offset(i))
}
