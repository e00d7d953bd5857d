//! [`Pair`]: eight lanes in two NEON registers.

use core::arch::aarch64::*;

use crate::attend::eight_lanes::{Fold, Lanes, N_LANES};
use crate::kernels::isa::scalar::attend::softmax::ROUND_TO_INT;

/// The lower four lanes and the upper four; it exists only where the CPU has NEON.
#[derive(Clone, Copy)]
pub(super) struct Pair([float32x4_t; 2]);

impl Pair {
    /// Applies `f` to both registers of two.
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Self([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }
}

/// The larger lanes; those of `b` where one is NaN.
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the CPU has NEON, since its registers are passed. (`fmax` would return NaN.)
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

impl Lanes for Pair {
    type Mask = [uint32x4_t; 2];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the CPU has NEON, as the caller promises.
        Self([unsafe { vdupq_n_f32(x) }; 2])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        Self(unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises; the CPU has NEON, since `self` exists.
        unsafe {
            vst1q_f32(to, self.0[0]);
            vst1q_f32(to.add(4), self.0[1]);
        }
    }

    #[inline(always)]
    unsafe fn mask(bits: u32) -> [uint32x4_t; 2] {
        const EACH: [u32; N_LANES] = [1, 2, 4, 8, 16, 32, 64, 128];
        // SAFETY: the CPU has NEON, as the caller promises; `EACH` has two registers.
        unsafe {
            let bits = vdupq_n_u32(bits);
            let each = EACH.as_ptr();
            [
                vtstq_u32(bits, vld1q_u32(each)),
                vtstq_u32(bits, vld1q_u32(each.add(4))),
            ]
        }
    }

    #[inline(always)]
    fn or_else(self, mask: [uint32x4_t; 2], others: Self) -> Self {
        // SAFETY: the CPU has NEON, since `self` exists.
        Self(unsafe {
            [
                vbslq_f32(mask[0], self.0[0], others.0[0]),
                vbslq_f32(mask[1], self.0[1], others.0[1]),
            ]
        })
    }

    #[inline(always)]
    fn multiply_add(self, by: Self, to: Self) -> Self {
        // SAFETY: the CPU has NEON, since `self` exists.
        Self(unsafe {
            [
                vfmaq_f32(to.0[0], self.0[0], by.0[0]),
                vfmaq_f32(to.0[1], self.0[1], by.0[1]),
            ]
        })
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the CPU has NEON, since `self` exists.
        self.zip(other, |a, b| unsafe { vaddq_f32(a, b) })
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        // SAFETY: the CPU has NEON, since `self` exists.
        self.zip(other, |a, b| unsafe { vsubq_f32(a, b) })
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.zip(other, larger)
    }

    #[inline(always)]
    fn times_power(self, rounded: Self) -> Self {
        // SAFETY: the CPU has NEON, since `self` exists.
        self.zip(rounded, |x, rounded| unsafe {
            let zero = vdupq_n_s32(ROUND_TO_INT.to_bits() as i32);
            let n = vsubq_s32(vreinterpretq_s32_f32(rounded), zero);
            let power = |n: int32x4_t| {
                let exponent = vaddq_s32(n, vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
            };
            let half = vshrq_n_s32::<1>(n);
            vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
        })
    }

    #[inline(always)]
    fn fold(pairs: [Self; N_LANES], how: Fold) -> Self {
        let of = |upper, lower| match how {
            Fold::Larger => larger(upper, lower),
            // SAFETY: the CPU has NEON, since a `Pair` exists.
            Fold::Sum => unsafe { vaddq_f32(upper, lower) },
        };
        let fours = pairs.map(|Self([lower, upper])| of(upper, lower));
        // Two lanes of each of two.
        let twos = |i: usize| {
            // SAFETY: as above.
            let [upper, lower] = unsafe {
                let [a, b] = [fours[i], fours[i + 1]].map(|x| vreinterpretq_f64_f32(x));
                [vzip2q_f64(a, b), vzip1q_f64(a, b)].map(|x| vreinterpretq_f32_f64(x))
            };
            of(upper, lower)
        };
        let ones = |i: usize| {
            let [a, b] = [twos(i), twos(i + 2)];
            // SAFETY: as above.
            let [upper, lower] = unsafe { [vuzp2q_f32(a, b), vuzp1q_f32(a, b)] };
            of(upper, lower)
        };
        Self([ones(0), ones(4)])
    }
}
