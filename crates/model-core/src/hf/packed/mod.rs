//! [`Packed`]: a matrix of whole numbers or 4-bit floats with scales for groups of columns, as
//! GPTQ, AWQ, compressed-tensors and BitNet store it in several tensors.
//!
//! Invariant: no value is rounded. A matrix becomes the smallest block format that holds its
//! numbers and scales as they are: a zero point only moves the numbers, so 4 bits with any zero
//! point fit the 5 bits of `Q5_0`. Where none does, it becomes `F32`. It is made when requested.

mod actions;
mod codes;
mod join;
mod module;
mod scales;

use half::f16;
use kv_block::{BlockFormat, MXFP4_VALUES, integer_block, integer_formats, mxfp4_block};
use kv_graph::weights::SharedBytes;

pub(super) use actions::{keep_rows, of_product};
pub(super) use join::join;

use codes::Codes;
use scales::{Groups, ScaleType, Scales};

/// Rows that are unpacked together: their codes lie next to each other in some layouts.
const ROWS_AT_ONCE: usize = 32;

/// What codes are subtracted from.
#[derive(Clone, Debug)]
enum Zeros {
    /// One number for all.
    Same(i32),
    /// A code for each row and group, and what is added to it.
    Each(Codes, i32),
}

impl Zeros {
    fn get(&self, row: usize, group: usize) -> i32 {
        match self {
            Self::Same(zero) => *zero,
            Self::Each(codes, more) => codes.get(row, group) as i32 + more,
        }
    }
}

/// The meaning of codes.
#[derive(Clone, Debug)]
enum Numbers {
    /// Whole numbers, less a zero point.
    Integers(Zeros),
    /// A sign, two bits of exponent and one of mantissa.
    Floats,
}

/// A matrix of packed numbers. See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Packed {
    n_rows: usize,
    n_columns: usize,
    codes: Codes,
    numbers: Numbers,
    scales: Scales,
    groups: Groups,
    n_groups: usize,
}

/// The scales and zero points of one row, a group each.
struct RowScales {
    scales: Vec<f32>,
    zeros: Vec<i32>,
}

impl Packed {
    /// The smallest format that holds all values, or why they are none.
    fn nearest(&self) -> Result<BlockFormat, String> {
        let (mut is_half, mut least, mut most) = (true, i32::MAX, i32::MIN);
        for row in 0..self.n_rows {
            for group in 0..self.n_groups {
                let scale = self.scales.get(row, group);
                if !scale.is_finite() {
                    return Err(format!(
                        "{scale} as the scale of group {group} of row {row}: a finite number is \
                         needed"
                    ));
                }
                is_half &= f16::from_f32(scale).to_f32() == scale;
                if let Numbers::Integers(zeros) = &self.numbers {
                    let zero = zeros.get(row, group);
                    (least, most) = (least.min(zero), most.max(zero));
                }
            }
        }
        let has_blocks = |format: &BlockFormat| {
            let len = format.block_len();
            self.n_columns.is_multiple_of(len) && self.groups.keep_blocks_whole(len)
        };
        let format = match self.numbers {
            Numbers::Floats => {
                let is_power = self.scales.stored() == ScaleType::E8M0;
                is_power.then_some(BlockFormat::MXFP4).filter(has_blocks)
            }
            Numbers::Integers(_) if is_half => {
                let last = (1 << self.codes.bits()) - 1;
                integer_formats(most.saturating_neg(), last - least).find(has_blocks)
            }
            Numbers::Integers(_) => None,
        };
        Ok(format.unwrap_or(BlockFormat::F32))
    }

    /// The kind of numbers, in words.
    pub(super) fn description(&self) -> String {
        let numbers = match self.numbers {
            Numbers::Integers(_) => "whole numbers",
            Numbers::Floats => "floats",
        };
        format!("{numbers} of {} bits with scales", self.codes.bits())
    }

    /// The values in their nearest format, or in another that holds them.
    pub(super) fn decode(&self, format: BlockFormat) -> SharedBytes {
        let row_bytes = format.row_bytes(self.n_columns).unwrap_or(0);
        let mut bytes = vec![0; self.n_rows * row_bytes];
        let mut codes = vec![0u8; ROWS_AT_ONCE * self.n_columns];
        for first in (0..self.n_rows).step_by(ROWS_AT_ONCE) {
            let rows = first..self.n_rows.min(first + ROWS_AT_ONCE);
            self.codes.unpack(rows.clone(), self.n_columns, &mut codes);
            for (codes, row) in codes.chunks(self.n_columns.max(1)).zip(rows) {
                let out = &mut bytes[row * row_bytes..(row + 1) * row_bytes];
                match format {
                    BlockFormat::F32 => self.floats(row, codes, out),
                    BlockFormat::MXFP4 => self.mxfp4(row, codes, out),
                    _ => self.integers(format, row, codes, out),
                }
            }
        }
        bytes.into()
    }

    fn row_scales(&self, row: usize) -> RowScales {
        let groups = 0..self.n_groups;
        let zero = |group| match &self.numbers {
            Numbers::Integers(zeros) => zeros.get(row, group),
            Numbers::Floats => 0,
        };
        RowScales {
            scales: groups.clone().map(|g| self.scales.get(row, g)).collect(),
            zeros: groups.map(zero).collect(),
        }
    }

    fn floats(&self, row: usize, codes: &[u8], out: &mut [u8]) {
        let RowScales { scales, zeros } = self.row_scales(row);
        let values = out.as_chunks_mut::<4>().0;
        for ((column, code), value) in codes.iter().enumerate().zip(values) {
            let group = self.groups.of(column);
            let number = match self.numbers {
                Numbers::Integers(_) => (i32::from(*code) - zeros[group]) as f32,
                Numbers::Floats => f32::from(MXFP4_VALUES[usize::from(*code & 15)]) / 2.0,
            };
            *value = (number * scales[group]).to_le_bytes();
        }
    }

    fn mxfp4(&self, row: usize, codes: &[u8], out: &mut [u8]) {
        let blocks = out.as_chunks_mut::<17>().0.iter_mut();
        for ((at, codes), block) in codes.as_chunks::<32>().0.iter().enumerate().zip(blocks) {
            let group = self.groups.of(at * 32);
            *block = mxfp4_block(self.scales.exponent(row, group), codes);
        }
    }

    fn integers(&self, format: BlockFormat, row: usize, codes: &[u8], out: &mut [u8]) {
        let RowScales { scales, zeros } = self.row_scales(row);
        let len = format.block_len();
        let blocks = out.chunks_mut(format.block_bytes());
        let mut numbers = vec![0; len];
        for ((at, codes), block) in codes.chunks(len).enumerate().zip(blocks) {
            let group = self.groups.of(at * len);
            for (number, code) in numbers.iter_mut().zip(codes) {
                *number = (i32::from(*code) - zeros[group]) as i16;
            }
            let scale = f16::from_f32(scales[group]);
            let written = integer_block(format, scale, &numbers, block);
            debug_assert!(written.is_ok(), "{written:?}");
        }
    }
}

/// The smallest format that holds the values of two matrices of packed numbers.
pub(super) fn wider(a: BlockFormat, b: BlockFormat) -> BlockFormat {
    let is_integers = |format| integer_formats(0, 0).any(|known| known == format);
    if a == b || is_integers(a) && is_integers(b) {
        // The largest block is of 256 values.
        std::cmp::max_by_key(a, b, |format| format.row_bytes(256))
    } else {
        BlockFormat::F32
    }
}
