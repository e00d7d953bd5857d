//! From a batch to committed ubatches: the part of planning and committing that all memories share.
//!
//! Invariant: [`Steps`] holds the memory while a plan is under way, so a plan is never committed to
//! a memory that has changed since. Knows nothing of what a placement is.

use super::{Memory, MemoryInputs, PlanError};
use crate::batch::{UBatch, ValidBatch};

/// Ubatches and where they go: what planning gives.
#[derive(Clone, Debug)]
pub struct Plan<P> {
    /// The pieces of the batch, in the order in which they are committed.
    pub ubatches: Vec<UBatch>,
    /// Their places, as the memory wants them.
    pub placement: P,
}

/// Whether rows of a step may have been written when it is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsWritten {
    /// None was: the memory becomes exactly what it was before the step.
    No,
    /// Perhaps some were: tokens whose cells the step recycled stay forgotten, since their rows may
    /// be overwritten. Nobody could see them any more; everything else is as before. When steps
    /// before it are undone too, their tokens may be missed: see [`Memory::check_rollback`].
    Perhaps,
}

/// A planned batch on its way into a memory, one ubatch at a time.
///
/// Dropping it early is fine: what was committed stays, the rest of the batch is forgotten.
#[derive(Debug)]
#[must_use = "nothing is committed until `next` is called"]
pub struct Steps<'m, M: Memory> {
    memory: &'m mut M,
    plan: Plan<M::Placement>,
    n_done: usize,
    /// Undoes the step before `n_done`.
    undo: Option<M::Undo>,
}

impl<'m, M: Memory> Steps<'m, M> {
    pub(super) fn new(memory: &'m mut M, plan: Plan<M::Placement>) -> Self {
        Self {
            memory,
            plan,
            n_done: 0,
            undo: None,
        }
    }

    /// Commits the next ubatch, writes its `inputs` and returns it; `None` after the last.
    pub fn next(&mut self, inputs: &mut MemoryInputs) -> Option<&UBatch> {
        let (step, placement) = (self.n_done, &self.plan.placement);
        let ubatch = self.plan.ubatches.get(step)?;
        self.undo = Some(self.memory.commit(ubatch, placement, step));
        self.memory.inputs(ubatch, placement, step, inputs);
        self.n_done += 1;
        Some(ubatch)
    }

    /// Undoes the ubatch that was just committed, because it could not be computed. The ubatches
    /// before it stay: they have been computed.
    pub fn fail(mut self, rows: RowsWritten) {
        if let Some(undo) = self.undo.take() {
            self.memory.rollback(undo, rows);
        }
    }

    /// All ubatches of the batch, committed or not.
    pub fn ubatches(&self) -> &[UBatch] {
        &self.plan.ubatches
    }

    /// Number of ubatches that have been committed.
    pub fn n_done(&self) -> usize {
        self.n_done
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
) -> Result<Plan<M::Placement>, PlanError> {
    let largest = n_ubatch.min(u32::try_from(batch.n_tokens()).unwrap_or(u32::MAX));
    let error = match plan_with(memory, batch, largest) {
        Err(error) => error,
        planned => return planned,
    };
    let mut size = largest / 2;
    while error.smaller_may_fit() && size > 0 {
        if let Ok(plan) = plan_with(memory, batch, size) {
            return Ok(plan);
        }
        size /= 2;
    }
    Err(error)
}

fn plan_with<M: Memory + ?Sized>(
    memory: &M,
    batch: &ValidBatch,
    n_ubatch: u32,
) -> Result<Plan<M::Placement>, PlanError> {
    let ubatches = memory.split_policy().split(batch, n_ubatch)?;
    let placement = memory.place(&ubatches)?;
    Ok(Plan {
        ubatches,
        placement,
    })
}
