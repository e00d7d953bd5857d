//! [`I8mm`]: products of int8 matrices, eight columns of two weight rows with those of two tokens
//! in one instruction.
//!
//! Invariant: sums are those of [`DotProd`], since integers may be added in any order. Knows no
//! format.

use std::arch::aarch64::*;
use std::arch::asm;

use super::dot::{Dot, DotProd, NeonTile};
use super::unpack::RowPairs;
use crate::kernels::gemm::tile::VECTORS;
use crate::kernels::gemm::tile_isa::Steps;

/// The extension for int8 matrices: eight products at once, of two rows and two tokens.
pub(super) struct I8mm;

impl Dot for I8mm {
    type Interleave = RowPairs;

    #[inline(always)]
    unsafe fn dot(acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
        // SAFETY: the caller has the extension, and the one for dot products.
        unsafe { DotProd::dot(acc, w, a) }
    }

    #[inline(always)]
    unsafe fn dot_steps<const T: usize>(steps: &Steps, sums: &mut [[int32x4_t; VECTORS]; T]) {
        // SAFETY: as above; the caller promises the steps, whose number is even.
        unsafe {
            // For each two tokens (a last one is its own neighbour) `[row][token]` of eight rows,
            // two in a register; the first half of this is used.
            let mut products = [[vdupq_n_s32(0); 2 * VECTORS]; T];
            for k in (0..steps.n).step_by(2) {
                // A step is eight columns of four rows.
                let [w0, w1] = steps.weights::<NeonTile<Self>>(k);
                let [w2, w3] = steps.weights::<NeonTile<Self>>(k + 1);
                for (pair, products) in products.iter_mut().enumerate().take(T.div_ceil(2)) {
                    let of_token = |t: usize| vld1_s32(steps.acts.add(t * steps.stride + k));
                    let a = vcombine_s32(of_token(2 * pair), of_token((2 * pair + 1).min(T - 1)));
                    products[0] = smmla(products[0], w0, a);
                    products[1] = smmla(products[1], w1, a);
                    products[2] = smmla(products[2], w2, a);
                    products[3] = smmla(products[3], w3, a);
                }
            }
            for (t, sums) in sums.iter_mut().enumerate() {
                let [low, high] = match (t % 2, products[t / 2]) {
                    (0, [a, b, c, d]) => [vuzp1q_s32(a, b), vuzp1q_s32(c, d)],
                    (_, [a, b, c, d]) => [vuzp2q_s32(a, b), vuzp2q_s32(c, d)],
                };
                *sums = [vaddq_s32(sums[0], low), vaddq_s32(sums[1], high)];
            }
        }
    }
}

/// The instruction, whose function in the standard library is not stable yet: `acc[i][j] += Σ w[i]
/// · a[j]` of eight signed bytes.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut acc: int32x4_t, w: int32x4_t, a: int32x4_t) -> int32x4_t {
    // SAFETY: arithmetic on registers, for which this function has the extension.
    unsafe {
        asm!("smmla {acc:v}.4s, {w:v}.16b, {a:v}.16b",
            acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}
