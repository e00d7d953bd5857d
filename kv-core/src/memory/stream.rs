//! One stream of a [`Unified`](super::Unified) memory: its cells, where the next slot search begins,
//! and what its sequences have forgotten.
//!
//! Invariant: a sequence that forgot positions still has its last one, and its next token sees
//! nothing of what is forgotten. Knows nothing of other streams.

use super::error::WindowForgotten;
use super::undo::StreamUndo;
use crate::batch::UBatchRow;
use crate::cells::{Cell, Freed, KvCells};
use crate::ids::{CellIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// The cells of one stream and what goes with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) cells: KvCells,
    /// Where the next slot search begins, counted from the first cell.
    pub(super) head: u32,
    /// By sequence of this stream: up to which position some may be missing that the sequence had.
    forgotten: Vec<Option<Pos>>,
}

/// What matters of a sequence for going on with it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeqEnd {
    /// Its last position.
    pub(super) last: Option<Pos>,
    /// Up to which position some may be missing that it had.
    pub(super) forgotten: Option<Pos>,
}

impl Stream {
    pub(super) fn new(cells: KvCells) -> Self {
        let forgotten = vec![None; cells.seqs().count()];
        Self {
            cells,
            head: 0,
            forgotten,
        }
    }

    /// Up to which position some may be missing that the sequence had.
    pub(super) fn forgotten(&self, seq: SeqId) -> Option<Pos> {
        self.forgotten.get(self.local_seq(seq)?).copied().flatten()
    }

    pub(super) fn set_forgotten(&mut self, seq: SeqId, to: Option<Pos>) {
        if let Some(i) = self.local_seq(seq)
            && let Some(forgotten) = self.forgotten.get_mut(i)
        {
            *forgotten = to;
        }
    }

    /// Puts tokens into cells, which are free or hold what nobody sees any more. Of a sequence that
    /// loses a token that way, all older ones go as well, so that what it has stays without holes.
    pub(super) fn put(&mut self, rows: impl Iterator<Item = (CellIdx, UBatchRow)>) -> StreamUndo {
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
            self.cells.put(
                at,
                Cell {
                    pos: row.pos,
                    seqs: row.seqs,
                },
            );
            undo.placed.push(at);
            self.set_head_behind(at);
        }
        for (seq, to) in newest_of_each(&undo.recycled) {
            let before = self.forgotten(seq);
            let (_, runs) = self.cells.remove(seq, PosRange::new(Pos(0), to));
            undo.purged.push((seq, runs));
            undo.forgotten.push((seq, before));
            self.set_forgotten(seq, before.max(Some(to)));
        }
        undo
    }

    /// Takes tokens from a sequence. Cells that became free before the head are used next.
    pub(super) fn remove(&mut self, seq: SeqId, range: PosRange) -> Freed {
        let forgotten = self.end_without(seq, range).forgotten;
        let (freed, _) = self.cells.remove(seq, range);
        self.set_forgotten(seq, forgotten);
        if let Some(lowest) = freed.lowest {
            self.head = self.head.min(lowest.0 - self.cells.first_cell().0);
        }
        freed
    }

    /// The next slot search begins behind this cell.
    pub(super) fn set_head_behind(&mut self, cell: CellIdx) {
        self.head = cell.0 - self.cells.first_cell().0 + 1;
    }

    /// How the sequence would end without its tokens in `range`.
    pub(super) fn end_without(&self, seq: SeqId, range: PosRange) -> SeqEnd {
        let forgotten = self.forgotten(seq);
        let Some(runs) = self.cells.runs(seq) else {
            return SeqEnd::default();
        };
        let last = runs.positions().map(|has| has.last);
        if range.is_empty() {
            return SeqEnd { last, forgotten };
        }
        SeqEnd {
            last: last
                .filter(|&last| last > range.last)
                .or_else(|| runs.last_before(range.first)),
            // What is removed on purpose is no longer missed.
            forgotten: match forgotten {
                Some(to) if range.contains(to) => range.first.0.checked_sub(1).map(Pos),
                other => other,
            },
        }
    }

    fn local_seq(&self, seq: SeqId) -> Option<usize> {
        let first = self.cells.seqs().next()?;
        Some(seq.0.checked_sub(first.0)? as usize)
    }
}

impl SeqEnd {
    /// Whether the sequence can go on: its next token misses nothing that its window reaches.
    pub(super) fn check(self, seq: SeqId, window: Window) -> Result<(), WindowForgotten> {
        let Some(forgotten_to) = self.forgotten else {
            return Ok(());
        };
        let next = self.last.unwrap_or(forgotten_to).next();
        let needed_from = window.oldest_key(next);
        // A sequence without tokens would not know any more where it is.
        if self.last.is_some() && needed_from > forgotten_to {
            return Ok(());
        }
        Err(WindowForgotten {
            seq,
            window,
            next,
            needed_from,
            forgotten_to,
        })
    }

    /// The end of a sequence that has both these ends.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            last: self.last.max(other.last),
            forgotten: self.forgotten.max(other.forgotten),
        }
    }
}

/// The newest position that each sequence lost.
fn newest_of_each(recycled: &[(CellIdx, Cell)]) -> Vec<(SeqId, Pos)> {
    let mut newest: Vec<(SeqId, Pos)> = Vec::new();
    for (_, held) in recycled {
        for seq in &held.seqs {
            match newest.iter_mut().find(|(s, _)| *s == seq) {
                Some((_, pos)) => *pos = held.pos.max(*pos),
                None => newest.push((seq, held.pos)),
            }
        }
    }
    newest
}
