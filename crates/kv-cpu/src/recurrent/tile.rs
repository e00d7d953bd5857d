//! [`TileRows`]: what kernels need of some rows of 16 neighbouring channels, gathered.
//!
//! Lanes beyond the last channel are 0, which no state remembers. Knows nothing of states.

use std::ops::Range;

use crate::kernels::{LANES, Lanes};

/// Rows that are gathered at once, where there are many: the lists of lanes stay in the first cache.
pub(super) const ROWS: usize = 64;

/// One value for each of some channels, for each of at most `N` rows.
pub(super) struct TileRows<const N: usize> {
    values: [Lanes; N],
    n_rows: usize,
}

impl<const N: usize> TileRows<N> {
    /// Zeros for this many rows.
    pub(super) fn zeros(n_rows: usize) -> Self {
        Self {
            values: [[0.0; LANES]; N],
            n_rows: n_rows.min(N),
        }
    }

    /// Columns of some rows of `from`, which is `[.., width]`.
    pub(super) fn gather(
        from: &[f32],
        width: usize,
        (rows, columns): (&[u32], &Range<usize>),
    ) -> Self {
        let mut tile = Self::zeros(rows.len());
        for (lanes, &row) in tile.values.iter_mut().zip(rows) {
            let first = row as usize * width;
            let values = &from[first + columns.start..first + columns.end];
            // Whole tiles are copied as one.
            match <&Lanes>::try_from(values) {
                Ok(values) => *lanes = *values,
                Err(_) => lanes[..values.len()].copy_from_slice(values),
            }
        }
        tile
    }

    pub(super) fn rows(&self) -> &[Lanes] {
        &self.values[..self.n_rows]
    }

    pub(super) fn rows_mut(&mut self) -> &mut [Lanes] {
        &mut self.values[..self.n_rows]
    }
}
