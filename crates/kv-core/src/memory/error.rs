//! Why a memory refuses, with numbers.

use super::recurrent::{CoupledStates, NoStateRoom, StateGone, StateIndivisible};
use super::shift::PosChange;
use crate::batch::{MAX_POS, SplitError};
use crate::grid::GridPos;
use crate::ids::{CellIdx, PartIdx, Pos, SeqId, StreamIdx};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// A batch that has no place in the memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// It cannot be cut as the memory needs it.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// There are too few cells.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// A token of several sequences, where each has cells of its own.
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
    /// There are too few rows for recurrent states.
    #[error(transparent)]
    NoStateRoom(#[from] NoStateRoom),
    /// A token of several sequences whose recurrent states differ.
    #[error(transparent)]
    CoupledStates(#[from] CoupledStates),
    /// A sequence that this memory does not have. The batch was checked with other rules.
    #[error(transparent)]
    NoSuchSequence(#[from] NoSuchSequence),
    /// A token of an image at the sequence's last position again, which sees further back than a
    /// window has kept.
    #[error(transparent)]
    WindowForgotten(#[from] WindowForgotten),
}

impl PlanError {
    /// Whether smaller ubatches may have a place: each frees what a window hides for the next.
    pub fn smaller_may_fit(&self) -> bool {
        // With a full window no token is ever forgotten, so smaller pieces need as many cells.
        // Smaller pieces store fewer recurrent states at once.
        match self {
            Self::NoRoom(no_room) => no_room.window != Window::Full,
            Self::NoStateRoom(_) => true,
            _ => false,
        }
    }
}

/// Too few cells for a ubatch. Holes are never the reason: any free cells will do, so
/// [`Memory::compact`](super::Memory::compact) makes no room. Removing tokens does, and where other
/// streams have free cells, [`Streams::Shared`](super::Streams::Shared) does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "ubatch {ubatch} needs {n_wanted} cells of part {part}, stream {stream} ({window}): {n_free} of \
     {n_cells} are free and {n_recyclable} recyclable{}",
    elsewhere(*.n_free_elsewhere)
)]
pub struct NoRoom {
    /// Number of the ubatch in the plan; the numbers hold after those before it.
    pub ubatch: usize,
    /// The part of the memory that has no room.
    pub part: PartIdx,
    /// The stream that has no room.
    pub stream: StreamIdx,
    /// The part's window.
    pub window: Window,
    /// Cells wanted.
    pub n_wanted: u32,
    /// Cells that are free.
    pub n_free: u32,
    /// Cells in use that no token can see any more.
    pub n_recyclable: u32,
    /// All cells of the stream.
    pub n_cells: u32,
    /// Cells that are free in other streams of the part: enough of them, and it is the limit of the
    /// stream that is met, not that of the memory.
    pub n_free_elsewhere: u32,
}

fn elsewhere(n_free: u32) -> String {
    match n_free {
        0 => String::new(),
        n => format!("; {n} are free in other streams, which sequences that share cells could use"),
    }
}

/// A sequence that the memory does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no sequence {seq}: the memory holds {n_seqs}, counted from 0")]
pub struct NoSuchSequence {
    /// The id.
    pub seq: SeqId,
    /// Sequences that the memory holds.
    pub n_seqs: u32,
}

/// An edit after which a sequence's next token would miss tokens that its window reaches, because
/// their cells were recycled. The sequence has to be evaluated again, from the start or from a
/// saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "sequence {seq} cannot go on at position {next}: it needs {window} from {needed_from} on, but \
     everything up to {forgotten_to} is forgotten"
)]
pub struct WindowForgotten {
    /// The sequence.
    pub seq: SeqId,
    /// The part's window.
    pub window: Window,
    /// The position of its next token.
    pub next: Pos,
    /// The oldest position that this token sees.
    pub needed_from: Pos,
    /// The newest position that the memory recycled.
    pub forgotten_to: Pos,
}

/// Why a removal was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveRefused {
    /// There is no such sequence.
    #[error(transparent)]
    NoSuchSequence(#[from] NoSuchSequence),
    /// What would be left of the sequence is no longer whole.
    #[error(transparent)]
    WindowForgotten(#[from] WindowForgotten),
    /// A recurrent state that would be needed is not kept.
    #[error(transparent)]
    StateGone(#[from] StateGone),
    /// A recurrent state cannot be cut like that.
    #[error(transparent)]
    StateIndivisible(#[from] StateIndivisible),
}

/// Why a step cannot be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RollbackRefused {
    /// Later steps, which were undone before, have overwritten what the sequence would need then.
    #[error(transparent)]
    WindowForgotten(#[from] WindowForgotten),
    /// Later steps, which were undone before, have overwritten the sequence's recurrent state.
    #[error(
        "sequence {seq} cannot go back to position {last}: later steps stored other states in row {row}"
    )]
    StateOverwritten {
        /// The sequence.
        seq: SeqId,
        /// Its last position before the step.
        last: Pos,
        /// The row that held its state.
        row: CellIdx,
    },
}

/// Why a copy was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyRefused {
    /// There is no such sequence.
    #[error(transparent)]
    NoSuchSequence(#[from] NoSuchSequence),
    /// What the sequence would consist of is not whole.
    #[error(transparent)]
    WindowForgotten(#[from] WindowForgotten),
    /// A recurrent state that would be needed is not kept.
    #[error(transparent)]
    StateGone(#[from] StateGone),
    /// A recurrent state cannot be cut like that.
    #[error(transparent)]
    StateIndivisible(#[from] StateIndivisible),
    /// The sequence's own cells do not suffice.
    #[error(
        "copying {n_wanted} tokens of sequence {from} needs as many cells of part {part}, stream \
         {stream}: {n_free} of {n_cells} are free"
    )]
    NoRoom {
        /// The sequence that is copied.
        from: SeqId,
        /// The part of the memory that has no room.
        part: PartIdx,
        /// The stream that has no room.
        stream: StreamIdx,
        /// Cells wanted.
        n_wanted: u32,
        /// Cells that are free or would be replaced.
        n_free: u32,
        /// All cells of the stream.
        n_cells: u32,
    },
}

/// Why a move to other positions was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShiftRefused {
    /// There is no such sequence.
    #[error(transparent)]
    NoSuchSequence(#[from] NoSuchSequence),
    /// The next token would see what the memory recycled.
    #[error(transparent)]
    WindowForgotten(#[from] WindowForgotten),
    /// A division by 0.
    #[error("positions of sequence {seq} cannot be divided by 0")]
    DivideByZero {
        /// The sequence.
        seq: SeqId,
    },
    /// Tokens would be before the first position or behind the last. Whoever wants to lose them
    /// removes them first.
    #[error(
        "{change} would move positions {moved} of sequence {seq} to {first}..={last}, and there \
         are none below 0 or above {MAX_POS}"
    )]
    OutOfRange {
        /// The sequence.
        seq: SeqId,
        /// From the first position with a token that moves to the last.
        moved: PosRange,
        /// How it moves.
        change: PosChange,
        /// Where the first would be.
        first: i64,
        /// Where the last would be.
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
        /// How it moves.
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
        /// How it would move.
        change: PosChange,
        /// Position of the first such token.
        pos: Pos,
        /// Its row and column.
        grid: GridPos,
    },
    /// A recurrent state moves as a whole or not at all.
    #[error(
        "{change} would move positions {moved} of sequence {seq}, which is one state of the tokens \
         at {has}: it can only be shifted as a whole"
    )]
    StateIndivisible {
        /// The sequence.
        seq: SeqId,
        /// What would move.
        moved: PosRange,
        /// How it would move.
        change: PosChange,
        /// What went into the state.
        has: PosRange,
    },
    /// Other sequences share the cells, and there are too few to give this one its own.
    #[error(
        "{n_wanted} tokens of sequence {seq} are shared and need cells of their own to move: \
         {n_free} of {n_cells} of part {part}, stream {stream}, are free"
    )]
    NoRoom {
        /// The sequence.
        seq: SeqId,
        /// The part of the memory that has no room.
        part: PartIdx,
        /// The stream that has no room.
        stream: StreamIdx,
        /// Cells wanted.
        n_wanted: u32,
        /// Cells that are free.
        n_free: u32,
        /// All cells of the stream.
        n_cells: u32,
    },
}

/// Why contents cannot be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreRefused {
    /// There is no such sequence in this memory.
    #[error(transparent)]
    NoSuchSequence(#[from] NoSuchSequence),
    /// There is no such sequence in what was saved.
    #[error("sequence {seq} was not saved: only {saved} were")]
    NotSaved {
        /// The sequence.
        seq: SeqId,
        /// The sequences that were saved.
        saved: SeqSet,
    },
    /// A part of this memory was not saved.
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
    /// No recurrent states were saved, but this memory has them.
    #[error("no recurrent states were saved")]
    NoStates,
    /// There are too few cells.
    #[error(
        "{n_wanted} saved tokens need as many cells of part {part}, stream {stream} ({window}): \
         {n_free} of {n_cells} are free"
    )]
    NoRoom {
        /// The part that has no room.
        part: PartIdx,
        /// The stream that has no room.
        stream: StreamIdx,
        /// The part's window.
        window: Window,
        /// Cells wanted.
        n_wanted: u32,
        /// Cells that are free or would be replaced.
        n_free: u32,
        /// All cells of the stream.
        n_cells: u32,
    },
    /// There are too few rows for recurrent states.
    #[error("{n_wanted} saved states need as many rows: {n_free} of {n_rows} are free")]
    NoStateRoom {
        /// Rows wanted.
        n_wanted: u32,
        /// Rows that are free or would be replaced.
        n_free: u32,
        /// All rows.
        n_rows: u32,
    },
}
