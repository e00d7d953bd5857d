//! F16 weights of fifteen bits against `f32` activations, as `f32`.
//!
//! Weights are below 2, so that the first bit of their exponents is 0. Of each 128 columns 120 stand in words of 16 bits
//! as they were stored, but for that bit. It is a bit of the last eight columns: in words `8 · i` to `8 · i + 7` bit `i` of
//! each, counted from the lowest one of what [`turned`] makes of them. Where a weight is 2 or more the row cannot be repacked.

use std::arch::x86_64::*;
use std::ops::Range;

use kv_core::block::BlockFormat;

use super::super::floats::{self, Sixteen};
use super::{FEW, Short, as_stored, few, repack_rows};
use crate::kernels::WeightRows;
use crate::kernels::floats::{Columns, FloatColumns};
use crate::output::OutputColumns;

/// Columns of a block, and its bytes.
pub(in super::super) const COLUMNS: usize = 128;
const BLOCK: usize = 240;
/// Bytes of a stored block, of a register, and registers of such a block.
const STORED: usize = 2 * COLUMNS;
const REGISTER: usize = 64;
const REGISTERS: usize = STORED / REGISTER;
/// Columns of a register of `f32`.
const LANES: usize = 16;
/// The words of the last register that a block has: all but those of eight columns.
const LAST: __mmask32 = (1 << 24) - 1;
/// The bit that is 0 in all weights, and how far it is from the lowest one.
const FREE: i16 = 1 << FREE_AT;
const FREE_AT: i16 = 14;

/// A block as it was stored, in memory: products take it in parts of a register.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Block([u8; STORED]);

/// Two registers of sixteen columns at a time.
struct InF32;

// The intrinsics are inlined where the caller has their features, which is what the trait asks for.
impl Short for InF32 {
    type Act = f32;
    type Scale = ();
    type Block = Block;
    type Values = [__m512; 2];
    const COLUMNS: usize = COLUMNS;
    const BYTES: usize = BLOCK;
    const TOGETHER: usize = 4;
    const PARTS: usize = REGISTERS;

    #[inline(always)]
    unsafe fn block(block: *const u8, (): ()) -> Block {
        let mut to = Block([0; STORED]);
        // SAFETY: as the caller promises.
        unsafe { store_block(block, &mut to.0) };
        to
    }

    #[inline(always)]
    unsafe fn part(block: &Block, part: usize) -> [__m512; 2] {
        let from = block.0.as_ptr().wrapping_add(part * REGISTER);
        // SAFETY: as the caller promises; parts are registers, and a half of one has sixteen columns.
        unsafe {
            [
                Sixteen::load_f16(from),
                Sixteen::load_f16(from.add(REGISTER / 2)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn add(sum: __m512, [a, b]: &[__m512; 2], acts: *const f32) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let sum = Sixteen::mul_add(*a, Sixteen::load(acts), sum);
            Sixteen::mul_add(*b, Sixteen::load(acts.add(LANES)), sum)
        }
    }
}

/// Bytes of a row, 0 where there is no such row.
pub(in super::super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    match format {
        BlockFormat::F16 if n_columns.is_multiple_of(COLUMNS) => n_columns / COLUMNS * BLOCK,
        _ => 0,
    }
}

/// As [`repack_rows`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn repack(stored: &WeightRows<'_>, to: &mut [u8]) -> bool {
    let row_bytes = row_bytes(stored.format, stored.n_columns);
    // Others have no such rows.
    debug_assert!(row_bytes > 0);
    row_bytes > 0 && repack_rows(stored, (to, row_bytes), |row, to| repack_row(row, to))
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn repack_row(row: &[u8], to: &mut [u8]) -> bool {
    let blocks = row.as_chunks::<STORED>().0.iter();
    blocks
        .zip(to.as_chunks_mut::<BLOCK>().0)
        .all(|(block, to)| repack_block(block, to))
}

/// A block of stored weights; says whether all of them are below 2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn repack_block(stored: &[u8; STORED], to: &mut [u8; BLOCK]) -> bool {
    let free = _mm512_set1_epi16(FREE);
    let mut words = [_mm512_setzero_si512(); REGISTERS];
    let mut is_below = true;
    for (words, from) in words.iter_mut().zip(stored.as_chunks::<REGISTER>().0) {
        // SAFETY: a register can be read; loads need no alignment.
        *words = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
        is_below &= _mm512_test_epi16_mask(*words, free) == 0;
    }
    let last = _mm512_extracti32x4_epi32::<3>(words[REGISTERS - 1]);
    let last = _mm512_broadcast_i32x4(turned(last));
    let to = to.as_mut_ptr();
    for (i, words) in words.into_iter().enumerate() {
        let bits = _mm512_and_si512(_mm512_sllv_epi16(last, places(i)), free);
        let mask = if i + 1 < REGISTERS { !0 } else { LAST };
        // SAFETY: a block has these words; stores need no alignment.
        unsafe {
            let to = to.add(i * REGISTER).cast();
            _mm512_mask_storeu_epi16(to, mask, _mm512_or_si512(words, bits));
        }
    }
    is_below
}

/// The sign of eight weights first, as the lowest bit, then what is beside it and the free bit.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn turned(words: __m128i) -> __m128i {
    let sign = _mm_srli_epi16::<15>(words);
    _mm_and_si128(
        _mm_or_si128(_mm_slli_epi16::<1>(words), sign),
        _mm_set1_epi16(0x7fff),
    )
}

/// How far the free bits of register `i` of a block are from their places in [`turned`] words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn places(i: usize) -> __m512i {
    let [a, b, c, d] = [0, 1, 2, 3].map(|j| {
        // The last register has three groups of words; nothing is taken from behind them.
        let place = (FREE_AT - (4 * i as i16 + j)).max(0);
        i64::from(place) * 0x0001_0001_0001_0001
    });
    _mm512_set_epi64(d, d, c, c, b, b, a, a)
}

/// Stores a block as it was stored before.
///
/// # Safety
/// The features are available, and the block can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store_block(block: *const u8, to: &mut [u8; STORED]) {
    let free = _mm512_set1_epi16(FREE);
    let mut bits = _mm512_setzero_si512();
    let mut words = [_mm512_setzero_si512(); REGISTERS];
    for (i, words) in words.iter_mut().enumerate() {
        let mask = if i + 1 < REGISTERS { !0 } else { LAST };
        // SAFETY: the block has these words; loads need no alignment.
        let stored = unsafe {
            let from = block.add(i * REGISTER).cast();
            _mm512_maskz_loadu_epi16(mask, from)
        };
        bits = _mm512_or_si512(
            bits,
            _mm512_srlv_epi16(_mm512_and_si512(stored, free), places(i)),
        );
        *words = _mm512_andnot_si512(free, stored);
    }
    let half = _mm256_or_si256(
        _mm512_castsi512_si256(bits),
        _mm512_extracti64x4_epi64::<1>(bits),
    );
    let all = _mm_or_si128(
        _mm256_castsi256_si128(half),
        _mm256_extracti128_si256::<1>(half),
    );
    // The sign goes back to the highest bit.
    let last = _mm_or_si128(_mm_srli_epi16::<1>(all), _mm_slli_epi16::<15>(all));
    words[REGISTERS - 1] = _mm512_inserti32x4::<3>(words[REGISTERS - 1], last);
    for (words, to) in words.into_iter().zip(to.as_chunks_mut::<REGISTER>().0) {
        // SAFETY: room for a register; stores need no alignment.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
    }
}

/// Columns `128 · b` to `128 · b + 127` of row `row`, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn stored_block(
    weights: &WeightRows<'_>,
    (row, b): (usize, usize),
    to: &mut [u8],
) {
    let mut rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    let block = rows
        .nth(row)
        .and_then(|row| row.as_chunks::<BLOCK>().0.get(b));
    let to = to.first_chunk_mut();
    debug_assert!(block.is_some() && to.is_some());
    if let (Some(block), Some(to)) = (block, to) {
        // SAFETY: a whole block; this function needs the same features.
        unsafe { store_block(block.as_ptr(), to) };
    }
}

/// All columns of a row, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_row(row: &[u8], to: &mut [u8]) {
    let blocks = row.as_chunks::<BLOCK>().0.iter();
    for (block, to) in blocks.zip(to.as_chunks_mut().0) {
        // SAFETY: a whole block; this function needs the same features.
        unsafe { store_block(block.as_ptr(), to) };
    }
}

/// All rows against some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn multiply(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let inside = has(weights) && tokens.end * n <= acts.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    if tokens.len() > FEW {
        let store = |row: &[u8], to: &mut [u8]| store_row(row, to);
        let multiply = |stored: &WeightRows<'_>| floats::multiply(stored, acts, tokens, out);
        return as_stored(weights, store, multiply);
    }
    // SAFETY: the tokens exist, as was checked above; this function has the features.
    unsafe { few::<InF32>(weights, (acts.as_ptr(), n), tokens, out) };
}

/// Whether these are such rows: those of thirteen bits are never as long.
pub(in super::super) fn has(weights: &WeightRows<'_>) -> bool {
    weights.row_bytes == row_bytes(weights.format, weights.n_columns)
}
