//! [`ExpertLayout`]: the matrix of one expert, read from the file into memory that another one
//! leaves.
//!
//! Invariant: the rows are as [`super::PackedWeights`] would have them, or as stored where their
//! values cannot be packed. Does not know which experts stay.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_graph::weights::Weight;
use memmap2::MmapMut;

use super::layout::PackedLayout;
use super::{PackedBytes, PackedRows, RowReader, write_piece};
use crate::kernels::PackFns;

/// Bytes of the file that are read at a time.
const READ_BYTES: usize = 4 << 20;

/// Memory is mapped in whole pages, at least so large.
const PAGE_BYTES: usize = 4096;

/// The experts of one weight, in memory one by one.
pub(crate) struct ExpertLayout {
    weight: Weight,
    n_experts: usize,
    /// Of one expert, as they are packed.
    planned: PackedLayout,
    /// The same for values that cannot be packed.
    stored: PackedLayout,
}

impl ExpertLayout {
    /// For a weight of a matrix for each expert. `None` where it is something else.
    pub(crate) fn new(weight: Weight, fns: Option<&'static PackFns>) -> Option<Self> {
        let &[n_experts, n_out, _] = weight.shape() else {
            return None;
        };
        let of_one = |layout: PackedLayout| PackedLayout {
            n_rows: n_out,
            ..layout
        };
        let planned = PackedLayout::new(&weight, fns).map(of_one)?;
        let stored = PackedLayout::stored(&weight).map(of_one)?;
        Some(Self {
            n_experts,
            planned,
            stored,
            weight,
        })
    }

    /// Number of experts.
    pub(crate) fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// The weight.
    pub(crate) fn name(&self) -> &str {
        self.weight.name()
    }

    /// True if the weight is read from a file, which experts can be read from one by one.
    pub(crate) fn is_in_file(&self) -> bool {
        self.weight.bytes().is_in_file()
    }

    /// Bytes that one expert takes in memory.
    pub(crate) fn n_bytes(&self) -> usize {
        let is_always_packed = self.weight.format().block_len() > 1;
        let most = if is_always_packed {
            self.planned.n_bytes()
        } else {
            self.planned.n_bytes().max(self.stored.n_bytes())
        };
        most.next_multiple_of(PAGE_BYTES)
    }

    /// Bytes that one expert takes in the file.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.stored.n_rows * self.stored.row_bytes
    }

    /// Reads an expert into memory of [`ExpertLayout::n_bytes`].
    ///
    /// # Errors
    /// [`BackendError::Device`] where the file cannot be read.
    pub(crate) fn read(
        &self,
        expert: usize,
        mut memory: MmapMut,
        reader: &mut RowReader,
    ) -> Result<PackedRows, BackendError> {
        let mut layout = self.planned;
        if !self.write(&layout, expert, &mut memory, reader)? {
            layout = self.stored;
            self.write(&layout, expert, &mut memory, reader)?;
        }
        Ok(PackedRows {
            memory: Arc::new(PackedBytes::Lent(memory)),
            start: 0,
            rows: 0..layout.n_rows,
            layout,
        })
    }

    /// Returns whether the values could be packed.
    fn write(
        &self,
        layout: &PackedLayout,
        expert: usize,
        memory: &mut [u8],
        reader: &mut RowReader,
    ) -> Result<bool, BackendError> {
        let rows_at_once = (READ_BYTES / self.stored.row_bytes.max(1)).max(1);
        let step = rows_at_once.next_multiple_of(layout.group_rows());
        let n_bytes = layout.n_rows * layout.row_bytes;
        let got = memory.len();
        let memory = memory.get_mut(..n_bytes);
        let memory = memory.ok_or(BackendError::WrongLength {
            what: "memory of an expert",
            wanted: n_bytes,
            got,
        })?;
        let first = expert * self.stored.n_rows;
        let pieces = memory.chunks_mut(step * layout.row_bytes);
        for (at, piece) in pieces.enumerate() {
            if !write_piece(&self.weight, layout, first + at * step, piece, reader)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl PackedRows {
    /// The memory again, where it was lent and nobody else uses it.
    pub(crate) fn into_memory(self) -> Option<MmapMut> {
        match Arc::into_inner(self.memory)? {
            PackedBytes::Lent(memory) => Some(memory),
            PackedBytes::Kept(_) => None,
        }
    }
}
