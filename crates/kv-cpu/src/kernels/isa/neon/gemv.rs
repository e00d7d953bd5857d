//! What GEMV on stored blocks ([`gemv_stored`](crate::kernels::gemv_stored)) needs of NEON: four
//! weight rows in lock-step.
//!
//! Integers, exactly. Generic over the block format ([`QuantFormat`]).

use std::arch::aarch64::*;

use super::dot::{Dot, NeonTile};
use super::vector::f16_to_f32;
use crate::kernels::gemm::block_scales::BlockScales;
use crate::kernels::gemv_stored::GemvIsa;
use crate::kernels::quant_format::QuantFormat;
use crate::operands::{BLOCK, Int8Row, SUPER_BLOCK};

/// Weight rows of a tile.
const ROWS: usize = 4;

impl<D: Dot> GemvIsa<ROWS> for NeonTile<D> {
    type Minima = int32x4_t;

    intrinsics! { unsafe;
        zero_minima() -> int32x4_t = vdupq_n_s32(0);
        add_lanes(rows: [int32x4_t; ROWS]) -> int32x4_t = add_lanes_4(rows);
        add_lanes_of_minima(rows: [int32x4_t; ROWS]) -> int32x4_t = add_lanes_4(rows);
        sub(a: int32x4_t, b: int32x4_t) -> int32x4_t = vsubq_s32(a, b);
        f16_to_f32(bits: &[[u16; ROWS]; 2]) -> [float32x4_t; 2] =
            f16_to_f32(vld1q_u16(bits.as_flattened().as_ptr()));
        exp2_scales(exponents: &[[u16; ROWS]; 2]) -> float32x4_t = {
            let exponents = vreinterpretq_s32_u32(vmovl_u16(vld1_u16(exponents[0].as_ptr())));
            let less = vsubq_s32(exponents, vdupq_n_s32(1));
            let subnormal = vshlq_s32(vdupq_n_s32(1 << 22), vminq_s32(less, vdupq_n_s32(0)));
            vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32::<23>(less), subnormal))
        };
    }

    #[inline(always)]
    unsafe fn dot_block<F: QuantFormat<BYTES>, const BYTES: usize>(
        block: &[u8; BYTES],
        g: usize,
        acts: &[i8; BLOCK],
    ) -> int32x4_t {
        // SAFETY: as the caller promises.
        unsafe {
            let (w, a) = (F::quants(block, g), load(acts));
            D::dot(D::dot(vdupq_n_s32(0), w[0], a[0]), w[1], a[1])
        }
    }

    #[inline(always)]
    unsafe fn dot_super<F: QuantFormat<BYTES>, const BYTES: usize>(
        block: &[u8; BYTES],
        scales: &BlockScales,
        acts: &Int8Row<'_>,
        first: usize,
    ) -> (int32x4_t, int32x4_t) {
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
            let minima = if F::MINIMA {
                minima_of(scales, F::PARTS, acts, first)
            } else {
                zero
            };
            (sum, minima)
        }
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
