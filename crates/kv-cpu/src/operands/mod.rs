//! Operands of matrix products that are not weights: activations as `f32`, int8 blocks or BF16.
//!
//! These are views. The memory behind them and who fills it is in [`crate::activations`], which is
//! above the kernels as this is below them. Knows nothing of weights or kernels.

pub(crate) mod bf16;
pub(crate) mod int8;

use std::ops::Range;

pub use self::bf16::Bf16Rows;
pub(crate) use self::int8::Int8RowMut;
pub use self::int8::{BLOCK, Int8Rows, PADDING, SUPER_BLOCK, ScaleSpan};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use self::int8::{Int8Acts, Int8Row};

/// Rows of activations, as a matrix is multiplied with them.
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

/// The kinds of activations; each matrix takes one of them.
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
