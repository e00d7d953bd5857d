//! [`Composite`]: attention parts with windows and optional recurrent states, as one memory.
//!
//! The memory of every model of this project. Its kinds, with their constructors and sizes, are
//! [`Composite::unified`], [`Composite::iswa`], [`Composite::recurrent`], [`Composite::hybrid`] and
//! [`Composite::encoder`]; [`Composite::new`] takes the one that a model's layers need.
//!
//! Invariant: all parts and the states hold every sequence up to the same position and are given
//! the same ubatches. An edit that one of them refuses is done in none. The part of sources, where
//! layers attend over any, is apart: see [`super::source`].

use super::capacity::{CellUse, MemoryCapacity};
use super::config::{MemoryConfig, MemoryConfigError, RowCounts};
use super::edit::{Edit, Edited, Seqs};
use super::occupancy::{self, Occupancy};
use super::owners::{self, OwnedRows};
use super::plan::{Plan, PlannedUBatch, RowsWritten};
use super::recurrent::{Recurrent, RecurrentUndo};
use super::refusal::Refusal;
use super::restore::Restoration;
use super::snapshot::{RestoreInto, Snapshot};
use super::undo::UnifiedUndo;
use super::unified::Unified;
use super::{Memory, MemoryInputs, source};
use crate::batch::{SplitPolicy, UBatch};
use crate::ids::{CellIdx, SeqId};
use crate::layers::LayerMap;
use crate::memory::StateGroup;
use crate::seq_set::SeqSet;
use crate::window::PosRange;

/// Attention parts and recurrent states as one memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Composite {
    pub(super) parts: Vec<Unified>,
    /// The sources of sequences: a part whose tokens are not theirs.
    pub(super) source: Option<Unified>,
    states: Option<Recurrent>,
    n_seqs: u32,
    split_policy: SplitPolicy,
}

/// The cells and states of one ubatch in a [`Composite`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompositeSlot {
    /// The cell of each token, `[parts, tokens]`; of tokens of sources, `[tokens]` in their part.
    cells: Vec<CellIdx>,
    /// The states that are read and stored, in the order in which they are computed.
    groups: Vec<StateGroup>,
}

impl CompositeSlot {
    /// The cell of each token in the part with this position in [`Composite::parts`]; empty where
    /// there is no such part.
    pub fn cells(&self, part: usize, n_tokens: u32) -> &[CellIdx] {
        let n = n_tokens as usize;
        self.cells.get(part * n..(part + 1) * n).unwrap_or_default()
    }

    /// The slot of tokens of sources.
    pub(super) fn of_source(cells: Vec<CellIdx>) -> Self {
        let groups = Vec::new();
        Self { cells, groups }
    }

    /// The recurrent states that are read and stored.
    pub fn groups(&self) -> &[StateGroup] {
        &self.groups
    }
}

/// The record that undoes a step of a [`Composite`].
#[derive(Clone, Debug, Default)]
pub struct CompositeUndo {
    /// Of the first part: most memories have one, and need no list.
    first: Option<UnifiedUndo>,
    others: Vec<UnifiedUndo>,
    /// Of the part of sources: then nothing else was changed.
    source: Option<UnifiedUndo>,
    states: Option<RecurrentUndo>,
}

impl CompositeUndo {
    fn parts(&self) -> impl Iterator<Item = &UnifiedUndo> {
        self.first.iter().chain(&self.others)
    }
}

impl Composite {
    /// The empty memory that these layers need.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where there is none, or sizes are impossible.
    pub fn new(layers: &LayerMap, config: &MemoryConfig) -> Result<Self, MemoryConfigError> {
        let parts = config.parts(layers)?;
        let mut recurrent = layers.iter().map(|(layer, _)| layers.recurrent(layer));
        let has_states = recurrent.any(|states| states.is_some());
        if parts.is_empty() && !has_states {
            return Ok(Self::encoder(config.n_seqs));
        }
        let part = |part| Ok(Unified::new(part)?.with_active(config.n_active()));
        let parts: Result<_, MemoryConfigError> = parts.into_iter().map(part).collect();
        let states = has_states.then(|| Recurrent::new(config.states()));
        Self::from_parts(parts?, states.transpose()?)
    }

    /// Parts and states as one memory. They must be empty, or hold the same sequences up to the
    /// same positions. There must be at least one.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where they do not suit each other.
    pub fn from_parts(
        parts: Vec<Unified>,
        states: Option<Recurrent>,
    ) -> Result<Self, MemoryConfigError> {
        let (sources, parts): (Vec<_>, Vec<_>) = parts.into_iter().partition(source::is_source);
        let source = sources.into_iter().next();
        let of_states = states.iter().map(Memory::n_seqs);
        let all = source.iter().map(Memory::n_seqs);
        let mut all = all.chain(parts.iter().map(Memory::n_seqs)).chain(of_states);
        let n_seqs = all
            .next()
            .ok_or(MemoryConfigError::SeqCount { n_seqs: 0 })?;
        if let Some(other) = all.find(|&other| other != n_seqs) {
            let (first, second) = (n_seqs, other);
            return Err(MemoryConfigError::SeqCountsDiffer { first, second });
        }
        // States take their tokens in any pieces, and so do causal parts.
        let whole = SplitPolicy::WholeSequences;
        let split_policy = if parts.iter().any(|part| part.split_policy() == whole) {
            whole
        } else {
            SplitPolicy::InOrder
        };
        Ok(Self {
            parts,
            source,
            states,
            n_seqs,
            split_policy,
        })
    }

    /// A memory that remembers nothing.
    pub(super) fn without_parts(n_seqs: u32) -> Self {
        Self {
            parts: Vec::new(),
            source: None,
            states: None,
            n_seqs,
            split_policy: SplitPolicy::WholeSequences,
        }
    }

    /// The attention parts, without that of sources.
    pub fn parts(&self) -> &[Unified] {
        &self.parts
    }

    /// The part of sources, where layers attend over any.
    pub fn source(&self) -> Option<&Unified> {
        self.source.as_ref()
    }

    /// The recurrent states, where there are recurrent layers.
    pub fn states(&self) -> Option<&Recurrent> {
        self.states.as_ref()
    }

    /// Number of cells in use, over all parts and streams; states are not counted.
    pub fn n_used(&self) -> u32 {
        let all = self.parts.iter().chain(&self.source);
        all.map(Unified::n_used).sum()
    }

    /// The sequences that an edit names are there: parts check that too, but there may be none.
    fn check_seqs(&self, edit: &Edit) -> Result<(), Refusal> {
        let (first, second) = match *edit {
            Edit::Remove { seqs, .. } => match seqs {
                Seqs::One(seq) => (Some(seq), None),
                Seqs::All => (None, None),
            },
            Edit::Copy { from, to, .. } => (Some(from), Some(to)),
            Edit::Reposition { seq, .. } | Edit::KeepOnly(seq) => (Some(seq), None),
            Edit::Compact | Edit::Clear => (None, None),
        };
        let mut named = first.into_iter().chain(second);
        named.try_for_each(|seq| self.check_seq(seq))
    }

    pub(super) fn check_seq(&self, seq: SeqId) -> Result<(), Refusal> {
        let n_seqs = self.n_seqs;
        if seq.0 < n_seqs {
            Ok(())
        } else {
            Err(Refusal::NoSuchSequence { seq, n_seqs })
        }
    }

    /// The cells of all parts for each ubatch, `[parts, tokens]`.
    fn find_cells(&self, ubatches: &[UBatch]) -> Result<Vec<Vec<CellIdx>>, Refusal> {
        let mut found: Result<Vec<Vec<CellIdx>>, Refusal> = Ok(Vec::new());
        for (number, part) in self.parts.iter().enumerate() {
            found = match (found, part.find_cells(ubatches)) {
                (Ok(_), Ok(own)) if number == 0 => Ok(own),
                (Ok(mut all), Ok(own)) => {
                    let both = all.iter_mut().zip(own);
                    both.for_each(|(all, own)| all.extend(own));
                    Ok(all)
                }
                (found, own) => Err(more_serious(found.err(), own.err())),
            };
        }
        found
    }
}

/// Of two refusals the one that counts: where the first may be cured by smaller ubatches, the
/// other.
fn more_serious(first: Option<Refusal>, second: Option<Refusal>) -> Refusal {
    match (first, second) {
        (Some(curable), Some(other)) if curable.smaller_may_fit() => other,
        (Some(refusal), _) | (None, Some(refusal)) => refusal,
        (None, None) => Refusal::NoStates,
    }
}

impl Memory for Composite {
    type Slot = CompositeSlot;
    type Undo = CompositeUndo;

    fn n_seqs(&self) -> u32 {
        self.n_seqs
    }

    fn n_rows(&self) -> RowCounts {
        let mut rows = RowCounts::default();
        for part in self.parts.iter().chain(&self.source) {
            let number = part.config().part.as_usize();
            let n = rows.cells.len().max(number + 1);
            rows.cells.resize(n, 0);
            rows.cells[number] = part.n_cells() as usize;
        }
        let states = self.states.as_ref();
        rows.states = states.map_or(0, |states| states.config().n_rows() as usize);
        rows
    }

    /// The positions that all parts remember.
    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let of_parts = self.parts.iter().map(|part| part.positions(seq));
        let of_states = self.states.iter().map(|states| states.positions(seq));
        let both = |a: Option<PosRange>, b: Option<PosRange>| Some(a?.intersection(b?));
        let all = of_parts.chain(of_states).reduce(both).flatten();
        all.filter(|all| !all.is_empty())
    }

    fn n_tokens(&self, seq: SeqId) -> u32 {
        let of_parts = self.parts.iter().map(|part| part.n_tokens(seq));
        let of_states = self.states.iter().map(|states| states.n_tokens(seq));
        of_parts.chain(of_states).max().unwrap_or(0)
    }

    /// Of the part that was given most of them: others may lack what a state restored left out.
    fn token_ranges(&self, seq: SeqId) -> Vec<PosRange> {
        let of_parts = self.parts.iter().map(|part| part.token_ranges(seq));
        let of_states = self.states.iter().map(|states| states.token_ranges(seq));
        let n_tokens = |ranges: &Vec<PosRange>| ranges.iter().map(|range| range.len()).sum::<u64>();
        of_parts
            .chain(of_states)
            .max_by_key(n_tokens)
            .unwrap_or_default()
    }

    fn split_policy(&self) -> SplitPolicy {
        self.split_policy
    }

    fn capacity(&self) -> MemoryCapacity {
        MemoryCapacity {
            parts: self.parts.iter().map(Unified::part_capacity).collect(),
            states: self.states.as_ref().map(Recurrent::state_capacity),
            is_endless: false,
        }
    }

    /// Sources are left out.
    fn owned_rows(&self) -> Vec<OwnedRows> {
        let mut owned = Vec::new();
        for part in &self.parts {
            owners::of_part(part, &mut owned);
        }
        if let Some(states) = &self.states {
            owners::of_states(states, &mut owned);
        }
        owned
    }

    fn cell_use(&self) -> CellUse {
        let parts = self.parts.iter().map(Unified::part_use);
        parts.max_by_key(|part| part.n_cells).unwrap_or_default()
    }

    fn max_take_back(&self) -> u32 {
        let of_parts = self.parts.iter().map(Memory::max_take_back);
        let of_states = self.states.iter().map(Memory::max_take_back);
        of_parts.chain(of_states).min().unwrap_or(0)
    }

    fn takes_sources(&self) -> bool {
        self.source.is_some()
    }

    fn takes_images(&self) -> bool {
        true
    }

    fn source_positions(&self, seq: SeqId) -> Option<PosRange> {
        self.source.as_ref()?.positions(seq)
    }

    fn find_slots(&self, ubatches: Vec<UBatch>) -> Result<Plan<CompositeSlot>, Refusal> {
        if ubatches.iter().any(source::is_of_source) {
            return self.find_source_slots(ubatches);
        }
        self.check_sources(&ubatches)?;
        let states = self.states.as_ref();
        let groups = states.map_or(Ok(Vec::new()), |states| states.find_groups(&ubatches));
        let (cells, groups) = match (self.find_cells(&ubatches), groups) {
            (Ok(cells), Ok(groups)) => (cells, groups),
            (cells, groups) => return Err(more_serious(cells.err(), groups.err())),
        };
        let (mut cells, mut groups) = (cells.into_iter(), groups.into_iter());
        let planned = ubatches.into_iter().map(|ubatch| {
            let slot = CompositeSlot {
                cells: cells.next().unwrap_or_default(),
                groups: groups.next().unwrap_or_default(),
            };
            PlannedUBatch { ubatch, slot }
        });
        Ok(planned.collect())
    }

    fn commit(&mut self, planned: &PlannedUBatch<CompositeSlot>) -> CompositeUndo {
        let PlannedUBatch { ubatch, slot } = planned;
        if let (true, Some(source)) = (source::is_of_source(ubatch), &mut self.source) {
            return CompositeUndo {
                source: Some(source.commit_cells(ubatch, &slot.cells)),
                ..CompositeUndo::default()
            };
        }
        let n_tokens = ubatch.n_tokens();
        let parts = self.parts.iter_mut().enumerate();
        let mut undo = parts.map(|(n, part)| part.commit_cells(ubatch, slot.cells(n, n_tokens)));
        let (first, others) = (undo.next(), undo.collect());
        let states = self.states.as_mut();
        CompositeUndo {
            first,
            others,
            source: None,
            states: states.map(|states| states.commit_groups(ubatch, &slot.groups)),
        }
    }

    fn check_rollback(&self, undo: &CompositeUndo, rows: RowsWritten) -> Result<(), Refusal> {
        for (part, undo) in self.parts.iter().zip(undo.parts()) {
            part.check_rollback(undo, rows)?;
        }
        if let (Some(source), Some(undo)) = (&self.source, &undo.source) {
            source.check_rollback(undo, rows)?;
        }
        match (&self.states, &undo.states) {
            (Some(states), Some(undo)) => states.check_rollback(undo, rows),
            _ => Ok(()),
        }
    }

    fn rollback(&mut self, undo: CompositeUndo, rows: RowsWritten) {
        if let (Some(states), Some(undo)) = (&mut self.states, undo.states) {
            states.rollback(undo, rows);
        }
        if let (Some(source), Some(undo)) = (&mut self.source, undo.source) {
            source.rollback(undo, rows);
        }
        let undo = undo.first.into_iter().chain(undo.others);
        for (part, undo) in self.parts.iter_mut().zip(undo) {
            part.rollback(undo, rows);
        }
    }

    fn inputs(&self, planned: &PlannedUBatch<CompositeSlot>, inputs: &mut MemoryInputs) {
        let PlannedUBatch { ubatch, slot } = planned;
        let is_of_source = source::is_of_source(ubatch);
        if let Some(source) = &self.source {
            let cells = if is_of_source { &slot.cells[..] } else { &[] };
            source.write_inputs(ubatch, cells, inputs);
        }
        if is_of_source {
            return;
        }
        let n_tokens = ubatch.n_tokens();
        for (n, part) in self.parts.iter().enumerate() {
            part.write_inputs(ubatch, slot.cells(n, n_tokens), inputs);
        }
        if let Some(states) = &self.states {
            states.write_inputs(&slot.groups, inputs);
        }
    }

    fn check(&self, edit: &Edit) -> Result<(), Refusal> {
        self.check_seqs(edit)?;
        self.parts.iter().try_for_each(|part| part.check(edit))?;
        self.check_source_edit(edit)?;
        self.states.iter().try_for_each(|states| states.check(edit))
    }

    fn apply(&mut self, edit: Edit) -> Result<Edited, Refusal> {
        self.check(&edit)?;
        let mut edited = Edited::default();
        for part in &mut self.parts {
            edited = edited.and(part.apply(edit)?);
        }
        if let Some(states) = &mut self.states {
            edited = edited.and(states.apply(edit)?);
        }
        if let (Some(source), Some(edit)) = (&mut self.source, source::edit_of_source(edit)) {
            // Its tokens are not those of the sequence, and are not counted.
            edited = edited.and(Edited {
                n_tokens: 0,
                ..source.apply(edit)?
            });
        }
        Ok(edited)
    }

    fn n_holes(&self) -> u32 {
        let all = self.parts.iter().chain(&self.source);
        all.map(Memory::n_holes).sum()
    }

    fn occupancy(&self) -> Option<Occupancy> {
        let parts = self.parts.iter().chain(&self.source);
        let parts = parts.map(occupancy::of_part);
        let states = self.states.iter().map(occupancy::of_states);
        let all = parts.chain(states);
        Some(all.fold(Occupancy::default(), Occupancy::and))
    }

    fn snapshot(&self, seqs: Seqs) -> Result<Snapshot, Refusal> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        let mut all = Snapshot::default();
        for part in self.parts.iter().chain(&self.source) {
            all = all.and(part.snapshot(seqs)?);
        }
        if let Some(states) = &self.states {
            all = all.and(states.snapshot(seqs)?);
        }
        let seqs = match seqs {
            Seqs::One(seq) => SeqSet::one(seq),
            Seqs::All => SeqSet::first_n(self.n_seqs),
        };
        Ok(all.of_seqs(&seqs))
    }

    fn check_restore(&self, snapshot: &Snapshot, into: RestoreInto) -> Result<(), Refusal> {
        into.replaced(snapshot, self.n_seqs)?;
        for part in self.parts.iter().chain(&self.source) {
            part.check_restore(snapshot, into)?;
        }
        let mut states = self.states.iter();
        states.try_for_each(|states| states.check_restore(snapshot, into))
    }

    fn restore(&mut self, snapshot: &Snapshot, into: RestoreInto) -> Result<Restoration, Refusal> {
        self.check_restore(snapshot, into)?;
        let mut restored = Restoration::default();
        for part in &mut self.parts {
            restored = restored.and(part.restore(snapshot, into)?);
        }
        if let Some(source) = &mut self.source {
            restored = restored.and(Restoration {
                n_tokens: 0,
                ..source.restore(snapshot, into)?
            });
        }
        if let Some(states) = &mut self.states {
            restored = restored.and(states.restore(snapshot, into)?);
        }
        Ok(restored)
    }
}
