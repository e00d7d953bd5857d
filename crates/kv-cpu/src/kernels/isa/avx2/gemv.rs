//! GEMV (one token) on stored blocks: eight weight rows in lock-step.
//!
//! Invariant: the additions of [`gemm::tile`](crate::kernels::gemm::tile), in its order. Generic
//! over the block format ([`QuantFormat`]).

use std::arch::x86_64::*;

use super::dot::{Dot, times};
use super::min_correction::{MinCorrection, SuperFactors, add_lanes_4};
use crate::kernels::WeightRows;
use crate::kernels::gemm::block_scales::BlockScales;
use crate::kernels::gemm::unpack_panel::QuantFormat;
use crate::kernels::prefetch::Prefetcher;
use crate::kernels::row_tiles::{row_tiles, write_sums};
use crate::operands::{Int8Row, SUPER_BLOCK};

/// Weight rows interleaved.
const ROWS: usize = 8;

/// All weight rows times one token: `out[row]`.
///
/// # Safety
/// AVX2, FMA and F16C are available, and what `D` needs.
#[inline(always)]
pub(in crate::kernels) unsafe fn gemv<D: Dot, F: QuantFormat<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let row_bytes = weights.row_bytes.max(1);
    let n_stored = (row_bytes / BYTES).min(acts.n_blocks() / F::GROUPS);
    for (rows, out) in row_tiles(weights, out) {
        let mut sums = [0.0; ROWS];
        // SAFETY: `n_stored` blocks can be read from the start of each row on; the store is of
        // eight values.
        unsafe {
            let acc = match F::GROUPS {
                1 => blocks::<D, F, BYTES>(&rows, (n_stored, row_bytes), acts),
                _ => supers::<F, BYTES>(&rows, (n_stored, row_bytes), acts),
            };
            _mm256_storeu_ps(sums.as_mut_ptr(), acc);
        }
        write_sums(&sums, out);
    }
}

/// The quants of group `g`, unsigned.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn unsigned<F: QuantFormat<BYTES>, const BYTES: usize>(
    block: &[u8; BYTES],
    g: usize,
) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe { _mm256_add_epi8(F::quants(block, g), _mm256_set1_epi8(F::OFFSET as i8)) }
}

/// Formats with a scale for each block, and perhaps a minimum.
///
/// # Safety
/// As for [`multiply`]; the rows have `n_blocks` blocks, the activations at least as many.
#[inline(always)]
unsafe fn blocks<D: Dot, F: QuantFormat<BYTES>, const BYTES: usize>(
    rows: &[*const [u8; BYTES]; ROWS],
    (n_blocks, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = _mm256_setzero_ps();
        for b in 0..n_blocks {
            let prefetcher = Prefetcher::new::<ROWS>(b * BYTES, BYTES, row_bytes);
            let a = _mm256_loadu_si256(acts.quants.as_ptr().add(b).cast());
            let (mut scales, mut minima) = ([0; ROWS], [0; ROWS]);
            let mut dots = [_mm256_setzero_si256(); ROWS];
            for (r, dots) in dots.iter_mut().enumerate() {
                let block = &*rows[r].add(b);
                prefetcher.prefetch(block, r);
                scales[r] = F::scale_bits(block);
                if F::MINIMA {
                    minima[r] = F::minimum_bits(block);
                }
                let w = unsigned::<F, BYTES>(block, 0);
                *dots = if F::WIDE {
                    D::dot_bytes::<true>(*dots, w, a)
                } else {
                    D::dot_bytes::<false>(*dots, w, a)
                };
            }
            let offset = match D::SIGNED_WIDE {
                true => F::SIGNED_OFFSET,
                false => F::OFFSET,
            };
            let taken = offset * i32::from(*acts.int_sums.get_unchecked(b));
            let dots = _mm256_sub_epi32(add_lanes_8(dots), _mm256_set1_epi32(taken));
            let scales = match F::POWERS {
                true => exp2_scales(&scales),
                false => f16_to_f32(&scales),
            };
            let scale = _mm256_mul_ps(scales, _mm256_set1_ps(*acts.scales.get_unchecked(b)));
            acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, acc);
            if F::MINIMA {
                let sum = _mm256_set1_ps(*acts.sums.get_unchecked(b));
                acc = _mm256_fmadd_ps(f16_to_f32(&minima), sum, acc);
            }
        }
        acc
    }
}

/// Formats with integer factors in super-blocks, and perhaps integer minima. Factors are multiplied
/// in where pairs of products are added, which VNNI has no use for.
///
/// # Safety
/// As for [`multiply`]; the rows have `n_supers` blocks, the activations at least as many.
#[inline(always)]
unsafe fn supers<F: QuantFormat<BYTES>, const BYTES: usize>(
    rows: &[*const [u8; BYTES]; ROWS],
    (n_supers, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = _mm256_setzero_ps();
        for s in 0..n_supers {
            let first = s * SUPER_BLOCK;
            let prefetcher = Prefetcher::new::<ROWS>(s * BYTES, BYTES, row_bytes);
            let (mut scales, mut scale_minima) = ([0; ROWS], [0; ROWS]);
            let mut sums = [_mm256_setzero_si256(); ROWS];
            let mut minima = [_mm_setzero_si128(); ROWS];
            for (r, row) in rows.iter().enumerate() {
                let block = &*row.add(s);
                prefetcher.prefetch(block, r);
                let Some(of_block) = F::super_scales_of(block) else {
                    return acc;
                };
                scales[r] = of_block.scale.to_bits();
                scale_minima[r] = of_block.minimum.to_bits();
                (sums[r], minima[r]) = dot::<F, BYTES>(block, &of_block, acts, first);
            }
            let act_scale = _mm256_set1_ps(*acts.scales.get_unchecked(first));
            let scale = _mm256_mul_ps(f16_to_f32(&scales), act_scale);
            acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(add_lanes_8(sums)), scale, acc);
            if F::MINIMA {
                let [a, b, c, d, e, f, g, h] = minima;
                let (low, high) = (add_lanes_4([a, b, c, d]), add_lanes_4([e, f, g, h]));
                let total = _mm256_cvtepi32_ps(_mm256_set_m128i(high, low));
                let scale = _mm256_mul_ps(f16_to_f32(&scale_minima), act_scale);
                acc = _mm256_fnmadd_ps(total, scale, acc);
            }
        }
        acc
    }
}

/// The integer sums of one row, to be added over lanes: of quants, and of minima.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn dot<F: QuantFormat<BYTES>, const BYTES: usize>(
    block: &[u8; BYTES],
    scales: &BlockScales,
    acts: &Int8Row<'_>,
    first: usize,
) -> (__m256i, __m128i) {
    // SAFETY: as the caller promises.
    unsafe {
        let min_correction = MinCorrection::of(SuperFactors::of(scales), F::PARTS, acts, first);
        let factors = by_group::<F, BYTES>(min_correction.factors);
        let mut sum = _mm256_setzero_si256();
        for (g, a) in acts.quants[first..first + SUPER_BLOCK].iter().enumerate() {
            let a = _mm256_loadu_si256(a.as_ptr().cast());
            let w = unsigned::<F, BYTES>(block, g);
            let pair = _mm256_set1_epi16(0x0100 + 0x0202 * g as i16);
            let factor = _mm256_shuffle_epi8(factors, pair);
            let more = if F::WIDE {
                times::<true>(w, a, factor)
            } else {
                times::<false>(w, a, factor)
            };
            sum = _mm256_add_epi32(sum, more);
        }
        if F::SIGNED_OFFSET != 0 {
            sum = _mm256_sub_epi32(sum, min_correction.offsets(F::SIGNED_OFFSET));
        }
        let minima = match F::MINIMA {
            true => min_correction.minima(),
            false => _mm_setzero_si128(),
        };
        (sum, minima)
    }
}

/// The factor of group `g` as the `g`-th number of 16 bits of both halves, or those of its halves
/// in the halves.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn by_group<F: QuantFormat<BYTES>, const BYTES: usize>(factors: __m128i) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let order = match F::PARTS {
            1 => _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7),
            _ => _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15),
        };
        _mm256_cvtepi8_epi16(_mm_shuffle_epi8(factors, order))
    }
}

/// The sums over the lanes of eight registers.
#[inline]
#[target_feature(enable = "avx2")]
fn add_lanes_8([a, b, c, d, e, f, g, h]: [__m256i; ROWS]) -> __m256i {
    let (low, high) = (
        add_half_lanes_4([a, b, c, d]),
        add_half_lanes_4([e, f, g, h]),
    );
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    )
}

/// In each half of the result, the sums of that half of four registers.
#[inline]
#[target_feature(enable = "avx2")]
fn add_half_lanes_4(r: [__m256i; 4]) -> __m256i {
    let a = _mm256_add_epi32(
        _mm256_unpacklo_epi32(r[0], r[1]),
        _mm256_unpackhi_epi32(r[0], r[1]),
    );
    let b = _mm256_add_epi32(
        _mm256_unpacklo_epi32(r[2], r[3]),
        _mm256_unpackhi_epi32(r[2], r[3]),
    );
    _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}

/// Eight half-precision numbers, f16_to_f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn f16_to_f32(numbers: &[u16; ROWS]) -> __m256 {
    // SAFETY: 16 readable bytes; the load needs no alignment.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(numbers.as_ptr().cast()) })
}

/// As [`mxfp4_scale`](kv_core::block::mxfp4_scale), of eight exponents.
#[inline]
#[target_feature(enable = "avx2")]
fn exp2_scales(exponents: &[u16; ROWS]) -> __m256 {
    // SAFETY: 16 readable bytes; the load needs no alignment.
    let e = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(exponents.as_ptr().cast()) });
    let one = _mm256_set1_epi32(1);
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, one));
    // From 2 on, shifted by more bits than there are.
    let subnormal = _mm256_srlv_epi32(_mm256_set1_epi32(1 << 22), _mm256_sub_epi32(one, e));
    _mm256_castsi256_ps(_mm256_max_epi32(normal, subnormal))
}
