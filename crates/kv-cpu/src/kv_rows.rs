//! Views of stored K and V rows: [`KvRows`] (one layer's K or V), [`KvRowsMut`] and [`HeadRows`]
//! (one KV head of all cells).
//!
//! Invariant: cell `c`'s row begins at byte `c · row bytes`; a head's bytes are whole blocks of
//! the KV type. Knows neither who owns the memory nor who reads it: storage and attention both
//! build on these types.

use half::f16;
use kv_rows::{HeadBlocks, HeadRotation, KvType, RowShape};

/// K or V rows of one layer, `[cells, heads, dim]` in the layer's KV type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvRows<'a> {
    pub(crate) shape: RowShape,
    bytes: &'a [u8],
}

impl<'a> KvRows<'a> {
    /// The rows in `bytes`, stored as `shape` says.
    pub(crate) fn new(shape: RowShape, bytes: &'a [u8]) -> Self {
        Self { shape, bytes }
    }

    /// Rows of the running batch that no cache holds, `[tokens, heads, dim]` in `f32`.
    pub(crate) fn from_f32(values: &'a [f32], heads: usize, dim: usize) -> Self {
        // SAFETY: every byte of an `f32` is initialised, and bytes need no alignment.
        let bytes = unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values))
        };
        let shape = RowShape {
            heads,
            dim,
            kv_type: KvType::F32,
            rotation: HeadRotation::None,
        };
        Self { shape, bytes }
    }

    /// Dequantizes all heads of one cell to `values`, `[heads, dim]`.
    pub(crate) fn decode_cell(&self, cell: usize, values: &mut [f32]) {
        let n = self.shape.bytes();
        self.shape.decode(&self.bytes[cell * n..][..n], values);
    }

    /// One KV head of all cells.
    #[inline]
    pub(crate) fn head(&self, head: usize) -> HeadRows<'a> {
        let HeadBlocks {
            first_byte,
            n_bytes,
            n_values,
            skip,
        } = self.shape.head(head);
        HeadRows {
            bytes: self.bytes,
            cell_stride: self.shape.bytes(),
            first_byte,
            n_bytes,
            n_values,
            skip,
        }
    }
}

/// K or V rows of one layer, to be overwritten.
#[derive(Debug)]
pub(crate) enum KvRowsMut<'a> {
    /// Stored as `f32`.
    F32(&'a mut [f32]),
    /// Stored as `f16`.
    F16(&'a mut [f16]),
    /// Stored in any other way that a shape describes.
    Encoded(RowShape, &'a mut [u8]),
}

/// One KV head of all cells of a layer, as stored: the whole blocks that contain it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadRows<'a> {
    /// The rows of all cells.
    pub(crate) bytes: &'a [u8],
    /// Bytes from one cell's row to the next.
    pub(crate) cell_stride: usize,
    /// Bytes of a row before this head's first block.
    pub(crate) first_byte: usize,
    /// Bytes of this head's blocks.
    pub(crate) n_bytes: usize,
    /// Values of this head's blocks.
    pub(crate) n_values: usize,
    /// Values in the first block that belong to the head before.
    pub(crate) skip: usize,
}

impl<'a> HeadRows<'a> {
    /// Address of this head in the row of `cell`, for a prefetch: the cell need not exist.
    #[inline(always)]
    pub(crate) fn address(&self, cell: usize) -> *const u8 {
        let offset = cell
            .wrapping_mul(self.cell_stride)
            .wrapping_add(self.first_byte);
        self.bytes.as_ptr().wrapping_add(offset)
    }

    /// This head's bytes in the row of `cell`.
    #[inline(always)]
    pub(crate) fn row(&self, cell: usize) -> &'a [u8] {
        &self.bytes[cell * self.cell_stride + self.first_byte..][..self.n_bytes]
    }
}
