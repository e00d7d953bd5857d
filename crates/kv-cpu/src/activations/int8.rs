//! Rows of int8 blocks: [`Int8Buffer`] makes them, [`Int8Rows`] is what kernels read.
//!
//! A row is cut into blocks of [`BLOCK`] values. A block whose largest magnitude is `a` has
//! the scale `a / 127`, and value `x` becomes `x · 127 / a` rounded to the nearest integer, ties to
//! even. Two special blocks: where `a < 127 · f32::MIN_POSITIVE` all values and the scale are 0,
//! and where a value is infinite or NaN the scale is NaN, so that whatever is computed from it is
//! NaN too. In *long* rows ([`ScaleSpan::SuperBlock`]) the eight blocks of 256 values have one scale,
//! by the same rule: what weights with integer scales inside blocks of 256 are multiplied with.
//! Beside the values each block has `scale · Σ q`, and `Σ q` whole and by halves, which weights with
//! a minimum or an offset need; `−Σ q` once more in 32 bits, to be broadcast where sums begin. Blocks of long rows also have
//! the larger `Σ |q|` of their halves, which tells whether sums of products fit into 16 bits.
//!
//! Invariant: rows are padded with zero blocks (scale 0) to a multiple of [`PADDING`] blocks, so
//! that kernels may read whole groups of blocks. Knows nothing of weights.

use std::marker::PhantomData;

use super::{ActivationKind, PART};
use crate::kernels::Kernels;

/// Values that share a scale.
pub const BLOCK: usize = 32;
/// Blocks that share a scale in long rows.
pub const SUPER_BLOCK: usize = 8;
/// Rows hold a multiple of this many blocks.
pub const PADDING: usize = SUPER_BLOCK;

/// Over how many values of a row a scale reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleSpan {
    /// [`BLOCK`] values.
    #[default]
    Block,
    /// [`SUPER_BLOCK`] blocks: each of them holds the same scale.
    SuperBlock,
}

impl ScaleSpan {
    /// The kind of activations that such rows are.
    pub fn kind(self) -> ActivationKind {
        match self {
            Self::Block => ActivationKind::Int8,
            Self::SuperBlock => ActivationKind::Int8Long,
        }
    }

    /// Values that share a scale.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Block => BLOCK,
            Self::SuperBlock => BLOCK * SUPER_BLOCK,
        }
    }
}

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
    /// No memory yet; a scale for every block.
    pub fn new() -> Self {
        Self::default()
    }

    /// No memory yet; scales that reach so far.
    pub fn with_span(span: ScaleSpan) -> Self {
        Self {
            span,
            ..Self::default()
        }
    }

    /// Which kind of activations this holds.
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
    /// are prepared. Allocates only to grow.
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

    /// Prepares all rows from `values`, `[tokens, columns]`.
    pub fn prepare(&mut self, kernels: &Kernels, values: &[f32]) {
        debug_assert_eq!(values.len(), self.n_tokens * self.n_columns);
        let n_columns = self.n_columns.max(1);
        let shared = self.shared();
        for (token, values) in values
            .chunks_exact(n_columns)
            .take(shared.n_tokens)
            .enumerate()
        {
            // SAFETY: `shared` came from `&mut self` and stays on this thread: nobody else reads
            // or writes the rows.
            unsafe { shared.prepare_row(kernels, token, values) };
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
            quants,
            scales: &self.scales[..n_blocks],
            sums: &self.sums[..n_blocks],
            int_sums: &self.int_sums[..n_blocks],
            int_half_sums: &self.int_half_sums[..n_blocks],
            negative_sums: &self.negative_sums[..n_blocks],
            negative_half_sums: &self.negative_half_sums[..n_blocks],
            magnitudes: &self.magnitudes[..n_blocks],
        }
    }

    /// The rows, for several threads that each prepare some of them and later read all.
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

/// Blocks in one row of `n_columns` values, with padding.
pub(crate) fn padded_blocks(n_columns: usize) -> usize {
    n_columns.div_ceil(BLOCK).next_multiple_of(PADDING)
}

/// The rows of an [`Int8Buffer`], shared by threads that take turns in writing and reading them.
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
    /// Prepares row `token` from its `n_columns` values.
    ///
    /// # Safety
    /// While this runs, no other thread prepares the same row and nobody reads
    /// the rows.
    pub unsafe fn prepare_row(&self, kernels: &Kernels, token: usize, values: &[f32]) {
        debug_assert!(token < self.n_tokens && values.len() == self.n_columns);
        if token >= self.n_tokens {
            return;
        }
        let n = padded_blocks(self.n_columns);
        let values = &values[..values.len().min(self.n_columns)];
        // SAFETY: `token` is one of `n_tokens` rows of `n` blocks each; the rest is promised to this function.
        unsafe { self.prepare_blocks(kernels, (token * n, n), values) };
    }

    /// Prepares values of the first row that begin [`PART`] times `part` values after its beginning and are as many, or
    /// those that are left.
    ///
    /// # Safety
    /// While this runs, no other thread prepares the same values and nobody reads the rows.
    pub(crate) unsafe fn prepare_part(&self, kernels: &Kernels, part: usize, values: &[f32]) {
        let first = part * PADDING;
        let there = self.n_tokens > 0 && first < padded_blocks(self.n_columns);
        let fits = there && values.len() <= PART;
        debug_assert!(fits);
        if fits {
            // SAFETY: rows are whole parts, and the first one has this part; the rest is promised to this function.
            unsafe { self.prepare_blocks(kernels, (first, PADDING), values) };
        }
    }

    /// Prepares `n` blocks from `first` on, in which `values` are padded with zeros.
    ///
    /// # Safety
    /// There are so many blocks, which hold the values, and no other thread uses them meanwhile.
    unsafe fn prepare_blocks(&self, kernels: &Kernels, (first, n): (usize, usize), values: &[f32]) {
        // SAFETY: the buffer that is borrowed for `'a` holds these blocks, and the caller promises that nobody else uses
        // them meanwhile.
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

/// One row to be filled by a kernel, all in units of (padded) blocks.
#[derive(Debug)]
pub(crate) struct Int8RowMut<'a> {
    pub(crate) span: ScaleSpan,
    pub(crate) quants: &'a mut [[i8; BLOCK]],
    pub(crate) scales: &'a mut [f32],
    pub(crate) sums: &'a mut [f32],
    pub(crate) int_sums: &'a mut [i16],
    pub(crate) int_half_sums: &'a mut [[i16; 2]],
    pub(crate) negative_sums: &'a mut [i32],
    pub(crate) negative_half_sums: &'a mut [[i32; 2]],
    pub(crate) magnitudes: &'a mut [u16],
}

/// Four neighbouring blocks of a row.
#[cfg(target_arch = "x86_64")]
pub(crate) struct FourBlocksMut<'a> {
    pub(crate) quants: &'a mut [[i8; BLOCK]; 4],
    pub(crate) scales: &'a mut [f32; 4],
    pub(crate) sums: &'a mut [f32; 4],
    pub(crate) int_sums: &'a mut [i16; 4],
    pub(crate) int_half_sums: &'a mut [[i16; 2]; 4],
    pub(crate) negative_sums: &'a mut [i32; 4],
    pub(crate) negative_half_sums: &'a mut [[i32; 2]; 4],
    pub(crate) magnitudes: &'a mut [u16; 4],
}

impl Int8RowMut<'_> {
    /// The blocks from `first` on, where there are four.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(crate) fn four(&mut self, first: usize) -> Option<FourBlocksMut<'_>> {
        Some(FourBlocksMut {
            quants: self.quants.get_mut(first..)?.first_chunk_mut()?,
            scales: self.scales.get_mut(first..)?.first_chunk_mut()?,
            sums: self.sums.get_mut(first..)?.first_chunk_mut()?,
            int_sums: self.int_sums.get_mut(first..)?.first_chunk_mut()?,
            int_half_sums: self.int_half_sums.get_mut(first..)?.first_chunk_mut()?,
            negative_sums: self.negative_sums.get_mut(first..)?.first_chunk_mut()?,
            negative_half_sums: self
                .negative_half_sums
                .get_mut(first..)?
                .first_chunk_mut()?,
            magnitudes: self.magnitudes.get_mut(first..)?.first_chunk_mut()?,
        })
    }

    /// Writes the scale of block `b`, whose quants are there, and the sums that follow from it and from the sums of the
    /// halves' quants.
    #[inline]
    pub(crate) fn set_marks(&mut self, b: usize, scale: f32, [low, high]: [i32; 2]) {
        self.scales[b] = scale;
        self.sums[b] = scale * (low + high) as f32;
        // 32 quants of at most 127 fit.
        self.int_sums[b] = (low + high) as i16;
        self.int_half_sums[b] = [low as i16, high as i16];
        self.negative_sums[b] = -(low + high);
        self.negative_half_sums[b] = [-low, -high];
        if self.span == ScaleSpan::SuperBlock {
            let sum = |half: &[i8]| {
                half.iter()
                    .map(|q| u16::from(q.unsigned_abs()))
                    .sum::<u16>()
            };
            let (low, high) = self.quants[b].split_at(BLOCK / 2);
            self.magnitudes[b] = sum(low).max(sum(high));
        }
    }
}

/// Prepared int8 rows.
#[derive(Clone, Copy, Debug)]
pub struct Int8Rows<'a> {
    span: ScaleSpan,
    n_tokens: usize,
    n_columns: usize,
    quants: &'a [[i8; BLOCK]],
    scales: &'a [f32],
    sums: &'a [f32],
    int_sums: &'a [i16],
    int_half_sums: &'a [[i16; 2]],
    negative_sums: &'a [i32],
    negative_half_sums: &'a [[i32; 2]],
    magnitudes: &'a [u16],
}

/// One prepared row, all in units of (padded) blocks.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code)
)] // the scalar kernels take values singly
pub(crate) struct Int8Row<'a> {
    pub(crate) quants: &'a [[i8; BLOCK]],
    pub(crate) scales: &'a [f32],
    pub(crate) sums: &'a [f32],
    pub(crate) int_sums: &'a [i16],
    pub(crate) int_half_sums: &'a [[i16; 2]],
    pub(crate) negative_sums: &'a [i32],
    pub(crate) negative_half_sums: &'a [[i32; 2]],
    pub(crate) magnitudes: &'a [u16],
}

impl<'a> Int8Rows<'a> {
    /// Which kind of activations these are.
    pub fn kind(&self) -> ActivationKind {
        self.span.kind()
    }

    /// Number of rows.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Values in one row.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Some of the rows, or `None` where there are not so many.
    pub fn slice(&self, tokens: std::ops::Range<usize>) -> Option<Self> {
        let n = padded_blocks(self.n_columns);
        let blocks = tokens.start.checked_mul(n)?..tokens.end.checked_mul(n)?;
        Some(Self {
            span: self.span,
            n_tokens: tokens.len(),
            n_columns: self.n_columns,
            quants: self.quants.get(blocks.clone())?,
            scales: self.scales.get(blocks.clone())?,
            sums: self.sums.get(blocks.clone())?,
            int_sums: self.int_sums.get(blocks.clone())?,
            int_half_sums: self.int_half_sums.get(blocks.clone())?,
            negative_sums: self.negative_sums.get(blocks.clone())?,
            negative_half_sums: self.negative_half_sums.get(blocks.clone())?,
            magnitudes: self.magnitudes.get(blocks)?,
        })
    }

    /// The values of row `token` that the int8 blocks stand for, or `None` where there is no such
    /// row: for tests and inspection.
    pub fn dequantized(&self, token: usize) -> Option<Vec<f32>> {
        let row = self.row(token)?;
        let blocks = row.quants.iter().zip(row.scales);
        let values = blocks.flat_map(|(quants, scale)| quants.map(|q| scale * f32::from(q)));
        Some(values.take(self.n_columns).collect())
    }

    /// Where everything begins.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn pointers(&self) -> crate::kernels::panel::Acts {
        crate::kernels::panel::Acts {
            row_blocks: padded_blocks(self.n_columns),
            ..self.blocks().pointers()
        }
    }

    /// The blocks of all rows, one row after the other.
    fn blocks(&self) -> Int8Row<'a> {
        Int8Row {
            quants: self.quants,
            scales: self.scales,
            sums: self.sums,
            int_sums: self.int_sums,
            int_half_sums: self.int_half_sums,
            negative_sums: self.negative_sums,
            negative_half_sums: self.negative_half_sums,
            magnitudes: self.magnitudes,
        }
    }

    /// Scale and quant of one value; the row must exist.
    pub(crate) fn value(&self, token: usize, column: usize) -> (f32, i8) {
        let block = token * padded_blocks(self.n_columns) + column / BLOCK;
        (self.scales[block], self.quants[block][column % BLOCK])
    }

    pub(crate) fn row(&self, token: usize) -> Option<Int8Row<'a>> {
        Some(self.slice(token..token.checked_add(1)?)?.blocks())
    }
}

#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code)
)] // the scalar kernels take values singly
impl<'a> Int8Row<'a> {
    /// Where everything begins.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn pointers(&self) -> crate::kernels::panel::Acts {
        crate::kernels::panel::Acts {
            quants: self.quants.as_ptr(),
            scales: self.scales.as_ptr(),
            sums: self.sums.as_ptr(),
            int_sums: self.int_sums.as_ptr(),
            int_half_sums: self.int_half_sums.as_ptr(),
            negative_sums: self.negative_sums.as_ptr(),
            negative_half_sums: self.negative_half_sums.as_ptr(),
            magnitudes: self.magnitudes.as_ptr(),
            row_blocks: self.n_blocks(),
        }
    }

    /// Blocks in the row, with padding.
    pub(crate) fn n_blocks(&self) -> usize {
        self.quants.len().min(self.scales.len())
    }
}
