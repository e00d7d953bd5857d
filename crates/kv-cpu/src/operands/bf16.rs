//! BF16 activations as kernels read them: [`Bf16Rows`], and how values are rounded ([`round`]).
//!
//! A value is rounded to the nearest BF16, ties to even; those below [`f32::MIN_POSITIVE`] become
//! zero, as processors treat them, and NaN stays NaN.
//!
//! Invariant: each row begins at a cache line. Knows nothing of weights or kernels.

use std::ops::Range;

use half::bf16;

/// Values of a cache line.
pub(crate) const LINE: usize = 32;

/// The nearest BF16, by the rule of this module.
#[inline]
pub(crate) fn round(x: f32) -> bf16 {
    if x.abs() < f32::MIN_POSITIVE {
        bf16::from_f32(0.0_f32.copysign(x))
    } else {
        bf16::from_f32(x)
    }
}

/// Values from the beginning of a row of `n_columns` values to that of the next one.
pub(crate) fn stride(n_columns: usize) -> usize {
    n_columns.next_multiple_of(LINE)
}

/// Rows of BF16 values.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Rows<'a> {
    pub(crate) n_tokens: usize,
    pub(crate) n_columns: usize,
    /// Padded to whole cache lines for each row.
    pub(crate) values: &'a [bf16],
}

impl<'a> Bf16Rows<'a> {
    /// Number of rows.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Values in one row.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Values from the beginning of a row to that of the next one.
    pub(crate) fn stride(&self) -> usize {
        stride(self.n_columns)
    }

    /// Some of the rows, or `None` where there are not so many.
    pub fn slice(&self, tokens: Range<usize>) -> Option<Self> {
        let n = self.stride();
        let values = tokens.start.checked_mul(n)?..tokens.end.checked_mul(n)?;
        Some(Self {
            n_tokens: tokens.len(),
            n_columns: self.n_columns,
            values: self.values.get(values)?,
        })
    }

    /// The values of row `token`, or `None` where there is no such row.
    pub fn row(&self, token: usize) -> Option<&'a [bf16]> {
        let row = self.slice(token..token.checked_add(1)?)?;
        row.values.get(..self.n_columns)
    }

    /// All values; each row is padded to whole cache lines.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn values(&self) -> &'a [bf16] {
        self.values
    }
}
