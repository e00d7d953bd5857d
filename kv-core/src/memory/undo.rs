//! What a committed step changed, so that it can be undone.
//!
//! Invariant: undoing with [`RowsWritten::No`] gives back a memory equal to the one before.

use super::RowsWritten;
use super::pos_set::PosSet;
use super::stream::Stream;
use crate::cells::Cell;
use crate::ids::{CellIdx, SeqId};
use crate::visibility::CellRun;

/// The record of one step of a [`Unified`](super::Unified) memory.
#[derive(Clone, Debug, Default)]
pub struct UnifiedUndo {
    /// One for each stream that took part.
    pub(super) streams: Vec<(usize, StreamUndo)>,
}

/// What a step changed in one stream.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamUndo {
    /// Where the slot search began.
    pub(super) head: u32,
    /// Cells that were given to tokens.
    pub(super) placed: Vec<CellIdx>,
    /// What those of them held that were in use.
    pub(super) recycled: Vec<(CellIdx, Cell)>,
    /// What else was forgotten because it is older.
    pub(super) purged: Vec<(SeqId, Vec<CellRun>)>,
    /// What had been forgotten before, of each sequence that forgot more.
    pub(super) forgotten: Vec<(SeqId, PosSet)>,
}

impl StreamUndo {
    pub(super) fn undo(self, stream: &mut Stream, rows: RowsWritten) {
        for cell in self.placed {
            stream.cells.take(cell);
        }
        stream.head = self.head;
        if rows == RowsWritten::Perhaps {
            return;
        }
        for (seq, runs) in self.purged {
            for run in runs {
                stream.cells.add_run(run, seq);
            }
        }
        for (cell, held) in self.recycled {
            stream.cells.put(cell, held);
        }
        for (seq, forgotten) in self.forgotten {
            stream.set_forgotten(seq, forgotten);
        }
    }
}
