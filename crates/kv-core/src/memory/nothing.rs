//! [`NoMemory`]: the memory of models that remember nothing, such as encoders.
//!
//! Invariant: every batch is evaluated as if it were the first, and a sequence's tokens are in one
//! ubatch, since they see each other there and nowhere else. Knows nothing of what they see:
//! [`batch_visibility`] says that.

use super::error::{
    CopyRefused, NoSuchSequence, PlanError, RemoveRefused, RollbackRefused, ShiftRefused,
};
use super::shift::PosChange;
use super::visible::{self, Reach};
use super::{Compacted, Copied, Memory, MemoryInputs, Removed, RowsWritten, Seqs, Shifted};
use super::{Contents, RestoreInto, RestoreRefused, Restored};
use crate::batch::{SplitPolicy, UBatch};
use crate::graph::BatchVisibility;
use crate::ids::SeqId;
use crate::window::{Causality, PosRange};

/// Remembers nothing, for any number of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory {
    n_seqs: u32,
}

impl NoMemory {
    /// A memory of nothing for sequences with ids below `n_seqs`.
    pub fn new(n_seqs: u32) -> Self {
        Self { n_seqs }
    }

    fn check(&self, seq: SeqId) -> Result<(), NoSuchSequence> {
        let n_seqs = self.n_seqs;
        match seq.0 < n_seqs {
            true => Ok(()),
            false => Err(NoSuchSequence { seq, n_seqs }),
        }
    }
}

/// Writes what the rows of `ubatch` see of each other through the window of `to`: all of their own
/// sequence that is within it, later ones too.
pub fn batch_visibility(ubatch: &UBatch, to: &mut BatchVisibility) {
    let reach = Reach {
        window: to.window,
        causality: Causality::NonCausal,
    };
    visible::write_within(ubatch, reach, &mut to.visibility);
}

impl Memory for NoMemory {
    type Placement = ();
    type Undo = ();

    fn n_seqs(&self) -> u32 {
        self.n_seqs
    }

    fn positions(&self, _: SeqId) -> Option<PosRange> {
        None
    }

    fn split_policy(&self) -> SplitPolicy {
        SplitPolicy::WholeSequences
    }

    fn place(&self, _: &[UBatch]) -> Result<(), PlanError> {
        Ok(())
    }

    fn commit(&mut self, _: &UBatch, _: &(), _: usize) {}

    fn check_rollback(&self, _: &(), _: RowsWritten) -> Result<(), RollbackRefused> {
        Ok(())
    }

    fn rollback(&mut self, _: (), _: RowsWritten) {}

    fn inputs(&self, _: &UBatch, _: &(), _: usize, _: &mut MemoryInputs) {}

    fn check_remove(&self, seqs: Seqs, _: PosRange) -> Result<(), RemoveRefused> {
        match seqs {
            Seqs::One(seq) => Ok(self.check(seq)?),
            Seqs::All => Ok(()),
        }
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused> {
        self.check_remove(seqs, range)?;
        Ok(Removed::default())
    }

    fn check_copy(&self, from: SeqId, to: SeqId, _: PosRange) -> Result<(), CopyRefused> {
        self.check(from)?;
        Ok(self.check(to)?)
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        self.check_copy(from, to, range)?;
        Ok(Copied::default())
    }

    fn check_reposition(&self, seq: SeqId, _: PosRange, _: PosChange) -> Result<(), ShiftRefused> {
        Ok(self.check(seq)?)
    }

    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused> {
        self.check_reposition(seq, range, change)?;
        Ok(Shifted::default())
    }

    fn n_holes(&self) -> u32 {
        0
    }

    fn compact(&mut self) -> Compacted {
        Compacted::default()
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        self.check(seq)?;
        Ok(Removed::default())
    }

    fn contents(&self, seqs: Seqs) -> Result<Contents, NoSuchSequence> {
        match seqs {
            Seqs::One(seq) => self.check(seq).map(|()| Contents::default()),
            Seqs::All => Ok(Contents::default()),
        }
    }

    fn check_restore(&self, contents: &Contents, into: RestoreInto) -> Result<(), RestoreRefused> {
        into.replaced(contents, self.n_seqs).map(drop)
    }

    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused> {
        self.check_restore(contents, into)?;
        Ok(Restored::default())
    }

    fn clear(&mut self) -> Removed {
        Removed::default()
    }
}
