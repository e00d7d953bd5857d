//! Rows of BF16: [`Bf16Buffer`] makes them, [`Bf16Rows`] is what kernels read.
//!
//! A value is rounded to the nearest BF16, ties to even; those below [`f32::MIN_POSITIVE`] become zero, as processors take
//! them, and NaN stays NaN.
//!
//! Invariant: each row begins with a cache line; what is left of its last one is nobody's. Knows nothing of weights.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::PART;
use crate::kernels::Kernels;

/// Values of a cache line.
const LINE: usize = 32;

/// A cache line of values.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([bf16; LINE]);

/// The nearest BF16, by the rule of this module.
#[inline]
pub(crate) fn round(x: f32) -> bf16 {
    match x.abs() < f32::MIN_POSITIVE {
        true => bf16::from_f32(0.0_f32.copysign(x)),
        false => bf16::from_f32(x),
    }
}

/// Memory for BF16 rows, reused from operation to operation.
#[derive(Debug, Default)]
pub struct Bf16Buffer {
    n_tokens: usize,
    n_columns: usize,
    values: Vec<Line>,
}

impl Bf16Buffer {
    /// Makes this `n_tokens` rows of `n_columns` values, whose content is unspecified until they are prepared. Allocates
    /// only to grow.
    pub fn reshape(&mut self, n_tokens: usize, n_columns: usize) {
        let n_lines = n_tokens * stride(n_columns) / LINE;
        if self.values.len() < n_lines {
            self.values.resize(n_lines, Line([bf16::ZERO; LINE]));
        }
        (self.n_tokens, self.n_columns) = (n_tokens, n_columns);
    }

    /// Prepares all rows from `values`, `[tokens, columns]`.
    pub fn prepare(&mut self, kernels: &Kernels, values: &[f32]) {
        debug_assert_eq!(values.len(), self.n_tokens * self.n_columns);
        let n_columns = self.n_columns.max(1);
        let shared = self.shared();
        for (token, values) in values.chunks_exact(n_columns).enumerate() {
            // SAFETY: `shared` came from `&mut self` and stays on this thread.
            unsafe { shared.prepare_row(kernels, token, values) };
        }
    }

    /// The rows, for reading.
    pub fn rows(&self) -> Bf16Rows<'_> {
        let n_values = self.n_tokens * stride(self.n_columns);
        // SAFETY: `Line` is its values without padding (its size is its alignment), and `reshape` made room for so many.
        let values = unsafe { std::slice::from_raw_parts(self.values.as_ptr().cast(), n_values) };
        Bf16Rows {
            n_tokens: self.n_tokens,
            n_columns: self.n_columns,
            values,
        }
    }

    /// The rows, for several threads that each prepare some of them.
    pub fn shared(&mut self) -> Bf16Shared<'_> {
        Bf16Shared {
            n_tokens: self.n_tokens,
            n_columns: self.n_columns,
            values: self.values.as_mut_ptr().cast(),
            owner: PhantomData,
        }
    }
}

/// From the beginning of a row of `n_columns` values to that of the next one, in values.
fn stride(n_columns: usize) -> usize {
    n_columns.next_multiple_of(LINE)
}

/// The rows of a [`Bf16Buffer`], shared by threads that take turns in writing and reading them.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Shared<'a> {
    n_tokens: usize,
    n_columns: usize,
    values: *mut bf16,
    owner: PhantomData<&'a mut Bf16Buffer>,
}

// SAFETY: plain memory borrowed for `'a`; every access is an unsafe call whose caller promises that
// no row is written while another thread uses it.
unsafe impl Send for Bf16Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Bf16Shared<'_> {}

impl Bf16Shared<'_> {
    /// Prepares row `token` from its `n_columns` values.
    ///
    /// # Safety
    /// While this runs, no other thread prepares the same row, and nobody reads the rows.
    pub unsafe fn prepare_row(&self, kernels: &Kernels, token: usize, values: &[f32]) {
        let fits = token < self.n_tokens && values.len() == self.n_columns;
        debug_assert!(fits);
        if fits {
            // SAFETY: the row has so many values; the rest is promised to this function.
            unsafe { self.put(kernels, token * stride(self.n_columns), values) };
        }
    }

    /// Prepares values of the first row that begin [`PART`] times `part` values after its beginning and are as many, or
    /// those that are left.
    ///
    /// # Safety
    /// While this runs, no other thread prepares the same values, and nobody reads the rows.
    pub(crate) unsafe fn prepare_part(&self, kernels: &Kernels, part: usize, values: &[f32]) {
        let first = part * PART;
        let fits = self.n_tokens > 0 && first + values.len() <= self.n_columns;
        debug_assert!(fits && values.len() <= PART);
        if fits {
            // SAFETY: the first row has so many values; the rest is promised to this function.
            unsafe { self.put(kernels, first, values) };
        }
    }

    /// Puts values down from value `first` on.
    ///
    /// # Safety
    /// There are so many, and no other thread uses them meanwhile.
    unsafe fn put(&self, kernels: &Kernels, first: usize, values: &[f32]) {
        // SAFETY: as the caller promises, of the buffer that is borrowed for `'a`.
        let to = unsafe { std::slice::from_raw_parts_mut(self.values.add(first), values.len()) };
        (kernels.round_bf16)(values, to);
    }
}

/// Prepared BF16 rows.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Rows<'a> {
    n_tokens: usize,
    n_columns: usize,
    /// With what is left of each row's last line.
    values: &'a [bf16],
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

    /// From the beginning of a row to that of the next one, in values.
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

    /// All values, with what is left of each row's last line.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn values(&self) -> &'a [bf16] {
        self.values
    }
}
