//! [`TileIsa`]: what a GEMM tile needs of an instruction set. Each lane holds one weight row.
//!
//! Invariant: integer functions are exact for the operands that formats have. Knows no format.

use super::tile::VECTORS;
use super::unpack_panel::Interleave;
use super::{ROWS, STEP};

/// Some steps of a panel, and of the tokens of a tile.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Steps {
    /// The weights of the first step.
    pub(in crate::kernels) weights: *const [u8; STEP],
    /// The first token's activations of the first step.
    pub(in crate::kernels) acts: *const i32,
    /// From one token's activations to the next one's, in steps.
    pub(in crate::kernels) stride: usize,
    pub(in crate::kernels) n: usize,
    /// Steps whose products, added in pairs, fit into 16 bits together; divides `n`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // NEON adds into 32 bits
    pub(in crate::kernels) n_narrow: usize,
}

impl Steps {
    /// The weights of step `k`.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn weights<L: TileIsa>(&self, k: usize) -> [L::Int; VECTORS] {
        // SAFETY: the caller promises the instruction set, and that there is such a step.
        unsafe {
            let w = self.weights.add(k * ROWS).cast::<i32>();
            [L::load(w), L::load(w.add(L::ROWS))]
        }
    }

    /// Adds the dot products, step by step.
    ///
    /// Their number is not a constant, so that the loop stays one: unrolled, the compiler would
    /// load ahead until sums no longer fit in registers.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn dot_each_step<L: TileIsa, const WIDE: bool, const T: usize>(
        &self,
        sums: &mut [[L::Int; VECTORS]; T],
    ) {
        for k in 0..self.n {
            // SAFETY: the caller promises the instruction set and the steps.
            unsafe {
                let w = self.weights::<L>(k);
                for (t, sums) in sums.iter_mut().enumerate() {
                    let a = self.acts::<L>(t, k);
                    sums[0] = L::dot_bytes::<WIDE>(sums[0], w[0], a);
                    sums[1] = L::dot_bytes::<WIDE>(sums[1], w[1], a);
                }
            }
        }
    }

    /// Token `t`'s activations of step `k`.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn acts<L: TileIsa>(&self, t: usize, k: usize) -> L::Int {
        // SAFETY: the caller promises the instruction set, and that there are such activations.
        unsafe { L::splat(self.acts.add(t * self.stride + k).read()) }
    }
}

/// Registers of `ROWS` integers or floats.
///
/// All functions need the instruction set that the type stands for, which is what makes them
/// unsafe to call; loads and stores need `4 · ROWS` readable or writable bytes.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(in crate::kernels) trait TileIsa: Sized {
    /// 32-bit integers, also taken as bytes or pairs of 16 bits.
    type Int: Copy;
    /// `f32`.
    type Float: Copy;
    /// The layout in a panel of the quants that [`TileIsa::dot_steps`] multiplies.
    type Interleave: Interleave;
    /// Number of lanes.
    const ROWS: usize;
    /// True if wide weights are taken for signed bytes, less 128, so that this is not left to take
    /// off. Where not, `WIDE` changes nothing.
    const SIGNED_WIDE: bool = false;

    unsafe fn zero() -> Self::Int;
    unsafe fn load(from: *const i32) -> Self::Int;
    unsafe fn splat(x: i32) -> Self::Int;
    /// `acc + Σ w · a` over the four bytes of each lane, `a` signed, `w` too where
    /// [`SIGNED`](super::SIGNED), else unsigned and below 64 unless `WIDE`.
    unsafe fn dot_bytes<const WIDE: bool>(acc: Self::Int, w: Self::Int, a: Self::Int) -> Self::Int;
    /// Adds the dot products of some steps to the sums of `T` tokens.
    #[inline(always)]
    unsafe fn dot_steps<const WIDE: bool, const T: usize>(
        steps: &Steps,
        sums: &mut [[Self::Int; VECTORS]; T],
    ) {
        // SAFETY: as the caller promises.
        unsafe { steps.dot_each_step::<Self, WIDE, T>(sums) }
    }
    /// `acc + Σ w · a` over the two signed halves of each lane.
    unsafe fn dot_pairs(acc: Self::Int, w: Self::Int, a: Self::Int) -> Self::Int;
    unsafe fn add(a: Self::Int, b: Self::Int) -> Self::Int;
    unsafe fn mul(a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a · 2^b`, which is 0 where `b` is 32.
    unsafe fn shift_left(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Rounded to nearest.
    unsafe fn to_float(x: Self::Int) -> Self::Float;

    unsafe fn zero_f() -> Self::Float;
    unsafe fn load_f(from: *const f32) -> Self::Float;
    unsafe fn store_f(to: *mut f32, x: Self::Float);
    unsafe fn splat_f(x: f32) -> Self::Float;
    unsafe fn mul_f(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a · b + c`, rounded once.
    unsafe fn mul_add_f(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `c − a · b`, rounded once.
    unsafe fn sub_mul_f(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
}
