//! GEMV and skinny GEMM on floats packed to fewer bits without loss.
//!
//! Models are trained in BF16, whose values have eight significant bits, and whichever format their
//! file has, those of a row are seldom more than thirty binades apart. So a row is stored as a
//! power of two and, for each value, its sign, five bits of exponent and seven of mantissa
//! ([`bf13`]). Where that does not keep every bit of every value, the row cannot be packed.
//!
//! Additions are in the order of [`gemm_float`](crate::kernels::gemm_float). [`PackedFloat`] says
//! how values are stored and what activations are.

pub(super) mod bf13;
pub(super) mod bf16;
pub(super) mod f32;
#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::float::Avx512Float;
use crate::kernels::gemm_float::FloatIsa;
use crate::kernels::prefetch::CacheLevel;
use crate::kernels::prefetch::{Prefetcher, prefetch_next_tile};
use crate::kernels::{WeightLayout, WeightRows};
use crate::output::OutputColumns;

const LINE: usize = 64;
/// Tokens of a tile, and the most tokens that packed rows are multiplied with: for more they are
/// unpacked to stored rows, once for all tokens.
const TILE_TOKENS: usize = 8;
const MAX_SKINNY_TOKENS: usize = 32;

/// Packs the given stored rows with `pack_row`, to `row_bytes` each. Returns whether all values
/// were kept; if not, what was written means nothing.
#[inline(always)]
fn pack_rows(
    stored: &WeightRows<'_>,
    (to, row_bytes): (&mut [u8], usize),
    pack_row: impl Fn(&[u8], &mut [u8]) -> bool,
) -> bool {
    let rows = stored.bytes.chunks_exact(stored.row_bytes.max(1));
    rows.zip(to.chunks_exact_mut(row_bytes.max(1)))
        .all(|(row, to)| pack_row(row, to))
}

/// The way rows are stored, how their values are unpacked, and the kind of activations.
///
/// All functions need the instruction set that the type stands for, which is what makes them unsafe
/// to call.
#[allow(clippy::missing_safety_doc)] // said once, above
trait PackedFloat {
    /// An activation.
    type Act: Copy;
    /// The scale at the end of a row.
    type Scale: Copy;
    /// A block's weights, and those of a part of it.
    type Block: Copy;
    type Values: Copy;

    /// FloatIsa of a block, and its bytes.
    const COLUMNS: usize;
    const BYTES: usize;
    /// Blocks that are a whole number of lines.
    const TOGETHER: usize;
    /// Parts of a block, of as many columns each.
    const PARTS: usize;

    /// The weights of a block, which can be read, in a row of the given scale.
    unsafe fn block(block: *const u8, scale: Self::Scale) -> Self::Block;
    /// Those of a part, in order.
    unsafe fn part(block: &Self::Block, part: usize) -> Self::Values;
    /// Adds the products of a part with activations, of which there are as many.
    unsafe fn add(sum: __m512, values: &Self::Values, acts: *const Self::Act) -> __m512;
}

/// All rows times at most [`MAX_SKINNY_TOKENS`] tokens, whose activations are `stride` apart.
///
/// # Safety
/// There are such tokens, and rows are what the type says; the instruction set is available.
#[inline(always)]
unsafe fn gemm_skinny<S: PackedFloat>(
    weights: &WeightRows<'_>,
    (acts, stride): (*const S::Act, usize),
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let mut token = tokens.start;
    while token < tokens.end {
        let left = tokens.end - token;
        // Of nine tokens five and four, not eight and one.
        let together = left.div_ceil(left.div_ceil(TILE_TOKENS));
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
                _ => rows::<S, TILE_TOKENS, 2>(weights, acts, token, out),
            }
        }
        token += together;
    }
}

/// All rows against `T` tokens, `R` rows at a time.
///
/// # Safety
/// As for [`gemm_skinny`]; `acts` are those of `token`.
#[inline(always)]
unsafe fn rows<S: PackedFloat, const T: usize, const R: usize>(
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
        // SAFETY: so many rows, and as many tokens as are promised; `to` has room for the sums of
        // both.
        unsafe {
            let n_blocks = weights.n_columns / S::COLUMNS;
            let sums = products::<S, T, R>(rows.as_ptr(), weights.row_bytes, acts, n_blocks);
            for (r, sums) in sums.into_iter().enumerate() {
                for (t, sum) in Avx512Float::sums(sums).into_iter().enumerate() {
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
unsafe fn products<S: PackedFloat, const T: usize, const R: usize>(
    rows: *const u8,
    row_bytes: usize,
    (acts, stride): (*const S::Act, usize),
    n_blocks: usize,
) -> [[__m512; T]; R] {
    let level = CacheLevel::for_streams();
    let scale = |r: usize| {
        let at = rows.wrapping_add(r * row_bytes + n_blocks * S::BYTES);
        // SAFETY: the row can be read, and its scale is at its end.
        unsafe { at.cast::<S::Scale>().read_unaligned() }
    };
    let scales: [S::Scale; R] = std::array::from_fn(scale);
    // SAFETY: the instruction set is available, as the caller promises.
    let mut sums = unsafe { [[Avx512Float::zero(); T]; R] };
    for b in 0..n_blocks {
        if b % (S::TOGETHER / R) == 0 {
            prefetch_blocks::<S, R>(rows, b * S::BYTES, row_bytes, level);
        }
        for (pair, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (r, [of_first, of_second]) = (2 * pair, sums);
            // SAFETY: the rows have this block, and the tokens these columns.
            unsafe {
                let row = rows.add(r * row_bytes + b * S::BYTES);
                let first = S::block(row, scales[r]);
                let second = S::block(row.add(row_bytes), scales[r + 1]);
                for part in 0..S::PARTS {
                    let (first, second) = (S::part(&first, part), S::part(&second, part));
                    let column = b * S::COLUMNS + part * (S::COLUMNS / S::PARTS);
                    for (t, sums) in of_first.iter_mut().zip(&mut *of_second).enumerate() {
                        let acts = acts.add(t * stride + column);
                        *sums.0 = S::add(*sums.0, &first, acts);
                        *sums.1 = S::add(*sums.1, &second, acts);
                    }
                }
            }
        }
    }
    sums
}

/// Prefetches what follows byte `at` of `R` rows, as much as is read until the next call.
#[inline(always)]
fn prefetch_blocks<S: PackedFloat, const R: usize>(
    rows: *const u8,
    at: usize,
    row_bytes: usize,
    level: CacheLevel,
) {
    const {
        assert!((S::TOGETHER * S::BYTES).is_multiple_of(LINE));
        assert!(S::TOGETHER.is_multiple_of(R) && R.is_multiple_of(2));
    };
    match level {
        CacheLevel::L1 => {
            let prefetcher = Prefetcher::new::<R>(at, S::TOGETHER / R * S::BYTES, row_bytes);
            for r in 0..R {
                prefetcher.prefetch(rows.wrapping_add(r * row_bytes + at), r);
            }
        }
        CacheLevel::L2 => {
            for line in 0..S::TOGETHER * S::BYTES / LINE {
                prefetch_next_tile::<R>(rows, at, line, row_bytes);
            }
        }
    }
}

thread_local! {
    /// Unpacked rows, for many tokens.
    static STORED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Unpacks rows to stored ones with `store`, and multiplies with these.
#[inline(always)]
fn with_stored_rows(
    weights: &WeightRows<'_>,
    store: impl Fn(&[u8], &mut [u8]),
    matmul: impl FnOnce(&WeightRows<'_>),
) {
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let row_bytes = weights.n_columns * weights.format.block_bytes();
    STORED.with_borrow_mut(|bytes| {
        bytes.resize(n_rows * row_bytes, 0);
        let rows = weights.bytes.chunks_exact(weights.row_bytes);
        for (row, to) in rows.zip(bytes.chunks_exact_mut(row_bytes)) {
            store(row, to);
        }
        matmul(&WeightRows {
            layout: WeightLayout::Stored,
            bytes,
            row_bytes,
            ..*weights
        });
    });
}
