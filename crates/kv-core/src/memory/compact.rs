//! Compaction: the cells of each sequence become neighbours, and the used cells of a stream its
//! first ones.
//!
//! The layout that compaction works towards has the sequences one after the other, by id, and the
//! tokens of each by position; a shared cell is laid out with the smallest of its sequences. A
//! stream whose sequences lie like that in any order is left alone. One call is one pass: it writes
//! free cells only, so that a pass whose copies fail can be undone by forgetting it, and the next
//! pass fills what this one has left. Where few cells are free, that would take too many passes:
//! the last cells fill the holes then, and sequences stay in pieces.
//!
//! A slot need not be contiguous, so compaction never makes room: it makes runs longer, and
//! shortens what a dense mask spans. Knows nothing of windows.

use super::copy::add_row_copy;
use super::edit::Edited;
use super::stream::Stream;
use crate::cells::{CellMove, KvCells, SeqRuns};
use crate::ids::{PartIdx, SeqId};

/// Used cells for each free one up to which sequences are laid out anew. A pass places about as
/// many tokens as cells are free, so this bounds the number of passes.
const MAX_USED_PER_FREE: u32 = 64;

/// The present and the final cells of the tokens of a stream, by number of the cell in the stream.
struct Layout {
    /// By target, the first cells of the stream: which cell holds its token.
    source: Vec<u32>,
    /// Of the cells behind them, those that are free.
    free_behind: Vec<u32>,
}

/// Number of tokens that [`compact`] has still to move.
pub(super) fn n_misplaced(stream: &Stream) -> u32 {
    let sources = Layout::of(&stream.cells).source;
    (0u32..)
        .zip(sources)
        .filter(|(to, from)| to != from)
        .count() as u32
}

/// Moves tokens of one stream to free cells, towards a compact layout.
pub(super) fn compact(stream: &mut Stream, part: PartIdx) -> Edited {
    let moves = Layout::of(&stream.cells).moves(&stream.cells);
    let mut row_copies = Vec::new();
    for &CellMove { from, to } in &moves {
        add_row_copy(&mut row_copies, part, from, to);
    }
    stream.cells.move_cells(&moves);
    if !moves.is_empty() {
        stream.head = stream.cells.n_used();
    }
    Edited {
        n_cells: moves.len() as u32,
        row_copies,
        ..Edited::default()
    }
}

impl Layout {
    fn of(cells: &KvCells) -> Self {
        let (n_used, n_free) = (cells.n_used(), cells.free().n_free());
        let in_place = by_sequence(cells, in_order_of_cells(cells));
        let source = if is_in_place(&in_place) {
            in_place
        } else if u64::from(n_used) <= u64::from(n_free) * u64::from(MAX_USED_PER_FREE) {
            by_sequence(cells, cells.seqs())
        } else {
            without_holes(cells)
        };
        let next = |from| cells.free().next_free(from);
        let behind = std::iter::successors(next(n_used), |&i| next(i + 1));
        Self {
            source,
            // At most one for each token that is in the way.
            free_behind: behind.take(n_used as usize).collect(),
        }
    }

    /// Every free target is filled. Tokens that are in the way of others give way to free cells
    /// behind the targets.
    fn moves(&self, cells: &KvCells) -> Vec<CellMove> {
        let first = cells.first_cell();
        let mut moves = Vec::new();
        let mut add = |from: u32, to: u32| {
            moves.push(CellMove {
                from: first.offset(from),
                to: first.offset(to),
            });
        };
        let misplaced = || {
            (0u32..)
                .zip(self.source.iter().copied())
                .filter(|(to, from)| to != from)
        };
        let mut leaves = vec![false; self.source.len()];
        for (to, from) in misplaced().filter(|(to, _)| cells.free().is_free(*to)) {
            if let Some(leaves) = leaves.get_mut(from as usize) {
                *leaves = true;
            }
            add(from, to);
        }
        // What holds a target and is not where it belongs. Where the last pass gave way already,
        // the targets are free now.
        let n_targets = self.source.len() as u32;
        let in_the_way = misplaced().map(|(_, from)| from).filter(|&from| {
            from < n_targets && !leaves.get(from as usize).copied().unwrap_or(false)
        });
        let mut in_the_way: Vec<u32> = in_the_way.collect();
        in_the_way.sort_unstable();
        for (from, to) in in_the_way.into_iter().zip(self.free_behind.iter().copied()) {
            add(from, to);
        }
        moves
    }
}

fn is_in_place(source: &[u32]) -> bool {
    (0u32..).zip(source).all(|(to, from)| to == *from)
}

/// The sequences in the order of the first cells that they have.
fn in_order_of_cells(cells: &KvCells) -> impl Iterator<Item = SeqId> {
    let first_own = |seq| {
        let mut own = own_cells(cells, seq);
        Some((own.next()?, seq))
    };
    let mut seqs: Vec<(u32, SeqId)> = cells.seqs().filter_map(first_own).collect();
    seqs.sort_unstable();
    seqs.into_iter().map(|(_, seq)| seq)
}

/// The cells that are laid out with a sequence, by position.
fn own_cells(cells: &KvCells, seq: SeqId) -> impl Iterator<Item = u32> {
    let runs = cells.runs(seq).map_or(&[][..], SeqRuns::as_slice);
    let all = runs.iter().flat_map(|run| run.iter()).map(|(cell, _)| cell);
    all.filter(move |&cell| cells.first_seq_of(cell) == Some(seq))
        .map(|cell| cell.0 - cells.first_cell().0)
}

/// The used cells as they are laid out with these sequences, one after the other.
fn by_sequence(cells: &KvCells, seqs: impl Iterator<Item = SeqId>) -> Vec<u32> {
    let mut source = Vec::with_capacity(cells.n_used() as usize);
    seqs.for_each(|seq| source.extend(own_cells(cells, seq)));
    source
}

/// The used cells with the last ones, by sequence and position, in the holes between the others.
fn without_holes(cells: &KvCells) -> Vec<u32> {
    let n_used = cells.n_used();
    let all = cells.seqs().flat_map(|seq| own_cells(cells, seq));
    let mut behind = all.filter(|&cell| cell >= n_used);
    let source = (0..n_used).map(|i| {
        if cells.free().is_free(i) {
            behind.next().unwrap_or(i)
        } else {
            i
        }
    });
    source.collect()
}
