//! [`NeonTile`]: GEMM tiles of four lanes; [`Dot`]: their dot products of int8, with the
//! dot-product extension or without.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use crate::kernels::gemm::tile::VECTORS;
use crate::kernels::gemm::tile_isa::{Steps, TileIsa};
use crate::kernels::gemm::unpack_panel::{Interleave, Words};

/// Dot products of bytes.
pub(super) trait Dot: Sized {
    /// As [`TileIsa::Interleave`].
    type Interleave: Interleave;

    /// `acc + Σ w · a` over the four signed bytes of each lane; `a` is never −128.
    ///
    /// # Safety
    /// The instruction set of the type is available.
    unsafe fn dot(acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t;

    /// As [`TileIsa::dot_steps`].
    ///
    /// # Safety
    /// The instruction set of the type is available; steps and tokens exist.
    #[inline(always)]
    unsafe fn dot_steps<const T: usize>(steps: &Steps, sums: &mut [[int32x4_t; VECTORS]; T]) {
        // SAFETY: as the caller promises.
        unsafe { steps.dot_each_step::<NeonTile<Self>, true, T>(sums) }
    }
}

/// NEON alone: products are added in pairs of 16 bits.
pub(super) struct Widening;

impl Dot for Widening {
    type Interleave = Words;

    intrinsics! { unsafe;
        dot(acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t = {
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
            // No sum of two products exceeds 2 · 128 · 127.
            vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(w, a)))
        };
    }
}

/// The dot-product extension: four products at once.
pub(super) struct DotProd;

impl Dot for DotProd {
    type Interleave = Words;

    intrinsics! { unsafe;
        dot(acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t = sdot(acc, w, a);
    }
}

/// The instruction, whose function in the standard library is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: arithmetic on registers, for which this function has the extension.
    unsafe {
        asm!("sdot {acc:v}.4s, {w:v}.16b, {a:v}.16b",
            acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// 128-bit registers.
pub(super) struct NeonTile<D>(PhantomData<D>);

impl<D: Dot> TileIsa for NeonTile<D> {
    type Int = int32x4_t;
    type Float = float32x4_t;
    type Interleave = D::Interleave;
    const ROWS: usize = 4;

    intrinsics! { unsafe;
        zero() -> int32x4_t = vdupq_n_s32(0);
        load(from: *const i32) -> int32x4_t = vld1q_s32(from);
        splat(x: i32) -> int32x4_t = vdupq_n_s32(x);
        dot_pairs(acc: int32x4_t, w: int32x4_t, a: int32x4_t) -> int32x4_t = {
            let (w, a) = (vreinterpretq_s16_s32(w), vreinterpretq_s16_s32(a));
            let low = vmull_s16(vget_low_s16(w), vget_low_s16(a));
            vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(w, a)))
        };
        add(a: int32x4_t, b: int32x4_t) -> int32x4_t = vaddq_s32(a, b);
        mul(a: int32x4_t, b: int32x4_t) -> int32x4_t = vmulq_s32(a, b);
        shift_left(a: int32x4_t, b: int32x4_t) -> int32x4_t = vshlq_s32(a, b);
        to_float(x: int32x4_t) -> float32x4_t = vcvtq_f32_s32(x);
        zero_f() -> float32x4_t = vdupq_n_f32(0.0);
        load_f(from: *const f32) -> float32x4_t = vld1q_f32(from);
        store_f(to: *mut f32, x: float32x4_t) -> () = vst1q_f32(to, x);
        splat_f(x: f32) -> float32x4_t = vdupq_n_f32(x);
        mul_f(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        mul_add_f(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t =
            vfmaq_f32(c, a, b);
        sub_mul_f(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t =
            vfmsq_f32(c, a, b);
    }

    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: int32x4_t, w: int32x4_t, a: int32x4_t) -> int32x4_t {
        // SAFETY: the caller has NEON, and what `D` needs.
        unsafe { D::dot(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(a)) }
    }

    #[inline(always)]
    unsafe fn dot_steps<const WIDE: bool, const T: usize>(
        steps: &Steps,
        sums: &mut [[int32x4_t; VECTORS]; T],
    ) {
        // SAFETY: as above.
        unsafe { D::dot_steps(steps, sums) }
    }
}
