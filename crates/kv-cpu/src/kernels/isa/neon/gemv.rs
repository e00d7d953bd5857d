//! GEMV (one token) on stored blocks: four weight rows in lock-step.
//!
//! Invariant: the additions of [`gemm::tile`](crate::kernels::gemm::tile), in its order. Generic
//! over the block format ([`QuantFormat`]).

use std::arch::aarch64::*;

use super::dot::Dot;
use super::vector::f16_to_f32;
use crate::kernels::WeightRows;
use crate::kernels::gemm::block_scales::BlockScales;
use crate::kernels::gemm::unpack_panel::QuantFormat;
use crate::kernels::prefetch::Prefetcher;
use crate::kernels::row_tiles::{row_tiles, write_sums};
use crate::operands::{BLOCK, Int8Row, SUPER_BLOCK};

/// Weight rows interleaved.
const ROWS: usize = 4;

/// All weight rows times one token: `out[row]`.
///
/// # Safety
/// NEON is available, and what `D` needs.
#[inline(always)]
pub(super) unsafe fn gemv<D: Dot, F: QuantFormat<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let row_bytes = weights.row_bytes.max(1);
    let n_stored = (row_bytes / BYTES).min(acts.n_blocks() / F::GROUPS);
    for (rows, out) in row_tiles(weights, out) {
        let mut sums = [0.0; ROWS];
        // SAFETY: `n_stored` blocks can be read from the start of each row on; the store is of
        // four values.
        unsafe {
            let acc = match F::GROUPS {
                1 => blocks::<D, F, BYTES>(&rows, (n_stored, row_bytes), acts),
                _ => supers::<D, F, BYTES>(&rows, (n_stored, row_bytes), acts),
            };
            vst1q_f32(sums.as_mut_ptr(), acc);
        }
        write_sums(&sums, out);
    }
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
) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = vdupq_n_f32(0.0);
        for b in 0..n_blocks {
            let prefetcher = Prefetcher::new::<ROWS>(b * BYTES, BYTES, row_bytes);
            let a = load(acts.quants.get_unchecked(b));
            // Scales, then minima.
            let mut scale_bits = [0; 2 * ROWS];
            let mut dots = [vdupq_n_s32(0); ROWS];
            for (r, dots) in dots.iter_mut().enumerate() {
                let block = &*rows[r].add(b);
                prefetcher.prefetch(block, r);
                scale_bits[r] = F::scale_bits(block);
                if F::MINIMA {
                    scale_bits[ROWS + r] = F::minimum_bits(block);
                }
                let w = F::quants(block, 0);
                *dots = D::dot(D::dot(*dots, w[0], a[0]), w[1], a[1]);
            }
            let scale_bits = vld1q_u16(scale_bits.as_ptr());
            let [mut scales, minima] = f16_to_f32(scale_bits);
            if F::POWERS {
                scales = exp2_scales(vget_low_u16(scale_bits));
            }
            let scale = vmulq_n_f32(scales, *acts.scales.get_unchecked(b));
            acc = vfmaq_f32(acc, vcvtq_f32_s32(add_lanes_4(dots)), scale);
            if F::MINIMA {
                acc = vfmaq_n_f32(acc, minima, *acts.sums.get_unchecked(b));
            }
        }
        acc
    }
}

/// Formats with integer factors in super-blocks, and perhaps integer minima.
///
/// # Safety
/// As for [`multiply`]; the rows have `n_supers` blocks, the activations at least as many.
#[inline(always)]
unsafe fn supers<D: Dot, F: QuantFormat<BYTES>, const BYTES: usize>(
    rows: &[*const [u8; BYTES]; ROWS],
    (n_supers, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = vdupq_n_f32(0.0);
        for s in 0..n_supers {
            let first = s * SUPER_BLOCK;
            let prefetcher = Prefetcher::new::<ROWS>(s * BYTES, BYTES, row_bytes);
            // Scales, then those of minima.
            let mut scale_bits = [0; 2 * ROWS];
            let (mut sums, mut minima) = ([vdupq_n_s32(0); ROWS], [vdupq_n_s32(0); ROWS]);
            for (r, row) in rows.iter().enumerate() {
                let block = &*row.add(s);
                prefetcher.prefetch(block, r);
                let Some(scales) = F::super_scales_of(block) else {
                    return acc;
                };
                scale_bits[r] = scales.scale.to_bits();
                scale_bits[ROWS + r] = scales.minimum.to_bits();
                sums[r] = dot::<D, F, BYTES>(block, &scales, acts, first);
                if F::MINIMA {
                    minima[r] = minima_of(&scales, F::PARTS, acts, first);
                }
            }
            let act_scale = *acts.scales.get_unchecked(first);
            let scale_bits = f16_to_f32(vld1q_u16(scale_bits.as_ptr()));
            let [scale, minimum] = scale_bits.map(|scales| vmulq_n_f32(scales, act_scale));
            acc = vfmaq_f32(acc, vcvtq_f32_s32(add_lanes_4(sums)), scale);
            if F::MINIMA {
                acc = vfmsq_f32(acc, vcvtq_f32_s32(add_lanes_4(minima)), minimum);
            }
        }
        acc
    }
}

/// The integer sum of one row's super-block, to be added over lanes.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn dot<D: Dot, F: QuantFormat<BYTES>, const BYTES: usize>(
    block: &[u8; BYTES],
    scales: &BlockScales,
    acts: &Int8Row<'_>,
    first: usize,
) -> int32x4_t {
    let factors = scales.each_factor();
    // SAFETY: as the caller promises.
    unsafe {
        let zero = vdupq_n_s32(0);
        let mut sum = zero;
        for (g, a) in acts.quants[first..first + SUPER_BLOCK].iter().enumerate() {
            let (w, a) = (F::quants(block, g), load(a));
            if F::PARTS == 1 {
                let both = D::dot(D::dot(zero, w[0], a[0]), w[1], a[1]);
                sum = vmlaq_n_s32(sum, both, i32::from(factors[g]));
            } else {
                for half in 0..2 {
                    let factor = i32::from(factors[2 * g + half]);
                    sum = vmlaq_n_s32(sum, D::dot(zero, w[half], a[half]), factor);
                }
            }
        }
        sum
    }
}

/// `Σ minimum · Σ activations` of a super-block, to be added over lanes.
#[inline]
#[target_feature(enable = "neon")]
fn minima_of(scales: &BlockScales, parts: usize, acts: &Int8Row<'_>, first: usize) -> int32x4_t {
    let minima = scales.each_minimum();
    // SAFETY: sixteen readable bytes.
    let minima = unsafe { vld1q_s8(minima.as_ptr()) };
    let blocks = first..first + SUPER_BLOCK;
    // Eight numbers times eight sums.
    let more = |total: int32x4_t, minima: int8x8_t, sums: int16x8_t| {
        let minima = vmovl_s8(minima);
        let total = vmlal_s16(total, vget_low_s16(minima), vget_low_s16(sums));
        vmlal_high_s16(total, minima, sums)
    };
    let zero = vdupq_n_s32(0);
    if parts == 1 {
        let sums: &[i16] = &acts.int_sums[blocks];
        // SAFETY: the slice has eight numbers.
        return more(zero, vget_low_s8(minima), unsafe {
            vld1q_s16(sums.as_ptr())
        });
    }
    let sums: &[i16] = acts.int_half_sums[blocks].as_flattened();
    // SAFETY: the slice has sixteen numbers.
    let [low, high] = unsafe { [vld1q_s16(sums.as_ptr()), vld1q_s16(sums.as_ptr().add(8))] };
    more(
        more(zero, vget_low_s8(minima), low),
        vget_high_s8(minima),
        high,
    )
}

#[inline]
#[target_feature(enable = "neon")]
fn load(quants: &[i8; BLOCK]) -> [int8x16_t; 2] {
    let from = quants.as_ptr();
    // SAFETY: 32 readable bytes; the loads need no alignment.
    unsafe { [vld1q_s8(from), vld1q_s8(from.add(16))] }
}

/// The sums over the lanes of four registers.
#[inline]
#[target_feature(enable = "neon")]
fn add_lanes_4([a, b, c, d]: [int32x4_t; ROWS]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))
}

/// As [`mxfp4_scale`](kv_core::block::mxfp4_scale), of four exponents.
#[inline]
#[target_feature(enable = "neon")]
fn exp2_scales(exponents: uint16x4_t) -> float32x4_t {
    let less = vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(exponents)), vdupq_n_s32(1));
    let subnormal = vshlq_s32(vdupq_n_s32(1 << 22), vminq_s32(less, vdupq_n_s32(0)));
    vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32::<23>(less), subnormal))
}
