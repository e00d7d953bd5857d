//! [`Neon`]: eight `f32` in two registers. Knows no operation.

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;

use crate::kernels::vector::{Transpose, Vector, Vector8};

/// NEON is available.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// The proof.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) fn new() -> Self {
        Self(())
    }
}

/// A function of each register.
macro_rules! each {
    ($function:path: $($x:ident),+) => {
        [$function($($x[0]),+), $function($($x[1]),+)]
    };
}

type F = [float32x4_t; 2];

impl Vector<8> for Neon {
    type F = F;

    intrinsics! { proof;
        splat(self, x: f32) -> F = [vdupq_n_f32(x); 2];
        load(self, from: &[f32; 8]) -> F =
            [vld1q_f32(from.as_ptr()), vld1q_f32(from.as_ptr().add(4))];
        load_f16(self, from: &[f16; 8]) -> F = f16_to_f32(vld1q_u16(from.as_ptr().cast()));
        store(self, to: &mut [f32; 8], x: F) -> () = {
            let to = to.as_mut_ptr();
            vst1q_f32(to, x[0]);
            vst1q_f32(to.add(4), x[1])
        };
        store_f16(self, to: &mut [f16; 8], x: F) -> () =
            vst1q_u16(to.as_mut_ptr().cast(), f32_to_f16(x));
        add(self, a: F, b: F) -> F = each!(vaddq_f32: a, b);
        sub(self, a: F, b: F) -> F = each!(vsubq_f32: a, b);
        mul(self, a: F, b: F) -> F = each!(vmulq_f32: a, b);
        div(self, a: F, b: F) -> F = each!(vdivq_f32: a, b);
        mul_add(self, a: F, b: F, c: F) -> F = each!(vfmaq_f32: c, a, b);
        abs(self, x: F) -> F = each!(vabsq_f32: x);
        max(self, a: F, b: F) -> F = {
            // The instruction for maxima gives NaN where either is.
            let larger = each!(vcgtq_f32: a, b);
            each!(vbslq_f32: larger, a, b)
        };
        min(self, a: F, b: F) -> F = {
            let smaller = each!(vcltq_f32: a, b);
            each!(vbslq_f32: smaller, a, b)
        };
        round(self, x: F) -> F = each!(vrndnq_f32: x);
        times_power_of_two(self, x: F, n: F) -> F = {
            let n = each!(vcvtq_s32_f32: n);
            let half = each!(vshrq_n_s32::<1>: n);
            let rest = each!(vsubq_s32: n, half);
            // Two factors: neither is subnormal or infinite where the result is not.
            let (a, b) = (each!(power_of_two: half), each!(power_of_two: rest));
            self.mul(self.mul(x, a), b)
        };
    }
}

impl Vector8 for Neon {
    intrinsics! { proof;
        sum(self, x: F) -> f32 = {
            let four = vaddq_f32(x[0], x[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vaddv_f32(two)
        };
        power_of_two(self, n: F) -> F = {
            let n = each!(vcvtq_s32_f32: n);
            each!(power_of_two: n)
        };
    }
}

impl Transpose<8> for Neon {
    intrinsics! { proof;
        transpose(self, rows: [F; 8]) -> [F; 8] = {
            let square = |first: usize, half: usize| {
                let [a, b, c, d] = [0, 1, 2, 3].map(|i| rows[first + i][half]);
                transpose_4x4([a, b, c, d].map(|x| vreinterpretq_u32_f32(x)))
            };
            let [left, right] = [0, 1].map(|half| [square(0, half), square(4, half)]);
            let mut columns = rows;
            for (i, column) in columns.iter_mut().enumerate() {
                let [upper, lower] = if i < 4 { left } else { right };
                let words = [upper[i % 4], lower[i % 4]];
                *column = each!(vreinterpretq_f32_u32: words);
            }
            columns
        };
    }
}

/// Rows as columns.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn transpose(rows: &[[f32; 8]; 8]) -> [[f32; 8]; 8] {
    let e = Neon::new();
    let mut columns = [[0.0; 8]; 8];
    let transpose_4x4 = e.transpose(std::array::from_fn(|i| e.load(&rows[i])));
    for (to, column) in columns.iter_mut().zip(transpose_4x4) {
        e.store(to, column);
    }
    columns
}

/// `2^n` for `n` in −126..=127, 0 for −127.
#[inline]
#[target_feature(enable = "neon")]
fn power_of_two(n: int32x4_t) -> float32x4_t {
    let exponent = vaddq_s32(n, vdupq_n_s32(127));
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
}

/// Four rows of four words become columns.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn transpose_4x4([a, b, c, d]: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    let pairs = [
        vtrn1q_u32(a, b),
        vtrn2q_u32(a, b),
        vtrn1q_u32(c, d),
        vtrn2q_u32(c, d),
    ];
    let [ab0, ab1, cd0, cd1] = pairs.map(|x| vreinterpretq_u64_u32(x));
    [
        vtrn1q_u64(ab0, cd0),
        vtrn1q_u64(ab1, cd1),
        vtrn2q_u64(ab0, cd0),
        vtrn2q_u64(ab1, cd1),
    ]
    .map(|x| vreinterpretq_u32_u64(x))
}

/// Eight half-precision numbers, exactly. (The types of the standard library's functions for
/// these are younger than the Rust that this crate needs.)
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn f16_to_f32(bits: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high);
    // SAFETY: conversions between registers, which NEON has.
    unsafe {
        asm!("fcvtl {low:v}.4s, {bits:v}.4h", "fcvtl2 {high:v}.4s, {bits:v}.8h",
            bits = in(vreg) bits, low = out(vreg) low, high = out(vreg) high,
            options(pure, nomem, nostack, preserves_flags));
    }
    [low, high]
}

/// Eight numbers in half precision, rounded to nearest, ties to even.
#[inline]
#[target_feature(enable = "neon")]
fn f32_to_f16([low, high]: [float32x4_t; 2]) -> uint16x8_t {
    let bits;
    // SAFETY: conversions between registers, which NEON has; the first sets the whole register.
    unsafe {
        asm!("fcvtn {bits:v}.4h, {low:v}.4s", "fcvtn2 {bits:v}.8h, {high:v}.4s",
            low = in(vreg) low, high = in(vreg) high, bits = out(vreg) bits,
            options(pure, nomem, nostack, preserves_flags));
    }
    bits
}
