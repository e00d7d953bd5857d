//! GEMV (one token) on stored rows of the IQ formats, whose values are entries of a grid. Those of
//! IQ2 and IQ3 are looked up in registers, 64 indices at a time, where there are VBMI and GFNI.
//!
//! An entry is a number of 16 bits, its values' levels. Its bytes come from two tables of as many
//! bytes as the grid has entries, by `vpermi2b` over 128 of them and a choice by the bits above;
//! `vpmultishiftqb` takes the levels apart, and a shuffle makes values of them. Where a block has
//! 32 indices, those of two rows are looked up together.
//!
//! Invariant: the additions of [`gemm::tile`](crate::kernels::gemm::tile), in its order; everything
//! within a super-block is exact. Generic over the format ([`GridFormat`]).

use std::arch::x86_64::*;

use kv_block::{
    BlockFormat, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, PackedGrid,
};

use crate::kernels::WeightRows;
use crate::kernels::gemv_stored;
use crate::kernels::isa::avx2::dot::{Avx2Tile, Maddubs};
use crate::kernels::isa::avx2::gemv::add_lanes_8;
use crate::kernels::isa::avx2::unpack::load32;
use crate::kernels::prefetch::prefetch_l2;
use crate::kernels::quant_format::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, QuantFormat};
use crate::operands::{Int8Row, SUPER_BLOCK};

/// Weight rows that are computed together.
const ROWS: usize = 8;

/// True if this machine has the instructions.
fn are_available() -> bool {
    is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("gfni")
        && is_x86_feature_detected!("bmi2")
}

/// The indices of a super-block: 64, or 32 in the low half.
#[derive(Clone, Copy)]
struct Indices {
    /// Their low bytes.
    low: __m512i,
    /// Their bits 8 and 9, as far as the grid has so many entries.
    more: [u64; 2],
    /// The values that are negated.
    signs: [u64; 4],
}

/// A format whose blocks are indices into a grid of `N` entries.
trait GridFormat<const BYTES: usize, const N: usize>: QuantFormat<BYTES> {
    /// Values of an entry: four or eight.
    const VALUES: usize;
    const GRID: &'static PackedGrid<N>;

    /// # Safety
    /// This module's instructions are available.
    unsafe fn indices(block: &[u8; BYTES]) -> Indices;
}

/// A format from its grid, the number of values of an entry, and the indices of block `b`.
macro_rules! grid_format {
    ($format:ty, $bytes:literal: $grid:ident of $n:literal, $values:literal values; ($b:ident) => $indices:expr) => {
        impl GridFormat<$bytes, $n> for $format {
            const VALUES: usize = $values;
            const GRID: &'static PackedGrid<$n> = &$grid;

            #[inline]
            #[target_feature(
                enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
            )]
            unsafe fn indices($b: &[u8; $bytes]) -> Indices {
                $indices
            }
        }
    };
}

grid_format!(Iq3S, 110: IQ3_S_GRID of 512, 4 values; (b) => Indices {
    low: load64(b, 2),
    more: [word64(b, 66), 0],
    signs: [word64(b, 74), word64(b, 82), word64(b, 90), word64(b, 98)],
});
grid_format!(Iq3Xxs, 98: IQ3_XXS_GRID of 256, 4 values; (b) => Indices {
    low: load64(b, 2),
    more: [0; 2],
    signs: even_signs(sevens::<0>(_mm512_cvtepu32_epi64(load32(b, 66)))),
});
grid_format!(Iq2Xxs, 66: IQ2_XXS_GRID of 256, 8 values; (b) => {
    let words = load64(b, 2);
    Indices {
        low: _mm512_zextsi256_si512(_mm512_cvtepi64_epi32(words)),
        more: [0; 2],
        signs: even_signs(sevens::<32>(words)),
    }
});
grid_format!(Iq2Xs, 74: IQ2_XS_GRID of 512, 8 values; (b) => {
    let words = load64(b, 2);
    let ninth = _mm512_test_epi16_mask(words, _mm512_set1_epi16(1 << 8));
    Indices {
        low: _mm512_zextsi256_si512(_mm512_cvtepi16_epi8(words)),
        more: [u64::from(ninth), 0],
        signs: even_signs(_mm512_cvtepi16_epi8(_mm512_srli_epi16::<9>(words))),
    }
});
grid_format!(Iq2S, 82: IQ2_S_GRID of 1024, 8 values; (b) => {
    let (high, every_second) = (word64(b, 66), 0x5555_5555_5555_5555);
    Indices {
        low: _mm512_zextsi256_si512(load32(b, 2)),
        more: [_pext_u64(high, every_second), _pext_u64(high, every_second << 1)],
        signs: [word64(b, 34), word64(b, 42), word64(b, 50), word64(b, 58)],
    }
});

/// All weight rows times one token: `out[row]`. False where there is nothing here that is faster
/// than AVX2's GEMV with VNNI.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn gemv(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) -> bool {
    use BlockFormat as B;
    match weights.format {
        B::IQ1_S => from_memory::<Iq1S, 50>(weights, acts, out),
        B::IQ1_M => from_memory::<Iq1M, 56>(weights, acts, out),
        format if are_available() => {
            // SAFETY: the instructions are available.
            unsafe {
                match format {
                    B::IQ2_XXS => gemv_of::<Iq2Xxs, 66, 256>(weights, acts, out),
                    B::IQ2_XS => gemv_of::<Iq2Xs, 74, 512>(weights, acts, out),
                    B::IQ2_S => gemv_of::<Iq2S, 82, 1024>(weights, acts, out),
                    B::IQ3_XXS => gemv_of::<Iq3Xxs, 98, 256>(weights, acts, out),
                    B::IQ3_S => gemv_of::<Iq3S, 110, 512>(weights, acts, out),
                    _ => return false,
                }
            }
        }
        _ => return false,
    }
    true
}

/// AVX2's GEMV, compiled without AVX-512: with it, the same look-ups of eight bytes take 1.7 times
/// as long (Zen 4). The grid of the IQ1 formats has too many entries for registers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn from_memory<F: QuantFormat<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    // SAFETY: this function has the features of `Maddubs`.
    unsafe { gemv_stored::gemv::<Avx2Tile<Maddubs>, F, ROWS, BYTES>(weights, acts, out) }
}

#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn gemv_of<F: GridFormat<BYTES, N>, const BYTES: usize, const N: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let row_bytes = weights.row_bytes.max(1);
    let n_blocks = (row_bytes / BYTES).min(acts.n_blocks() / SUPER_BLOCK);
    let tiles = weights.bytes.chunks(ROWS * row_bytes);
    let tiles = tiles.filter(|bytes| bytes.len() >= row_bytes);
    for (bytes, out) in tiles.zip(out.chunks_mut(ROWS)) {
        // In the last tile the last row stands in for missing ones.
        let last = bytes.len() / row_bytes - 1;
        let rows: [&[[u8; BYTES]]; ROWS] =
            std::array::from_fn(|r| bytes[r.min(last) * row_bytes..].as_chunks().0);
        let mut sums = [0.0; ROWS];
        let mut acc = _mm256_setzero_ps();
        for s in 0..n_blocks {
            prefetch_next_tile(bytes, ROWS * s * BYTES..ROWS * (s + 1) * BYTES);
            let blocks = rows.map(|row| &row[s]);
            // SAFETY: the activations have this super-block; this function has the instructions.
            acc = unsafe { add_super::<F, BYTES, N>(&blocks, acts, s * SUPER_BLOCK, acc) };
        }
        // SAFETY: the store is of `ROWS` values.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), acc) };
        let n = out.len().min(ROWS);
        out[..n].copy_from_slice(&sums[..n]);
    }
}

/// Prefetches bytes of the tile behind one, as far as they begin lines.
#[inline]
fn prefetch_next_tile(tile: &[u8], bytes: std::ops::Range<usize>) {
    let next = tile.as_ptr_range().end;
    for at in (bytes.start.next_multiple_of(64)..bytes.end).step_by(64) {
        prefetch_l2(next.wrapping_add(at));
    }
}

/// Adds a super-block of each row, whose first block of activations is `first`.
///
/// # Safety
/// The activations have it.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
unsafe fn add_super<F: GridFormat<BYTES, N>, const BYTES: usize, const N: usize>(
    blocks: &[&[u8; BYTES]; ROWS],
    acts: &Int8Row<'_>,
    first: usize,
    acc: __m256,
) -> __m256 {
    // SAFETY: as the caller promises; blocks of 32 lie one after the other.
    unsafe {
        let quants: *const __m512i = acts.quants.as_ptr().add(first).cast();
        let mut acts_of = [_mm512_setzero_si512(); 4];
        for (j, acts) in acts_of.iter_mut().enumerate() {
            *acts = _mm512_loadu_si512(quants.add(j).cast());
        }
        let mut scale_bits = [0; ROWS];
        let mut sums = [_mm256_setzero_si256(); ROWS];
        let mut r = 0;
        while r < ROWS {
            let n = if F::VALUES == 4 { 1 } else { 2 };
            let a = F::indices(blocks[r]);
            let b = if n == 1 { a } else { F::indices(blocks[r + 1]) };
            let (indices, codes) = ([a, b], codes::<F, BYTES, N>([&a, &b]));
            for k in 0..n {
                let indices = &indices[k];
                let Some(scales) = F::super_scales_of(blocks[r + k]) else {
                    return acc;
                };
                scale_bits[r + k] = scales.scale.to_bits();
                let [low, high] = [0, 64].map(|at| (scales.factors >> at) as i64);
                let factors = _mm256_cvtepi8_epi16(_mm_set_epi64x(high, low));
                let mut values = [_mm512_setzero_si512(); 4];
                for (j, values) in values.iter_mut().enumerate() {
                    *values = match F::VALUES {
                        4 => fours(codes[j / 2], j % 2, &F::GRID.levels),
                        _ => eights(codes[k], j, &F::GRID.levels),
                    };
                }
                sums[r + k] = dot_row::<F, BYTES>(&values, &indices.signs, &acts_of, factors);
            }
            r += n;
        }
        let scales = _mm256_cvtph_ps(_mm_loadu_si128(scale_bits.as_ptr().cast()));
        let scales = if F::UNIT == 1.0 {
            scales
        } else {
            _mm256_mul_ps(scales, _mm256_set1_ps(F::UNIT))
        };
        let act_scale = _mm256_set1_ps(*acts.scales.get_unchecked(first));
        let sums = _mm256_cvtepi32_ps(add_lanes_8(sums));
        _mm256_fmadd_ps(sums, _mm256_mul_ps(scales, act_scale), acc)
    }
}

/// The entries, 16 bits each: of the first 32 indices, and of the others. Those are the second
/// row's where a block has 32.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn codes<F: GridFormat<BYTES, N>, const BYTES: usize, const N: usize>(
    [a, b]: [&Indices; 2],
) -> [__m512i; 2] {
    let (mut low, mut more) = (a.low, a.more);
    if F::VALUES == 8 {
        low = _mm512_inserti64x4::<1>(low, _mm512_castsi512_si256(b.low));
        for (more, b) in more.iter_mut().zip(b.more) {
            *more |= b << 32;
        }
    }
    // So that the halves of lanes, which are what is interleaved, are in order.
    let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    let high = _mm512_permutexvar_epi64(order, lookup(&F::GRID.high, low, &more));
    let low = _mm512_permutexvar_epi64(order, lookup(&F::GRID.low, low, &more));
    [
        _mm512_unpacklo_epi8(low, high),
        _mm512_unpackhi_epi8(low, high),
    ]
}

/// The bytes of a table of at most 1024 that 64 indices stand for: their low bytes, and their bits
/// 8 and 9.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn lookup<const N: usize>(table: &[u8; N], low: __m512i, more: &[u64; 2]) -> __m512i {
    let mut found = [_mm512_setzero_si512(); 8];
    for (found, entries) in found.iter_mut().zip(table.chunks_exact(128)) {
        *found = _mm512_permutex2var_epi8(load64(entries, 0), low, load64(entries, 64));
    }
    let eighth = _mm512_movepi8_mask(low);
    let mut n = N / 128;
    for bit in [eighth, more[0], more[1]] {
        n /= 2;
        for at in 0..n {
            found[at] = _mm512_mask_blend_epi8(bit, found[2 * at], found[2 * at + 1]);
        }
    }
    found[0]
}

/// The values of half `half` of 32 entries of four values each.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn fours(codes: __m512i, half: usize, levels: &[u8; 8]) -> __m512i {
    let codes = if half == 0 {
        _mm512_castsi512_si256(codes)
    } else {
        _mm512_extracti64x4_epi64::<1>(codes)
    };
    // Two entries in each number of 64 bits.
    let offsets = _mm512_set1_epi64(0x1916_1310_0906_0300);
    let numbers = _mm512_multishift_epi64_epi8(offsets, _mm512_cvtepu32_epi64(codes));
    values_of(levels, _mm512_and_si512(numbers, _mm512_set1_epi8(7)))
}

/// The values of quarter `quarter` of 32 entries of eight values each.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn eights(codes: __m512i, quarter: usize, levels: &[u8; 8]) -> __m512i {
    let codes = match quarter {
        0 => _mm512_castsi512_si128(codes),
        1 => _mm512_extracti32x4_epi32::<1>(codes),
        2 => _mm512_extracti32x4_epi32::<2>(codes),
        _ => _mm512_extracti32x4_epi32::<3>(codes),
    };
    let offsets = _mm512_set1_epi64(0x0e0c_0a08_0604_0200);
    let numbers = _mm512_multishift_epi64_epi8(offsets, _mm512_cvtepu16_epi64(codes));
    values_of(levels, _mm512_and_si512(numbers, _mm512_set1_epi8(3)))
}

#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn values_of(levels: &[u8; 8], numbers: __m512i) -> __m512i {
    _mm512_shuffle_epi8(_mm512_set1_epi64(i64::from_le_bytes(*levels)), numbers)
}

/// The dot product of a super-block's values, some of them negated, with activations, times the
/// factors of its parts, to be added over lanes.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn dot_row<F: QuantFormat<BYTES>, const BYTES: usize>(
    values: &[__m512i; 4],
    signs: &[u64; 4],
    acts: &[__m512i; 4],
    factors: __m256i,
) -> __m256i {
    let factors = _mm512_zextsi256_si512(factors);
    let zero = _mm512_setzero_si512();
    // The part of each pair of values.
    let part = match F::PARTS {
        1 => _mm512_srli_epi16::<4>(pair_numbers()),
        _ => _mm512_srli_epi16::<3>(pair_numbers()),
    };
    let mut sum = zero;
    for j in 0..4 {
        let acts = _mm512_mask_sub_epi8(acts[j], signs[j], zero, acts[j]);
        // At most 62 · 127 · 2, which 16 bits hold.
        let pairs = _mm512_maddubs_epi16(values[j], acts);
        let first = _mm512_set1_epi16((j * 2 * F::PARTS) as i16);
        let factor = _mm512_permutexvar_epi16(_mm512_add_epi16(part, first), factors);
        sum = _mm512_dpwssd_epi32(sum, pairs, factor);
    }
    _mm256_add_epi32(
        _mm512_castsi512_si256(sum),
        _mm512_extracti64x4_epi64::<1>(sum),
    )
}

/// 0 to 31.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn pair_numbers() -> __m512i {
    const NUMBERS: [i16; 32] = {
        let (mut numbers, mut i) = ([0; 32], 0);
        while i < 32 {
            numbers[i as usize] = i;
            i += 1;
        }
        numbers
    };
    // SAFETY: 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(NUMBERS.as_ptr().cast()) }
}

/// The four bytes of each number of 64 bits that begin at bit `FIRST` and every seventh after it.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn sevens<const FIRST: i64>(numbers: __m512i) -> __m256i {
    let offsets = _mm512_set1_epi64(0x150e_0700 + FIRST * 0x0101_0101);
    _mm512_cvtepi64_epi32(_mm512_multishift_epi64_epi8(offsets, numbers))
}

/// The signs that 32 times seven bits stand for: an eighth makes their number even.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn even_signs(bytes: __m256i) -> [u64; 4] {
    // Row by row from the last byte on: each bit itself, then the sum of all seven.
    let matrix = _mm256_set1_epi64x(0x0102_0408_1020_407f);
    let signs = _mm256_gf2p8affine_epi64_epi8::<0>(bytes, matrix);
    let mut words = [0; 4];
    // SAFETY: 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), signs) };
    words
}

#[inline]
fn word64(block: &[u8], at: usize) -> u64 {
    block[at..]
        .first_chunk()
        .map_or(0, |word| u64::from_le_bytes(*word))
}

#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn load64(bytes: &[u8], at: usize) -> __m512i {
    let bytes = &bytes[at..at + 64];
    // SAFETY: 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}
