//! Rows of activations as a [`crate::matrix::Matrix`] wants them: `f32` as they are, int8 blocks, or BF16.
//!
//! Invariant: rows are prepared from their values alone, whichever thread does it and whatever rows are beside them.
//! Knows nothing of weights.

mod bf16;
mod int8;

use std::ops::Range;

pub(crate) use self::bf16::round;
pub use self::bf16::{Bf16Buffer, Bf16Rows, Bf16Shared};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use self::int8::Int8Row;
pub(crate) use self::int8::Int8RowMut;
pub use self::int8::{BLOCK, Int8Buffer, Int8Rows, Int8Shared, PADDING, SUPER_BLOCK, ScaleSpan};
use crate::kernels::Kernels;

/// Values that can be prepared without the rest of their row, whatever shares a scale.
pub(crate) const PART: usize = PADDING * BLOCK;

/// Rows of activations, ready to be multiplied.
#[derive(Clone, Copy, Debug)]
pub enum Activations<'a> {
    /// `f32 [tokens, columns]`.
    F32(&'a [f32]),
    /// Int8 blocks.
    Int8(Int8Rows<'a>),
    /// BF16 values.
    Bf16(Bf16Rows<'a>),
}

impl Activations<'_> {
    /// Some of the rows, of so many columns each, or `None` where there are not so many.
    pub fn slice(&self, tokens: Range<usize>, n_columns: usize) -> Option<Self> {
        Some(match self {
            Self::F32(values) => {
                let start = tokens.start.checked_mul(n_columns)?;
                Self::F32(values.get(start..tokens.end.checked_mul(n_columns)?)?)
            }
            Self::Int8(rows) => Self::Int8(rows.slice(tokens)?),
            Self::Bf16(rows) => Self::Bf16(rows.slice(tokens)?),
        })
    }
}

/// What a matrix wants its activations to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationKind {
    /// [`Activations::F32`].
    F32,
    /// [`Activations::Int8`] with a scale for every block.
    Int8,
    /// [`Activations::Int8`] with a scale for every [`SUPER_BLOCK`] blocks.
    Int8Long,
    /// [`Activations::Bf16`].
    Bf16,
}

/// Memory for rows that are prepared, reused from operation to operation.
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

    /// Which kind of activations this holds.
    pub fn kind(&self) -> ActivationKind {
        match self {
            Self::Int8(rows) => rows.kind(),
            Self::Bf16(_) => ActivationKind::Bf16,
        }
    }

    /// Makes this `n_tokens` rows of `n_columns` values, whose content is unspecified until they are prepared. Allocates
    /// only to grow.
    pub fn reshape(&mut self, n_tokens: usize, n_columns: usize) {
        match self {
            Self::Int8(rows) => rows.reshape(n_tokens, n_columns),
            Self::Bf16(rows) => rows.reshape(n_tokens, n_columns),
        }
    }

    /// The rows, for reading.
    pub fn rows(&self) -> Activations<'_> {
        match self {
            Self::Int8(rows) => Activations::Int8(rows.rows()),
            Self::Bf16(rows) => Activations::Bf16(rows.rows()),
        }
    }

    /// The rows, for several threads that each prepare some of them.
    pub fn shared(&mut self) -> SharedRows<'_> {
        match self {
            Self::Int8(rows) => SharedRows::Int8(rows.shared()),
            Self::Bf16(rows) => SharedRows::Bf16(rows.shared()),
        }
    }

    /// Prepares all rows from `values`, `[tokens, columns]`.
    pub fn prepare(&mut self, kernels: &Kernels, values: &[f32]) {
        match self {
            Self::Int8(rows) => rows.prepare(kernels, values),
            Self::Bf16(rows) => rows.prepare(kernels, values),
        }
    }
}

/// The rows of a [`RowBuffer`], shared by threads that take turns in writing and reading them.
#[derive(Clone, Copy, Debug)]
pub enum SharedRows<'a> {
    /// Of either kind of int8.
    Int8(Int8Shared<'a>),
    /// Of BF16.
    Bf16(Bf16Shared<'a>),
}

impl SharedRows<'_> {
    /// Prepares row `token` from its values.
    ///
    /// # Safety
    /// While this runs, no other thread prepares the same row, and nobody reads the rows.
    pub unsafe fn prepare_row(&self, kernels: &Kernels, token: usize, values: &[f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Int8(rows) => rows.prepare_row(kernels, token, values),
                Self::Bf16(rows) => rows.prepare_row(kernels, token, values),
            }
        }
    }

    /// Prepares values of the first row that begin [`PART`] times `part` values after its beginning and are as many, or
    /// those that are left.
    ///
    /// # Safety
    /// While this runs, no other thread prepares the same values, and nobody reads the rows.
    pub(crate) unsafe fn prepare_part(&self, kernels: &Kernels, part: usize, values: &[f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Int8(rows) => rows.prepare_part(kernels, part, values),
                Self::Bf16(rows) => rows.prepare_part(kernels, part, values),
            }
        }
    }
}
