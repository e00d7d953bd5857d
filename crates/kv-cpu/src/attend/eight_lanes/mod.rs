//! Tile loops over vectors of eight lanes: YMM registers of AVX2, pairs of NEON's.
//!
//! Code that handles vectors has no closures that the standard library calls: those would be
//! compiled without the features, and every instruction would be a call. Hand-written, since what
//! the compiler makes of the scalar loops keeps sums in memory. An ISA implements [`Lanes`] and
//! compiles the loops for its features. Invariant: the same products and additions in the same
//! order as in the scalar loops, all fused, so the same bits on every ISA.

pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod values;

use super::tile_kernels::KV_TILE;

/// Lanes of a vector.
pub(crate) const N_LANES: usize = 8;
/// Vectors of a query's scores.
const N_VECTORS: usize = KV_TILE / N_LANES;

/// Eight `f32`. A value exists only where the CPU has the ISA's features: what makes one of
/// anything else is `unsafe`.
pub(crate) trait Lanes: Copy {
    /// All bits of a lane, or none.
    type Mask: Copy;

    /// The same number in all lanes.
    ///
    /// # Safety
    /// The CPU has the features.
    unsafe fn splat(x: f32) -> Self;

    /// Eight numbers, aligned or not.
    ///
    /// # Safety
    /// The CPU has the features, and the numbers can be read.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes eight numbers, aligned or not.
    ///
    /// # Safety
    /// The numbers can be written.
    unsafe fn store(self, to: *mut f32);

    /// The lanes whose bits are set in the lowest eight of `bits`.
    ///
    /// # Safety
    /// The CPU has the features.
    unsafe fn mask(bits: u32) -> Self::Mask;

    /// These lanes where `mask` is set, elsewhere those of `others`.
    fn or_else(self, mask: Self::Mask, others: Self) -> Self;

    /// `self · by + to`, rounded once.
    fn multiply_add(self, by: Self, to: Self) -> Self;
    fn add(self, other: Self) -> Self;
    fn subtract(self, other: Self) -> Self;

    /// Whatever is larger; `other` where one is NaN.
    fn larger(self, other: Self) -> Self;

    /// `self · 2^n` with `n` the whole number that `rounded` is, which has
    /// [`ROUND_TO_INT`](crate::kernels::isa::scalar::attend::softmax::ROUND_TO_INT) added: in two
    /// factors, so that
    /// neither is subnormal if the product is not.
    fn times_power(self, rounded: Self) -> Self;

    /// Reduces each of eight vectors, the upper half with the lower, repeatedly: lane `i` of the
    /// result is that of vector `i`.
    fn fold(vectors: [Self; N_LANES], how: Fold) -> Self;

    #[inline(always)]
    fn to_array(self) -> [f32; N_LANES] {
        let mut array = [0.0; N_LANES];
        // SAFETY: the array has eight numbers.
        unsafe { self.store(array.as_mut_ptr()) };
        array
    }
}

/// The operation of [`Lanes::fold`] on two lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fold {
    Larger,
    Sum,
}
