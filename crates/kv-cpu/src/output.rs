//! The output matrix of a GEMM, filled by several threads: [`SharedOutput`] is the whole matrix,
//! [`OutputColumns`] the columns of one task.
//!
//! Invariant: at any time only one [`OutputColumns`] can reach a column. Knows nothing of what is
//! computed.

use std::marker::PhantomData;
use std::ops::Range;

/// `f32` `[tokens, columns]`, to be divided by columns among threads.
#[derive(Clone, Copy, Debug)]
pub struct SharedOutput<'a> {
    values: *mut f32,
    n_tokens: usize,
    n_columns: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: plain memory borrowed for `'a`, reached only through `OutputColumns`, of which the
// callers of `SharedOutput::columns` promise that no two overlap.
unsafe impl Send for SharedOutput<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedOutput<'_> {}

impl<'a> SharedOutput<'a> {
    /// The matrix `[tokens, n_columns]` in `values`, with as many tokens as fit.
    pub fn new(values: &'a mut [f32], n_columns: usize) -> Self {
        let n_tokens = values.len() / n_columns.max(1);
        Self {
            values: values.as_mut_ptr(),
            n_tokens,
            n_columns,
            owner: PhantomData,
        }
    }

    /// The matrix `[n_tokens, n_columns]` that begins at `values`.
    ///
    /// # Safety
    /// For all of `'a`, `values` points to `n_tokens · n_columns` initialised values that nothing
    /// else reads or writes, except through what [`SharedOutput::columns`] gives out.
    pub unsafe fn from_raw(values: *mut f32, n_tokens: usize, n_columns: usize) -> Self {
        Self {
            values,
            n_tokens,
            n_columns,
            owner: PhantomData,
        }
    }

    /// Number of tokens (rows).
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Number of columns (values per token).
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// The given columns of all rows, for writing; columns that do not exist are left out.
    ///
    /// # Safety
    /// No two results that live at the same time, on whatever threads, have a column in common.
    pub unsafe fn columns(&self, columns: Range<usize>) -> OutputColumns<'a> {
        let end = columns.end.min(self.n_columns);
        let columns = columns.start.min(end)..end;
        OutputColumns {
            // SAFETY: inside the borrowed matrix, or at its end.
            values: unsafe { self.values.add(columns.start) },
            n_tokens: self.n_tokens,
            stride: self.n_columns,
            n_columns: self.n_columns,
            columns,
            owner: PhantomData,
        }
    }
}

/// Some columns of all rows of the matrix, to be written by one thread.
#[derive(Debug)]
pub struct OutputColumns<'a> {
    /// First of these columns in the first row.
    values: *mut f32,
    n_tokens: usize,
    /// Values from one row to the next.
    stride: usize,
    n_columns: usize,
    columns: Range<usize>,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: only this value reaches its columns, like a `&mut [f32]`.
unsafe impl Send for OutputColumns<'_> {}
// SAFETY: as above; shared references read nothing.
unsafe impl Sync for OutputColumns<'_> {}

impl<'a> OutputColumns<'a> {
    /// All columns of the matrix `[tokens, n_columns]` in `values`.
    pub fn all(values: &'a mut [f32], n_columns: usize) -> Self {
        Self::alone(values, n_columns, 0..n_columns)
    }

    /// Some columns of rows of `n_columns` in a buffer of their own: `values` is
    /// `[tokens, columns.len()]`.
    pub(crate) fn alone(values: &'a mut [f32], n_columns: usize, columns: Range<usize>) -> Self {
        Self {
            n_tokens: values.len() / columns.len().max(1),
            values: values.as_mut_ptr(),
            stride: columns.len(),
            n_columns,
            columns,
            owner: PhantomData,
        }
    }

    /// The columns of the matrix.
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Number of tokens (rows).
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Number of columns of the whole matrix.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Some of these columns of one row, or `None` if others are among them.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code)
    )] // the scalar kernels set single values
    pub(crate) fn values(&mut self, token: usize, columns: Range<usize>) -> Option<&mut [f32]> {
        let n = columns.len();
        let (start, _) = self.block(token..token + 1, columns)?;
        // SAFETY: `n` values inside the borrowed matrix, in columns that only this reaches.
        Some(unsafe { std::slice::from_raw_parts_mut(start, n) })
    }

    /// Pointer to the first value of some of these columns of some rows, and the row stride; `None`
    /// if others are among them. The values may be read and written until the next call on this.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code)
    )] // as above
    pub(crate) fn block(
        &mut self,
        tokens: Range<usize>,
        columns: Range<usize>,
    ) -> Option<(*mut f32, usize)> {
        let inside = tokens.start < tokens.end
            && tokens.end <= self.n_tokens
            && columns.start < columns.end
            && self.columns.start <= columns.start
            && columns.end <= self.columns.end;
        // SAFETY: row and column are inside the borrowed matrix.
        inside.then(|| unsafe { (self.at(tokens.start, columns.start), self.stride) })
    }

    /// Pointer to one value.
    ///
    /// # Safety
    /// The row exists, and the column is one of these.
    unsafe fn at(&self, token: usize, column: usize) -> *mut f32 {
        // SAFETY: row and column are inside the borrowed matrix, as the caller promises.
        unsafe {
            self.values
                .add(token * self.stride + column - self.columns.start)
        }
    }

    /// Writes one value. Writing outside these columns is a bug of the caller: it panics with debug
    /// assertions and does nothing without.
    #[inline]
    pub(crate) fn set(&mut self, token: usize, column: usize, value: f32) {
        let inside = token < self.n_tokens && self.columns.contains(&column);
        debug_assert!(inside, "row {token}, column {column} of {self:?}");
        if inside {
            // SAFETY: row and column are inside the borrowed matrix, and this is the only
            // `OutputColumns` that reaches the column.
            unsafe { *self.at(token, column) = value };
        }
    }

    /// Adds to one value, with the checks of [`OutputColumns::set`].
    #[inline]
    pub(crate) fn add(&mut self, token: usize, column: usize, value: f32) {
        let inside = token < self.n_tokens && self.columns.contains(&column);
        debug_assert!(inside, "row {token}, column {column} of {self:?}");
        if inside {
            // SAFETY: inside the matrix, and no other `OutputColumns` reaches the column.
            unsafe { *self.at(token, column) += value };
        }
    }
}
