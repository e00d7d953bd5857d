//! A matrix of results that several threads fill, each its own columns.
//!
//! Invariant: an [`OutputColumns`] is the only one that reaches its columns. Knows nothing of what
//! is computed.

use std::marker::PhantomData;
use std::ops::Range;

/// `f32 [tokens, columns]`, to be divided by columns among threads.
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
    /// As many rows of `n_columns` as `values` has.
    pub fn new(values: &'a mut [f32], n_columns: usize) -> Self {
        let n_tokens = values.len() / n_columns.max(1);
        Self {
            values: values.as_mut_ptr(),
            n_tokens,
            n_columns,
            owner: PhantomData,
        }
    }

    /// `n_tokens` rows of `n_columns` from `values` on.
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

    /// Number of rows.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Values in one row.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// The right to write some columns of all rows; columns that do not exist are left out.
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

/// Some columns of all rows of a result, to be written by one thread.
#[derive(Debug)]
pub struct OutputColumns<'a> {
    /// The first of these columns of the first row.
    values: *mut f32,
    n_tokens: usize,
    /// From one row to the next one.
    stride: usize,
    n_columns: usize,
    columns: Range<usize>,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: values that only this reaches, like those of a `&mut [f32]`.
unsafe impl Send for OutputColumns<'_> {}
// SAFETY: as above; shared references read nothing.
unsafe impl Sync for OutputColumns<'_> {}

impl<'a> OutputColumns<'a> {
    /// All columns of as many rows of `n_columns` as `values` has.
    pub fn all(values: &'a mut [f32], n_columns: usize) -> Self {
        Self::alone(values, n_columns, 0..n_columns)
    }

    /// Some columns of rows of `n_columns` that lie in memory of their own: `values` has as many rows of these columns.
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

    /// Which columns these are.
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Number of rows.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Values in one whole row, of which these columns are a part.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Some of these columns of one row, or `None` where they are not all of these.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code)
    )] // the scalar kernels set values singly
    pub(crate) fn values(&mut self, token: usize, columns: Range<usize>) -> Option<&mut [f32]> {
        let n = columns.len();
        let (start, _) = self.block(token..token + 1, columns)?;
        // SAFETY: `n` values inside the borrowed matrix, in columns that only this reaches.
        Some(unsafe { std::slice::from_raw_parts_mut(start, n) })
    }

    /// Where some of these columns of some rows begin, and how far apart rows are, or `None` where
    /// they are not all of these. The values may be read and written until the next call on this.
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
        // SAFETY: the place is inside the borrowed matrix.
        inside.then(|| unsafe { (self.at(tokens.start, columns.start), self.stride) })
    }

    /// Where one value is.
    ///
    /// # Safety
    /// There are such a row and such a column.
    unsafe fn at(&self, token: usize, column: usize) -> *mut f32 {
        // SAFETY: the place is inside the borrowed matrix, as the caller promises.
        unsafe {
            self.values
                .add(token * self.stride + column - self.columns.start)
        }
    }

    /// Writes one value; a place outside these columns is a mistake of the caller, and is left
    /// alone where debug assertions are off.
    #[inline]
    pub(crate) fn set(&mut self, token: usize, column: usize, value: f32) {
        let inside = token < self.n_tokens && self.columns.contains(&column);
        debug_assert!(inside, "row {token}, column {column} of {self:?}");
        if inside {
            // SAFETY: the place is inside the borrowed matrix, and this is the only
            // `OutputColumns` that reaches its column.
            unsafe { *self.at(token, column) = value };
        }
    }

    /// Adds to one value; the rule of [`OutputColumns::set`] holds.
    #[inline]
    pub(crate) fn add(&mut self, token: usize, column: usize, value: f32) {
        let inside = token < self.n_tokens && self.columns.contains(&column);
        debug_assert!(inside, "row {token}, column {column} of {self:?}");
        if inside {
            // SAFETY: as in `set`.
            unsafe { *self.at(token, column) += value };
        }
    }
}
