//! [`Pair`]: two memories of one model as one.
//!
//! Both remember the same sequences and take the same ubatches, each in its way: windows of two
//! kinds, attention and recurrent states. A pair is a memory, so pairs can be made of pairs.
//!
//! Invariant: both parts hold every sequence up to the same position. An edit that one of them would
//! refuse is done in neither. Knows nothing of what its parts are.

use super::error::{
    CopyRefused, NoSuchSequence, PlanError, RemoveRefused, RollbackRefused, ShiftRefused,
};
use super::shift::PosChange;
use super::{Compacted, Copied, Memory, MemoryInputs, Removed, RowsWritten, Seqs, Shifted};
use super::{Contents, RestoreInto, RestoreRefused, Restored};
use crate::batch::{SplitPolicy, UBatch};
use crate::ids::SeqId;
use crate::window::PosRange;

/// Two memories as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair<A, B> {
    first: A,
    second: B,
    split_policy: SplitPolicy,
}

/// Two memories that cannot be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// They hold different numbers of sequences.
    #[error("one part holds {first} sequences and the other {second}: there must be as many")]
    SeqCount {
        /// Sequences of the first part.
        first: u32,
        /// Sequences of the second part.
        second: u32,
    },
    /// No ubatches suit both.
    #[error("one part wants batches cut {first:?} and the other {second:?}: nothing suits both")]
    Split {
        /// What the first part wants.
        first: SplitPolicy,
        /// What the second part wants.
        second: SplitPolicy,
    },
}

impl<A: Memory, B: Memory> Pair<A, B> {
    /// The two as one. They must be empty, or hold the same sequences up to the same positions.
    ///
    /// # Errors
    /// [`PairError`] where they do not suit each other.
    pub fn new(first: A, second: B) -> Result<Self, PairError> {
        let n_seqs = (first.n_seqs(), second.n_seqs());
        if n_seqs.0 != n_seqs.1 {
            let (first, second) = n_seqs;
            return Err(PairError::SeqCount { first, second });
        }
        let policies = (first.split_policy(), second.split_policy());
        let split_policy = policies.0.and(policies.1).ok_or(PairError::Split {
            first: policies.0,
            second: policies.1,
        })?;
        Ok(Self {
            first,
            second,
            split_policy,
        })
    }
}

impl<A, B> Pair<A, B> {
    /// The first part.
    pub fn first(&self) -> &A {
        &self.first
    }

    /// The second part.
    pub fn second(&self) -> &B {
        &self.second
    }
}

impl<A: Memory, B: Memory> Memory for Pair<A, B> {
    type Placement = (A::Placement, B::Placement);
    type Undo = (A::Undo, B::Undo);

    fn n_seqs(&self) -> u32 {
        self.first.n_seqs()
    }

    /// The positions that both parts remember.
    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let both = self
            .first
            .positions(seq)?
            .intersection(self.second.positions(seq)?);
        (!both.is_empty()).then_some(both)
    }

    fn split_policy(&self) -> SplitPolicy {
        self.split_policy
    }

    fn place(&self, ubatches: &[UBatch]) -> Result<Self::Placement, PlanError> {
        match (self.first.place(ubatches), self.second.place(ubatches)) {
            (Ok(first), Ok(second)) => Ok((first, second)),
            // Where both refuse, the reason counts that smaller ubatches cannot cure.
            (Err(curable), Err(other)) if curable.smaller_may_fit() => Err(other),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    fn commit(
        &mut self,
        ubatch: &UBatch,
        (first, second): &Self::Placement,
        step: usize,
    ) -> Self::Undo {
        (
            self.first.commit(ubatch, first, step),
            self.second.commit(ubatch, second, step),
        )
    }

    fn check_rollback(
        &self,
        (first, second): &Self::Undo,
        rows: RowsWritten,
    ) -> Result<(), RollbackRefused> {
        self.first.check_rollback(first, rows)?;
        self.second.check_rollback(second, rows)
    }

    fn rollback(&mut self, (first, second): Self::Undo, rows: RowsWritten) {
        self.second.rollback(second, rows);
        self.first.rollback(first, rows);
    }

    fn inputs(
        &self,
        ubatch: &UBatch,
        (first, second): &Self::Placement,
        step: usize,
        inputs: &mut MemoryInputs,
    ) {
        self.first.inputs(ubatch, first, step, inputs);
        self.second.inputs(ubatch, second, step, inputs);
    }

    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), RemoveRefused> {
        self.first.check_remove(seqs, range)?;
        self.second.check_remove(seqs, range)
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused> {
        self.check_remove(seqs, range)?;
        let removed = self.first.remove(seqs, range)?;
        Ok(removed.in_parts(self.second.remove(seqs, range)?))
    }

    fn check_copy(&self, from: SeqId, to: SeqId, range: PosRange) -> Result<(), CopyRefused> {
        self.first.check_copy(from, to, range)?;
        self.second.check_copy(from, to, range)
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        self.check_copy(from, to, range)?;
        let copied = self.first.copy(from, to, range)?;
        Ok(copied.in_parts(self.second.copy(from, to, range)?))
    }

    fn check_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<(), ShiftRefused> {
        self.first.check_reposition(seq, range, change)?;
        self.second.check_reposition(seq, range, change)
    }

    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused> {
        self.check_reposition(seq, range, change)?;
        let shifted = self.first.reposition(seq, range, change)?;
        Ok(shifted.in_parts(self.second.reposition(seq, range, change)?))
    }

    fn n_holes(&self) -> u32 {
        self.first.n_holes() + self.second.n_holes()
    }

    fn compact(&mut self) -> Compacted {
        self.first.compact().in_parts(self.second.compact())
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        // A part refuses only sequences that the other does not have either.
        let removed = self.first.keep_only(seq)?;
        Ok(removed.in_parts(self.second.keep_only(seq)?))
    }

    fn contents(&self, seqs: Seqs) -> Result<Contents, NoSuchSequence> {
        let first = self.first.contents(seqs)?;
        Ok(first.in_parts(self.second.contents(seqs)?))
    }

    fn check_restore(&self, contents: &Contents, into: RestoreInto) -> Result<(), RestoreRefused> {
        self.first.check_restore(contents, into)?;
        self.second.check_restore(contents, into)
    }

    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused> {
        self.check_restore(contents, into)?;
        let restored = self.first.restore(contents, into)?;
        Ok(restored.in_parts(self.second.restore(contents, into)?))
    }

    fn clear(&mut self) -> Removed {
        self.first.clear().in_parts(self.second.clear())
    }
}
