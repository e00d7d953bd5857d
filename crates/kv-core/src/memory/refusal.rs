//! [`Refusal`]: why a memory refuses a batch, an edit, a rollback or a restore, with numbers.
//!
//! Invariant: a refused call has changed nothing. A memory outside this crate gives its own reason
//! as [`Refusal::Custom`].

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use super::PosChange;
use crate::batch::{BatchError, MAX_POS};
use crate::grid::GridPos;
use crate::ids::{CellIdx, PartIdx, Pos, SeqId, StreamIdx};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// Why a memory refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The memory has no such sequence.
    #[error("there is no sequence {seq}: the memory holds {n_seqs}, counted from 0")]
    NoSuchSequence {
        /// The id.
        seq: SeqId,
        /// Sequences that the memory holds.
        n_seqs: u32,
    },
    /// The batch cannot be split as the memory needs it.
    #[error(transparent)]
    Split(#[from] BatchError),
    /// There are too few cells.
    #[error("{0}")]
    NoRoom(NoRoom),
    /// There are too few rows for recurrent states.
    #[error("{0}")]
    NoStateRoom(NoStateRoom),
    /// A token of several sequences, where each sequence has its own cells.
    #[error(
        "entry {entry} belongs to {set}, but sequences have cells of their own here: \
         share the cells, or give the token to each sequence"
    )]
    CoupledStreams {
        /// Number of the entry in its batch.
        entry: u32,
        /// Its sequences.
        set: SeqSet,
    },
    /// A token of several sequences whose recurrent states differ.
    #[error(
        "entry {entry} belongs to sequences {a} and {b}, which are at different states: only \
         sequences that are copies of one another, or new, can share a token"
    )]
    CoupledStates {
        /// Number of the entry in its batch.
        entry: u32,
        /// The sequence with the smallest id.
        a: SeqId,
        /// One that is at another state.
        b: SeqId,
    },
    /// The sequence's next token would miss tokens that its window reaches.
    #[error("{0}")]
    WindowForgotten(WindowForgotten),
    /// The sequence would have to go back to a state that is not kept. It has to be evaluated
    /// again, from the start or from a saved state.
    #[error(
        "sequence {seq} is at position {last} and cannot go back to {wanted}: the oldest state that \
         is kept is that after {oldest} ({n_snapshots} snapshots)"
    )]
    StateGone {
        /// The sequence.
        seq: SeqId,
        /// Its last position.
        last: Pos,
        /// The last position that was asked for.
        wanted: Pos,
        /// The last position of the oldest state that is kept.
        oldest: Pos,
        /// Snapshots that it has in addition to its current state.
        n_snapshots: u32,
    },
    /// Tokens in the past of a recurrent state cannot be removed from it, and tokens of two
    /// sequences cannot be combined.
    #[error(
        "sequence {seq} is one state of the tokens at {has}: {range} cannot be taken out of it or \
         replaced"
    )]
    StateIndivisible {
        /// The sequence.
        seq: SeqId,
        /// The positions in its state.
        has: PosRange,
        /// The positions that were to be removed or replaced.
        range: PosRange,
    },
    /// A recurrent state moves as a whole or not at all.
    #[error(
        "{change} would move positions {moved} of sequence {seq}, which is one state of the tokens \
         at {has}: it can only be shifted as a whole"
    )]
    StateMovesWhole {
        /// The sequence.
        seq: SeqId,
        /// The positions that would move.
        moved: PosRange,
        /// The move.
        change: PosChange,
        /// The positions in the state.
        has: PosRange,
    },
    /// Later steps, which were undone before, have overwritten the sequence's recurrent state.
    #[error(
        "sequence {seq} cannot go back to position {last}: later steps stored other states in row \
         {row}"
    )]
    StateOverwritten {
        /// The sequence.
        seq: SeqId,
        /// Its last position before the step.
        last: Pos,
        /// The row that held its state.
        row: CellIdx,
    },
    /// A division by 0.
    #[error("positions of sequence {seq} cannot be divided by 0")]
    DivideByZero {
        /// The sequence.
        seq: SeqId,
    },
    /// Tokens would be before the first position or behind the last. Remove them first to lose
    /// them.
    #[error(
        "{change} would move positions {moved} of sequence {seq} to {first}..={last}, and there \
         are none below 0 or above {MAX_POS}"
    )]
    OutOfRange {
        /// The sequence.
        seq: SeqId,
        /// From the first position with a token that moves to the last.
        moved: PosRange,
        /// The move.
        change: PosChange,
        /// The new position of the first token.
        first: i64,
        /// The new position of the last token.
        last: i64,
    },
    /// Tokens would meet one that stays, or change places with it.
    #[error(
        "{change} would move positions {moved} of sequence {seq} up to or past its token at \
         {other}, which stays"
    )]
    Overtakes {
        /// The sequence.
        seq: SeqId,
        /// From the first position with a token that moves to the last.
        moved: PosRange,
        /// The move.
        change: PosChange,
        /// The nearest position that stays and is in the way.
        other: Pos,
    },
    /// A token of an image has a row and a column, and no rotation moves one of three alone.
    #[error(
        "{change} would move a token of an image: sequence {seq}, position {pos}, row and column \
         {grid}"
    )]
    Image {
        /// The sequence.
        seq: SeqId,
        /// The move.
        change: PosChange,
        /// Position of the first such token.
        pos: Pos,
        /// Its row and column.
        grid: GridPos,
    },
    /// Tokens of a sequence that attend over its source, which it does not have yet.
    #[error(
        "sequence {seq} has no source: layers attend over one, so it has to be encoded before the \
         sequence's own tokens"
    )]
    NoSource {
        /// The sequence.
        seq: SeqId,
    },
    /// Tokens of a source, for layers of which none attends over one.
    #[error("sequence {seq} was given a source, but no layer attends over one")]
    TakesNoSources {
        /// The sequence.
        seq: SeqId,
    },
    /// A token of an image, for a memory that has no place for rows and columns.
    #[error(
        "this memory takes text only, but a token of sequence {seq} lies in an image: position \
         {pos}, row and column {grid}"
    )]
    TakesNoImages {
        /// The sequence.
        seq: SeqId,
        /// The position of the first such token.
        pos: Pos,
        /// Its row and column.
        grid: GridPos,
    },
    /// Tokens of one sequence would get into another, whose tokens attend over another source.
    #[error(
        "sequences {seq} and {other} have different sources: a sequence's tokens attend over one, so \
         they cannot be those of both"
    )]
    OtherSource {
        /// A sequence.
        seq: SeqId,
        /// The other one.
        other: SeqId,
    },
    /// The snapshot does not have this sequence.
    #[error("sequence {seq} was not saved: only {saved} were")]
    NotSaved {
        /// The sequence.
        seq: SeqId,
        /// The sequences that were saved.
        saved: SeqSet,
    },
    /// The snapshot does not have a part of this memory.
    #[error("part {part} ({window}) was not saved")]
    NoPart {
        /// The part.
        part: PartIdx,
        /// Its window.
        window: Window,
    },
    /// A part has another window.
    #[error("part {part} was saved with the window {saved}, and has {here} here")]
    OtherWindow {
        /// The part.
        part: PartIdx,
        /// The window that it had.
        saved: Window,
        /// The window that it has.
        here: Window,
    },
    /// The snapshot has no recurrent states, but this memory has them.
    #[error("no recurrent states were saved")]
    NoStates,
    /// A range of tokens that does not follow what the sequence has.
    #[error(
        "sequence {seq} goes on at position {next}, and what was saved begins at {first}: restore \
         the ranges in order"
    )]
    NotBehind {
        /// The sequence.
        seq: SeqId,
        /// The position of its next token.
        next: Pos,
        /// The first position that was saved.
        first: Pos,
    },
    /// This memory does not have the operation.
    #[error("this memory cannot {operation}")]
    Unsupported {
        /// The operation, as a verb.
        operation: &'static str,
    },
    /// The reason of a memory outside this crate.
    #[error("{0}")]
    Custom(Reason),
}

impl Refusal {
    /// A reason of a memory outside this crate, which [`Reason::downcast_ref`] gives back.
    pub fn custom(reason: impl Error + Send + Sync + 'static) -> Self {
        Self::Custom(Reason(Arc::new(reason)))
    }

    /// True if smaller ubatches may fit: each frees what a window hides for the next.
    pub fn smaller_may_fit(&self) -> bool {
        // With a full window no token is ever forgotten, so smaller pieces need as many cells.
        // Smaller pieces store fewer recurrent states at once.
        match self {
            Self::NoRoom(no_room) => no_room.window.width().is_some(),
            Self::NoStateRoom(_) => true,
            _ => false,
        }
    }
}

impl From<WindowForgotten> for Refusal {
    fn from(forgotten: WindowForgotten) -> Self {
        Self::WindowForgotten(forgotten)
    }
}

impl From<NoRoom> for Refusal {
    fn from(no_room: NoRoom) -> Self {
        Self::NoRoom(no_room)
    }
}

/// The purpose of cells or rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeededFor {
    /// The ubatch with this number in the plan; the numbers hold after those before it.
    Ubatch(usize),
    /// A copy of the tokens of this sequence.
    Copy(SeqId),
    /// Cells of its own for this sequence, which shares those of the tokens that move.
    Move(SeqId),
    /// A restore.
    Restore,
}

/// Too few cells.
///
/// Holes are never the reason: any free cells will do, so [`Edit::Compact`](super::Edit::Compact)
/// makes no room. Removing tokens does, and where other streams have free cells,
/// [`Streams::Shared`](super::Streams::Shared) does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// The purpose of the cells.
    pub needed_for: NeededFor,
    /// The part of the memory that has no room.
    pub part: PartIdx,
    /// The stream that has no room.
    pub stream: StreamIdx,
    /// The part's window.
    pub window: Window,
    /// Cells wanted.
    pub n_wanted: u32,
    /// Cells that are free, or would be by the edit.
    pub n_free: u32,
    /// Cells in use that no token can see any more: only a ubatch recycles them.
    pub n_recyclable: u32,
    /// All cells of the stream.
    pub n_cells: u32,
    /// Cells that are free in other streams of the part: enough of them, and the limit of the
    /// stream is met, not that of the memory.
    pub n_free_elsewhere: u32,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            part,
            stream,
            window,
            n_wanted,
            n_free,
            n_recyclable,
            n_cells,
            ..
        } = self;
        match self.needed_for {
            NeededFor::Ubatch(ubatch) => write!(
                f,
                "ubatch {ubatch} needs {n_wanted} cells of part {part}, stream {stream} ({window}): \
                 {n_free} of {n_cells} are free and {n_recyclable} recyclable"
            )?,
            NeededFor::Copy(from) => write!(
                f,
                "copying {n_wanted} tokens of sequence {from} needs as many cells of part {part}, \
                 stream {stream}: {n_free} of {n_cells} are free"
            )?,
            NeededFor::Move(seq) => write!(
                f,
                "{n_wanted} tokens of sequence {seq} are shared and need cells of their own to \
                 move: {n_free} of {n_cells} of part {part}, stream {stream}, are free"
            )?,
            NeededFor::Restore => write!(
                f,
                "{n_wanted} saved tokens need as many cells of part {part}, stream {stream} \
                 ({window}): {n_free} of {n_cells} are free"
            )?,
        }
        match self.n_free_elsewhere {
            0 => Ok(()),
            n => write!(
                f,
                "; {n} are free in other streams, which sequences that share cells could use"
            ),
        }
    }
}

/// Too few rows for recurrent states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoStateRoom {
    /// The purpose of the rows.
    pub needed_for: NeededFor,
    /// Rows wanted.
    pub n_wanted: u32,
    /// Rows that are free, or would be.
    pub n_free: u32,
    /// All rows.
    pub n_rows: u32,
}

impl fmt::Display for NoStateRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            n_wanted,
            n_free,
            n_rows,
            ..
        } = self;
        match self.needed_for {
            NeededFor::Ubatch(ubatch) => write!(
                f,
                "ubatch {ubatch} stores {n_wanted} states: {n_free} of {n_rows} rows are free"
            ),
            _ => write!(
                f,
                "{n_wanted} saved states need as many rows: {n_free} of {n_rows} are free"
            ),
        }
    }
}

/// A sequence whose next token would miss tokens that its window reaches, because their cells were
/// recycled. It has to be evaluated again, from the start or from a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowForgotten {
    /// The sequence.
    pub seq: SeqId,
    /// The part's window.
    pub window: Window,
    /// The position of its next token.
    pub next: Pos,
    /// The oldest position that this token sees.
    pub needed_from: Pos,
    /// The smallest interval around the positions that the memory recycled.
    pub forgotten: PosRange,
}

impl fmt::Display for WindowForgotten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seq,
            window,
            next,
            needed_from,
            forgotten,
        } = self;
        write!(f, "sequence {seq} cannot go on at position {next}: ")?;
        match window.n_first() {
            first if forgotten.first < Pos(first) => {
                write!(
                    f,
                    "it needs the first {first} positions, but {forgotten} are forgotten"
                )
            }
            _ => write!(
                f,
                "it needs {window} from {needed_from} on, but everything up to {} is forgotten",
                forgotten.last
            ),
        }
    }
}

/// A reason that this crate does not know. Two are equal where they read the same.
#[derive(Clone, Debug)]
pub struct Reason(Arc<dyn Error + Send + Sync>);

impl Reason {
    /// The reason as the type that [`Refusal::custom`] was given.
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for Reason {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Reason {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_custom_reason_comes_back_as_it_was() {
        let refusal = Refusal::custom(std::fmt::Error);
        assert_eq!(refusal.to_string(), std::fmt::Error.to_string());
        let Refusal::Custom(reason) = &refusal else {
            panic!("{refusal:?}");
        };
        assert_eq!(reason.downcast_ref(), Some(&std::fmt::Error));
        assert!(reason.downcast_ref::<std::io::Error>().is_none());
        assert_eq!(refusal, refusal.clone());
        let other = Refusal::custom(std::io::Error::other("no such file"));
        assert_ne!(refusal, other);
        assert!(!refusal.smaller_may_fit());
    }
}
