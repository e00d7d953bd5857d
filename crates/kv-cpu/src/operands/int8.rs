//! Int8 activations as kernels read and write them: [`Int8Rows`] and [`Int8RowMut`].
//!
//! A row is cut into blocks of [`BLOCK`] values. A block whose largest magnitude is `a` has
//! the scale `a / 127`, and value `x` becomes `x · 127 / a` rounded to the nearest integer, ties to
//! even. Two special blocks: where `a < 127 · f32::MIN_POSITIVE` all values and the scale are 0,
//! and where a value is infinite or NaN the scale is NaN, so that every product is NaN too. In rows
//! with [`ScaleSpan::SuperBlock`] the eight blocks of 256 values share one scale, by the same rule;
//! weights with integer scales inside blocks of 256 are multiplied with these.
//!
//! Besides its quants each block has `scale · Σ q`, and `Σ q` for the block and for its halves,
//! which weights with a minimum or an offset need; `−Σ q` once more in 32 bits, to be broadcast as
//! the initial sum. Super-block rows also have the larger `Σ |q|` of each block's halves, which
//! tells whether sums of products fit into 16 bits.
//!
//! Invariant: rows are padded with zero blocks (scale 0) to a multiple of [`PADDING`] blocks, so
//! that kernels may read whole groups of blocks. Knows nothing of weights or kernels.

use super::ActivationKind;

/// Values that share a scale.
pub const BLOCK: usize = 32;
/// Blocks that share a scale in long rows.
pub const SUPER_BLOCK: usize = 8;
/// Rows hold a multiple of this many blocks.
pub const PADDING: usize = SUPER_BLOCK;

/// The number of values of a row share a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleSpan {
    /// [`BLOCK`] values.
    #[default]
    Block,
    /// [`SUPER_BLOCK`] blocks: each of them holds the same scale.
    SuperBlock,
}

impl ScaleSpan {
    /// The kind of activations with such scales.
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

/// Blocks in one row of `n_columns` values, with padding.
pub(crate) fn padded_blocks(n_columns: usize) -> usize {
    n_columns.div_ceil(BLOCK).next_multiple_of(PADDING)
}

/// One row that a kernel fills, all in units of (padded) blocks.
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

/// Four neighbouring blocks of a row that a kernel fills.
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

    /// Writes the scale of block `b`, whose quants are written, and what follows from it and from
    /// the sums of the quants of its halves.
    #[inline]
    pub(crate) fn set_scale_and_sums(&mut self, b: usize, scale: f32, [low, high]: [i32; 2]) {
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

/// The start of the parts of quantized rows, and how many blocks a row has.
#[derive(Clone, Copy)]
pub(crate) struct Int8Acts {
    pub(crate) quants: *const [i8; BLOCK],
    pub(crate) scales: *const f32,
    pub(crate) sums: *const f32,
    pub(crate) int_sums: *const i16,
    pub(crate) int_half_sums: *const [i16; 2],
    pub(crate) negative_sums: *const i32,
    pub(crate) negative_half_sums: *const [i32; 2],
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only AVX-512 multiplies in pairs
    pub(crate) magnitudes: *const u16,
    pub(crate) row_blocks: usize,
}

impl Int8Acts {
    /// The address of `−Σ q` of a block (`parts` = 1) or of half a block: that of half block
    /// `half`, counted from block `first`.
    ///
    /// # Safety
    /// There are so many blocks.
    #[inline(always)]
    pub(crate) unsafe fn negative_sum(
        &self,
        parts: usize,
        first: usize,
        half: usize,
    ) -> *const i32 {
        // SAFETY: as the caller promises.
        unsafe {
            match parts {
                1 => self.negative_sums.add(first + half / 2),
                _ => self.negative_half_sums.add(first).cast::<i32>().add(half),
            }
        }
    }

    /// The address of sums `2 · pair` and `2 · pair + 1` of the blocks (`parts` = 1) or half blocks
    /// from block `first` on, in 16 bits each; not aligned.
    ///
    /// # Safety
    /// There are so many blocks.
    #[inline(always)]
    pub(crate) unsafe fn two_sums(&self, parts: usize, first: usize, pair: usize) -> *const i32 {
        // SAFETY: as the caller promises.
        unsafe {
            match parts {
                1 => self.int_sums.add(first + 2 * pair).cast(),
                _ => self.int_half_sums.add(first + pair).cast(),
            }
        }
    }
}

/// Quantized rows.
#[derive(Clone, Copy, Debug)]
pub struct Int8Rows<'a> {
    pub(crate) span: ScaleSpan,
    pub(crate) n_tokens: usize,
    pub(crate) n_columns: usize,
    /// The blocks of all rows, one row after the other.
    pub(crate) blocks: Int8Row<'a>,
}

/// One quantized row, all in units of (padded) blocks.
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
    /// The kind of activations.
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
        let all = &self.blocks;
        Some(Self {
            span: self.span,
            n_tokens: tokens.len(),
            n_columns: self.n_columns,
            blocks: Int8Row {
                quants: all.quants.get(blocks.clone())?,
                scales: all.scales.get(blocks.clone())?,
                sums: all.sums.get(blocks.clone())?,
                int_sums: all.int_sums.get(blocks.clone())?,
                int_half_sums: all.int_half_sums.get(blocks.clone())?,
                negative_sums: all.negative_sums.get(blocks.clone())?,
                negative_half_sums: all.negative_half_sums.get(blocks.clone())?,
                magnitudes: all.magnitudes.get(blocks)?,
            },
        })
    }

    /// Row `token` dequantized, or `None` where there is no such row: for tests and inspection.
    pub fn dequantized(&self, token: usize) -> Option<Vec<f32>> {
        let row = self.row(token)?;
        let blocks = row.quants.iter().zip(row.scales);
        let values = blocks.flat_map(|(quants, scale)| quants.map(|q| scale * f32::from(q)));
        Some(values.take(self.n_columns).collect())
    }

    /// The start of the parts of the rows.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn pointers(&self) -> Int8Acts {
        Int8Acts {
            row_blocks: padded_blocks(self.n_columns),
            ..self.blocks.pointers()
        }
    }

    /// Scale and quant of one value; the row must exist.
    pub(crate) fn value(&self, token: usize, column: usize) -> (f32, i8) {
        let block = token * padded_blocks(self.n_columns) + column / BLOCK;
        (
            self.blocks.scales[block],
            self.blocks.quants[block][column % BLOCK],
        )
    }

    /// Row `token`, or `None` where there is no such row.
    pub(crate) fn row(&self, token: usize) -> Option<Int8Row<'a>> {
        Some(self.slice(token..token.checked_add(1)?)?.blocks)
    }
}

#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code)
)] // the scalar kernels take values singly
impl<'a> Int8Row<'a> {
    /// The start of the parts of the rows.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn pointers(&self) -> Int8Acts {
        Int8Acts {
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
