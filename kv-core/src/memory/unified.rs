//! Attention memory of one part: one set of cells for all its layers, with any window.
//!
//! The cells are shared by all sequences, or each sequence has a stream of its own. Tokens that a
//! window hides for good give their cells to new ones, but only when a step is committed; what a
//! token sees never depends on that. Knows nothing of other parts.

use serde::{Deserialize, Serialize};

use super::error::{CopyRefused, NoRoom, NoSuchSequence, PlanError, RemoveRefused};
use super::stream::{SeqEnd, Stream};
use super::undo::UnifiedUndo;
use super::visible::{self, Reach};
use super::{Copied, Memory, MemoryInputs, Removed, RowsWritten, Seqs};
use crate::backend::RowCopy;
use crate::batch::{SplitPolicy, UBatch, UBatchRow};
use crate::cells::{Cell, FreeMap, Freed, KvCells};
use crate::ids::{CellIdx, MAX_SEQS, PartIdx, Pos, SeqId, StreamIdx};
use crate::seq_set::SeqSet;
use crate::slot::{Shortage, SlotSearch};
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

/// The cells of each token of each ubatch of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnifiedPlacement {
    steps: Vec<Vec<CellIdx>>,
}

impl UnifiedPlacement {
    /// The cell of each token of ubatch `step`, in its order; empty where there is no such ubatch.
    pub fn cells(&self, step: usize) -> &[CellIdx] {
        self.steps.get(step).map_or(&[], Vec::as_slice)
    }
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
        if n_seqs == 0 || n_seqs as usize > MAX_SEQS {
            return Err(UnifiedConfigError::SeqCount { n_seqs });
        }
        let n_streams = match config.streams {
            Streams::Shared => 1,
            Streams::PerSequence => n_seqs,
        };
        let n_all = n_cells
            .checked_mul(n_streams)
            .filter(|&n| n > 0 && i32::try_from(n).is_ok());
        if n_all.is_none() {
            return Err(UnifiedConfigError::CellCount { n_cells, n_streams });
        }
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

    fn stream_of(&self, seq: SeqId) -> usize {
        match self.config.streams {
            Streams::Shared => 0,
            Streams::PerSequence => seq.as_usize(),
        }
    }

    fn check_seq(&self, seq: SeqId) -> Result<(), NoSuchSequence> {
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

    /// Row numbers of `ubatch` with their streams, by stream, else in order.
    fn rows_by_stream(&self, ubatch: &UBatch) -> Result<Vec<(usize, u32)>, PlanError> {
        let mut rows = Vec::with_capacity(ubatch.entries.len());
        for (number, row) in (0u32..).zip(ubatch.rows()) {
            if let Some(beyond) = row.seqs.iter().find(|seq| seq.0 >= self.config.n_seqs) {
                self.check_seq(beyond)?;
            }
            if self.config.streams == Streams::PerSequence && row.seqs.len() > 1 {
                let entry = ubatch
                    .entries
                    .get(number as usize)
                    .copied()
                    .unwrap_or(number);
                return Err(PlanError::CoupledStreams {
                    entry,
                    set: row.seqs,
                });
            }
            rows.push((self.stream_of(row.first_seq), number));
        }
        rows.sort_unstable();
        Ok(rows)
    }

    /// For each ubatch the sequences whose next token, in this or a later one, is at the position
    /// of their last one in an earlier one.
    fn repeating(&self, ubatches: &[UBatch]) -> Vec<SeqSet> {
        let mut repeating = vec![SeqSet::EMPTY; ubatches.len()];
        if self.config.window == Window::Full || ubatches.len() < 2 {
            return repeating;
        }
        let mut latest: Vec<Option<(usize, Pos)>> = vec![None; self.config.n_seqs as usize];
        for (step, ubatch) in ubatches.iter().enumerate() {
            for row in ubatch.rows() {
                for seq in row.seqs {
                    let Some(latest) = latest.get_mut(seq.as_usize()) else {
                        continue;
                    };
                    if let Some((before, pos)) = *latest
                        && pos == row.pos
                    {
                        let waiting = repeating.iter_mut().take(step + 1).skip(before + 1);
                        waiting.for_each(|seqs| {
                            seqs.insert(seq);
                        });
                    }
                    *latest = Some((step, row.pos));
                }
            }
        }
        repeating
    }

    fn no_room(&self, ubatch: usize, stream: usize, shortage: Shortage) -> NoRoom {
        let Shortage {
            n_wanted,
            n_free,
            n_recyclable,
            n_cells,
        } = shortage;
        NoRoom {
            ubatch,
            part: self.config.part,
            stream: StreamIdx(stream as u32),
            window: self.config.window,
            n_wanted,
            n_free,
            n_recyclable,
            n_cells,
        }
    }

    /// How `to` would end with the tokens of `from` in `range` instead of its own.
    fn end_after_copy(&self, from: SeqId, to: SeqId, range: PosRange) -> SeqEnd {
        let stream = |seq| self.streams.get(self.stream_of(seq));
        let kept = stream(to).map_or(SeqEnd::default(), |s| s.end_without(to, range));
        let copied = stream(from).map_or(SeqEnd::default(), |s| SeqEnd {
            last: last_within(s, from, range),
            forgotten: s
                .forgotten(from)
                .map(|f| f.min(range.last))
                .filter(|&f| f >= range.first),
        });
        kept.max(copied)
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
        SplitPolicy::InOrder
    }

    fn place(&self, ubatches: &[UBatch]) -> Result<UnifiedPlacement, PlanError> {
        let mut shadows: Vec<Shadow<'_>> = self.streams.iter().map(Shadow::of).collect();
        let repeating = self.repeating(ubatches);
        let mut placement = UnifiedPlacement::default();
        let mut slot = Vec::new();
        for (step, ubatch) in ubatches.iter().enumerate() {
            let rows = self.rows_by_stream(ubatch)?;
            let ubatch_rows: Vec<UBatchRow> = ubatch.rows().collect();
            let mut cells = vec![CellIdx(0); rows.len()];
            for group in rows.chunk_by(|a, b| a.0 == b.0) {
                let Some(&(stream, _)) = group.first() else {
                    continue;
                };
                slot.clear();
                let search = shadows[stream]
                    .search(self.config.window)
                    .with_repeating(repeating[step]);
                search
                    .find(group.len() as u32, &mut slot)
                    .map_err(|shortage| self.no_room(step, stream, shortage))?;
                for (&(_, row), &cell) in group.iter().zip(&slot) {
                    cells[row as usize] = cell;
                }
                if step + 1 < ubatches.len() {
                    let rows = group.iter().map(|&(_, row)| ubatch_rows[row as usize]);
                    shadows[stream].put(self.config.window, slot.iter().copied().zip(rows));
                }
            }
            placement.steps.push(cells);
        }
        Ok(placement)
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
        let runs_of = |seq| self.streams.get(self.stream_of(seq))?.cells.runs(seq);
        visible::write(
            ubatch,
            Reach { window, causality },
            runs_of,
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
        self.check_seq(from)?;
        self.check_seq(to)?;
        if from == to || range.is_empty() {
            return Ok(());
        }
        self.end_after_copy(from, to, range)
            .check(to, self.config.window)?;
        let (source, target) = (self.stream_of(from), self.stream_of(to));
        if let (Some(s), Some(t)) = (self.streams.get(source), self.streams.get(target))
            && source != target
        {
            let n_wanted = n_within(s, from, range);
            let n_cells = t.cells.n_cells();
            let n_free = n_cells - t.cells.n_used() + n_within(t, to, range);
            if n_wanted > n_free {
                let (part, stream) = (self.config.part, StreamIdx(target as u32));
                return Err(CopyRefused::NoRoom {
                    from,
                    part,
                    stream,
                    n_wanted,
                    n_free,
                    n_cells,
                });
            }
        }
        Ok(())
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        self.check_copy(from, to, range)?;
        let mut copied = Copied::default();
        if from == to || range.is_empty() {
            return Ok(copied);
        }
        let forgotten = self.end_after_copy(from, to, range).forgotten;
        let (source, target) = (self.stream_of(from), self.stream_of(to));
        let runs = self.streams.get(source).and_then(|s| s.cells.runs(from));
        let runs: Vec<CellRun> = runs
            .into_iter()
            .flat_map(|runs| runs.within(range))
            .collect();
        copied.n_tokens = runs.iter().map(|run| run.len).sum();
        let Some(stream) = self.streams.get_mut(target) else {
            return Ok(copied);
        };
        stream.remove(to, range);
        if source == target {
            for &run in &runs {
                stream.cells.add_run(run, to);
            }
        } else {
            copied.row_copies = put_copies(stream, to, &runs, self.config.part);
        }
        stream.set_forgotten(to, forgotten);
        Ok(copied)
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        self.check_seq(seq)?;
        let mut others = self.seqs(Seqs::All);
        others.remove(seq);
        Ok(self.remove_each(others, PosRange::ALL))
    }

    fn clear(&mut self) -> Removed {
        let removed = self.remove_each(self.seqs(Seqs::All), PosRange::ALL);
        for stream in &mut self.streams {
            stream.head = 0;
        }
        removed
    }
}

/// A stream as it will be after some steps of a plan; shares what it can with the real one.
struct Shadow<'a> {
    stream: &'a Stream,
    changed: Changed,
}

enum Changed {
    Not,
    /// With a full window only the free cells matter.
    Free {
        free: FreeMap,
        head: u32,
    },
    All(Box<Stream>),
}

impl<'a> Shadow<'a> {
    fn of(stream: &'a Stream) -> Self {
        Self {
            stream,
            changed: Changed::Not,
        }
    }

    fn search(&self, window: Window) -> SlotSearch<'_> {
        match &self.changed {
            Changed::Not => SlotSearch::new(&self.stream.cells, self.stream.head, window),
            Changed::Free { free, head } => {
                SlotSearch::in_free(free, self.stream.cells.first_cell(), *head)
            }
            Changed::All(stream) => SlotSearch::new(&stream.cells, stream.head, window),
        }
    }

    fn put(&mut self, window: Window, rows: impl Iterator<Item = (CellIdx, UBatchRow)>) {
        if let Changed::Not = self.changed {
            self.changed = match window {
                Window::Full => {
                    let free = self.stream.cells.free().clone();
                    Changed::Free {
                        free,
                        head: self.stream.head,
                    }
                }
                _ => Changed::All(Box::new(self.stream.clone())),
            };
        }
        match &mut self.changed {
            Changed::Not => {}
            Changed::Free { free, head } => {
                for (cell, _) in rows {
                    let i = cell.0 - self.stream.cells.first_cell().0;
                    free.take(i);
                    *head = i + 1;
                }
            }
            Changed::All(stream) => {
                stream.put(rows);
            }
        }
    }
}

fn last_within(stream: &Stream, seq: SeqId, range: PosRange) -> Option<Pos> {
    Some(stream.cells.runs(seq)?.within(range).last()?.last_pos())
}

fn n_within(stream: &Stream, seq: SeqId, range: PosRange) -> u32 {
    let runs = stream.cells.runs(seq).into_iter();
    runs.flat_map(|runs| runs.within(range))
        .map(|run| run.len)
        .sum()
}

/// Gives `seq` cells of its own stream for the tokens in `runs` of another. There are enough.
fn put_copies(stream: &mut Stream, seq: SeqId, runs: &[CellRun], part: PartIdx) -> Vec<RowCopy> {
    let n = runs.iter().map(|run| run.len).sum();
    let mut slot = Vec::new();
    let free = SlotSearch::in_free(stream.cells.free(), stream.cells.first_cell(), stream.head);
    let found = free.find(n, &mut slot);
    debug_assert!(found.is_ok(), "room was checked before: {found:?}");
    let mut copies: Vec<RowCopy> = Vec::new();
    for ((from, pos), &to) in runs.iter().flat_map(|run| run.iter()).zip(&slot) {
        stream.cells.put(
            to,
            Cell {
                pos,
                seqs: SeqSet::one(seq),
            },
        );
        stream.set_head_behind(to);
        match copies.last_mut() {
            Some(c) if c.from.offset(c.len) == from && c.to.offset(c.len) == to => c.len += 1,
            _ => copies.push(RowCopy {
                part,
                from,
                to,
                len: 1,
            }),
        }
    }
    copies
}
