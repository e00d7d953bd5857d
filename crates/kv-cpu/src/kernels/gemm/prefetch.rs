//! Prefetches what GEMM needs after a panel, in address order: whole rows into the second-level
//! cache while tokens pass the panels before them, and the next panel from there into the
//! first-level cache while this one is unpacked.
//!
//! Knows no format.

use std::ops::Range;

use super::ROWS;
use crate::kernels::WeightRows;
use crate::kernels::prefetch::prefetch_l2;

/// Prefetches the panel after one that is being unpacked.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct PanelPrefetch {
    /// From a block to the one in its place in the next panel.
    bytes: usize,
}

impl PanelPrefetch {
    /// After a panel that holds the given part of its rows' bytes.
    pub(in crate::kernels) fn after(part: Range<usize>, row_bytes: usize) -> Self {
        let bytes = if part.end < row_bytes {
            part.len()
        } else {
            ROWS * row_bytes - part.start
        };
        Self { bytes }
    }

    /// Distances from each row's `n_bytes` bytes at byte `at` to the lines to prefetch, each line
    /// once; addresses past the end of the weights do no harm.
    #[inline(always)]
    pub(in crate::kernels) fn lines(
        self,
        at: usize,
        n_bytes: usize,
    ) -> impl Iterator<Item = usize> {
        let first = at.next_multiple_of(64) - at;
        (first..n_bytes)
            .step_by(64)
            .map(move |line| self.bytes + line)
    }
}

/// Prefetches the rows after a panel's, in address order, into the second-level cache, while tokens
/// pass the panels before.
pub(in crate::kernels) struct RowPrefetch {
    from: *const u8,
    n_lines: usize,
    lines_each: usize,
}

impl RowPrefetch {
    /// For the panel that holds the given part of the bytes of the rows from `row` on, in so many
    /// steps.
    pub(in crate::kernels) fn of(
        weights: &WeightRows<'_>,
        row: usize,
        part: Range<usize>,
        n_steps: usize,
    ) -> Self {
        let next = (row + ROWS) * weights.row_bytes;
        let n_lines = (ROWS * part.len()).div_ceil(64);
        Self {
            // The lines for the parts before are prefetched already.
            from: weights
                .bytes
                .as_ptr()
                .wrapping_add(next + ROWS * part.start),
            n_lines,
            lines_each: n_lines.div_ceil(n_steps.max(1)),
        }
    }

    /// Prefetches the lines of one step. Past the end of the weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn step(&mut self) {
        let n_lines = self.lines_each.min(self.n_lines);
        for line in 0..n_lines {
            prefetch_l2(self.from.wrapping_add(64 * line));
        }
        self.from = self.from.wrapping_add(64 * n_lines);
        self.n_lines -= n_lines;
    }
}
