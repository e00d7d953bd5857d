//! What a model remembers, as modules with one interface: [`Memory`].
//!
//! Evaluating a batch has two halves. **Planning** takes `&self`: the batch is cut into ubatches and
//! every one is given its place, or the reason why it has none; nothing has changed yet.
//! **Committing** cannot fail: [`Steps`] takes one ubatch after the other into the memory and says
//! what the graph needs to know of it. If its computation fails, the step is undone.
//!
//! Sequence operations are checked whole before anything changes and return what they did, also what
//! remains to be done with rows; nothing is queued for later.
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
//!     // … run the graph; where that fails: `return steps.fail(RowsWritten::Perhaps)`
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

use crate::backend::{RowCopy, RowShift};
use crate::batch::{SplitPolicy, UBatch, ValidBatch};
use crate::graph::{PartInputs, StateGroup};
use crate::ids::{CellIdx, PartIdx, PosDelta, SeqId};
use crate::window::PosRange;

mod any;
mod compact;
mod contents;
mod copy;
mod error;
mod hybrid;
pub mod invariants;
mod iswa;
mod nothing;
mod place;
mod pos_set;
mod recurrent;
mod restore;
mod shift;
mod steps;
mod stream;
mod undo;
mod unified;
mod visible;

pub use any::{AnyMemory, AnyPlacement, AnyUndo, MemoryConfig, MemoryConfigError};
pub use contents::{ChainContents, Contents, ContentsError, HeldToken, PartContents, RestoreInto};
pub use error::{
    CopyRefused, NoRoom, NoSuchSequence, PlanError, RemoveRefused, RestoreRefused, RollbackRefused,
    ShiftRefused, WindowForgotten,
};
pub use hybrid::{Pair, PairError};
pub use iswa::{Iswa, SwaSize};
pub use nothing::{NoMemory, batch_visibility};
pub use place::UnifiedPlacement;
pub use recurrent::{
    CoupledStates, KeptState, NoStateRoom, Recurrent, RecurrentConfig, RecurrentConfigError,
    RecurrentPlacement, RecurrentUndo, StateGone, StateIndivisible,
};
pub use shift::{Division, PosChange};
pub use steps::{Plan, RowsWritten, Steps};
pub use undo::UnifiedUndo;
pub use unified::{Streams, Unified, UnifiedConfig, UnifiedConfigError};

/// A memory module.
///
/// Callers use [`Memory::begin`] (or [`Memory::plan`], to know whether something would fit), the
/// sequence operations and [`Memory::positions`]. The other methods are for modules made of modules
/// and are called by [`Steps`].
///
/// A module made of two has the placements and undo records of both, places the same ubatches in
/// both, and checks an edit with both before it edits either.
pub trait Memory {
    /// Where the ubatches of one plan go.
    type Placement;
    /// What is needed to undo a committed step.
    type Undo;

    /// Sequences have ids below this number.
    fn n_seqs(&self) -> u32;

    /// The positions of a sequence, from the oldest that is remembered to the newest; `None` where
    /// nothing is.
    fn positions(&self, seq: SeqId) -> Option<PosRange>;

    /// How batches are to be cut for this memory: the same for all its life.
    fn split_policy(&self) -> SplitPolicy;

    /// Finds places for ubatches that are committed one after the other.
    ///
    /// # Errors
    /// [`PlanError`] where one of them has no place.
    fn place(&self, ubatches: &[UBatch]) -> Result<Self::Placement, PlanError>;

    /// Takes a ubatch into the memory: number `step` of those that `placement` was made for. All
    /// before it have been committed, and nothing else was changed since.
    fn commit(&mut self, ubatch: &UBatch, placement: &Self::Placement, step: usize) -> Self::Undo;

    /// Whether [`Memory::rollback`] would leave sequences that cannot go on. That of the step that
    /// was committed last never does. That of one before it does where a window's tokens were
    /// recycled by steps after it, which wrote their rows before they were undone.
    ///
    /// # Errors
    /// [`RollbackRefused`], the reason.
    fn check_rollback(&self, undo: &Self::Undo, rows: RowsWritten) -> Result<(), RollbackRefused>;

    /// Undoes the latest commit that was not undone.
    fn rollback(&mut self, undo: Self::Undo, rows: RowsWritten);

    /// Writes what the graph needs to know of the ubatch that was just committed.
    fn inputs(
        &self,
        ubatch: &UBatch,
        placement: &Self::Placement,
        step: usize,
        inputs: &mut MemoryInputs,
    );

    /// Whether [`Memory::remove`] would be refused.
    ///
    /// # Errors
    /// [`RemoveRefused`], the reason.
    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), RemoveRefused>;

    /// Takes the tokens with positions in `range` from sequences.
    ///
    /// # Errors
    /// [`RemoveRefused`]; nothing has changed then. Removing all positions of a sequence that exists
    /// is never refused.
    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused>;

    /// Whether [`Memory::copy`] would be refused.
    ///
    /// # Errors
    /// [`CopyRefused`], the reason.
    fn check_copy(&self, from: SeqId, to: SeqId, range: PosRange) -> Result<(), CopyRefused>;

    /// Makes the tokens of `to` with positions in `range` the same as those of `from`. What `to` had
    /// there is replaced, what it has elsewhere stays.
    ///
    /// # Errors
    /// [`CopyRefused`]; nothing has changed then.
    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused>;

    /// Whether [`Memory::reposition`] would be refused.
    ///
    /// # Errors
    /// [`ShiftRefused`], the reason.
    fn check_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<(), ShiftRefused>;

    /// Moves the tokens of a sequence with positions in `range` to other positions. Tokens keep
    /// their order; sequences that share them keep them where they are.
    ///
    /// # Errors
    /// [`ShiftRefused`]; nothing has changed then.
    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused>;

    /// Moves tokens of a sequence by `delta` positions.
    ///
    /// # Errors
    /// As [`Memory::reposition`].
    fn shift(
        &mut self,
        seq: SeqId,
        range: PosRange,
        delta: PosDelta,
    ) -> Result<Shifted, ShiftRefused> {
        self.reposition(seq, range, PosChange::Shift(delta))
    }

    /// Moves tokens of a sequence closer together.
    ///
    /// # Errors
    /// As [`Memory::reposition`].
    fn divide(
        &mut self,
        seq: SeqId,
        range: PosRange,
        division: Division,
    ) -> Result<Shifted, ShiftRefused> {
        self.reposition(seq, range, PosChange::Divide(division))
    }

    /// Number of cells that [`Memory::compact`] would move.
    fn n_holes(&self) -> u32;

    /// Moves cells until those in use are the first of their stream. What tokens see stays the same.
    /// Makes attention read fewer and longer runs of cells; it makes no room, since tokens go to any
    /// free cells.
    fn compact(&mut self) -> Compacted;

    /// Removes all other sequences.
    ///
    /// # Errors
    /// [`NoSuchSequence`]; nothing has changed then.
    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence>;

    /// Removes everything.
    fn clear(&mut self) -> Removed;

    /// What is held of sequences, to be saved; rows are named, not read.
    ///
    /// # Errors
    /// [`NoSuchSequence`].
    fn contents(&self, seqs: Seqs) -> Result<Contents, NoSuchSequence>;

    /// Whether [`Memory::restore`] would be refused.
    ///
    /// # Errors
    /// [`RestoreRefused`], the reason.
    fn check_restore(&self, contents: &Contents, into: RestoreInto) -> Result<(), RestoreRefused>;

    /// Takes back what was saved, of this memory or of another of the same layers, in new places.
    /// What the sequences had that are restored goes. Parts that this memory does not have are left
    /// out.
    ///
    /// # Errors
    /// [`RestoreRefused`]; nothing has changed then.
    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused>;

    /// Cuts a batch into ubatches of at most `n_ubatch` tokens and finds a place for each. Changes
    /// nothing.
    ///
    /// Where a window leaves too few cells, smaller ubatches are tried: each frees what it can for
    /// the next.
    ///
    /// # Errors
    /// [`PlanError`] where the batch cannot be cut or has no place; of all sizes tried, for the
    /// largest.
    fn plan(&self, batch: &ValidBatch, n_ubatch: u32) -> Result<Plan<Self::Placement>, PlanError> {
        steps::plan(self, batch, n_ubatch)
    }

    /// Plans a batch and begins to commit it.
    ///
    /// # Errors
    /// [`PlanError`] as from [`Memory::plan`]; nothing has changed then.
    fn begin(&mut self, batch: &ValidBatch, n_ubatch: u32) -> Result<Steps<'_, Self>, PlanError>
    where
        Self: Sized,
    {
        let plan = self.plan(batch, n_ubatch)?;
        Ok(Steps::new(self, plan))
    }
}

/// Which sequences an operation concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seqs {
    /// One.
    One(SeqId),
    /// Every one.
    All,
}

/// What a graph needs to know of the memory for one ubatch. Buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct MemoryInputs {
    /// By number of the part.
    pub parts: Vec<PartInputs>,
    /// Which rows continue which recurrent state; empty without recurrent layers.
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

/// What a removal did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Tokens taken from sequences; a token of two sequences counts twice.
    pub n_tokens: u32,
    /// Cells that became free, of all parts.
    pub n_cells: u32,
}

impl Removed {
    /// What was done in both parts of a memory, each of which remembers the same tokens or fewer.
    pub(crate) fn in_parts(self, other: Self) -> Self {
        Self {
            n_tokens: self.n_tokens.max(other.n_tokens),
            n_cells: self.n_cells + other.n_cells,
        }
    }
}

/// What a copy did, and what is left to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the backend has to copy these rows before it does anything else with them"]
pub struct Copied {
    /// Tokens that the sequence was given.
    pub n_tokens: u32,
    /// Rows that the backend must copy, at once and in this order.
    pub row_copies: Vec<RowCopy>,
}

impl Copied {
    /// What was done in both parts of a memory, each of which remembers the same tokens or fewer.
    pub(crate) fn in_parts(mut self, other: Self) -> Self {
        self.n_tokens = self.n_tokens.max(other.n_tokens);
        self.row_copies.extend(other.row_copies);
        self
    }
}

/// What a move to other positions did, and what is left to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the backend has to copy and shift these rows before it does anything else with them"]
pub struct Shifted {
    /// Tokens of the sequence whose position changed.
    pub n_tokens: u32,
    /// Rows that the backend must copy, at once and in this order: of tokens that others share.
    pub row_copies: Vec<RowCopy>,
    /// Rows whose keys the backend must rotate then, each once.
    pub row_shifts: Vec<RowShift>,
}

impl Shifted {
    /// What was done in both parts of a memory, each of which remembers the same tokens or fewer.
    pub(crate) fn in_parts(mut self, other: Self) -> Self {
        self.n_tokens = self.n_tokens.max(other.n_tokens);
        self.row_copies.extend(other.row_copies);
        self.row_shifts.extend(other.row_shifts);
        self
    }
}

/// Rows of every layer of a part that are to be written as they were saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowWrite {
    /// Which part.
    pub part: PartIdx,
    /// The row that the first of them had in the contents.
    pub from: CellIdx,
    /// The first row to write.
    pub to: CellIdx,
    /// Number of rows, one after the other in both places.
    pub len: u32,
}

/// A recurrent state that is to be written, in every recurrent layer, as it was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateWrite {
    /// The row that it had in the contents.
    pub from: CellIdx,
    /// The row to write.
    pub to: CellIdx,
}

/// Which rows a restoration writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowsTaken {
    /// Only such as no sequence used: until they are written, a clone of the memory before is as good
    /// as it was.
    #[default]
    Free,
    /// Some of the sequences that it replaced.
    InUse,
}

/// What a restoration did, and what is left to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the backend has to write these rows before it does anything else with them"]
pub struct Restored {
    /// Tokens that sequences were given; a token of two sequences counts twice.
    pub n_tokens: u32,
    /// Rows of attention layers that the backend must write.
    pub row_writes: Vec<RowWrite>,
    /// Rows of recurrent layers that the backend must write.
    pub state_writes: Vec<StateWrite>,
    /// Whether rows were in use before.
    pub rows_taken: RowsTaken,
}

impl Restored {
    /// What was done in both parts of a memory, each of which remembers the same tokens or fewer.
    pub(crate) fn in_parts(mut self, other: Self) -> Self {
        self.n_tokens = self.n_tokens.max(other.n_tokens);
        self.row_writes.extend(other.row_writes);
        self.state_writes.extend(other.state_writes);
        if other.rows_taken == RowsTaken::InUse {
            self.rows_taken = RowsTaken::InUse;
        }
        self
    }
}

/// What a compaction did, and what is left to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the backend has to copy these rows before it does anything else with them"]
pub struct Compacted {
    /// Cells that moved.
    pub n_cells: u32,
    /// Rows that the backend must copy. None writes a row that another reads.
    pub row_copies: Vec<RowCopy>,
}

impl Compacted {
    /// What was done in both parts of a memory, which have different cells.
    pub(crate) fn in_parts(mut self, other: Self) -> Self {
        self.n_cells += other.n_cells;
        self.row_copies.extend(other.row_copies);
        self
    }
}
