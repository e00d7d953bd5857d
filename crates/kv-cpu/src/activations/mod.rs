//! Memory for quantized activations, reused from operation to operation: [`RowBuffer`].
//!
//! Invariant: a row is quantized from its own values alone, whichever thread does it and whatever
//! rows are quantized with it. What quantized rows are is defined in `operands`. Knows nothing of
//! weights.

mod bf16;
mod int8;

pub use self::bf16::{Bf16Buffer, Bf16Shared};
pub use self::int8::{Int8Buffer, Int8Shared};
use crate::kernels::Kernels;
pub use crate::operands::{
    ActivationKind, Activations, BLOCK, Bf16Rows, Int8Rows, PADDING, SUPER_BLOCK, ScaleSpan,
};

/// Values that can be quantized without the rest of their row, whatever shares a scale.
pub(crate) const PART: usize = PADDING * BLOCK;

/// Memory for quantized rows, reused from operation to operation.
#[derive(Debug)]
pub enum RowBuffer {
    /// For both kinds of int8.
    Int8(Int8Buffer),
    /// For BF16.
    Bf16(Bf16Buffer),
}

impl RowBuffer {
    /// One of each kind, without memory yet.
    pub fn of_each_kind() -> [Self; 3] {
        let int8 = |span| Self::Int8(Int8Buffer::with_span(span));
        [
            int8(ScaleSpan::Block),
            int8(ScaleSpan::SuperBlock),
            Self::Bf16(Bf16Buffer::default()),
        ]
    }

    /// The kind of activations.
    pub fn kind(&self) -> ActivationKind {
        match self {
            Self::Int8(rows) => rows.kind(),
            Self::Bf16(_) => ActivationKind::Bf16,
        }
    }

    /// Makes this `n_tokens` rows of `n_columns` values, whose content is unspecified until
    /// they are quantized. Allocates only to grow.
    pub fn reshape(&mut self, n_tokens: usize, n_columns: usize) {
        match self {
            Self::Int8(rows) => rows.reshape(n_tokens, n_columns),
            Self::Bf16(rows) => rows.reshape(n_tokens, n_columns),
        }
    }

    /// Bytes that are allocated.
    pub(crate) fn n_bytes(&self) -> usize {
        match self {
            Self::Int8(rows) => rows.n_bytes(),
            Self::Bf16(rows) => rows.n_bytes(),
        }
    }

    /// The rows, for reading.
    pub fn rows(&self) -> Activations<'_> {
        match self {
            Self::Int8(rows) => Activations::Int8(rows.rows()),
            Self::Bf16(rows) => Activations::Bf16(rows.rows()),
        }
    }

    /// The rows, for several threads that each quantize some of them.
    pub fn shared(&mut self) -> SharedRows<'_> {
        match self {
            Self::Int8(rows) => SharedRows::Int8(rows.shared()),
            Self::Bf16(rows) => SharedRows::Bf16(rows.shared()),
        }
    }

    /// Quantizes all rows from `values`, `[tokens, columns]`.
    pub fn quantize(&mut self, kernels: &Kernels, values: &[f32]) {
        match self {
            Self::Int8(rows) => rows.quantize(kernels, values),
            Self::Bf16(rows) => rows.quantize(kernels, values),
        }
    }
}

/// The rows of a [`RowBuffer`], shared by threads that write and read them in turns.
#[derive(Clone, Copy, Debug)]
pub enum SharedRows<'a> {
    /// Of either kind of int8.
    Int8(Int8Shared<'a>),
    /// Of BF16.
    Bf16(Bf16Shared<'a>),
}

impl SharedRows<'_> {
    /// Quantizes row `token` from its values.
    ///
    /// # Safety
    /// While this runs, no other thread quantizes the same row, and no thread reads the rows.
    pub unsafe fn quantize_row(&self, kernels: &Kernels, token: usize, values: &[f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Int8(rows) => rows.quantize_row(kernels, token, values),
                Self::Bf16(rows) => rows.quantize_row(kernels, token, values),
            }
        }
    }

    /// Quantizes part `part` of the first row: [`PART`] values, or those that are left.
    ///
    /// # Safety
    /// While this runs, no other thread quantizes the same values, and no thread reads the rows.
    pub(crate) unsafe fn quantize_part(&self, kernels: &Kernels, part: usize, values: &[f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Int8(rows) => rows.quantize_part(kernels, part, values),
                Self::Bf16(rows) => rows.quantize_part(kernels, part, values),
            }
        }
    }
}
