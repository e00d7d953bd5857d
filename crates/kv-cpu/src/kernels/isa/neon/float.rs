//! Products with unquantized weights ([`gemm_float`]), eight columns at a time, in two registers of
//! NEON.

use std::arch::aarch64::*;
use std::ops::Range;

use super::vector::f16_to_f32;
use crate::kernels::WeightRows;
use crate::kernels::gemm_float::{self, F32Isa, FloatIsa};
use crate::output::OutputColumns;

/// Weight rows that are multiplied with several tokens at a time.
const ROWS: usize = 3;

#[target_feature(enable = "neon")]
pub(super) fn matmul(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    // SAFETY: this function has the features of its registers.
    unsafe { gemm_float::matmul::<NeonFloat, ROWS>(weights, acts, tokens, out) }
}

struct NeonFloat;

impl FloatIsa for NeonFloat {
    type Float = [float32x4_t; 2];
    type Act = f32;
    const LANES: usize = 8;

    intrinsics! { unsafe;
        zero() -> [float32x4_t; 2] = [vdupq_n_f32(0.0); 2];
        load(from: *const f32) -> [float32x4_t; 2] = [vld1q_f32(from), vld1q_f32(from.add(4))];
        load_bf16(from: *const u8) -> [float32x4_t; 2] = {
            let bits = vld1q_u16(from.cast());
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(bits))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(bits))),
            ]
        };
        mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> [float32x4_t; 2] =
            [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])];
        sum(x: [float32x4_t; 2]) -> f32 = vaddvq_f32(vaddq_f32(x[0], x[1]));
    }
}

impl F32Isa for NeonFloat {
    intrinsics! { unsafe;
        load_f16(from: *const u8) -> [float32x4_t; 2] = f16_to_f32(vld1q_u16(from.cast()));
    }
}
