//! Drop guards: what becomes of a memory when its backend fails, or panics, before rows and tokens
//! agree.
//!
//! Invariant: a guard that is dropped without [`Uncomputed::keep`] or [`Forgetting::keep`] leaves
//! no token without its rows. Knows nothing of graphs.

use kv_core::batch::UBatch;
use kv_core::memory::{Edit, Memory, MemoryInputs, RowsWritten, Steps};

/// Steps that are undone, unless they were computed.
pub(crate) struct Uncomputed<'m, M: Memory> {
    steps: Option<Steps<'m, M>>,
    /// Whether the step that was committed last may have written rows.
    rows: RowsWritten,
}

impl<'m, M: Memory> Uncomputed<'m, M> {
    pub(crate) fn new(steps: Steps<'m, M>) -> Self {
        Self {
            steps: Some(steps),
            rows: RowsWritten::Perhaps,
        }
    }

    /// Commits the next ubatch, see [`Steps::next`].
    pub(crate) fn next(&mut self, inputs: &mut MemoryInputs) -> Option<&UBatch> {
        self.steps.as_mut()?.next(inputs)
    }

    /// All steps were computed.
    pub(crate) fn keep(mut self) {
        self.steps = None;
    }

    /// The last step was not computed. All are undone, as far as the memory can.
    pub(crate) fn undo(mut self, rows: RowsWritten) {
        self.rows = rows;
    }
}

impl<M: Memory> Drop for Uncomputed<'_, M> {
    fn drop(&mut self) {
        if let Some(steps) = self.steps.take() {
            steps.undo_all(self.rows);
        }
    }
}

/// Sequences whose rows are being changed: they are removed, unless that is completed.
pub(crate) struct Forgetting<'m, M: Memory> {
    memory: Option<&'m mut M>,
    removal: Edit,
}

impl<'m, M: Memory> Forgetting<'m, M> {
    /// `removal` takes whole sequences out of the memory, or the ends of such with full attention:
    /// that is never refused.
    pub(crate) fn new(memory: &'m mut M, removal: Edit) -> Self {
        Self {
            memory: Some(memory),
            removal,
        }
    }

    /// The rows are what the memory says.
    pub(crate) fn keep(mut self) {
        self.memory = None;
    }
}

impl<M: Memory> Drop for Forgetting<'_, M> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        if memory.apply(self.removal).is_err() {
            // A sequence that is not there has nothing to lose; a memory that keeps one is emptied.
            memory.clear();
        }
    }
}
