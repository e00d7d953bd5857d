//! Quantizes activations to int8 blocks of 32. Bit for bit what the scalar kernel does.

use std::arch::aarch64::*;

use crate::kernels::isa::scalar::quantize::Steps;
use crate::operands::{BLOCK, Int8RowMut};

#[target_feature(enable = "neon")]
pub(super) fn quantize(values: &[f32], mut row: Int8RowMut<'_>) {
    for (first, values) in values.chunks(row.span.len()).enumerate() {
        let (whole, rest) = values.as_chunks::<BLOCK>();
        let mut last = [0.0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        let mut bits = vdupq_n_u32(0);
        for values in whole.iter().chain(last) {
            bits = vmaxq_u32(bits, magnitudes(values));
        }
        let steps = Steps::of(f32::from_bits(vmaxvq_u32(bits)));
        for (b, values) in (first * row.span.len() / BLOCK..).zip(whole.iter().chain(last)) {
            let Some(quants) = row.quants.get_mut(b) else {
                return;
            };
            let sums;
            (*quants, sums) = quantize_block(values, &steps);
            row.set_scale_and_sums(b, steps.scale, sums);
        }
    }
}

/// Four values of each eighth.
#[inline]
#[target_feature(enable = "neon")]
fn load(values: &[f32; BLOCK]) -> [float32x4_t; 8] {
    let from = values.as_ptr();
    // SAFETY: 32 values can be read.
    [0, 4, 8, 12, 16, 20, 24, 28].map(|at: usize| unsafe { vld1q_f32(from.add(at)) })
}

/// The largest bit patterns of magnitudes, lane by lane: their order is that of magnitudes, with
/// infinities and then NaN last.
#[inline]
#[target_feature(enable = "neon")]
fn magnitudes(values: &[f32; BLOCK]) -> uint32x4_t {
    let mut most = vdupq_n_u32(0);
    for x in load(values) {
        most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(x)));
    }
    most
}

/// The quants, and the sums of the first and last 16 of them.
#[inline]
#[target_feature(enable = "neon")]
fn quantize_block(values: &[f32; BLOCK], steps: &Steps) -> ([i8; BLOCK], [i32; 2]) {
    if steps.inverse == 0.0 {
        return ([0; BLOCK], [0; 2]);
    }
    // To nearest, ties to even.
    let q = load(values).map(|x| vcvtnq_s32_f32(vmulq_n_f32(x, steps.inverse)));
    let words = |i: usize| vcombine_s16(vqmovn_s32(q[i]), vqmovn_s32(q[i + 1]));
    let bytes = |i: usize| vcombine_s8(vqmovn_s16(words(i)), vqmovn_s16(words(i + 2)));
    let halves = [bytes(0), bytes(4)];
    let mut quants = [0; BLOCK];
    let (to, _) = quants.as_chunks_mut::<16>();
    for (to, half) in to.iter_mut().zip(halves) {
        // SAFETY: 16 writable bytes; the store needs no alignment.
        unsafe { vst1q_s8(to.as_mut_ptr(), half) };
    }
    (quants, halves.map(|half| i32::from(vaddlvq_s8(half))))
}
