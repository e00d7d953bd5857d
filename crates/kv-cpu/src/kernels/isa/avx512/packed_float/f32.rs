//! 13-bit weights times `f32` activations, unpacked to `f32`.
//!
//! The scale of a row is what its values are multiplied with. The two halves of a lane hold columns
//! that are sixteen apart.

use std::arch::x86_64::*;
use std::ops::Range;

use kv_block::BlockFormat;

use super::super::float::{self, Avx512Float};
use super::bf13::{
    self, BLOCK, COLUMNS, SCALE, TOGETHER, TOP, block_of, halves, parts, write_block,
};
use super::{MAX_SKINNY_TOKENS, PackedFloat, gemm_skinny, pack_rows, with_stored_rows};
use crate::kernels::WeightRows;
use crate::kernels::gemm_float::{F32Isa, FloatIsa};
use crate::output::OutputColumns;

/// FloatIsa of a register.
const LANES: usize = 16;
/// Registers of a block.
const QUARTERS: usize = COLUMNS / LANES;
/// The start of the exponent of an `f32`, and that of 1.0.
const EXPONENT: u32 = 23;
const ONE: u32 = 127;

/// Registers of sixteen columns.
struct F32Acts;

// The intrinsics are inlined where the caller has their features, as the trait demands.
impl PackedFloat for F32Acts {
    type Act = f32;
    type Scale = [u8; SCALE];
    type Block = [__m512; QUARTERS];
    type Values = [__m512; QUARTERS];
    const COLUMNS: usize = COLUMNS;
    const BYTES: usize = BLOCK;
    const TOGETHER: usize = TOGETHER;
    const PARTS: usize = 1;

    #[inline(always)]
    unsafe fn block(block: *const u8, scale: [u8; SCALE]) -> [__m512; QUARTERS] {
        // SAFETY: as the caller promises.
        unsafe { values(block, scale) }
    }

    #[inline(always)]
    unsafe fn part(block: &[__m512; QUARTERS], _part: usize) -> [__m512; QUARTERS] {
        *block
    }

    #[inline(always)]
    unsafe fn add(mut sum: __m512, values: &[__m512; QUARTERS], acts: *const f32) -> __m512 {
        for (q, values) in values.iter().enumerate() {
            // SAFETY: as the caller promises; loads need no alignment.
            sum = unsafe { _mm512_fmadd_ps(*values, _mm512_loadu_ps(acts.add(q * LANES)), sum) };
        }
        sum
    }
}

/// As [`pack_rows`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn pack(stored: &WeightRows<'_>, to: &mut [u8]) -> bool {
    let row_bytes = bf13::row_bytes(stored.format, stored.n_columns);
    let pack_row = |row: &[u8], to: &mut [u8]| pack_row(stored.format, row, to);
    pack_rows(stored, (to, row_bytes), pack_row)
}

/// Sixteen stored values.
///
/// # Safety
/// The features are available, and there are so many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load(format: BlockFormat, from: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe {
        match format {
            BlockFormat::BF16 => Avx512Float::load_bf16(from),
            BlockFormat::F16 => Avx512Float::load_f16(from),
            _ => Avx512Float::load(from.cast()),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn pack_row(format: BlockFormat, row: &[u8], to: &mut [u8]) -> bool {
    let n_bytes = LANES * format.block_bytes();
    let Some((factor, scale)) = scales(format, row) else {
        return false;
    };
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let (into, last) = to.as_chunks_mut::<BLOCK>();
    for (block, to) in row.chunks_exact(QUARTERS * n_bytes).zip(into) {
        let mut quarters = [_mm512_setzero_si512(); QUARTERS];
        for (from, to) in block.chunks_exact(n_bytes).zip(&mut quarters) {
            // SAFETY: sixteen values are there to be read.
            let values = unsafe { load(format, from.as_ptr()) };
            let short = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(factor)));
            *to = _mm512_and_si512(short, upper);
            let kept = _mm512_mul_ps(_mm512_castsi512_ps(*to), _mm512_set1_ps(scale));
            let (kept, values) = (_mm512_castps_si512(kept), _mm512_castps_si512(values));
            if _mm512_cmpeq_epi32_mask(kept, values) != !0 {
                return false;
            }
        }
        let both = |low, high| _mm512_or_si512(_mm512_srli_epi32::<16>(low), high);
        let [a, b, c, d] = quarters;
        write_block([both(a, b), both(c, d)], to);
    }
    last.copy_from_slice(&scale.to_le_bytes());
    true
}

/// The scale that gives the largest value of a row the exponent [`TOP`], and its inverse. `None`
/// where no power of two in `f32` does, or where the value is not finite.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn scales(format: BlockFormat, row: &[u8]) -> Option<(f32, f32)> {
    let mut most = _mm512_setzero_si512();
    for sixteen in row.chunks_exact(LANES * format.block_bytes()) {
        // SAFETY: sixteen values are there to be read.
        let values = unsafe { load(format, sixteen.as_ptr()) };
        most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(values)));
    }
    let exponent = _mm512_reduce_max_epu32(most) >> EXPONENT;
    let power = |exponent: u32| {
        let is_normal = (1..=2 * ONE).contains(&exponent);
        is_normal.then(|| f32::from_bits(exponent << EXPONENT))
    };
    let factor = power((ONE + TOP).checked_sub(exponent)?)?;
    Some((factor, power(ONE + exponent - TOP)?))
}

/// The columns of a block, in order, times the row's scale.
///
/// # Safety
/// The features are available, and the block can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn values(block: *const u8, scale: [u8; SCALE]) -> [__m512; QUARTERS] {
    // SAFETY: as the caller promises.
    let [a, b] = unsafe { halves(block) };
    let scale = _mm512_set1_ps(f32::from_le_bytes(scale));
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let wide = [
        _mm512_slli_epi32::<16>(a),
        _mm512_and_si512(a, upper),
        _mm512_slli_epi32::<16>(b),
        _mm512_and_si512(b, upper),
    ];
    // Exact, as the product is a stored value.
    [
        _mm512_mul_ps(_mm512_castsi512_ps(wide[0]), scale),
        _mm512_mul_ps(_mm512_castsi512_ps(wide[1]), scale),
        _mm512_mul_ps(_mm512_castsi512_ps(wide[2]), scale),
        _mm512_mul_ps(_mm512_castsi512_ps(wide[3]), scale),
    ]
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
    debug_assert!(block.is_some() && to.len() == COLUMNS * weights.format.block_bytes());
    if let Some(block) = block {
        store_block(weights.format, block, to);
    }
}

/// All columns of a row, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_row(format: BlockFormat, row: &[u8], to: &mut [u8]) {
    let Some((blocks, scale)) = parts(row) else {
        return;
    };
    let to = to.chunks_exact_mut(COLUMNS * format.block_bytes());
    for (block, to) in blocks.iter().zip(to) {
        store_block(format, (block, scale), to);
    }
}

/// A block, as it was stored.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_block(format: BlockFormat, (block, scale): (&[u8; BLOCK], [u8; SCALE]), to: &mut [u8]) {
    // SAFETY: a whole block; this function needs the same features.
    let values = unsafe { values(block.as_ptr(), scale) };
    let to = to.chunks_exact_mut(LANES * format.block_bytes());
    for (values, to) in values.into_iter().zip(to) {
        let to = to.as_mut_ptr();
        // SAFETY: room for sixteen values; stores need no alignment.
        unsafe {
            match format {
                BlockFormat::F32 => _mm512_storeu_ps(to.cast(), values),
                BlockFormat::F16 => {
                    let short = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                    _mm256_storeu_si256(to.cast(), short);
                }
                _ => {
                    let upper = _mm512_srli_epi32::<16>(_mm512_castps_si512(values));
                    _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(upper));
                }
            }
        }
    }
}

/// All rows times some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn matmul(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let is_short = weights.row_bytes == bf13::row_bytes(weights.format, n);
    let inside = is_short && tokens.end * n <= acts.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    if tokens.len() > MAX_SKINNY_TOKENS {
        let store = |row: &[u8], to: &mut [u8]| store_row(weights.format, row, to);
        let matmul = |stored: &WeightRows<'_>| float::matmul(stored, acts, tokens, out);
        return with_stored_rows(weights, store, matmul);
    }
    // SAFETY: the tokens exist, as was checked above; this function has the features.
    unsafe { gemm_skinny::<F32Acts>(weights, (acts.as_ptr(), n), tokens, out) };
}
