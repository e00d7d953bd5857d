//! Products of stored BF16 weights with BF16 activations: dot products of pairs, 32 columns at a
//! time.
//!
//! The instruction adds the products of two neighbouring columns to each sum, the second one's
//! first, each rounded as a multiply-add is; subnormal numbers count as zero (Intel 64 and IA-32
//! Architectures Software Developer's Manual, `VDPBF16PS`).

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::float::Avx512Float;
use super::packed_float;
use crate::kernels::gemm_float::{self, FloatIsa, FloatRows};
use crate::kernels::{WeightLayout, WeightRows};
use crate::operands::Bf16Rows;
use crate::output::OutputColumns;

/// Weight rows that are multiplied with several tokens at a time.
const ROWS: usize = 6;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn matmul(
    weights: &WeightRows<'_>,
    acts: &Bf16Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match weights.layout {
        WeightLayout::Stored => matmul_stored(weights, acts, tokens, out),
        WeightLayout::Packed => packed_float::bf16::matmul(weights, acts, tokens, out),
    }
}

/// With weights as they are stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn matmul_stored(
    weights: &WeightRows<'_>,
    acts: &Bf16Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let acts = FloatRows {
        values: acts.values(),
        stride: acts.stride(),
    };
    // SAFETY: this function has the features of its registers.
    unsafe { gemm_float::matmul_bf16::<Bf16Pairs, ROWS>(weights, acts, tokens, out) }
}

/// Rounds by the rule of [`crate::operands::bf16`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn round(from: &[f32], to: &mut [bf16]) {
    debug_assert_eq!(from.len(), to.len());
    const LANES: usize = 16;
    for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
        let n = from.len().min(to.len());
        let lanes = (!0_u16).unbounded_shr((LANES - n) as u32);
        // SAFETY: only the lanes that both have are read and written, which needs no alignment.
        unsafe {
            let values = _mm512_maskz_loadu_ps(lanes, from.as_ptr());
            let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(values));
            _mm256_mask_storeu_epi16(to.as_mut_ptr().cast(), lanes, rounded);
        }
    }
}

/// Registers of 32 columns, the two of a lane interleaved.
pub(super) struct Bf16Pairs;

impl FloatIsa for Bf16Pairs {
    type Float = __m512;
    type Act = bf16;
    const LANES: usize = 32;

    intrinsics! { unsafe;
        zero() -> __m512 = _mm512_setzero_ps();
        load(from: *const bf16) -> __m512 = _mm512_loadu_ps(from.cast());
        load_bf16(from: *const u8) -> __m512 = _mm512_loadu_ps(from.cast());
        mul_add(weights: __m512, acts: __m512, acc: __m512) -> __m512 = {
            let pairs = |x| std::mem::transmute::<__m512, __m512bh>(x);
            _mm512_dpbf16_ps(acc, pairs(weights), pairs(acts))
        };
        sum(x: __m512) -> f32 = Avx512Float::sum(x);
    }

    #[inline(always)]
    unsafe fn sums<const N: usize>(x: [__m512; N]) -> [f32; N] {
        // SAFETY: as above.
        unsafe { Avx512Float::sums(x) }
    }
}
