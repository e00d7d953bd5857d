//! Attention memory of one part: one set of cells for all its layers, with any window.
//!
//! The cells are shared by all sequences, or each sequence has a stream of its own. Tokens that a
//! window hides for good give their cells to new ones, but only when a step is committed; what a
//! token sees never depends on that. Knows nothing of other parts.

use serde::{Deserialize, Serialize};

use super::error::{
    CopyRefused, NoSuchSequence, PlanError, RemoveRefused, RollbackRefused, ShiftRefused,
};
use super::place::{self, UnifiedPlacement};
use super::shift::{self, PosChange};
use super::stream::Stream;
use super::undo::UnifiedUndo;
use super::visible::{self, Reach};
use super::{Compacted, Copied, Memory, MemoryInputs, Removed, RowsWritten, Seqs, Shifted};
use super::{Contents, RestoreInto, RestoreRefused, Restored, compact, copy, restore};
use crate::batch::{SplitPolicy, UBatch, UBatchRow};
use crate::cells::{Cell, Freed, KvCells};
use crate::ids::{CellIdx, MAX_SEQS, PartIdx, SeqId};
use crate::seq_set::SeqSet;
use crate::visibility::CellRun;
use crate::window::{Causality, PosRange, Window};

/// What a [`Unified`] memory is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnifiedConfig {
    /// Its number among the parts of the model's memory.
    pub part: PartIdx,
    /// Number of sequences, at most [`MAX_SEQS`].
    pub n_seqs: u32,
    /// Number of cells of each stream.
    pub n_cells: u32,
    /// Who shares the cells.
    pub streams: Streams,
    /// How far tokens see.
    pub window: Window,
    /// Whether they see later tokens.
    pub causality: Causality,
}

impl UnifiedConfig {
    /// Number of cells over all streams: the rows that a backend needs for this part.
    ///
    /// # Errors
    /// [`UnifiedConfigError`] where a memory could hold nothing, or more than can be counted.
    pub fn n_all_cells(&self) -> Result<u32, UnifiedConfigError> {
        let (n_seqs, n_cells) = (self.n_seqs, self.n_cells);
        if n_seqs == 0 || n_seqs as usize > MAX_SEQS {
            return Err(UnifiedConfigError::SeqCount { n_seqs });
        }
        let n_streams = match self.streams {
            Streams::Shared => 1,
            Streams::PerSequence => n_seqs,
        };
        n_cells
            .checked_mul(n_streams)
            .filter(|&n| n > 0 && i32::try_from(n).is_ok())
            .ok_or(UnifiedConfigError::CellCount { n_cells, n_streams })
    }
}

/// Who shares the cells of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Streams {
    /// All sequences: one stream. A token can belong to several sequences.
    #[default]
    Shared,
    /// Nobody: a stream for each sequence.
    PerSequence,
}

/// A configuration that makes no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnifiedConfigError {
    /// No sequences, or more than can be.
    #[error("a memory for {n_seqs} sequences: there must be 1 to {MAX_SEQS}")]
    SeqCount {
        /// Sequences wanted.
        n_seqs: u32,
    },
    /// No cells, or more than can be numbered.
    #[error(
        "{n_streams} streams of {n_cells} cells: there must be 1 to {} in all",
        i32::MAX
    )]
    CellCount {
        /// Cells of each stream.
        n_cells: u32,
        /// Streams.
        n_streams: u32,
    },
}

/// Attention memory of one part of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unified {
    config: UnifiedConfig,
    pub(super) streams: Vec<Stream>,
}

impl Unified {
    /// An empty memory.
    ///
    /// # Errors
    /// [`UnifiedConfigError`] where it could hold nothing, or more than can be counted.
    pub fn new(config: UnifiedConfig) -> Result<Self, UnifiedConfigError> {
        let UnifiedConfig {
            n_seqs, n_cells, ..
        } = config;
        let n_streams = config.n_all_cells()? / n_cells;
        let stream = |s: u32| {
            let seqs = match config.streams {
                Streams::Shared => 0..n_seqs,
                Streams::PerSequence => s..s + 1,
            };
            Stream::new(KvCells::new(s * n_cells..(s + 1) * n_cells, seqs))
        };
        Ok(Self {
            config,
            streams: (0..n_streams).map(stream).collect(),
        })
    }

    /// What it was made from.
    pub fn config(&self) -> &UnifiedConfig {
        &self.config
    }

    /// Number of cells over all streams: the rows that a backend needs for this part.
    pub fn n_cells(&self) -> u32 {
        self.streams.iter().map(|s| s.cells.n_cells()).sum()
    }

    /// Number of cells in use over all streams.
    pub fn n_used(&self) -> u32 {
        self.streams.iter().map(|s| s.cells.n_used()).sum()
    }

    /// What a cell holds, or `None` where it is free or does not exist.
    pub fn cell(&self, cell: CellIdx) -> Option<Cell> {
        let stream = (cell.0 / self.config.n_cells) as usize;
        self.streams.get(stream)?.cells.get(cell)
    }

    /// The cells of a sequence in the order of their positions.
    pub fn runs(&self, seq: SeqId) -> &[CellRun] {
        let runs = self
            .streams
            .get(self.stream_of(seq))
            .and_then(|s| s.cells.runs(seq));
        runs.map_or(&[], |runs| runs.as_slice())
    }

    pub(super) fn stream_of(&self, seq: SeqId) -> usize {
        match self.config.streams {
            Streams::Shared => 0,
            Streams::PerSequence => seq.as_usize(),
        }
    }

    pub(super) fn check_seq(&self, seq: SeqId) -> Result<(), NoSuchSequence> {
        let n_seqs = self.config.n_seqs;
        if seq.0 < n_seqs {
            Ok(())
        } else {
            Err(NoSuchSequence { seq, n_seqs })
        }
    }

    fn seqs(&self, seqs: Seqs) -> SeqSet {
        match seqs {
            Seqs::One(seq) => SeqSet::one(seq),
            Seqs::All => (0..self.config.n_seqs).map(SeqId).collect(),
        }
    }

    fn remove_each(&mut self, seqs: SeqSet, range: PosRange) -> Removed {
        let mut freed = Freed::default();
        for seq in seqs {
            let stream = self.stream_of(seq);
            if let Some(stream) = self.streams.get_mut(stream) {
                freed = freed.and(stream.remove(seq, range));
            }
        }
        Removed {
            n_tokens: freed.n_tokens,
            n_cells: freed.n_cells,
        }
    }
}

impl Memory for Unified {
    type Placement = UnifiedPlacement;
    type Undo = UnifiedUndo;

    fn n_seqs(&self) -> u32 {
        self.config.n_seqs
    }

    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        self.streams.get(self.stream_of(seq))?.cells.positions(seq)
    }

    fn split_policy(&self) -> SplitPolicy {
        match self.config.causality {
            Causality::Causal => SplitPolicy::InOrder,
            // Tokens see later ones, which must be there when they are computed.
            Causality::NonCausal => SplitPolicy::WholeSequences,
        }
    }

    fn place(&self, ubatches: &[UBatch]) -> Result<UnifiedPlacement, PlanError> {
        place::place(self, ubatches)
    }

    fn commit(
        &mut self,
        ubatch: &UBatch,
        placement: &UnifiedPlacement,
        step: usize,
    ) -> UnifiedUndo {
        let cells = placement.cells(step).iter().copied();
        let mut rows: Vec<(usize, CellIdx, UBatchRow)> = cells
            .zip(ubatch.rows())
            .map(|(cell, row)| (self.stream_of(row.first_seq), cell, row))
            .collect();
        rows.sort_by_key(|&(stream, ..)| stream);
        let mut undo = UnifiedUndo::default();
        for group in rows.chunk_by(|a, b| a.0 == b.0) {
            let Some(&(number, ..)) = group.first() else {
                continue;
            };
            if let Some(stream) = self.streams.get_mut(number) {
                let tokens = group.iter().map(|&(_, cell, row)| (cell, row));
                undo.streams.push((number, stream.put(tokens)));
            }
        }
        undo
    }

    fn check_rollback(&self, undo: &UnifiedUndo, rows: RowsWritten) -> Result<(), RollbackRefused> {
        if rows == RowsWritten::No {
            return Ok(());
        }
        for (number, undo) in &undo.streams {
            if let Some(stream) = self.streams.get(*number) {
                undo.check(stream, self.config.window)?;
            }
        }
        Ok(())
    }

    fn rollback(&mut self, undo: UnifiedUndo, rows: RowsWritten) {
        for (number, undo) in undo.streams {
            if let Some(stream) = self.streams.get_mut(number) {
                undo.undo(stream, rows);
            }
        }
    }

    fn inputs(
        &self,
        ubatch: &UBatch,
        placement: &UnifiedPlacement,
        step: usize,
        inputs: &mut MemoryInputs,
    ) {
        let part = inputs.part_mut(self.config.part);
        part.cells.clear();
        part.cells.extend_from_slice(placement.cells(step));
        let UnifiedConfig {
            window, causality, ..
        } = self.config;
        let cells_of = |seq| Some(&self.streams.get(self.stream_of(seq))?.cells);
        visible::write(
            ubatch,
            Reach { window, causality },
            cells_of,
            &mut part.visibility,
        );
    }

    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), RemoveRefused> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        for seq in self.seqs(seqs) {
            if let Some(stream) = self.streams.get(self.stream_of(seq)) {
                stream
                    .end_without(seq, range)
                    .check(seq, self.config.window)?;
            }
        }
        Ok(())
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused> {
        self.check_remove(seqs, range)?;
        Ok(self.remove_each(self.seqs(seqs), range))
    }

    fn check_copy(&self, from: SeqId, to: SeqId, range: PosRange) -> Result<(), CopyRefused> {
        copy::check(self, from, to, range)
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        copy::copy(self, from, to, range)
    }

    fn check_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<(), ShiftRefused> {
        shift::check(self, seq, range, change)
    }

    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused> {
        shift::shift(self, seq, range, change)
    }

    fn n_holes(&self) -> u32 {
        self.streams.iter().map(compact::n_holes).sum()
    }

    fn compact(&mut self) -> Compacted {
        let part = self.config.part;
        let mut all = Compacted::default();
        for stream in &mut self.streams {
            let one = compact::compact(stream, part);
            all.n_cells += one.n_cells;
            all.row_copies.extend(one.row_copies);
        }
        all
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        self.check_seq(seq)?;
        let mut others = self.seqs(Seqs::All);
        others.remove(seq);
        Ok(self.remove_each(others, PosRange::ALL))
    }

    fn contents(&self, seqs: Seqs) -> Result<Contents, NoSuchSequence> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        Ok(Contents::of_part(restore::contents(self, self.seqs(seqs))))
    }

    fn check_restore(&self, contents: &Contents, into: RestoreInto) -> Result<(), RestoreRefused> {
        restore::after(self, contents, into).map(drop)
    }

    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused> {
        let (after, restored) = restore::after(self, contents, into)?;
        *self = after;
        Ok(restored)
    }

    fn clear(&mut self) -> Removed {
        let removed = self.remove_each(self.seqs(Seqs::All), PosRange::ALL);
        for stream in &mut self.streams {
            stream.head = 0;
        }
        removed
    }
}
