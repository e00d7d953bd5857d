//! What a committed step changed, so that it can be undone.
//!
//! Invariant: undoing with [`RowsWritten::No`] gives back a memory equal to the one before.

use super::RowsWritten;
use super::pos_set::PosSet;
use super::refusal::WindowForgotten;
use super::stream::{SeqEnd, Stream};
use crate::cells::Cell;
use crate::grid::GridPos;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::visibility::CellRun;
use crate::window::{PosRange, Window};

/// The record of one step of a [`Unified`](super::Unified) memory.
#[derive(Clone, Debug, Default)]
pub struct UnifiedUndo {
    /// One for each stream that took part.
    pub(super) streams: Vec<(usize, StreamUndo)>,
}

/// The changes of a step in one stream.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamUndo {
    /// The start of the slot search before the step.
    pub(super) head: u32,
    /// Cells that were given to tokens.
    pub(super) filled: Vec<CellIdx>,
    /// The former contents of the cells among them that were in use.
    pub(super) recycled: Vec<(CellIdx, Cell)>,
    /// The other tokens that were forgotten because they are older.
    pub(super) purged: Vec<(SeqId, Vec<CellRun>)>,
    /// The places in images of tokens that were forgotten because they are older.
    pub(super) grids: Vec<(CellIdx, GridPos)>,
    /// The positions that had been forgotten before, of each sequence that forgot more.
    pub(super) forgotten: Vec<(SeqId, PosSet)>,
    /// The end of each sequence before it was given tokens.
    pub(super) ends: Vec<(SeqId, Option<Pos>)>,
}

impl StreamUndo {
    /// Checks that the sequences that were given tokens could go on without them, if what is
    /// forgotten now stays forgotten.
    pub(super) fn check(&self, stream: &Stream, window: Window) -> Result<(), WindowForgotten> {
        for &(seq, last) in &self.ends {
            if let Some(last) = last {
                let forgotten = stream.end(seq).forgotten;
                let last = self.leaves(stream, seq, last).then_some(last);
                SeqEnd { last, forgotten }.check(seq, window)?;
            }
        }
        Ok(())
    }

    /// True if the sequence would still have a token at this position. It may have forgotten others
    /// that share it.
    fn leaves(&self, stream: &Stream, seq: SeqId, pos: Pos) -> bool {
        let runs = stream.cells.runs(seq).into_iter();
        runs.flat_map(|runs| runs.within(PosRange::new(pos, pos)))
            .flat_map(|run| run.iter())
            .any(|(cell, _)| !self.filled.contains(&cell))
    }

    pub(super) fn undo(self, stream: &mut Stream, rows: RowsWritten) {
        for cell in self.filled {
            stream.cells.take(cell);
        }
        stream.head = self.head;
        if rows == RowsWritten::Perhaps {
            // A sequence that begins again misses nothing.
            for (seq, _) in self.ends.iter().filter(|(_, last)| last.is_none()) {
                stream.set_forgotten(*seq, PosSet::default());
            }
            return;
        }
        for (seq, runs) in self.purged {
            for run in runs {
                stream.cells.add_run(run, seq);
            }
        }
        for (cell, grid) in self.grids {
            stream.cells.set_grid(cell, grid);
        }
        for (cell, held) in self.recycled {
            stream.cells.insert(cell, &held);
        }
        for (seq, forgotten) in self.forgotten {
            stream.set_forgotten(seq, forgotten);
        }
    }
}
