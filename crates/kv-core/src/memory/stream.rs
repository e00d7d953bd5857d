//! One stream of a [`Unified`](super::Unified) memory: its cells, where the next slot search
//! begins, and what its sequences have forgotten.
//!
//! Invariant: a sequence that forgot positions still has its last one, and its next token sees
//! nothing of what is forgotten. Knows nothing of other streams.

use std::collections::BTreeMap;

use super::pos_set::PosSet;
use super::refusal::WindowForgotten;
use super::undo::StreamUndo;
use crate::batch::UBatchRow;
use crate::cells::{Cell, FreedCells, KvCells};
use crate::grid::GridPos;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::visibility::CellRun;
use crate::window::{PosRange, Window};

/// The cells of one stream and what goes with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) cells: KvCells,
    /// The start of the next slot search, counted from the first cell.
    pub(super) head: u32,
    /// By sequence of this stream: the positions that it had and that were recycled.
    forgotten: Vec<PosSet>,
}

/// The data of a sequence that decides how it can go on.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeqEnd {
    /// Its last position.
    pub(super) last: Option<Pos>,
    /// The smallest interval around the positions that it forgot.
    pub(super) forgotten: PosRange,
}

impl Stream {
    pub(super) fn new(cells: KvCells) -> Self {
        let forgotten = vec![PosSet::default(); cells.seqs().count()];
        Self {
            cells,
            head: 0,
            forgotten,
        }
    }

    /// The positions that the sequence had and that were recycled; `None` where it cannot have
    /// cells here.
    pub(super) fn forgotten(&self, seq: SeqId) -> Option<&PosSet> {
        self.forgotten.get(self.local_seq(seq)?)
    }

    pub(super) fn set_forgotten(&mut self, seq: SeqId, positions: PosSet) {
        if let Some(forgotten) = self.forgotten_mut(seq) {
            *forgotten = positions;
        }
    }

    pub(super) fn forgotten_mut(&mut self, seq: SeqId) -> Option<&mut PosSet> {
        let i = self.local_seq(seq)?;
        self.forgotten.get_mut(i)
    }

    /// Stores tokens in cells, which are free or hold what no token sees any more. Of a sequence
    /// that loses a token that way, all older ones go as well that are not always kept, so that
    /// what it has stays without further holes.
    pub(super) fn insert(
        &mut self,
        window: Window,
        rows: impl Iterator<Item = (CellIdx, UBatchRow)>,
    ) -> StreamUndo {
        let mut undo = StreamUndo {
            head: self.head,
            ..StreamUndo::default()
        };
        let mut met = SeqSet::EMPTY;
        for (at, row) in rows {
            for seq in &row.seqs {
                if !met.contains(seq) {
                    met.insert(seq);
                    let last = self.cells.positions(seq).map(|has| has.last);
                    undo.ends.push((seq, last));
                }
            }
            if let Some(held) = self.cells.take(at) {
                undo.recycled.push((at, held));
            }
            self.cells.insert(
                at,
                &Cell {
                    pos: row.pos,
                    seqs: row.seqs,
                    grid: row.grid,
                },
            );
            undo.filled.push(at);
            self.set_head_behind(at);
        }
        for (seq, to) in newest_of_each(&undo.recycled) {
            let older = PosRange::new(Pos(window.n_first()), to);
            undo.grids.extend(self.grids_of(seq, older));
            let (_, runs) = self.cells.remove(seq, older);
            if let Some(forgotten) = self.forgotten_mut(seq) {
                undo.forgotten.push((seq, forgotten.clone()));
                for run in &runs {
                    forgotten.insert(PosRange::new(run.pos, run.last_pos()));
                }
                let recycled = undo.recycled.iter().map(|(_, held)| held);
                for held in recycled.filter(|held| held.seqs.contains(seq)) {
                    forgotten.insert(PosRange::new(held.pos, held.pos));
                }
            }
            undo.purged.push((seq, runs));
        }
        undo
    }

    /// Takes tokens from a sequence. Cells that became free before the head are used next.
    pub(super) fn remove(&mut self, seq: SeqId, range: PosRange) -> FreedCells {
        let (freed, _) = self.cells.remove(seq, range);
        // What is removed on purpose is no longer missed.
        if let Some(forgotten) = self.forgotten_mut(seq) {
            forgotten.remove(range);
        }
        if let Some(lowest) = freed.lowest {
            self.head = self.head.min(lowest.0 - self.cells.first_cell().0);
        }
        freed
    }

    /// The sequences whose last token is one of an image, which may have more at its position.
    pub(super) fn in_images(&self) -> SeqSet {
        let grids = self.cells.grids();
        if grids.is_empty() {
            return SeqSet::EMPTY;
        }
        let is_in_image = |seq: &SeqId| {
            let Some(runs) = self.cells.runs(*seq) else {
                return false;
            };
            let last = runs
                .positions()
                .map_or(PosRange::EMPTY, |has| PosRange::new(has.last, has.last));
            let mut cells = runs.within(last).flat_map(|run| run.iter());
            cells.any(|(cell, _)| grids.contains_key(&cell))
        };
        self.cells.seqs().filter(is_in_image).collect()
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        let ranges: usize = self.forgotten.iter().map(PosSet::heap_bytes).sum();
        self.cells.heap_bytes() + ranges + self.forgotten.capacity() * size_of::<PosSet>()
    }

    /// The next slot search begins behind this cell.
    pub(super) fn set_head_behind(&mut self, cell: CellIdx) {
        self.head = cell.0 - self.cells.first_cell().0 + 1;
    }

    /// The end of the sequence.
    pub(super) fn end(&self, seq: SeqId) -> SeqEnd {
        self.end_without(seq, PosRange::EMPTY)
    }

    /// The end of the sequence without its tokens in `range`.
    pub(super) fn end_without(&self, seq: SeqId, range: PosRange) -> SeqEnd {
        let (Some(runs), Some(forgotten)) = (self.cells.runs(seq), self.forgotten(seq)) else {
            return SeqEnd::OF_NOTHING;
        };
        let last = match runs.positions().map(|has| has.last) {
            Some(pos) if range.contains(pos) => runs.last_before(range.first),
            last => last,
        };
        SeqEnd {
            last,
            forgotten: forgotten.hull_without(range),
        }
    }

    /// The tokens of images among those of a sequence in `range`.
    fn grids_of(&self, seq: SeqId, range: PosRange) -> Vec<(CellIdx, GridPos)> {
        let grids = self.cells.grids();
        if grids.is_empty() {
            return Vec::new();
        }
        let runs = self.cells.runs(seq).into_iter();
        let cells = runs
            .flat_map(|runs| runs.within(range))
            .flat_map(CellRun::iter);
        cells
            .filter_map(|(cell, _)| Some((cell, *grids.get(&cell)?)))
            .collect()
    }

    fn local_seq(&self, seq: SeqId) -> Option<usize> {
        let first = self.cells.seqs().next()?;
        Some(seq.0.checked_sub(first.0)? as usize)
    }
}

impl SeqEnd {
    /// Of a sequence that never had tokens.
    pub(super) const OF_NOTHING: Self = Self {
        last: None,
        forgotten: PosRange::EMPTY,
    };

    /// Checks that the sequence can go on: its next token misses nothing of what its window keeps.
    pub(super) fn check(self, seq: SeqId, window: Window) -> Result<(), WindowForgotten> {
        let last = self.last.unwrap_or(self.forgotten.last);
        self.check_at(last.next(), seq, window)
    }

    /// The same for a token at position `next`.
    pub(super) fn check_at(
        self,
        next: Pos,
        seq: SeqId,
        window: Window,
    ) -> Result<(), WindowForgotten> {
        let forgotten = self.forgotten;
        let is_expired = window.expired(next).intersection(forgotten) == forgotten;
        // A sequence without tokens would not know any more where it is.
        if forgotten.is_empty() || (self.last.is_some() && is_expired) {
            return Ok(());
        }
        Err(WindowForgotten {
            seq,
            window,
            next,
            needed_from: window.oldest_key(next),
            forgotten,
        })
    }

    /// The end of a sequence that has both these ends.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            last: self.last.max(other.last),
            forgotten: self.forgotten.hull(other.forgotten),
        }
    }
}

/// The newest position that each sequence lost.
fn newest_of_each(recycled: &[(CellIdx, Cell)]) -> BTreeMap<SeqId, Pos> {
    let mut newest: BTreeMap<SeqId, Pos> = BTreeMap::new();
    for (_, held) in recycled {
        for seq in &held.seqs {
            let pos = newest.entry(seq).or_insert(held.pos);
            *pos = held.pos.max(*pos);
        }
    }
    newest
}
