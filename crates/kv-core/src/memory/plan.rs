//! From a batch to committed ubatches: the part of planning and committing that all memories share.
//!
//! Invariant: [`Steps`] holds the memory while a plan is under way, so a plan is never committed to
//! a memory that has changed since. Knows nothing of what a slot is.

use super::{Memory, MemoryInputs, Refusal};
use crate::batch::{SplitPolicy, TokensOf, UBatch, ValidBatch, ValidEntry};
use crate::ids::SeqId;

/// A ubatch and the slot that the memory found for it.
#[derive(Clone, Debug)]
pub struct PlannedUBatch<S> {
    /// The tokens.
    pub ubatch: UBatch,
    /// Their target.
    pub slot: S,
}

/// The ubatches of a batch, in the order in which they are committed.
pub type Plan<S> = Vec<PlannedUBatch<S>>;

/// A batch that was validated against a memory, and the slots that this memory found for it. To be
/// committed before anything else changes there.
#[derive(Clone, Debug)]
pub struct PlannedBatch<S> {
    /// The batch.
    pub batch: ValidBatch,
    /// Its ubatches.
    pub plan: Plan<S>,
}

/// The possibility that rows of a step were written before it is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsWritten {
    /// None was: the memory becomes exactly what it was before the step.
    No,
    /// Perhaps some were: tokens whose cells the step recycled stay forgotten, since their rows may
    /// be overwritten. Nobody could see them any more; everything else is as before. When steps
    /// before it are undone too, their tokens may be missed: see [`Memory::check_rollback`].
    Perhaps,
}

/// A planned batch that is committed one ubatch at a time.
///
/// Dropping it early is fine: what was committed stays, the rest of the batch is forgotten.
#[derive(Debug)]
#[must_use = "nothing is committed until `next` is called"]
pub struct Steps<'m, M: Memory> {
    memory: &'m mut M,
    plan: Plan<M::Slot>,
    /// Undoes the steps so far, the first one first.
    undo: Vec<M::Undo>,
}

impl<'m, M: Memory> Steps<'m, M> {
    pub(super) fn new(memory: &'m mut M, plan: Plan<M::Slot>) -> Self {
        let undo = Vec::with_capacity(plan.len());
        Self { memory, plan, undo }
    }

    /// Commits the next ubatch, writes its `inputs` and returns it; `None` after the last.
    pub fn next(&mut self, inputs: &mut MemoryInputs) -> Option<&UBatch> {
        let planned = self.plan.get(self.undo.len())?;
        self.undo.push(self.memory.commit(planned));
        self.memory.inputs(planned, inputs);
        Some(&planned.ubatch)
    }

    /// Undoes the ubatch that was just committed, because it could not be computed. The ubatches
    /// before it stay: they have been computed.
    pub fn undo_last(mut self, rows: RowsWritten) {
        if let Some(undo) = self.undo.pop() {
            self.memory.rollback(undo, rows);
        }
    }

    /// Undoes the ubatch that was just committed, whose rows are `rows`, and those before it, which
    /// did write theirs, back to the first or to the first that [`Memory::check_rollback`] refuses.
    pub fn undo_all(mut self, mut rows: RowsWritten) {
        while let Some(undo) = self.undo.pop() {
            if self.memory.check_rollback(&undo, rows).is_err() {
                break;
            }
            self.memory.rollback(undo, rows);
            rows = RowsWritten::Perhaps;
        }
    }

    /// All ubatches of the batch, committed or not.
    pub fn ubatches(&self) -> impl ExactSizeIterator<Item = &UBatch> {
        self.plan.iter().map(|planned| &planned.ubatch)
    }

    /// Number of ubatches that have been committed.
    pub fn n_done(&self) -> usize {
        self.undo.len()
    }

    /// The memory, as it is after the steps so far.
    pub fn memory(&self) -> &M {
        self.memory
    }
}

pub(super) fn plan<M: Memory + ?Sized>(
    memory: &M,
    batch: &ValidBatch,
    n_ubatch: u32,
) -> Result<Plan<M::Slot>, Refusal> {
    if batch.tokens_of() == TokensOf::Source && !memory.takes_sources() {
        let first = batch.entries().first();
        let seq = first.map_or(SeqId(0), |entry| entry.first_seq);
        return Err(Refusal::TakesNoSources { seq });
    }
    let of_image = |entry: &ValidEntry| Some((entry.first_seq, entry.pos, entry.grid?));
    let of_image = batch.entries().iter().find_map(of_image);
    if let Some((seq, pos, grid)) = of_image.filter(|_| !memory.takes_images()) {
        return Err(Refusal::TakesNoImages { seq, pos, grid });
    }
    let largest = n_ubatch.min(u32::try_from(batch.n_tokens()).unwrap_or(u32::MAX));
    let refusal = match plan_with(memory, batch, largest) {
        Err(refusal) => refusal,
        planned => return planned,
    };
    let mut size = largest / 2;
    while refusal.smaller_may_fit() && size > 0 {
        if let Ok(plan) = plan_with(memory, batch, size) {
            return Ok(plan);
        }
        size /= 2;
    }
    Err(refusal)
}

fn plan_with<M: Memory + ?Sized>(
    memory: &M,
    batch: &ValidBatch,
    n_ubatch: u32,
) -> Result<Plan<M::Slot>, Refusal> {
    let policy = match batch.tokens_of() {
        TokensOf::Sequence => memory.split_policy(),
        // Those of a source see each other.
        TokensOf::Source => SplitPolicy::WholeSequences,
    };
    let ubatches = policy.split(batch, n_ubatch)?;
    memory.find_slots(ubatches)
}
