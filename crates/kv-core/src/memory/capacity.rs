//! [`MemoryCapacity`]: how many tokens and sequences a memory holds, for a scheduler that decides
//! which requests run together.
//!
//! An estimate: whether a batch has slots is decided by [`Memory::plan`](super::Memory::plan).
//! Plain data.

use super::{Memory, Recurrent, RowCounts, Streams, Unified};
use crate::ids::{PartIdx, SeqId};
use crate::window::Window;

/// The cells, states and sequences of a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryCapacity {
    /// Its attention parts, without a part of sources.
    pub parts: Vec<PartCapacity>,
    /// The recurrent states; `None` without recurrent layers.
    pub states: Option<StateCapacity>,
    /// True if the memory evicts tokens before a batch that does not fit
    /// ([`Memory::edits_before`]), so that a text of any length goes on.
    pub is_endless: bool,
}

/// The cells of one attention part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartCapacity {
    /// The number of the part.
    pub part: PartIdx,
    /// Cells that all sequences share, or that each sequence has.
    pub n_cells: u32,
    /// The streams of its cells: one for all sequences, or one for each.
    pub streams: Streams,
    /// The window of its layers.
    pub window: Window,
    /// Tokens that one sequence keeps at most: the width of a window, or how many an evicting
    /// memory keeps. `None` if it keeps all.
    pub width: Option<u32>,
}

/// The use of the cells of an attention part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CellUse {
    /// Its cells, over all streams; 0 where no layer has attention.
    pub n_cells: u32,
    /// Cells that hold tokens.
    pub n_used: u32,
}

impl CellUse {
    /// The use of a memory in which no two sequences share a cell.
    pub(super) fn of_tokens<M: Memory + ?Sized>(memory: &M) -> Self {
        let cells = memory.n_rows().cells.into_iter().max().unwrap_or(0);
        let n_cells = u32::try_from(cells).unwrap_or(u32::MAX);
        let tokens = (0..memory.n_seqs()).map(|seq| memory.n_tokens(SeqId(seq)));
        Self {
            n_cells,
            n_used: tokens.fold(0, u32::saturating_add).min(n_cells),
        }
    }
}

/// The rows of recurrent states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateCapacity {
    /// Rows in each recurrent layer.
    pub n_rows: u32,
    /// Rows that one sequence has: its state, and those after earlier tokens that it can go back
    /// to.
    pub n_rows_per_seq: u32,
}

impl MemoryCapacity {
    /// The capacity of a memory of which only the number of rows is known: all sequences share the
    /// cells, and keep all tokens.
    pub fn of_rows(rows: &RowCounts) -> Self {
        let limit = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let parts = (0..).zip(&rows.cells).map(|(part, &n_cells)| PartCapacity {
            part: PartIdx(part),
            n_cells: limit(n_cells),
            streams: Streams::Shared,
            window: Window::Full,
            width: None,
        });
        Self {
            parts: parts.collect(),
            states: (rows.states > 0).then(|| StateCapacity {
                n_rows: limit(rows.states),
                n_rows_per_seq: 1,
            }),
            is_endless: false,
        }
    }
}

impl Unified {
    pub(super) fn part_use(&self) -> CellUse {
        CellUse {
            n_cells: self.n_cells(),
            n_used: self.n_used(),
        }
    }

    pub(super) fn part_capacity(&self) -> PartCapacity {
        let config = self.config();
        PartCapacity {
            part: config.part,
            n_cells: config.n_cells,
            streams: config.streams,
            window: config.window,
            width: config.window.width(),
        }
    }
}

impl Recurrent {
    pub(super) fn state_capacity(&self) -> StateCapacity {
        let config = self.config();
        StateCapacity {
            n_rows: config.n_rows(),
            n_rows_per_seq: config.n_snapshots() + 1,
        }
    }
}
