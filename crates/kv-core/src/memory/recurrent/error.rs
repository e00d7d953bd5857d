//! Why a recurrent memory refuses, with numbers.

use crate::ids::{Pos, SeqId};
use crate::window::PosRange;

/// A configuration that makes no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecurrentConfigError {
    /// No sequences, or more than can be.
    #[error(
        "a memory for {n_seqs} sequences: there must be 1 to {}",
        crate::MAX_SEQS
    )]
    SeqCount {
        /// Sequences wanted.
        n_seqs: u32,
    },
    /// Too few rows to evaluate even one token, or more than can be numbered.
    #[error(
        "{n_rows} state rows with {n_snapshots} snapshots: one sequence alone needs {n_needed}, \
         and there can be {} at most",
        i32::MAX
    )]
    RowCount {
        /// Rows wanted.
        n_rows: u32,
        /// Snapshots of each sequence.
        n_snapshots: u32,
        /// Rows with which one sequence can go on token by token.
        n_needed: u64,
    },
}

/// A sequence would have to go back to a state that is not kept. It has to be evaluated again, from
/// the start or from a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "sequence {seq} is at position {last} and cannot go back to {wanted}: the oldest state that is \
     kept is that after {oldest} ({n_snapshots} snapshots)"
)]
pub struct StateGone {
    /// The sequence.
    pub seq: SeqId,
    /// Its last position.
    pub last: Pos,
    /// What its last position would become.
    pub wanted: Pos,
    /// The last position of the oldest state that is kept.
    pub oldest: Pos,
    /// Snapshots that it has beside its current state.
    pub n_snapshots: u32,
}

/// Tokens in the past of a recurrent state cannot be taken out of it, nor tokens of two sequences be
/// put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "sequence {seq} is one state of the tokens at {has}: {range} cannot be taken out of it or \
     replaced"
)]
pub struct StateIndivisible {
    /// The sequence.
    pub seq: SeqId,
    /// What went into its state.
    pub has: PosRange,
    /// What was to be taken out or replaced.
    pub range: PosRange,
}

/// A token of several sequences that are not at the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "entry {entry} belongs to sequences {a} and {b}, which are at different states: only sequences \
     that are copies of one another, or new, can share a token"
)]
pub struct CoupledStates {
    /// Number of the entry in its batch.
    pub entry: u32,
    /// The sequence with the smallest id.
    pub a: SeqId,
    /// One that is at another state.
    pub b: SeqId,
}

/// Too few rows for the states of a ubatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ubatch {ubatch} stores {n_wanted} states: {n_free} of {n_rows} rows are free")]
pub struct NoStateRoom {
    /// Number of the ubatch in the plan; the numbers hold after those before it.
    pub ubatch: usize,
    /// States that it stores.
    pub n_wanted: u32,
    /// Rows that are free.
    pub n_free: u32,
    /// All rows.
    pub n_rows: u32,
}
