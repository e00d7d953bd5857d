//! The layout of 13-bit floats: 64 columns to a block, and one scale for each row.
//!
//! A block has the lower eight bits of its columns, then the upper four of their exponents, then
//! their signs, permuted so that unpacking needs no shuffle across lanes. The row's scale is at its
//! end. [`f32`](super::f32) and [`bf16`](super::bf16) define what a scale is and the order of
//! columns.

use std::arch::x86_64::*;

use kv_block::BlockFormat;

use crate::kernels::WeightRows;

/// FloatIsa of a block.
pub(in super::super) const COLUMNS: usize = 64;
/// The start of the nibbles and of the signs of a block, and its end.
const NIBBLES: usize = COLUMNS;
const SIGNS: usize = NIBBLES + COLUMNS / 2;
pub(super) const BLOCK: usize = SIGNS + COLUMNS / 8;
/// Bytes of a row's scale.
pub(super) const SCALE: usize = 4;
/// Blocks that are a whole number of lines.
pub(super) const TOGETHER: usize = 8;

/// The exponent of the largest value of a row before it is scaled: the largest that has five bits.
pub(super) const TOP: u32 = 31;

/// Bytes of a row, 0 where there is no such row.
pub(in super::super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    match format {
        BlockFormat::BF16 | BlockFormat::F16 | BlockFormat::F32
            if n_columns.is_multiple_of(COLUMNS) =>
        {
            n_columns / COLUMNS * BLOCK + SCALE
        }
        _ => 0,
    }
}

/// The blocks of a row, and its scale.
pub(super) fn parts(row: &[u8]) -> Option<(&[[u8; BLOCK]], [u8; SCALE])> {
    let (blocks, scale) = row.split_last_chunk::<SCALE>()?;
    Some((blocks.as_chunks().0, *scale))
}

/// Block `b` of row `row`, and the row's scale.
pub(super) fn block_of<'a>(
    weights: &WeightRows<'a>,
    row: usize,
    b: usize,
) -> Option<(&'a [u8; BLOCK], [u8; SCALE])> {
    let mut rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    let (blocks, scale) = rows.nth(row).and_then(parts)?;
    Some((blocks.get(b)?, scale))
}

/// Values of 64 columns in 16 bits each, of which bits 12 to 14 are zero: of each eight bytes of
/// the lower half the first eight, with what is above them, of the other eight the second.
///
/// # Safety
/// The block can be read; the instruction set is available.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn halves(block: *const u8) -> [__m512i; 2] {
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
pub(super) fn write_block([a, b]: [__m512i; 2], to: &mut [u8; BLOCK]) {
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
