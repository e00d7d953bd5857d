//! Weights of thirteen bits against activations of BF16, as BF16.
//!
//! A row's scale is what is added to the exponent of its values, other than zeros. Columns are in order. Subnormal
//! numbers, which products would take for zeros, cannot be repacked.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;
use kv_core::block::BlockFormat;

use super::super::bf16::{Pairs, multiply_stored};
use super::thirteen::{self, BLOCK, COLUMNS, SCALE, TOGETHER, TOP, block_of, halves, parts, put};
use super::{FEW, Short, as_stored, few, repack_rows};
use crate::activations::Bf16Rows;
use crate::kernels::WeightRows;
use crate::kernels::floats::Columns;
use crate::output::OutputColumns;

/// Bytes of a register, and columns.
const REGISTER: usize = 64;
const LANES: usize = Pairs::LANES;
/// Where the exponent of a BF16 begins, its mantissa, and the exponent of infinity.
const EXPONENT: u32 = 7;
const MANTISSA: i16 = 0x7f;
const INFINITE: u32 = 0xff;
/// A value without its sign.
const MAGNITUDE: i16 = 0x7fff;

/// Registers of 32 columns.
struct InBf16;

// The intrinsics are inlined where the caller has their features, which is what the trait asks for.
impl Short for InBf16 {
    type Act = bf16;
    type Scale = [u8; SCALE];
    type Block = [__m512i; 2];
    type Values = [__m512i; 2];
    const COLUMNS: usize = COLUMNS;
    const BYTES: usize = BLOCK;
    const TOGETHER: usize = TOGETHER;
    const PARTS: usize = 1;

    #[inline(always)]
    unsafe fn block(block: *const u8, scale: [u8; SCALE]) -> [__m512i; 2] {
        // SAFETY: as the caller promises.
        unsafe { values(block, scale) }
    }

    #[inline(always)]
    unsafe fn part(block: &[__m512i; 2], _part: usize) -> [__m512i; 2] {
        *block
    }

    #[inline(always)]
    unsafe fn add(sum: __m512, values: &[__m512i; 2], acts: *const bf16) -> __m512 {
        let [a, b] = *values;
        // SAFETY: as the caller promises.
        unsafe {
            let sum = Pairs::mul_add(_mm512_castsi512_ps(a), Pairs::load(acts), sum);
            let acts = Pairs::load(acts.add(LANES));
            Pairs::mul_add(_mm512_castsi512_ps(b), acts, sum)
        }
    }
}

/// Bytes of a row, 0 where there is no such row.
pub(in super::super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    match format {
        BlockFormat::BF16 => thirteen::row_bytes(format, n_columns),
        _ => 0,
    }
}

/// As [`repack_rows`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn repack(stored: &WeightRows<'_>, to: &mut [u8]) -> bool {
    debug_assert_eq!(stored.format, BlockFormat::BF16);
    let row_bytes = row_bytes(stored.format, stored.n_columns);
    repack_rows(stored, (to, row_bytes), |row, to| repack_row(row, to))
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn repack_row(row: &[u8], to: &mut [u8]) -> bool {
    let Some(offset) = offset(row) else {
        return false;
    };
    let all = |x: i16| _mm512_set1_epi16(x);
    let (magnitude, sign) = (all(MAGNITUDE), all(i16::MIN));
    let (least, most) = (1 << EXPONENT, ((TOP as i16) << EXPONENT) | MANTISSA);
    let (registers, _) = row.as_chunks::<REGISTER>();
    let (into, last) = to.as_chunks_mut::<BLOCK>();
    for (block, to) in registers.as_chunks::<2>().0.iter().zip(into) {
        let mut short = [_mm512_setzero_si512(); 2];
        for (from, to) in block.iter().zip(&mut short) {
            // SAFETY: a register can be read; loads need no alignment.
            let stored = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
            let is_zero = _mm512_testn_epi16_mask(stored, magnitude);
            let moved = _mm512_sub_epi16(_mm512_and_si512(stored, magnitude), all(offset));
            let is_kept = _mm512_cmpge_epi16_mask(moved, all(least))
                & _mm512_cmple_epi16_mask(moved, all(most))
                // As a subnormal number might be what is far enough above the offset, where that is below zero.
                & _mm512_test_epi16_mask(stored, all(MAGNITUDE & !MANTISSA));
            if is_kept | is_zero != !0 {
                return false;
            }
            let moved = _mm512_maskz_mov_epi16(!is_zero, moved);
            *to = _mm512_or_si512(moved, _mm512_and_si512(stored, sign));
        }
        put(short, to);
    }
    last.copy_from_slice(&i32::from(offset).to_le_bytes());
    true
}

/// What is taken from the exponents of a row so that the largest is [`TOP`], where they are in a BF16; none where that value is
/// not finite.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn offset(row: &[u8]) -> Option<i16> {
    let mut most = _mm512_setzero_si512();
    for from in row.as_chunks::<REGISTER>().0 {
        // SAFETY: a register can be read; loads need no alignment.
        let stored = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
        let magnitudes = _mm512_and_si512(stored, _mm512_set1_epi16(MAGNITUDE));
        most = _mm512_max_epi16(most, magnitudes);
    }
    let (even, odd) = (_mm512_slli_epi32::<16>(most), most);
    let most = _mm512_reduce_max_epu32(_mm512_max_epu32(even, odd)) >> 16;
    let exponent = most >> EXPONENT;
    let offset = (exponent as i16 - TOP as i16) << EXPONENT;
    (exponent < INFINITE).then_some(offset)
}

/// The columns of a block, as they were stored.
///
/// # Safety
/// The features are available, and the block can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn values(block: *const u8, scale: [u8; SCALE]) -> [__m512i; 2] {
    // SAFETY: as the caller promises.
    let [a, b] = unsafe { halves(block) };
    let offset = _mm512_set1_epi16(i32::from_le_bytes(scale) as i16);
    let magnitude = _mm512_set1_epi16(MAGNITUDE);
    let moved = |x| _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, magnitude), x, offset);
    [moved(a), moved(b)]
}

/// Columns `64 · b` to `64 · b + 63` of row `row`, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn stored_block(
    weights: &WeightRows<'_>,
    (row, b): (usize, usize),
    to: &mut [u8],
) {
    let block = block_of(weights, row, b);
    let to = to.first_chunk_mut();
    debug_assert!(block.is_some() && to.is_some());
    if let (Some(block), Some(to)) = (block, to) {
        store_block(block, to);
    }
}

/// All columns of a row, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_row(row: &[u8], to: &mut [u8]) {
    let Some((blocks, scale)) = parts(row) else {
        return;
    };
    for (block, to) in blocks.iter().zip(to.as_chunks_mut().0) {
        store_block((block, scale), to);
    }
}

/// A block, as it was stored.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_block((block, scale): (&[u8; BLOCK], [u8; SCALE]), to: &mut [u8; 2 * REGISTER]) {
    // SAFETY: a whole block; this function needs the same features.
    let [a, b] = unsafe { values(block.as_ptr(), scale) };
    let to = to.as_mut_ptr();
    // SAFETY: room for two registers; stores need no alignment.
    unsafe {
        _mm512_storeu_si512(to.cast(), a);
        _mm512_storeu_si512(to.add(REGISTER).cast(), b);
    }
}

/// All rows against some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(in super::super) fn multiply(
    weights: &WeightRows<'_>,
    acts: &Bf16Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let (values, stride) = (acts.values(), acts.stride());
    let is_short = weights.row_bytes == row_bytes(weights.format, n);
    let inside = is_short && n <= stride && tokens.end * stride <= values.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    if tokens.len() > FEW {
        let store = |row: &[u8], to: &mut [u8]| store_row(row, to);
        let multiply = |stored: &WeightRows<'_>| multiply_stored(stored, acts, tokens, out);
        return as_stored(weights, store, multiply);
    }
    // SAFETY: the tokens exist, as was checked above; this function has the features.
    unsafe { few::<InBf16>(weights, (values.as_ptr(), stride), tokens, out) };
}
