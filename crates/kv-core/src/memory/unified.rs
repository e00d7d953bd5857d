//! Attention memory of one part: one set of cells for all its layers, with any window.
//!
//! The cells are shared by all sequences, or each sequence has a stream of its own. Tokens that a
//! window hides for good give their cells to new ones, but only when a step is committed; what a
//! token sees never depends on that. Knows nothing of other parts.

use serde::{Deserialize, Serialize};

use super::capacity::{CellUse, MemoryCapacity};
use super::composite::Composite;
use super::config::{MemoryConfigError, RowCounts};
use super::edit::{Edit, Edited, Removal, Seqs};
use super::occupancy::{self, Occupancy};
use super::owners::{self, OwnedRows};
use super::place;
use super::plan::{Plan, PlannedUBatch, RowsWritten};
use super::refusal::Refusal;
use super::shift;
use super::snapshot::{RestoreInto, Snapshot};
use super::stream::Stream;
use super::undo::UnifiedUndo;
use super::visible::{self, Reach};
use super::{Memory, MemoryInputs, Restoration, compact, copy, restore};
use crate::batch::{SplitPolicy, UBatch};
use crate::cells::{Cell, FreedCells, KvCells};
use crate::ids::{CellIdx, MAX_SEQS, PartIdx, SeqId};
use crate::seq_set::SeqSet;
use crate::visibility::{CellRun, Visibility};
use crate::window::{Causality, PosRange, Window};

/// The configuration of a [`Unified`] memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnifiedConfig {
    /// Its number among the parts of the model's memory.
    pub part: PartIdx,
    /// Number of sequences, at most [`MAX_SEQS`].
    pub n_seqs: u32,
    /// Number of cells of each stream.
    pub n_cells: u32,
    /// The sequences that share the cells.
    pub streams: Streams,
    /// The window of the tokens.
    pub window: Window,
    /// The visibility of later tokens.
    pub causality: Causality,
}

impl UnifiedConfig {
    /// Number of cells over all streams: the rows that a backend needs for this part.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where a memory could hold nothing, or more than can be counted.
    pub fn n_all_cells(&self) -> Result<u32, MemoryConfigError> {
        let (n_seqs, n_cells) = (self.n_seqs, self.n_cells);
        if n_seqs == 0 || n_seqs as usize > MAX_SEQS {
            return Err(MemoryConfigError::SeqCount { n_seqs });
        }
        let n_streams = match self.streams {
            Streams::Shared => 1,
            Streams::PerSequence => n_seqs,
        };
        n_cells
            .checked_mul(n_streams)
            .filter(|&n| n > 0 && i32::try_from(n).is_ok())
            .ok_or(MemoryConfigError::CellCount {
                part: self.part,
                window: self.window,
                n_cells,
                n_streams,
            })
    }
}

/// The sequences that share the cells of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Streams {
    /// All sequences: one stream. A token can belong to several sequences.
    #[default]
    Shared,
    /// Nobody: a stream for each sequence.
    PerSequence,
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
    /// [`MemoryConfigError`] where it could hold nothing, or more than can be counted.
    pub fn new(config: UnifiedConfig) -> Result<Self, MemoryConfigError> {
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

    /// The same where only so many sequences grow at the same time, and blocks of cells are for
    /// these.
    pub fn with_active(self, n_active: u32) -> Self {
        let with = |stream: Stream| Stream::new(stream.cells.with_active(n_active));
        Self {
            streams: self.streams.into_iter().map(with).collect(),
            ..self
        }
    }

    /// The configuration it was made from.
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

    /// Bytes of main memory that keep track of cells and sequences: no KV rows.
    pub fn bookkeeping_bytes(&self) -> usize {
        let streams: usize = self.streams.iter().map(Stream::heap_bytes).sum();
        streams + self.streams.capacity() * size_of::<Stream>()
    }

    /// The contents of a cell, or `None` where it is free or does not exist.
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

    pub(super) fn check_seq(&self, seq: SeqId) -> Result<(), Refusal> {
        let n_seqs = self.config.n_seqs;
        if seq.0 < n_seqs {
            Ok(())
        } else {
            Err(Refusal::NoSuchSequence { seq, n_seqs })
        }
    }

    fn seqs(&self, seqs: Seqs) -> SeqSet {
        match seqs {
            Seqs::One(seq) => SeqSet::one(seq),
            Seqs::All => SeqSet::first_n(self.config.n_seqs),
        }
    }

    fn remove_each(&mut self, seqs: &SeqSet, range: PosRange) -> Removal {
        let mut freed = FreedCells::default();
        for seq in seqs {
            let stream = self.stream_of(seq);
            if let Some(stream) = self.streams.get_mut(stream) {
                freed = freed.and(stream.remove(seq, range));
            }
        }
        Removal {
            n_tokens: freed.n_tokens,
            n_cells: freed.n_cells,
        }
    }
}

/// Attention cells of one part, and what is done with the ubatches of a plan. [`Composite`] calls
/// these for each of its parts.
impl Unified {
    pub(super) fn find_cells(&self, ubatches: &[UBatch]) -> Result<Vec<Vec<CellIdx>>, Refusal> {
        place::place(self, ubatches)
    }

    /// Takes the tokens of `ubatch` into `cells`, one each.
    pub(super) fn commit_cells(&mut self, ubatch: &UBatch, cells: &[CellIdx]) -> UnifiedUndo {
        let cells = cells.iter().copied();
        let window = self.config.window;
        let mut undo = UnifiedUndo::default();
        if let [stream] = self.streams.as_mut_slice() {
            undo.streams
                .push((0, stream.insert(window, cells.zip(ubatch.rows()))));
            return undo;
        }
        let seqs = ubatch.first_seqs.iter();
        let streams = seqs.map(|&seq| self.stream_of(seq));
        let mut rows: Vec<(usize, u32, CellIdx)> = streams
            .zip(cells)
            .zip(0u32..)
            .map(|((stream, cell), number)| (stream, number, cell))
            .collect();
        rows.sort_unstable();
        for group in rows.chunk_by(|a, b| a.0 == b.0) {
            let Some(&(number, ..)) = group.first() else {
                continue;
            };
            if let Some(stream) = self.streams.get_mut(number) {
                let tokens = group.iter();
                let tokens = tokens.filter_map(|&(_, row, cell)| Some((cell, ubatch.row(row)?)));
                undo.streams.push((number, stream.insert(window, tokens)));
            }
        }
        undo
    }

    /// Writes where the tokens of `ubatch` are and what they see.
    pub(super) fn write_inputs(
        &self,
        ubatch: &UBatch,
        cells: &[CellIdx],
        inputs: &mut MemoryInputs,
    ) {
        let part = inputs.part_mut(self.config.part);
        part.cells.clear();
        part.cells.extend_from_slice(cells);
        let UnifiedConfig {
            window, causality, ..
        } = self.config;
        let cells_of = |seq| Some(&self.streams.get(self.stream_of(seq))?.cells);
        let reach = Reach { window, causality };
        visible::write(ubatch, reach, cells_of, &mut part.visibility);
        match window.first() {
            Some(window) => {
                let reach = Reach { window, causality };
                visible::write(ubatch, reach, cells_of, &mut part.first);
            }
            None => part.first = Visibility::default(),
        }
    }

    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), Refusal> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        for seq in &self.seqs(seqs) {
            if let Some(stream) = self.streams.get(self.stream_of(seq)) {
                let end = stream.end_without(seq, range);
                end.check(seq, self.config.window)?;
            }
        }
        Ok(())
    }

    fn compact_streams(&mut self) -> Edited {
        let part = self.config.part;
        let mut all = Edited::default();
        for stream in &mut self.streams {
            all = all.and(compact::compact(stream, part));
        }
        all
    }

    fn remove_all(&mut self) -> Removal {
        let removed = self.remove_each(&self.seqs(Seqs::All), PosRange::ALL);
        for stream in &mut self.streams {
            stream.head = 0;
        }
        removed
    }
}

impl Memory for Unified {
    /// The cell of each token.
    type Slot = Vec<CellIdx>;
    type Undo = UnifiedUndo;

    fn n_seqs(&self) -> u32 {
        self.config.n_seqs
    }

    fn n_rows(&self) -> RowCounts {
        let mut cells = vec![0; self.config.part.as_usize()];
        cells.push(self.n_cells() as usize);
        RowCounts { cells, states: 0 }
    }

    fn capacity(&self) -> MemoryCapacity {
        MemoryCapacity {
            parts: vec![self.part_capacity()],
            states: None,
            is_endless: false,
        }
    }

    fn owned_rows(&self) -> Vec<OwnedRows> {
        let mut owned = Vec::new();
        owners::of_part(self, &mut owned);
        owned
    }

    fn cell_use(&self) -> CellUse {
        self.part_use()
    }

    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        self.streams.get(self.stream_of(seq))?.cells.positions(seq)
    }

    fn n_tokens(&self, seq: SeqId) -> u32 {
        self.runs(seq).iter().map(|run| run.len).sum()
    }

    fn token_ranges(&self, seq: SeqId) -> Vec<PosRange> {
        let runs = self.runs(seq).iter();
        let held = runs.map(|run| PosRange::new(run.pos, run.last_pos()));
        let stream = self.streams.get(self.stream_of(seq));
        let forgotten = stream.and_then(|stream| stream.forgotten(seq));
        let recycled = forgotten.map_or(&[][..], |forgotten| forgotten.ranges());
        held.chain(recycled.iter().copied()).collect()
    }

    fn split_policy(&self) -> SplitPolicy {
        match self.config.causality {
            Causality::Causal | Causality::CausalInFull => SplitPolicy::InOrder,
            // Tokens see later ones, which must be there when they are computed.
            Causality::NonCausal => SplitPolicy::WholeSequences,
        }
    }

    /// Any number, with windows, too: a ubatch recycles only what its first tokens do not see.
    fn max_take_back(&self) -> u32 {
        u32::MAX
    }

    fn takes_images(&self) -> bool {
        true
    }

    fn find_slots(&self, ubatches: Vec<UBatch>) -> Result<Plan<Vec<CellIdx>>, Refusal> {
        let slots = self.find_cells(&ubatches)?;
        let planned = ubatches.into_iter().zip(slots);
        Ok(planned
            .map(|(ubatch, slot)| PlannedUBatch { ubatch, slot })
            .collect())
    }

    fn commit(&mut self, planned: &PlannedUBatch<Vec<CellIdx>>) -> UnifiedUndo {
        self.commit_cells(&planned.ubatch, &planned.slot)
    }

    fn check_rollback(&self, undo: &UnifiedUndo, rows: RowsWritten) -> Result<(), Refusal> {
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

    fn inputs(&self, planned: &PlannedUBatch<Vec<CellIdx>>, inputs: &mut MemoryInputs) {
        self.write_inputs(&planned.ubatch, &planned.slot, inputs);
    }

    fn check(&self, edit: &Edit) -> Result<(), Refusal> {
        match *edit {
            Edit::Remove { seqs, range } => self.check_remove(seqs, range),
            Edit::Copy { from, to, range } => copy::check(self, from, to, range),
            Edit::Reposition { seq, range, change } => shift::check(self, seq, range, change),
            Edit::KeepOnly(seq) => self.check_seq(seq),
            Edit::Compact | Edit::Clear => Ok(()),
        }
    }

    fn apply(&mut self, edit: Edit) -> Result<Edited, Refusal> {
        self.check(&edit)?;
        Ok(match edit {
            Edit::Remove { seqs, range } => self.remove_each(&self.seqs(seqs), range).into(),
            Edit::Copy { from, to, range } => copy::copy(self, from, to, range),
            Edit::Reposition { seq, range, change } => shift::shift(self, seq, range, change),
            Edit::KeepOnly(seq) => {
                let mut others = self.seqs(Seqs::All);
                others.remove(seq);
                self.remove_each(&others, PosRange::ALL).into()
            }
            Edit::Compact => self.compact_streams(),
            Edit::Clear => self.remove_all().into(),
        })
    }

    fn n_holes(&self) -> u32 {
        self.streams.iter().map(compact::n_misplaced).sum()
    }

    fn occupancy(&self) -> Option<Occupancy> {
        Some(occupancy::of_part(self))
    }

    fn snapshot(&self, seqs: Seqs) -> Result<Snapshot, Refusal> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        let seqs = self.seqs(seqs);
        let part = restore::snapshot(self, &seqs);
        Ok(Snapshot::of_part(part).of_seqs(&seqs))
    }

    fn check_restore(&self, snapshot: &Snapshot, into: RestoreInto) -> Result<(), Refusal> {
        restore::plan(self, snapshot, into).map(drop)
    }

    fn restore(&mut self, snapshot: &Snapshot, into: RestoreInto) -> Result<Restoration, Refusal> {
        let planned = restore::plan(self, snapshot, into)?;
        Ok(restore::carry_out(self, planned))
    }
}

impl Composite {
    /// An empty memory of a model whose attention layers all have the same window.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where it could hold nothing, or more than can be counted.
    pub fn unified(part: UnifiedConfig) -> Result<Self, MemoryConfigError> {
        Self::from_parts(vec![Unified::new(part)?], None)
    }
}
