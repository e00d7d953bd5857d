//! Rows of floats of whose values thirteen bits say all: the others need not be read.
//!
//! Models are trained in BF16, whose values have eight significant bits, and whichever format their file has, those of a
//! row are seldom more than thirty binades apart. So a row is stored as a scale, a power of two, and of each value its sign, five
//! bits of exponent and seven of mantissa. Where that does not give every bit of every value the row cannot be repacked.
//!
//! Of each 64 columns the lower eight bits come first, then the upper four of the exponent, then signs, in an order that takes them
//! to the lanes of registers. The row's scale stands at its end. Products are added up as [`floats`](crate::kernels::floats)
//! does. What a scale is, which order that is and what activations are says [`Short`].

pub(super) mod bf16;
pub(super) mod floats;
#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use kv_core::block::BlockFormat;

use super::floats::Sixteen;
use crate::kernels::ahead::{Ahead, ask_next_tile};
use crate::kernels::fetch::Level;
use crate::kernels::floats::Columns;
use crate::kernels::{Arrangement, WeightRows};
use crate::output::OutputColumns;

/// Columns of a block.
pub(super) const COLUMNS: usize = 64;
/// Where the nibbles and signs of a block begin, and its end.
const NIBBLES: usize = COLUMNS;
const SIGNS: usize = NIBBLES + COLUMNS / 2;
const BLOCK: usize = SIGNS + COLUMNS / 8;
/// Bytes of a row's scale.
const SCALE: usize = 4;
const LINE: usize = 64;
/// Tokens that are multiplied side by side, and up to how many rows are read as they lie: for more they are stored as
/// they were before, once for all of them.
const TOKENS: usize = 8;
const FEW: usize = 32;

/// The exponent of the largest value of a row before it is scaled: the largest that has five bits.
const TOP: u32 = 31;

/// Bytes of a row, 0 where there is no such row.
pub(super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    match format {
        BlockFormat::BF16 | BlockFormat::F16 | BlockFormat::F32
            if n_columns.is_multiple_of(COLUMNS) =>
        {
            n_columns / COLUMNS * BLOCK + SCALE
        }
        _ => 0,
    }
}

/// Repacks the given rows, as they are stored, with `repack_row`; says whether all values could be kept, else what was written
/// means nothing.
#[inline(always)]
fn repack_rows(
    stored: &WeightRows<'_>,
    to: &mut [u8],
    repack_row: impl Fn(&[u8], &mut [u8]) -> bool,
) -> bool {
    let row_bytes = row_bytes(stored.format, stored.n_columns).max(1);
    let rows = stored.bytes.chunks_exact(stored.row_bytes.max(1));
    rows.zip(to.chunks_exact_mut(row_bytes))
        .all(|(row, to)| repack_row(row, to))
}

/// What rows are multiplied with, and how their values come to registers.
///
/// All functions need the instruction set that the type stands for, which is what makes them unsafe to call.
#[allow(clippy::missing_safety_doc)] // said once, above
trait Short {
    /// An activation.
    type Act: Copy;
    /// A block's weights.
    type Values: Copy;

    /// The weights of a block, which can be read, in a row of the given scale.
    unsafe fn values(block: *const u8, scale: [u8; SCALE]) -> Self::Values;
    /// Adds a block's products with activations, of which there are as many.
    unsafe fn add(sum: __m512, values: &Self::Values, acts: *const Self::Act) -> __m512;
}

/// All rows against at most [`FEW`] tokens, one after the other `stride` activations further.
///
/// # Safety
/// There are such tokens, and rows are of [`row_bytes`]; the instruction set is available.
#[inline(always)]
unsafe fn few<S: Short>(
    weights: &WeightRows<'_>,
    (acts, stride): (*const S::Act, usize),
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let mut token = tokens.start;
    while token < tokens.end {
        let left = tokens.end - token;
        // Of nine tokens five and four, not eight and one.
        let together = left.div_ceil(left.div_ceil(TOKENS));
        // SAFETY: as the caller promises.
        unsafe {
            let acts = (acts.add(token * stride), stride);
            match together {
                1 => rows::<S, 1, 4>(weights, acts, token, out),
                2 => rows::<S, 2, 2>(weights, acts, token, out),
                3 => rows::<S, 3, 2>(weights, acts, token, out),
                4 => rows::<S, 4, 2>(weights, acts, token, out),
                5 => rows::<S, 5, 2>(weights, acts, token, out),
                6 => rows::<S, 6, 2>(weights, acts, token, out),
                7 => rows::<S, 7, 2>(weights, acts, token, out),
                _ => rows::<S, TOKENS, 2>(weights, acts, token, out),
            }
        }
        token += together;
    }
}

/// All rows against `T` tokens, `R` rows at a time.
///
/// # Safety
/// As for [`few`]; `acts` are those of `token`.
#[inline(always)]
unsafe fn rows<S: Short, const T: usize, const R: usize>(
    weights: &WeightRows<'_>,
    acts: (*const S::Act, usize),
    token: usize,
    out: &mut OutputColumns<'_>,
) {
    let tiles = weights.bytes.chunks_exact(R * weights.row_bytes);
    debug_assert!(tiles.remainder().is_empty());
    for (tile, rows) in tiles.enumerate() {
        let first = weights.first + tile * R;
        let Some((to, stride)) = out.block(token..token + T, first..first + R) else {
            return;
        };
        // SAFETY: so many rows, and as many tokens as are promised; `to` has room for the sums of both.
        unsafe {
            let n_blocks = weights.n_columns / COLUMNS;
            let sums = products::<S, T, R>(rows.as_ptr(), weights.row_bytes, acts, n_blocks);
            for (r, sums) in sums.into_iter().enumerate() {
                for (t, sum) in Sixteen::sums(sums).into_iter().enumerate() {
                    *to.add(t * stride + r) = sum;
                }
            }
        }
    }
}

/// `R` rows against `T` tokens: a register of sums for each, `[rows][tokens]`.
///
/// # Safety
/// They can be read; the instruction set is available.
#[inline(always)]
unsafe fn products<S: Short, const T: usize, const R: usize>(
    rows: *const u8,
    row_bytes: usize,
    (acts, stride): (*const S::Act, usize),
    n_blocks: usize,
) -> [[__m512; T]; R] {
    let level = Level::of_streams();
    let mut scales = [[0; SCALE]; R];
    for (r, scale) in scales.iter_mut().enumerate() {
        let at = rows.wrapping_add(r * row_bytes + n_blocks * BLOCK);
        // SAFETY: the row can be read, and its scale is at its end.
        *scale = unsafe { at.cast::<[u8; SCALE]>().read() };
    }
    // SAFETY: the instruction set is available, as the caller promises.
    let mut sums = unsafe { [[Sixteen::zero(); T]; R] };
    for b in 0..n_blocks {
        // So many blocks of all rows are a whole number of lines.
        if b % (8 / R) == 0 {
            ask_ahead::<R>(rows, b * BLOCK, row_bytes, level);
        }
        for (pair, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (r, [of_first, of_second]) = (2 * pair, sums);
            // SAFETY: the rows have this block, and the tokens these columns.
            unsafe {
                let row = rows.add(r * row_bytes + b * BLOCK);
                let first = S::values(row, scales[r]);
                let second = S::values(row.add(row_bytes), scales[r + 1]);
                for (t, sums) in of_first.iter_mut().zip(of_second).enumerate() {
                    let acts = acts.add(t * stride + b * COLUMNS);
                    *sums.0 = S::add(*sums.0, &first, acts);
                    *sums.1 = S::add(*sums.1, &second, acts);
                }
            }
        }
    }
    sums
}

/// Asks for what comes after byte `at` of `R` rows, as much as is read until it is asked for again.
#[inline(always)]
fn ask_ahead<const R: usize>(rows: *const u8, at: usize, row_bytes: usize, level: Level) {
    const { assert!((8 * BLOCK).is_multiple_of(LINE) && R.is_multiple_of(2)) };
    match level {
        Level::First => {
            let ahead = Ahead::of::<R>(at, 8 / R * BLOCK, row_bytes);
            for r in 0..R {
                ahead.fetch(rows.wrapping_add(r * row_bytes + at), r);
            }
        }
        Level::Second => {
            for line in 0..8 * BLOCK / LINE {
                ask_next_tile::<R>(rows, (at, line), row_bytes);
            }
        }
    }
}

thread_local! {
    /// Rows as they were stored, for many tokens.
    static STORED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Stores rows as they were, with `store`, for whom they are multiplied by.
#[inline(always)]
fn as_stored(
    weights: &WeightRows<'_>,
    store: impl Fn(&[u8], &mut [u8]),
    multiply: impl FnOnce(&WeightRows<'_>),
) {
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let row_bytes = weights.n_columns * weights.format.block_bytes();
    STORED.with_borrow_mut(|bytes| {
        bytes.resize(n_rows * row_bytes, 0);
        let rows = weights.bytes.chunks_exact(weights.row_bytes);
        for (row, to) in rows.zip(bytes.chunks_exact_mut(row_bytes)) {
            store(row, to);
        }
        multiply(&WeightRows {
            arrangement: Arrangement::Stored,
            bytes,
            row_bytes,
            ..*weights
        });
    });
}

/// The blocks of a row, and its scale.
fn parts(row: &[u8]) -> Option<(&[[u8; BLOCK]], [u8; SCALE])> {
    let (blocks, scale) = row.split_last_chunk::<SCALE>()?;
    Some((blocks.as_chunks().0, *scale))
}

/// Block `b` of row `row`, and the row's scale.
fn block_of<'a>(
    weights: &WeightRows<'a>,
    row: usize,
    b: usize,
) -> Option<(&'a [u8; BLOCK], [u8; SCALE])> {
    let mut rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    let (blocks, scale) = rows.nth(row).and_then(parts)?;
    Some((blocks.get(b)?, scale))
}

/// Values of 64 columns in 16 bits each, of which bits 12 to 14 are zero: of each eight bytes of the lower half the first
/// eight, with what is above them, of the other eight the second.
///
/// # Safety
/// The block can be read; the instruction set is available.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn halves(block: *const u8) -> [__m512i; 2] {
    // SAFETY: as the caller promises; loads need no alignment.
    let (lower, nibbles, signs) = unsafe {
        (
            _mm512_loadu_si512(block.cast()),
            _mm256_loadu_si256(block.add(NIBBLES).cast()),
            block.add(SIGNS).cast::<u64>().read_unaligned(),
        )
    };
    // Low nibbles in the lower half, high ones in the upper half.
    let to_bottom = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(4));
    let upper = _mm512_srlv_epi16(_mm512_broadcast_i64x4(nibbles), to_bottom);
    let upper = _mm512_and_si512(upper, _mm512_set1_epi8(0xf));
    let upper = _mm512_mask_add_epi8(upper, signs, upper, _mm512_set1_epi8(i8::MIN));
    [
        _mm512_unpacklo_epi8(lower, upper),
        _mm512_unpackhi_epi8(lower, upper),
    ]
}

/// A block from such registers: the inverse.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn put([a, b]: [__m512i; 2], to: &mut [u8; BLOCK]) {
    let bytes = _mm512_set1_epi16(0xff);
    let lower = _mm512_packus_epi16(_mm512_and_si512(a, bytes), _mm512_and_si512(b, bytes));
    let upper = _mm512_packus_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
    let signs = _mm512_movepi8_mask(upper);
    let nibbles = _mm512_and_si512(upper, _mm512_set1_epi8(0xf));
    let high = _mm256_slli_epi16::<4>(_mm512_extracti64x4_epi64::<1>(nibbles));
    let nibbles = _mm256_or_si256(_mm512_castsi512_si256(nibbles), high);
    let to = to.as_mut_ptr();
    // SAFETY: a whole block can be written; stores need no alignment.
    unsafe {
        _mm512_storeu_si512(to.cast(), lower);
        _mm256_storeu_si256(to.add(NIBBLES).cast(), nibbles);
        to.add(SIGNS).cast::<u64>().write_unaligned(signs);
    }
}
