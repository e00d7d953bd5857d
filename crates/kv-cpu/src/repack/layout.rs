//! [`PackedLayout`]: how the rows of one matrix lie in memory.
//!
//! Knows nothing of where that memory is, nor of when rows are packed.

use kv_graph::weights::Weight;

use crate::kernels::{PackFns, WeightLayout};
use crate::storage::LINE;

/// Bytes that a task packs, about.
const BYTES_PER_TASK: usize = 256 << 10;

/// The layout of the rows of a matrix in memory.
#[derive(Clone, Copy)]
pub(super) struct PackedLayout {
    /// The way they are packed; `None` where they lie as in the file.
    pub(super) fns: Option<&'static PackFns>,
    /// Number of rows, from the first one on: all whole groups.
    pub(super) n_rows: usize,
    /// Bytes of a row, on average.
    pub(super) row_bytes: usize,
}

impl PackedLayout {
    /// As packed by `fns`, or as stored where these do not pack such a weight. `None` where it is
    /// neither a matrix nor one matrix per expert.
    pub(super) fn new(weight: &Weight, fns: Option<&'static PackFns>) -> Option<Self> {
        let (&[n_out, _] | &[_, n_out, _]) = weight.shape() else {
            return None;
        };
        let row_bytes = |fns: &PackFns| (fns.row_bytes)(weight.format(), weight.n_columns());
        // The matrices of experts must be whole groups.
        let is_one_matrix = n_out == weight.n_rows();
        let fits = |fns: &PackFns| match n_out % fns.group_rows {
            0 => n_out > 0,
            _ => is_one_matrix && n_out > fns.group_rows,
        };
        let Some(fns) = fns.filter(|fns| fits(fns) && row_bytes(fns) > 0) else {
            return Self::stored(weight);
        };
        Some(Self {
            fns: Some(fns),
            n_rows: weight.n_rows() / fns.group_rows * fns.group_rows,
            row_bytes: row_bytes(fns),
        })
    }

    /// As in the file; `None` for an empty weight.
    pub(super) fn stored(weight: &Weight) -> Option<Self> {
        let row_bytes = weight.format().row_bytes(weight.n_columns())?;
        let n_rows = weight.n_rows();
        (n_rows > 0 && row_bytes > 0).then_some(Self {
            fns: None,
            n_rows,
            row_bytes,
        })
    }

    pub(super) fn layout(&self) -> WeightLayout {
        match self.fns {
            Some(_) => WeightLayout::Packed,
            None => WeightLayout::Stored,
        }
    }

    /// Rows that lie together and cannot be separated.
    pub(super) fn group_rows(&self) -> usize {
        self.fns.map_or(1, |fns| fns.group_rows)
    }

    /// Rows that a task packs.
    pub(super) fn rows_per_task(&self) -> usize {
        let n_rows = (BYTES_PER_TASK / self.row_bytes.max(1)).max(1);
        n_rows.next_multiple_of(self.group_rows())
    }

    /// Bytes of all rows, in whole cache lines.
    pub(super) fn n_bytes(&self) -> usize {
        (self.n_rows * self.row_bytes).next_multiple_of(LINE)
    }
}
