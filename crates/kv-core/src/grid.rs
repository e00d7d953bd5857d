//! [`GridPos`]: the row and the column of a token in an image.
//!
//! Tokens of one image share a position and differ in row and column (M-RoPE: Wang et al.,
//! arXiv 2409.12191). A token of text has its position in all three. Invariant: tokens at one
//! position see each other in reading order. Knows nothing of cells.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::Pos;

/// A place in an image; ordered by row, then by column.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct GridPos {
    /// The row, counted downwards.
    pub y: u32,
    /// The column, counted to the right.
    pub x: u32,
}

impl GridPos {
    /// That of a token of text at `pos`.
    pub const fn of_text(pos: Pos) -> Self {
        Self { y: pos.0, x: pos.0 }
    }

    /// Position, row and column of a token at `pos`, as rotations take them.
    pub fn coordinates(pos: Pos, grid: Option<Self>) -> [u32; 3] {
        let Self { y, x } = grid.unwrap_or(Self::of_text(pos));
        [pos.0, y, x]
    }
}

impl fmt::Display for GridPos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.y, self.x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c23_rows_come_before_columns() {
        let at = |y, x| GridPos { y, x };
        assert!(at(5, 6) > at(5, 5) && at(6, 0) > at(5, 5));
        assert!(at(4, 9) < at(5, 5));
    }

    #[test]
    fn b21_text_has_one_number_for_all() {
        let grid = Some(GridPos { y: 5, x: 7 });
        assert_eq!(GridPos::coordinates(Pos(10), None), [10, 10, 10]);
        assert_eq!(GridPos::coordinates(Pos(10), grid), [10, 5, 7]);
    }
}
