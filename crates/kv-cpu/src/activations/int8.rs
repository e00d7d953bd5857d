//! [`Int8Buffer`]: memory for rows of int8 activations, and how threads fill it.
//!
//! Invariant: rows are padded with zero blocks to a multiple of
//! [`PADDING`](crate::operands::PADDING) blocks. Knows nothing of weights.

use std::marker::PhantomData;

use super::PART;
use crate::kernels::Kernels;
use crate::operands::int8::{Int8Row, Int8RowMut, padded_blocks};
use crate::operands::{ActivationKind, BLOCK, Int8Rows, PADDING, ScaleSpan};

/// 64 int8 values on a cache line of their own.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([[i8; BLOCK]; 2]);

/// Memory for int8 rows, reused from operation to operation.
#[derive(Debug, Default)]
pub struct Int8Buffer {
    span: ScaleSpan,
    n_columns: usize,
    n_tokens: usize,
    quants: Vec<Line>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    int_sums: Vec<i16>,
    int_half_sums: Vec<[i16; 2]>,
    negative_sums: Vec<i32>,
    negative_half_sums: Vec<[i32; 2]>,
    magnitudes: Vec<u16>,
}

impl Int8Buffer {
    /// Bytes that are allocated.
    pub(crate) fn n_bytes(&self) -> usize {
        let of_4 = self.scales.capacity()
            + self.sums.capacity()
            + self.int_half_sums.capacity()
            + self.negative_sums.capacity();
        let of_2 = self.int_sums.capacity() + self.magnitudes.capacity();
        self.quants.capacity() * size_of::<Line>()
            + of_4 * 4
            + of_2 * 2
            + self.negative_half_sums.capacity() * 8
    }

    /// No memory yet; a scale for every block.
    pub fn new() -> Self {
        Self::default()
    }

    /// No memory yet; a scale for so many values.
    pub fn with_span(span: ScaleSpan) -> Self {
        Self {
            span,
            ..Self::default()
        }
    }

    /// The kind of activations.
    pub fn kind(&self) -> ActivationKind {
        self.span.kind()
    }

    /// Memory for `n_tokens` rows of `n_columns` values; later shapes that need no more memory
    /// allocate nothing.
    pub fn with_capacity(n_tokens: usize, n_columns: usize) -> Self {
        let mut buffer = Self::new();
        buffer.reshape(n_tokens, n_columns);
        buffer
    }

    /// Makes this `n_tokens` rows of `n_columns` values, whose content is unspecified until they
    /// are quantized. Allocates only to grow.
    pub fn reshape(&mut self, n_tokens: usize, n_columns: usize) {
        let n_blocks = n_tokens * padded_blocks(n_columns);
        if self.scales.len() < n_blocks {
            self.quants.resize(n_blocks / 2, Line([[0; BLOCK]; 2]));
            self.scales.resize(n_blocks, 0.0);
            self.sums.resize(n_blocks, 0.0);
            self.int_sums.resize(n_blocks, 0);
            self.int_half_sums.resize(n_blocks, [0; 2]);
            self.negative_sums.resize(n_blocks, 0);
            self.negative_half_sums.resize(n_blocks, [0; 2]);
            self.magnitudes.resize(n_blocks, 0);
        }
        (self.n_tokens, self.n_columns) = (n_tokens, n_columns);
    }

    /// Quantizes all rows from `values`, `[tokens, columns]`.
    pub fn quantize(&mut self, kernels: &Kernels, values: &[f32]) {
        debug_assert_eq!(values.len(), self.n_tokens * self.n_columns);
        let n_columns = self.n_columns.max(1);
        let shared = self.shared();
        for (token, values) in values
            .chunks_exact(n_columns)
            .take(shared.n_tokens)
            .enumerate()
        {
            // SAFETY: `shared` came from `&mut self` and stays on this thread: no other reads
            // or writes the rows.
            unsafe { shared.quantize_row(kernels, token, values) };
        }
    }

    /// The rows, for reading.
    pub fn rows(&self) -> Int8Rows<'_> {
        let (n_tokens, n_columns) = (self.n_tokens, self.n_columns);
        let n_blocks = n_tokens * padded_blocks(n_columns);
        // SAFETY: `Line` is two blocks without padding (its size is its alignment), and
        // `reshape` made room for `n_blocks`.
        let quants = unsafe {
            std::slice::from_raw_parts(self.quants.as_ptr().cast::<[i8; BLOCK]>(), n_blocks)
        };
        Int8Rows {
            span: self.span,
            n_tokens,
            n_columns,
            blocks: Int8Row {
                quants,
                scales: &self.scales[..n_blocks],
                sums: &self.sums[..n_blocks],
                int_sums: &self.int_sums[..n_blocks],
                int_half_sums: &self.int_half_sums[..n_blocks],
                negative_sums: &self.negative_sums[..n_blocks],
                negative_half_sums: &self.negative_half_sums[..n_blocks],
                magnitudes: &self.magnitudes[..n_blocks],
            },
        }
    }

    /// The rows, for several threads that each quantize some of them and later read all.
    pub fn shared(&mut self) -> Int8Shared<'_> {
        Int8Shared {
            span: self.span,
            n_tokens: self.n_tokens,
            n_columns: self.n_columns,
            quants: self.quants.as_mut_ptr().cast(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            int_sums: self.int_sums.as_mut_ptr(),
            int_half_sums: self.int_half_sums.as_mut_ptr(),
            negative_sums: self.negative_sums.as_mut_ptr(),
            negative_half_sums: self.negative_half_sums.as_mut_ptr(),
            magnitudes: self.magnitudes.as_mut_ptr(),
            owner: PhantomData,
        }
    }
}

/// The rows of an [`Int8Buffer`], shared by threads that write and read them in turns.
#[derive(Clone, Copy, Debug)]
pub struct Int8Shared<'a> {
    span: ScaleSpan,
    n_tokens: usize,
    n_columns: usize,
    quants: *mut [i8; BLOCK],
    scales: *mut f32,
    sums: *mut f32,
    int_sums: *mut i16,
    int_half_sums: *mut [i16; 2],
    negative_sums: *mut i32,
    negative_half_sums: *mut [i32; 2],
    magnitudes: *mut u16,
    owner: PhantomData<&'a mut Int8Buffer>,
}

// SAFETY: plain memory borrowed for `'a`; every access is an unsafe call whose caller promises that
// no row is written while another thread uses it.
unsafe impl Send for Int8Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Int8Shared<'_> {}

impl<'a> Int8Shared<'a> {
    /// Quantizes row `token` from its `n_columns` values.
    ///
    /// # Safety
    /// While this runs, no other thread quantizes the same row and no thread reads
    /// the rows.
    pub unsafe fn quantize_row(&self, kernels: &Kernels, token: usize, values: &[f32]) {
        debug_assert!(token < self.n_tokens && values.len() == self.n_columns);
        if token >= self.n_tokens {
            return;
        }
        let n = padded_blocks(self.n_columns);
        let values = &values[..values.len().min(self.n_columns)];
        // SAFETY: `token` is one of `n_tokens` rows of `n` blocks each; the rest is promised to
        // this function.
        unsafe { self.quantize_blocks(kernels, token * n, n, values) };
    }

    /// Quantizes part `part` of the first row: [`PART`] values, or those that are left.
    ///
    /// # Safety
    /// While this runs, no other thread quantizes the same values and no thread reads the rows.
    pub(crate) unsafe fn quantize_part(&self, kernels: &Kernels, part: usize, values: &[f32]) {
        let first = part * PADDING;
        let there = self.n_tokens > 0 && first < padded_blocks(self.n_columns);
        let fits = there && values.len() <= PART;
        debug_assert!(fits);
        if fits {
            // SAFETY: rows are whole parts, and the first one has this part; the rest is promised
            // to this function.
            unsafe { self.quantize_blocks(kernels, first, PADDING, values) };
        }
    }

    /// Quantizes `values`, padded with zeros, to `n` blocks from `first` on.
    ///
    /// # Safety
    /// There are so many blocks, which hold the values, and no other thread uses them meanwhile.
    unsafe fn quantize_blocks(&self, kernels: &Kernels, first: usize, n: usize, values: &[f32]) {
        // SAFETY: the buffer that is borrowed for `'a` holds these blocks, and the caller promises
        // that no other thread uses them meanwhile.
        let row = unsafe {
            Int8RowMut {
                span: self.span,
                quants: std::slice::from_raw_parts_mut(self.quants.add(first), n),
                scales: std::slice::from_raw_parts_mut(self.scales.add(first), n),
                sums: std::slice::from_raw_parts_mut(self.sums.add(first), n),
                int_sums: std::slice::from_raw_parts_mut(self.int_sums.add(first), n),
                int_half_sums: std::slice::from_raw_parts_mut(self.int_half_sums.add(first), n),
                negative_sums: std::slice::from_raw_parts_mut(self.negative_sums.add(first), n),
                negative_half_sums: std::slice::from_raw_parts_mut(
                    self.negative_half_sums.add(first),
                    n,
                ),
                magnitudes: std::slice::from_raw_parts_mut(self.magnitudes.add(first), n),
            }
        };
        let used = values.len().div_ceil(BLOCK);
        row.quants[used..].fill([0; BLOCK]);
        row.scales[used..].fill(0.0);
        row.sums[used..].fill(0.0);
        row.int_sums[used..].fill(0);
        row.int_half_sums[used..].fill([0; 2]);
        row.negative_sums[used..].fill(0);
        row.negative_half_sums[used..].fill([0; 2]);
        row.magnitudes[used..].fill(0);
        (kernels.quantize)(values, row);
    }
}
