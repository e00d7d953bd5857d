//! [`RowCopy`] and [`RowShift`]: what an edit of a memory asks of the rows that a backend stores.
//!
//! They name rows by part and cell. Rows themselves are the backend's.

use crate::ids::{CellIdx, PartIdx, PosDelta};

/// Rows of every layer of a part, to be copied within that part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    /// The part.
    pub part: PartIdx,
    /// First row to read.
    pub from: CellIdx,
    /// First row to write.
    pub to: CellIdx,
    /// Number of rows.
    pub len: u32,
}

/// Keys of every layer of a part that move to other positions of their sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShift {
    /// The part.
    pub part: PartIdx,
    /// The first row.
    pub first: CellIdx,
    /// Number of rows.
    pub len: u32,
    /// By how much they move: a key at position `p` becomes one at `p + delta`.
    pub delta: PosDelta,
}
