//! [`Edit`]: what can be done to sequences, as data, and [`Edited`]: the device work that it
//! implies.
//!
//! Invariant: an edit is done whole or refused, and what is left to do with rows is returned, never
//! queued. Removals leave nothing to do, so a sequence can always be dropped, also after the device
//! has failed.

use super::PosChange;
use crate::ids::{Pos, PosDelta, SeqId};
use crate::memory::{RowCopy, RowShift};
use crate::window::PosRange;

/// An edit of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Edit {
    /// Takes the tokens with positions in `range` from sequences. Removing all positions of a
    /// sequence that exists is never refused.
    Remove {
        /// From which sequences.
        seqs: Seqs,
        /// The positions.
        range: PosRange,
    },
    /// Makes the tokens of `to` with positions in `range` the same as those of `from`. What `to`
    /// had there is replaced, what it has elsewhere stays.
    Copy {
        /// The sequence that is copied.
        from: SeqId,
        /// The sequence that is given tokens.
        to: SeqId,
        /// The positions.
        range: PosRange,
    },
    /// Moves the tokens of a sequence with positions in `range` to other positions. Tokens keep
    /// their order; sequences that share them keep them where they are.
    Reposition {
        /// The sequence.
        seq: SeqId,
        /// The positions.
        range: PosRange,
        /// Their target.
        change: PosChange,
    },
    /// Removes all other sequences.
    KeepOnly(SeqId),
    /// One pass of compaction: moves tokens to free cells, so that the cells of each sequence
    /// become neighbours and the used ones the first of their stream. What tokens see stays the
    /// same. Attention then reads fewer and longer runs of cells; it makes no room, since tokens go
    /// to any free cells. Where the row copies fail, a clone of the memory before is still right.
    /// The last pass moves nothing.
    Compact,
    /// Removes everything. Never refused.
    Clear,
}

impl Edit {
    /// The edits that drop the tokens of a sequence at `from..behind`, and move those behind them
    /// down to close the gap.
    pub fn drop_between(seq: SeqId, from: Pos, behind: Pos) -> [Self; 2] {
        // Positions fit `i32`, and so do their differences.
        let down = PosDelta(-((behind.0 - from.0) as i32));
        let removal = Self::Remove {
            seqs: Seqs::One(seq),
            range: PosRange::from(from..behind),
        };
        let move_down = Self::Reposition {
            seq,
            range: PosRange::from(behind..),
            change: PosChange::Shift(down),
        };
        [removal, move_down]
    }

    /// The edit as a verb, for [`Refusal::Unsupported`](super::Refusal::Unsupported).
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Remove { .. } => "remove tokens",
            Self::Copy { .. } => "copy tokens",
            Self::Reposition { .. } => "move tokens to other positions",
            Self::KeepOnly(_) => "keep only one sequence",
            Self::Compact => "compact its cells",
            Self::Clear => "remove everything",
        }
    }
}

/// The sequences that an operation concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seqs {
    /// One.
    One(SeqId),
    /// Every one.
    All,
}

/// The result of an edit, and the work that is left for the backend: first the copies, then the
/// shifts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the backend has to copy and shift these rows before it does anything else with them"]
pub struct Edited {
    /// Tokens that were taken from sequences, given to one, or moved to other positions; a token
    /// of two sequences counts twice.
    pub n_tokens: u32,
    /// Cells that became free, or moved.
    pub n_cells: u32,
    /// Rows that the backend must copy, at once and in this order.
    pub row_copies: Vec<RowCopy>,
    /// Rows whose keys the backend must rotate then, each once.
    pub row_shifts: Vec<RowShift>,
}

impl Edited {
    /// The sum of two parts' edits; each part holds the same tokens or fewer.
    pub fn and(mut self, other: Self) -> Self {
        self.n_tokens = self.n_tokens.max(other.n_tokens);
        self.n_cells += other.n_cells;
        self.row_copies.extend(other.row_copies);
        self.row_shifts.extend(other.row_shifts);
        self
    }
}

impl From<Removal> for Edited {
    fn from(removed: Removal) -> Self {
        Self {
            n_tokens: removed.n_tokens,
            n_cells: removed.n_cells,
            ..Self::default()
        }
    }
}

/// The result of a removal. It leaves nothing to do with rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// Tokens taken from sequences; a token of two sequences counts twice.
    pub n_tokens: u32,
    /// Cells that became free, of all parts.
    pub n_cells: u32,
}

impl From<Edited> for Removal {
    fn from(edited: Edited) -> Self {
        let has_work = !edited.row_copies.is_empty() || !edited.row_shifts.is_empty();
        debug_assert!(!has_work, "a removal left work to do: {edited:?}");
        Self {
            n_tokens: edited.n_tokens,
            n_cells: edited.n_cells,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(debug_assertions)]
    use crate::ids::{CellIdx, PartIdx, PosDelta};

    fn moved() -> Edited {
        Edited {
            n_tokens: 2,
            n_cells: 1,
            ..Edited::default()
        }
    }

    #[test]
    fn a_removal_has_the_numbers_of_its_edit() {
        let removed = Removal::from(moved());
        assert_eq!((removed.n_tokens, removed.n_cells), (2, 1));
        assert_eq!(Edited::from(removed), moved());
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a removal left work to do")]
    fn a_removal_that_copies_rows_is_a_defect() {
        let copy = RowCopy {
            part: PartIdx(0),
            from: CellIdx(0),
            to: CellIdx(1),
            len: 1,
        };
        let _ = Removal::from(Edited {
            row_copies: vec![copy],
            ..moved()
        });
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a removal left work to do")]
    fn a_removal_that_shifts_keys_is_a_defect() {
        let shift = RowShift {
            part: PartIdx(0),
            first: CellIdx(0),
            len: 1,
            delta: PosDelta(1),
        };
        let _ = Removal::from(Edited {
            row_shifts: vec![shift],
            ..moved()
        });
    }

    #[test]
    fn parts_are_counted_as_one_memory() {
        let both = moved().and(Edited {
            n_tokens: 1,
            n_cells: 1,
            ..Edited::default()
        });
        assert_eq!((both.n_tokens, both.n_cells), (2, 2));
    }
}
