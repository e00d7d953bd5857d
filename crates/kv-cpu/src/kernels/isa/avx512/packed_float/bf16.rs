//! 13-bit weights times BF16 activations, unpacked to BF16.
//!
//! The scale of a row is what is added to the exponent of its values, other than zeros. Columns are
//! in order. Subnormal numbers, which products would treat as zeros, cannot be packed.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;
use kv_block::BlockFormat;

use super::super::bf16::{Bf16Pairs, matmul_stored};
use super::bf13::{
    self, BLOCK, COLUMNS, SCALE, TOGETHER, TOP, block_of, halves, parts, write_block,
};
use super::{MAX_SKINNY_TOKENS, PackedFloat, gemm_skinny, pack_rows, with_stored_rows};
use crate::kernels::WeightRows;
use crate::kernels::gemm_float::FloatIsa;
use crate::operands::Bf16Rows;
use crate::output::OutputColumns;

/// Bytes of a register, and columns.
const REGISTER: usize = 64;
const LANES: usize = Bf16Pairs::LANES;
/// The start of the exponent of a BF16, its mantissa, and the exponent of infinity.
const EXPONENT: u32 = 7;
const MANTISSA: i16 = 0x7f;
const INFINITE: u32 = 0xff;
/// A value without its sign.
const MAGNITUDE: i16 = 0x7fff;

/// Registers of 32 columns.
struct Bf16Acts;

// The intrinsics are inlined where the caller has their features, as the trait demands.
impl PackedFloat for Bf16Acts {
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
            let sum = Bf16Pairs::mul_add(_mm512_castsi512_ps(a), Bf16Pairs::load(acts), sum);
            let acts = Bf16Pairs::load(acts.add(LANES));
            Bf16Pairs::mul_add(_mm512_castsi512_ps(b), acts, sum)
        }
    }
}

/// Bytes of a row, 0 where there is no such row.
pub(in super::super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    match format {
        BlockFormat::BF16 => bf13::row_bytes(format, n_columns),
        _ => 0,
    }
}

/// As [`pack_rows`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn pack(stored: &WeightRows<'_>, to: &mut [u8]) -> bool {
    debug_assert_eq!(stored.format, BlockFormat::BF16);
    let row_bytes = row_bytes(stored.format, stored.n_columns);
    pack_rows(stored, (to, row_bytes), |row, to| pack_row(row, to))
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn pack_row(row: &[u8], to: &mut [u8]) -> bool {
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
                // As a subnormal number might be what is far enough above the offset, where that is
                // below zero.
                & _mm512_test_epi16_mask(stored, all(MAGNITUDE & !MANTISSA));
            if is_kept | is_zero != !0 {
                return false;
            }
            let moved = _mm512_maskz_mov_epi16(!is_zero, moved);
            *to = _mm512_or_si512(moved, _mm512_and_si512(stored, sign));
        }
        write_block(short, to);
    }
    last.copy_from_slice(&i32::from(offset).to_le_bytes());
    true
}

/// The number that is subtracted from the exponents of a row so that the largest is [`TOP`], at
/// their place in a BF16. `None` where the largest value is not finite.
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

/// FloatIsa `64 · b` to `64 · b + 63` of row `row`, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn stored_block(
    weights: &WeightRows<'_>,
    row: usize,
    b: usize,
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

/// All rows times some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(in super::super) fn matmul(
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
    if tokens.len() > MAX_SKINNY_TOKENS {
        let store = |row: &[u8], to: &mut [u8]| store_row(row, to);
        let matmul = |stored: &WeightRows<'_>| matmul_stored(stored, acts, tokens, out);
        return with_stored_rows(weights, store, matmul);
    }
    // SAFETY: the tokens exist, as was checked above; this function has the features.
    unsafe { gemm_skinny::<Bf16Acts>(weights, (values.as_ptr(), stride), tokens, out) };
}
