//! Recurrent memory: one state for each sequence, and a few snapshots of where it was before.
//!
//! A state is a row in the storage of every recurrent layer (for Mamba: the last inputs of the
//! convolution, and the state of the scan). Rows are never updated in place. A ubatch reads the row
//! that a sequence is at and stores new states in rows that no sequence can be at; committing makes
//! the sequence point to them, and undoing makes it point back. So a computation that failed
//! half-way has destroyed nothing, sequences share rows until they part, and a sequence without
//! tokens reads no row at all.
//!
//! The states after the last tokens stay where they are as snapshots, also over several ubatches: a
//! sequence is a chain of at most `1 + n_snapshots` rows, and going back to one of them only drops
//! the newer. What is not in the chain is refused.
//!
//! What it costs: a ubatch can store as many rows as all sequences keep, in addition to those, so
//! `2 * n_seqs * (1 + n_snapshots)` rows always suffice, and that is how many
//! [`RecurrentConfig::new`] asks for: twice what in-place updates need. Where not all sequences are
//! in use, [`RecurrentConfig::with_rows`] takes fewer, and plans can be refused.
//!
//! Invariant: every row that a chain names holds exactly the state after that chain's tokens.
//! Knows nothing of attention.

use serde::{Deserialize, Serialize};

use super::capacity::MemoryCapacity;
use super::composite::Composite;
use super::config::{MemoryConfigError, RowCounts};
use super::edit::{Edit, Edited, Removal, Seqs};
use super::occupancy::{self, Occupancy};
use super::owners::{self, OwnedRows};
use super::plan::{Plan, PlannedUBatch, RowsWritten};
use super::refusal::Refusal;
use super::restore::Restoration;
use super::shift::PosChange;
use super::snapshot::{RestoreInto, Snapshot};
use super::{Memory, MemoryInputs};
use crate::batch::UBatch;
use crate::cells::FreeMap;
use crate::ids::{CellIdx, MAX_SEQS, Pos, SeqId};
use crate::memory::StateGroup;
use crate::seq_set::SeqSet;
use crate::window::PosRange;

mod chain;
mod copy;
mod find_slots;
mod restore;
mod shift;

use chain::{Chain, Cut};

pub use chain::KeptState;

/// The sizes of a [`Recurrent`] memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecurrentConfig {
    n_seqs: u32,
    n_snapshots: u32,
    n_rows: u32,
}

impl RecurrentConfig {
    /// For this many sequences, without snapshots, with rows enough for every plan.
    pub fn new(n_seqs: u32) -> Self {
        Self {
            n_seqs,
            n_snapshots: 0,
            n_rows: n_seqs.saturating_mul(2),
        }
    }

    /// The same, keeping the states before the last `n` tokens of each sequence, with rows enough
    /// for every plan.
    pub fn with_snapshots(self, n: u32) -> Self {
        let n_kept = n.saturating_add(1);
        Self {
            n_snapshots: n,
            n_rows: self.n_seqs.saturating_mul(2).saturating_mul(n_kept),
            ..self
        }
    }

    /// The same with another number of rows.
    pub fn with_rows(self, n_rows: u32) -> Self {
        Self { n_rows, ..self }
    }

    /// Number of sequences.
    pub fn n_seqs(&self) -> u32 {
        self.n_seqs
    }

    /// States kept of each sequence in addition to its current one.
    pub fn n_snapshots(&self) -> u32 {
        self.n_snapshots
    }

    /// Number of rows that every recurrent layer needs in the backend's storage.
    pub fn n_rows(&self) -> u32 {
        self.n_rows
    }

    fn n_kept(&self) -> usize {
        self.n_snapshots as usize + 1
    }
}

/// The memory of all recurrent layers of a model. Two are equal where their sequences are at the
/// same states.
#[derive(Clone, Debug)]
pub struct Recurrent {
    config: RecurrentConfig,
    /// By sequence; `None` where it has no tokens.
    chains: Vec<Option<Chain>>,
    /// By row: of how many chains it is.
    n_chains: Vec<u32>,
    /// The rows of no chain.
    free: FreeMap,
    /// Number of steps and restorations so far. Never goes back: what was overwritten stays so.
    n_steps: u64,
    /// By row: the last of them that it was given to.
    stored_in: Vec<u64>,
}

impl PartialEq for Recurrent {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.chains == other.chains
    }
}

impl Eq for Recurrent {}

/// The record of one step of a [`Recurrent`] memory.
#[derive(Clone, Debug, Default)]
pub struct RecurrentUndo {
    /// The sequences before the step.
    before: Vec<(SeqId, Option<Chain>)>,
    /// Its number.
    step: u64,
}

impl Recurrent {
    /// An empty memory.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where it could hold nothing, or more than can be counted.
    pub fn new(config: RecurrentConfig) -> Result<Self, MemoryConfigError> {
        let RecurrentConfig {
            n_seqs,
            n_snapshots,
            n_rows,
        } = config;
        if n_seqs == 0 || n_seqs as usize > MAX_SEQS {
            return Err(MemoryConfigError::SeqCount { n_seqs });
        }
        let n_needed = u64::from(n_snapshots) + 2;
        if u64::from(n_rows) < n_needed || i32::try_from(n_rows).is_err() {
            return Err(MemoryConfigError::StateRowCount {
                n_rows,
                n_snapshots,
                n_needed,
            });
        }
        Ok(Self {
            config,
            chains: vec![None; n_seqs as usize],
            n_chains: vec![0; n_rows as usize],
            free: FreeMap::all_free(n_rows),
            n_steps: 0,
            stored_in: vec![0; n_rows as usize],
        })
    }

    /// The configuration it was made from.
    pub fn config(&self) -> &RecurrentConfig {
        &self.config
    }

    /// The states that a sequence can go back to, oldest first; the last is its current one. Empty
    /// where it has no tokens.
    pub fn states(&self, seq: SeqId) -> &[KeptState] {
        self.chain(seq).map_or(&[], Chain::states)
    }

    /// Number of rows that hold a state some sequence can be at.
    pub fn n_used(&self) -> u32 {
        self.config.n_rows - self.free.n_free()
    }

    fn chain(&self, seq: SeqId) -> Option<&Chain> {
        self.chains.get(seq.as_usize())?.as_ref()
    }

    /// Gives a sequence another chain and returns the one before.
    fn set_chain(&mut self, seq: SeqId, chain: Option<Chain>) -> Option<Chain> {
        let slot = self.chains.get_mut(seq.as_usize())?;
        for KeptState { row, .. } in chain.iter().flat_map(Chain::states) {
            if let Some(n) = self.n_chains.get_mut(row.as_usize()) {
                *n += 1;
                self.free.take(row.0);
            }
        }
        let before = std::mem::replace(slot, chain);
        for KeptState { row, .. } in before.iter().flat_map(Chain::states) {
            if let Some(n) = self.n_chains.get_mut(row.as_usize()) {
                *n = n.saturating_sub(1);
                if *n == 0 {
                    self.free.release(row.0);
                }
            }
        }
        before
    }

    /// The rows that no sequence can be at, ascending.
    fn free_rows(&self) -> impl Iterator<Item = CellIdx> + '_ {
        let next = |from| self.free.next_free(from);
        let rows = std::iter::successors(next(0), move |&row| next(row + 1));
        rows.map(CellIdx)
    }

    /// Notes that a step or a restoration writes a row.
    fn note_stored(&mut self, row: CellIdx) {
        if let Some(step) = self.stored_in.get_mut(row.as_usize()) {
            *step = self.n_steps;
        }
    }

    fn check_seq(&self, seq: SeqId) -> Result<(), Refusal> {
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
            Seqs::All => (0..self.config.n_seqs).map(SeqId).collect(),
        }
    }

    /// The rest of a sequence without its tokens in `range`.
    fn without(&self, seq: SeqId, range: PosRange) -> Result<Option<Chain>, Refusal> {
        let Some(chain) = self.chain(seq) else {
            return Ok(None);
        };
        let has = chain.positions();
        match chain.cut(range) {
            Cut::Untouched => Ok(Some(chain.clone())),
            Cut::Everything => Ok(None),
            Cut::BackTo(at) => Ok(Some(chain.clone().truncated(at))),
            Cut::Gone { oldest } => Err(Refusal::StateGone {
                seq,
                last: has.last,
                wanted: Pos(range.first.0.saturating_sub(1)),
                oldest,
                n_snapshots: (chain.states().len() - 1) as u32,
            }),
            Cut::Indivisible => Err(Refusal::StateIndivisible { seq, has, range }),
        }
    }

    /// True if no step after that of `undo` was given this row.
    fn is_intact(&self, undo: &RecurrentUndo, row: CellIdx) -> bool {
        let stored_in = self.stored_in.get(row.as_usize());
        stored_in.is_none_or(|&step| step <= undo.step)
    }

    /// Gives sequences other chains and counts what went.
    fn replace(&mut self, chains: Vec<(SeqId, Option<Chain>)>) -> Removal {
        let n_used = self.n_used();
        let mut n_tokens = 0;
        for (seq, chain) in chains {
            let before = self.n_tokens(seq);
            self.set_chain(seq, chain);
            n_tokens += before.saturating_sub(self.n_tokens(seq));
        }
        Removal {
            n_tokens,
            n_cells: n_used.saturating_sub(self.n_used()),
        }
    }
}

/// Operations on the ubatches of a plan, also as the states of a [`Composite`], and edits.
impl Recurrent {
    pub(super) fn find_groups(&self, ubatches: &[UBatch]) -> Result<Vec<Vec<StateGroup>>, Refusal> {
        find_slots::find_slots(self, ubatches)
    }

    /// Takes a ubatch into the states of its sequences.
    pub(super) fn commit_groups(
        &mut self,
        ubatch: &UBatch,
        groups: &[StateGroup],
    ) -> RecurrentUndo {
        self.n_steps += 1;
        for store in groups.iter().flat_map(|group| &group.stores) {
            self.note_stored(store.to);
        }
        RecurrentUndo {
            before: find_slots::extend(self, ubatch, groups),
            step: self.n_steps,
        }
    }

    /// Writes which rows continue which state; buffers are reused.
    pub(super) fn write_inputs(&self, groups: &[StateGroup], inputs: &mut MemoryInputs) {
        inputs.states.truncate(groups.len());
        let n_reused = inputs.states.len();
        for (to, from) in inputs.states.iter_mut().zip(groups) {
            to.clone_from(from);
        }
        inputs.states.extend(groups.iter().skip(n_reused).cloned());
    }

    /// The rest of these sequences without their tokens in `range`.
    fn left(&self, seqs: Seqs, range: PosRange) -> Result<Vec<(SeqId, Option<Chain>)>, Refusal> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        let seqs = self.seqs(seqs);
        let left = seqs.iter().map(|seq| Ok((seq, self.without(seq, range)?)));
        left.collect()
    }

    /// Shares the state: no row is copied.
    fn copy_state(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Edited, Refusal> {
        let Some((chain, n_tokens)) = copy::after(self, from, to, range)? else {
            return Ok(Edited::default());
        };
        self.set_chain(to, chain);
        Ok(Edited {
            n_tokens,
            ..Edited::default()
        })
    }

    /// Moves whole sequences; no row changes.
    fn move_state(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Edited, Refusal> {
        let Some(chain) = shift::after(self, seq, range, change)? else {
            return Ok(Edited::default());
        };
        self.set_chain(seq, Some(chain));
        Ok(Edited {
            n_tokens: self.n_tokens(seq),
            ..Edited::default()
        })
    }
}

impl Memory for Recurrent {
    /// The states that are read and stored, in the order in which they are computed.
    type Slot = Vec<StateGroup>;
    type Undo = RecurrentUndo;

    fn n_seqs(&self) -> u32 {
        self.config.n_seqs
    }

    fn n_rows(&self) -> RowCounts {
        RowCounts {
            cells: Vec::new(),
            states: self.config.n_rows as usize,
        }
    }

    fn capacity(&self) -> MemoryCapacity {
        MemoryCapacity {
            parts: Vec::new(),
            states: Some(self.state_capacity()),
            is_endless: false,
        }
    }

    fn owned_rows(&self) -> Vec<OwnedRows> {
        let mut owned = Vec::new();
        owners::of_states(self, &mut owned);
        owned
    }

    /// From the first to the last token that went into the sequence's state.
    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        self.chain(seq).map(Chain::positions)
    }

    fn n_tokens(&self, seq: SeqId) -> u32 {
        let current = self.chain(seq).and_then(Chain::current);
        current.map_or(0, |state| state.n_tokens)
    }

    /// As many as snapshots are kept.
    fn max_take_back(&self) -> u32 {
        self.config.n_snapshots
    }

    fn takes_images(&self) -> bool {
        true
    }

    fn find_slots(&self, ubatches: Vec<UBatch>) -> Result<Plan<Vec<StateGroup>>, Refusal> {
        let slots = self.find_groups(&ubatches)?;
        let planned = ubatches.into_iter().zip(slots);
        Ok(planned
            .map(|(ubatch, slot)| PlannedUBatch { ubatch, slot })
            .collect())
    }

    fn commit(&mut self, planned: &PlannedUBatch<Vec<StateGroup>>) -> RecurrentUndo {
        self.commit_groups(&planned.ubatch, &planned.slot)
    }

    fn check_rollback(&self, undo: &RecurrentUndo, rows: RowsWritten) -> Result<(), Refusal> {
        for (seq, chain) in &undo.before {
            if let Some(state) = chain.as_ref().and_then(Chain::current)
                && rows == RowsWritten::Perhaps
                && !self.is_intact(undo, state.row)
            {
                return Err(Refusal::StateOverwritten {
                    seq: *seq,
                    last: state.pos,
                    row: state.row,
                });
            }
        }
        Ok(())
    }

    /// Exact for the step that was committed last, whatever was written: a step only writes rows
    /// that no sequence could be at. Of one before it, states that later steps overwrote are
    /// forgotten.
    fn rollback(&mut self, undo: RecurrentUndo, rows: RowsWritten) {
        for (seq, chain) in &undo.before {
            let chain = chain.clone().and_then(|chain| match rows {
                RowsWritten::No => Some(chain),
                RowsWritten::Perhaps => chain.newest_where(|row| self.is_intact(&undo, row)),
            });
            self.set_chain(*seq, chain);
        }
    }

    fn inputs(&self, planned: &PlannedUBatch<Vec<StateGroup>>, inputs: &mut MemoryInputs) {
        self.write_inputs(&planned.slot, inputs);
    }

    fn check(&self, edit: &Edit) -> Result<(), Refusal> {
        match *edit {
            Edit::Remove { seqs, range } => self.left(seqs, range).map(drop),
            Edit::Copy { from, to, range } => copy::after(self, from, to, range).map(drop),
            Edit::Reposition { seq, range, change } => {
                shift::after(self, seq, range, change).map(drop)
            }
            Edit::KeepOnly(seq) => self.check_seq(seq),
            Edit::Compact | Edit::Clear => Ok(()),
        }
    }

    fn apply(&mut self, edit: Edit) -> Result<Edited, Refusal> {
        let left = match edit {
            Edit::Copy { from, to, range } => return self.copy_state(from, to, range),
            Edit::Reposition { seq, range, change } => return self.move_state(seq, range, change),
            // States are in rows of their own: there are no holes.
            Edit::Compact => return Ok(Edited::default()),
            Edit::Remove { seqs, range } => self.left(seqs, range)?,
            Edit::KeepOnly(seq) => {
                self.check_seq(seq)?;
                let mut others = self.seqs(Seqs::All);
                others.remove(seq);
                others.iter().map(|seq| (seq, None)).collect()
            }
            Edit::Clear => self.left(Seqs::All, PosRange::ALL)?,
        };
        Ok(self.replace(left).into())
    }

    fn occupancy(&self) -> Option<Occupancy> {
        Some(occupancy::of_states(self))
    }

    fn snapshot(&self, seqs: Seqs) -> Result<Snapshot, Refusal> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        let seqs = self.seqs(seqs);
        let histories = restore::histories(self, &seqs);
        Ok(Snapshot::of_states(histories).of_seqs(&seqs))
    }

    fn check_restore(&self, snapshot: &Snapshot, into: RestoreInto) -> Result<(), Refusal> {
        restore::after(self, snapshot, into).map(drop)
    }

    fn restore(&mut self, snapshot: &Snapshot, into: RestoreInto) -> Result<Restoration, Refusal> {
        let (after, restored) = restore::after(self, snapshot, into)?;
        *self = after;
        Ok(restored)
    }
}

impl Composite {
    /// An empty memory of a model whose layers that remember are all recurrent.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where it could hold nothing, or more than can be counted.
    pub fn recurrent(states: RecurrentConfig) -> Result<Self, MemoryConfigError> {
        Self::from_parts(Vec::new(), Some(Recurrent::new(states)?))
    }
}
