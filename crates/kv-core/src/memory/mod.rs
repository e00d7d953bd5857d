//! What a model remembers, as modules with one interface: [`Memory`].
//!
//! Evaluating a batch has two halves. **Planning** takes `&self`: the batch is split into ubatches,
//! and each is given a slot, or the reason why there is none; nothing has changed yet.
//! **Committing** cannot fail: [`Steps`] takes one ubatch after the other into the memory and
//! writes the inputs that the graph needs. If its computation fails, the step is undone.
//!
//! An [`Edit`] of sequences is checked whole before anything changes and returns the device work
//! that it implies ([`Edited`]); nothing is queued for later.
//!
//! [`Composite`] is the memory of every model of this project: attention parts with windows and
//! optional recurrent states. [`Unified`] and [`Recurrent`] are what it consists of, and memories
//! on their own. Third parties write their own `Memory`: nine methods are required.
//!
//! Invariant: how a memory is laid out, what it recycles and in which pieces tokens came is not
//! visible to a model: a token sees the same tokens whatever happened around it. A call that would
//! break this is refused. Knows nothing of rows and tensors.
//!
//! ```
//! use kv_core::batch::{Batch, BatchRules, validate};
//! use kv_core::memory::{Memory, MemoryInputs, Seqs, Streams, Unified, UnifiedConfig};
//! use kv_core::{Causality, PartIdx, Pos, PosRange, SeqId, TokenId, Window};
//!
//! let mut memory = Unified::new(UnifiedConfig {
//!     part: PartIdx(0),
//!     n_seqs: 2,
//!     n_cells: 16,
//!     streams: Streams::Shared,
//!     window: Window::Sliding(4),
//!     causality: Causality::Causal,
//! })?;
//! let rules = BatchRules { n_batch: 16, n_seqs: 2, n_vocab: 100, n_embd: 8 };
//!
//! let prompt = Batch::prompt(SeqId(0), (0..6).map(TokenId));
//! let batch = validate(&prompt, &rules, |seq| memory.positions(seq))?;
//! let mut inputs = MemoryInputs::default();
//! let mut steps = memory.begin(&batch, 4)?; // ubatches of 4 and 2 tokens
//! while let Some(ubatch) = steps.next(&mut inputs) {
//!     assert_eq!(inputs.parts[0].cells.len(), ubatch.tokens.len());
//!     // … run the graph; where that fails: `return steps.undo_last(RowsWritten::Perhaps)`
//! }
//! // The last row: position 5 sees 2, 3, 4 and itself.
//! let mask = inputs.parts[0].visibility.dense_mask(8)?;
//! assert_eq!(mask.to_string(), ".####...\n..####..\n");
//!
//! // A second sequence with the same beginning, without copying a row.
//! let copied = memory.copy(SeqId(0), SeqId(1), PosRange::ALL)?;
//! assert!(copied.row_copies.is_empty());
//! memory.remove(Seqs::One(SeqId(0)), PosRange::from(Pos(5)..))?;
//! assert_eq!(memory.positions(SeqId(0)), Some(PosRange::new(Pos(0), Pos(4))));
//! assert_eq!(memory.positions(SeqId(1)), Some(PosRange::new(Pos(0), Pos(5))));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::batch::{Batch, SplitPolicy, UBatch, ValidBatch};
use crate::ids::{PartIdx, Pos, PosDelta, SeqId};
use crate::window::PosRange;

mod capacity;
mod compact;
mod composite;
mod config;
mod copy;
mod edit;
mod encoder;
mod hybrid;
mod inputs;
pub mod invariants;
mod iswa;
mod occupancy;
mod owners;
mod place;
mod plan;
mod pos_set;
mod recurrent;
mod refusal;
mod restore;
mod row_edits;
mod shift;
mod snapshot;
mod source;
mod state_groups;
mod stream;
mod undo;
mod unified;
mod visible;

pub use crate::cells::OwnedRun;
pub use capacity::{CellUse, MemoryCapacity, PartCapacity, StateCapacity};
pub use composite::{Composite, CompositeSlot, CompositeUndo};
pub use config::{BYTES_PER_CELL, MAX_N_CTX, MemoryConfig, MemoryConfigError, RowCounts};
pub use edit::{Edit, Edited, Removal, Seqs};
pub use encoder::batch_visibility;
pub use inputs::{BatchVisibility, PartInputs};
pub use iswa::SwaSize;
pub use occupancy::{Occupancy, PartOccupancy, StateOccupancy};
pub use owners::{OwnedRows, RowsOf};
pub use plan::{Plan, PlannedBatch, PlannedUBatch, RowsWritten, Steps};
pub use recurrent::{KeptState, Recurrent, RecurrentConfig, RecurrentUndo};
pub use refusal::{NeededFor, NoRoom, NoStateRoom, Reason, Refusal, WindowForgotten};
pub use restore::{Restoration, RowWrite, StateWrite, TargetRows};
pub use row_edits::{RowCopy, RowShift};
pub use shift::{Division, PosChange};
pub use snapshot::{CellRecord, PartSnapshot, RestoreInto, Snapshot, SnapshotError, StateHistory};
pub use state_groups::{StateGroup, StateMarks, StateStore, check_states};
pub use undo::UnifiedUndo;
pub use unified::{Streams, Unified, UnifiedConfig};

/// A memory module.
///
/// Callers use [`Memory::begin`] (or [`Memory::plan`], to know whether something would fit),
/// [`Memory::apply`] or a method for one edit, and [`Memory::positions`].
///
/// Authors write the nine required methods. The provided ones refuse what a memory need not have:
/// snapshots, rollbacks over several steps that lost something, edits before a batch. The contract
/// suite (`kv_contract::memory_contract!`) defines what a memory must do.
pub trait Memory {
    /// The target of one ubatch of a plan.
    type Slot;
    /// The record that undoes a committed step.
    type Undo;

    /// Sequences have ids below this number.
    fn n_seqs(&self) -> u32;

    /// The rows that a backend must allocate for it.
    fn n_rows(&self) -> RowCounts;

    /// The positions of a sequence, from the oldest that is remembered to the newest; `None` where
    /// nothing is.
    fn positions(&self, seq: SeqId) -> Option<PosRange>;

    /// Finds slots for ubatches that are committed one after the other.
    ///
    /// # Errors
    /// [`Refusal`] where one of them has no slot.
    fn find_slots(&self, ubatches: Vec<UBatch>) -> Result<Plan<Self::Slot>, Refusal>;

    /// Takes the next ubatch of a plan into the memory. All before it have been committed, and
    /// nothing else was changed since the plan was made.
    fn commit(&mut self, planned: &PlannedUBatch<Self::Slot>) -> Self::Undo;

    /// Undoes the latest commit that was not undone.
    fn rollback(&mut self, undo: Self::Undo, rows: RowsWritten);

    /// Writes what the graph needs to know of the ubatch that was just committed.
    fn inputs(&self, planned: &PlannedUBatch<Self::Slot>, inputs: &mut MemoryInputs);

    /// Checks an edit as [`Memory::apply`] would, and changes nothing.
    ///
    /// # Errors
    /// [`Refusal`], the reason; [`Refusal::Unsupported`] for edits that this memory does not have.
    fn check(&self, edit: &Edit) -> Result<(), Refusal>;

    /// Does an edit, and returns what is left to do with rows. [`Edit::Remove`], [`Edit::KeepOnly`]
    /// and [`Edit::Clear`] leave nothing to do.
    ///
    /// # Errors
    /// [`Refusal`] as from [`Memory::check`]; nothing has changed then.
    fn apply(&mut self, edit: Edit) -> Result<Edited, Refusal>;

    /// The way in which batches are split for this memory: the same for all its life.
    fn split_policy(&self) -> SplitPolicy {
        SplitPolicy::InOrder
    }

    /// The most tokens of the last ubatch that can be taken from the end of a sequence again
    /// ([`Edit::Remove`]) before another ubatch is committed: drafted tokens that the model
    /// rejects.
    fn max_take_back(&self) -> u32 {
        0
    }

    /// True if sequences have sources: tokens that layers attend over in addition, see
    /// [`TokensOf::Source`](crate::batch::TokensOf::Source). Where they have none, [`Memory::plan`]
    /// refuses batches of sources.
    fn takes_sources(&self) -> bool {
        false
    }

    /// True if tokens may lie in images, with a row and a column next to their position
    /// ([`GridPos`](crate::GridPos)), so that several share a position. Where they may not,
    /// [`Memory::plan`] refuses batches with such tokens.
    fn takes_images(&self) -> bool {
        false
    }

    /// The positions of a sequence's source; `None` where it has none.
    fn source_positions(&self, _seq: SeqId) -> Option<PosRange> {
        None
    }

    /// Number of tokens of a sequence that are remembered, in the part that remembers most of them.
    fn n_tokens(&self, seq: SeqId) -> u32 {
        let has = self.positions(seq);
        has.map_or(0, |has| has.last.0 - has.first.0 + 1)
    }

    /// The position of the next token of a sequence.
    fn next_pos(&self, seq: SeqId) -> Pos {
        let has = self.positions(seq);
        has.map_or(Pos(0), |has| has.last.next())
    }

    /// Positions of the tokens that a sequence was given and that were not removed, also where a
    /// window has recycled their cells. Tokens that share a position are in ranges of their own.
    fn token_ranges(&self, seq: SeqId) -> Vec<PosRange> {
        self.positions(seq).into_iter().collect()
    }

    /// Edits that make room for a batch, to be done in this order before it is validated: what a
    /// memory evicts. A batch that fails later does not bring back what they removed.
    fn edits_before(&self, _batch: &Batch) -> Vec<Edit> {
        Vec::new()
    }

    /// Checks that [`Memory::rollback`] restores every sequence. The last committed step can always
    /// be rolled back. An earlier one cannot if later steps recycled cells of a window and their
    /// rows were written.
    ///
    /// # Errors
    /// [`Refusal`], the reason.
    fn check_rollback(&self, _undo: &Self::Undo, _rows: RowsWritten) -> Result<(), Refusal> {
        Ok(())
    }

    /// Number of tokens that passes of [`Edit::Compact`] have still to move.
    fn n_holes(&self) -> u32 {
        0
    }

    /// Its size in tokens and sequences, for a scheduler. An evicting memory overrides it: by
    /// default all sequences share the cells, and keep all tokens.
    fn capacity(&self) -> MemoryCapacity {
        MemoryCapacity::of_rows(&self.n_rows())
    }

    /// The rows in use, by the sequences that they belong to: what an eviction would free. Empty if
    /// this memory does not know; all cached prefixes then weigh the same.
    fn owned_rows(&self) -> Vec<OwnedRows> {
        Vec::new()
    }

    /// The use of the largest attention part.
    fn cell_use(&self) -> CellUse {
        CellUse::of_tokens(self)
    }

    /// The cells of each sequence, for a live view; `None` where this memory has no such list.
    /// Takes time proportional to the cells that were ever used.
    fn occupancy(&self) -> Option<Occupancy> {
        None
    }

    /// The bookkeeping of sequences, to be saved; rows are named, not read.
    ///
    /// # Errors
    /// [`Refusal::NoSuchSequence`]; [`Refusal::Unsupported`] where this memory cannot be saved.
    fn snapshot(&self, _seqs: Seqs) -> Result<Snapshot, Refusal> {
        let operation = "be saved";
        Err(Refusal::Unsupported { operation })
    }

    /// Checks a snapshot as [`Memory::restore`] would, and changes nothing.
    ///
    /// # Errors
    /// [`Refusal`], the reason.
    fn check_restore(&self, _snapshot: &Snapshot, _into: RestoreInto) -> Result<(), Refusal> {
        let operation = "be restored";
        Err(Refusal::Unsupported { operation })
    }

    /// Takes back what was saved, of this memory or of another of the same layers, in new cells.
    /// What the restored sequences had goes, unless a range is put
    /// [behind](RestoreInto::Behind) it. Parts that this memory does not have are left out.
    ///
    /// # Errors
    /// [`Refusal`]; nothing has changed then.
    fn restore(&mut self, snapshot: &Snapshot, into: RestoreInto) -> Result<Restoration, Refusal> {
        self.check_restore(snapshot, into)?;
        let operation = "be restored";
        Err(Refusal::Unsupported { operation })
    }

    /// Splits a batch into ubatches of at most `n_ubatch` tokens and finds a slot for each. Changes
    /// nothing.
    ///
    /// If a window leaves too few cells, smaller ubatches are tried: each frees what it can for the
    /// next.
    ///
    /// # Errors
    /// [`Refusal`] where the batch cannot be split or has no slots; of all sizes tried, for the
    /// largest.
    fn plan(&self, batch: &ValidBatch, n_ubatch: u32) -> Result<Plan<Self::Slot>, Refusal> {
        plan::plan(self, batch, n_ubatch)
    }

    /// Plans a batch and begins to commit it.
    ///
    /// # Errors
    /// [`Refusal`] as from [`Memory::plan`]; nothing has changed then.
    fn begin(&mut self, batch: &ValidBatch, n_ubatch: u32) -> Result<Steps<'_, Self>, Refusal>
    where
        Self: Sized,
    {
        let plan = self.plan(batch, n_ubatch)?;
        Ok(Steps::new(self, plan))
    }

    /// Begins to commit a plan that this memory made. Nothing was changed since.
    fn begin_planned(&mut self, plan: Plan<Self::Slot>) -> Steps<'_, Self>
    where
        Self: Sized,
    {
        Steps::new(self, plan)
    }

    /// [`Edit::Remove`].
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removal, Refusal> {
        self.apply(Edit::Remove { seqs, range }).map(Removal::from)
    }

    /// [`Edit::Copy`].
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Edited, Refusal> {
        self.apply(Edit::Copy { from, to, range })
    }

    /// [`Edit::Reposition`].
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Edited, Refusal> {
        self.apply(Edit::Reposition { seq, range, change })
    }

    /// Moves tokens of a sequence by `delta` positions.
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn shift(&mut self, seq: SeqId, range: PosRange, delta: PosDelta) -> Result<Edited, Refusal> {
        self.reposition(seq, range, PosChange::Shift(delta))
    }

    /// Moves tokens of a sequence closer together.
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn divide(
        &mut self,
        seq: SeqId,
        range: PosRange,
        division: Division,
    ) -> Result<Edited, Refusal> {
        self.reposition(seq, range, PosChange::Divide(division))
    }

    /// [`Edit::Compact`].
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn compact(&mut self) -> Result<Edited, Refusal> {
        self.apply(Edit::Compact)
    }

    /// [`Edit::KeepOnly`].
    ///
    /// # Errors
    /// As [`Memory::apply`].
    fn keep_only(&mut self, seq: SeqId) -> Result<Removal, Refusal> {
        self.apply(Edit::KeepOnly(seq)).map(Removal::from)
    }

    /// [`Edit::Clear`], which no memory refuses.
    fn clear(&mut self) -> Removal {
        let cleared = self.apply(Edit::Clear);
        debug_assert!(cleared.is_ok(), "clearing was refused: {cleared:?}");
        cleared.map(Removal::from).unwrap_or_default()
    }
}

/// A graph's inputs from the memory for one ubatch. Buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct MemoryInputs {
    /// By number of the part.
    pub parts: Vec<PartInputs>,
    /// The recurrent state that each row continues; empty without recurrent layers.
    pub states: Vec<StateGroup>,
}

impl MemoryInputs {
    /// The inputs of a part, to be overwritten.
    pub fn part_mut(&mut self, part: PartIdx) -> &mut PartInputs {
        let n = self.parts.len().max(part.as_usize() + 1);
        self.parts.resize_with(n, PartInputs::default);
        &mut self.parts[part.as_usize()]
    }
}
