//! [`Bf16Buffer`]: memory for rows of BF16 activations.
//!
//! Invariant: each row begins at a cache line; its padding is never read. Knows nothing of weights.

use std::marker::PhantomData;

use half::bf16;

use super::PART;
use crate::kernels::Kernels;
use crate::operands::Bf16Rows;
use crate::operands::bf16::{LINE, stride};

/// A cache line of values.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([bf16; LINE]);

/// Memory for BF16 rows, reused from operation to operation.
#[derive(Debug, Default)]
pub struct Bf16Buffer {
    n_tokens: usize,
    n_columns: usize,
    values: Vec<Line>,
}

impl Bf16Buffer {
    /// Bytes that are allocated.
    pub(crate) fn n_bytes(&self) -> usize {
        self.values.capacity() * size_of::<Line>()
    }

    /// Makes this `n_tokens` rows of `n_columns` values, whose content is unspecified until
    /// they are quantized. Allocates only to grow.
    pub fn reshape(&mut self, n_tokens: usize, n_columns: usize) {
        let n_lines = n_tokens * stride(n_columns) / LINE;
        if self.values.len() < n_lines {
            self.values.resize(n_lines, Line([bf16::ZERO; LINE]));
        }
        (self.n_tokens, self.n_columns) = (n_tokens, n_columns);
    }

    /// Quantizes all rows from `values`, `[tokens, columns]`.
    pub fn quantize(&mut self, kernels: &Kernels, values: &[f32]) {
        debug_assert_eq!(values.len(), self.n_tokens * self.n_columns);
        let n_columns = self.n_columns.max(1);
        let shared = self.shared();
        for (token, values) in values.chunks_exact(n_columns).enumerate() {
            // SAFETY: `shared` came from `&mut self` and stays on this thread.
            unsafe { shared.quantize_row(kernels, token, values) };
        }
    }

    /// The rows, for reading.
    pub fn rows(&self) -> Bf16Rows<'_> {
        let n_values = self.n_tokens * stride(self.n_columns);
        // SAFETY: `Line` is its values without padding (its size is its alignment), and `reshape`
        // made room for so many.
        let values = unsafe { std::slice::from_raw_parts(self.values.as_ptr().cast(), n_values) };
        Bf16Rows {
            n_tokens: self.n_tokens,
            n_columns: self.n_columns,
            values,
        }
    }

    /// The rows, for several threads that each quantize some of them.
    pub fn shared(&mut self) -> Bf16Shared<'_> {
        Bf16Shared {
            n_tokens: self.n_tokens,
            n_columns: self.n_columns,
            values: self.values.as_mut_ptr().cast(),
            owner: PhantomData,
        }
    }
}

/// The rows of a [`Bf16Buffer`], shared by threads that write and read them in turns.
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
    /// Quantizes row `token` from its `n_columns` values.
    ///
    /// # Safety
    /// While this runs, no other thread quantizes the same row, and no thread reads the rows.
    pub unsafe fn quantize_row(&self, kernels: &Kernels, token: usize, values: &[f32]) {
        let fits = token < self.n_tokens && values.len() == self.n_columns;
        debug_assert!(fits);
        if fits {
            // SAFETY: the row has so many values; the rest is promised to this function.
            unsafe { self.round(kernels, token * stride(self.n_columns), values) };
        }
    }

    /// Quantizes part `part` of the first row: [`PART`] values, or those that are left.
    ///
    /// # Safety
    /// While this runs, no other thread quantizes the same values, and no thread reads the rows.
    pub(crate) unsafe fn quantize_part(&self, kernels: &Kernels, part: usize, values: &[f32]) {
        let first = part * PART;
        let fits = self.n_tokens > 0 && first + values.len() <= self.n_columns;
        debug_assert!(fits && values.len() <= PART);
        if fits {
            // SAFETY: the first row has so many values; the rest is promised to this function.
            unsafe { self.round(kernels, first, values) };
        }
    }

    /// Rounds values to places from value `first` on.
    ///
    /// # Safety
    /// There are so many, and no other thread uses them meanwhile.
    unsafe fn round(&self, kernels: &Kernels, first: usize, values: &[f32]) {
        // SAFETY: as the caller promises, of the buffer that is borrowed for `'a`.
        let to = unsafe { std::slice::from_raw_parts_mut(self.values.add(first), values.len()) };
        (kernels.round_bf16)(values, to);
    }
}
