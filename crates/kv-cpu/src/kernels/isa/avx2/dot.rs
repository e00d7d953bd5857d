//! [`Avx2Tile`]: GEMM tiles of eight lanes; [`Dot`]: their dot products of int8, with VNNI or
//! without.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use crate::kernels::gemm::tile::VECTORS;
use crate::kernels::gemm::tile_isa::{Steps, TileIsa};
use crate::kernels::gemm::unpack_panel::Words;

/// Dot products of bytes in 256-bit registers.
#[allow(clippy::missing_safety_doc)] // as for `TileIsa`
pub(in crate::kernels) trait Dot: Sized {
    /// As [`TileIsa::SIGNED_WIDE`].
    const SIGNED_WIDE: bool;

    /// As [`TileIsa::dot_bytes`].
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m256i, w: __m256i, a: __m256i) -> __m256i;

    /// As [`TileIsa::dot_steps`].
    #[inline(always)]
    unsafe fn dot_steps<const WIDE: bool, const T: usize>(
        steps: &Steps,
        sums: &mut [[__m256i; VECTORS]; T],
    ) {
        // SAFETY: as the caller promises.
        unsafe { steps.dot_each_step::<Avx2Tile<Self>, WIDE, T>(sums) }
    }
}

/// AVX2 alone: products are added in pairs of 16 bits, which saturate.
pub(in crate::kernels) struct Maddubs;

impl Dot for Maddubs {
    const SIGNED_WIDE: bool = true;

    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_add_epi32(acc, times::<WIDE>(w, a, _mm256_set1_epi16(1))) }
    }

    #[inline(always)]
    unsafe fn dot_steps<const WIDE: bool, const T: usize>(
        steps: &Steps,
        sums: &mut [[__m256i; VECTORS]; T],
    ) {
        if WIDE {
            // SAFETY: as the caller promises.
            return unsafe { steps.dot_each_step::<Avx2Tile<Self>, WIDE, T>(sums) };
        }
        for first in (0..steps.n).step_by(steps.n_narrow) {
            // SAFETY: the caller has AVX2 and promises the steps; so many pairs do not overflow.
            unsafe {
                let mut pairs = [[_mm256_setzero_si256(); VECTORS]; T];
                for k in first..first + steps.n_narrow {
                    let w = steps.weights::<Avx2Tile<Self>>(k);
                    for (t, pairs) in pairs.iter_mut().enumerate() {
                        let a = steps.acts::<Avx2Tile<Self>>(t, k);
                        pairs[0] = _mm256_add_epi16(pairs[0], _mm256_maddubs_epi16(w[0], a));
                        pairs[1] = _mm256_add_epi16(pairs[1], _mm256_maddubs_epi16(w[1], a));
                    }
                }
                let ones = _mm256_set1_epi16(1);
                for (sums, pairs) in sums.iter_mut().zip(pairs) {
                    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(pairs[0], ones));
                    sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(pairs[1], ones));
                }
            }
        }
    }
}

/// The products of bytes, weights wide or not as in [`TileIsa::dot_bytes`], added in pairs, times
/// the 16-bit numbers of `factors`, added in pairs again.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
pub(super) unsafe fn times<const WIDE: bool>(w: __m256i, a: __m256i, factors: __m256i) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let pairs = if WIDE {
            // No sum of two products exceeds 2 · 128 · 127: activations are never −128.
            let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
        } else {
            _mm256_maddubs_epi16(w, a)
        };
        _mm256_madd_epi16(pairs, factors)
    }
}

/// AVX-VNNI: four products at once, which do not saturate.
pub(super) struct Vnni;

impl Dot for Vnni {
    const SIGNED_WIDE: bool = false;

    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller has AVX-VNNI.
        unsafe { _mm256_dpbusd_avx_epi32(acc, w, a) }
    }
}

/// VNNI as AVX-512 encodes it (EVEX), on 256-bit registers: for processors without AVX-VNNI.
pub(in crate::kernels) struct VnniEvex;

impl Dot for VnniEvex {
    const SIGNED_WIDE: bool = false;

    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller has AVX-512 VNNI and VL.
        unsafe { _mm256_dpbusd_epi32(acc, w, a) }
    }
}

/// 256-bit registers.
pub(in crate::kernels) struct Avx2Tile<D>(PhantomData<D>);

impl<D: Dot> TileIsa for Avx2Tile<D> {
    type Int = __m256i;
    type Float = __m256;
    type Interleave = Words;
    const ROWS: usize = 8;
    const SIGNED_WIDE: bool = D::SIGNED_WIDE;

    intrinsics! { unsafe;
        zero() -> __m256i = _mm256_setzero_si256();
        load(from: *const i32) -> __m256i = _mm256_loadu_si256(from.cast());
        splat(x: i32) -> __m256i = _mm256_set1_epi32(x);
        dot_pairs(acc: __m256i, w: __m256i, a: __m256i) -> __m256i =
            _mm256_add_epi32(acc, _mm256_madd_epi16(w, a));
        add(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        mul(a: __m256i, b: __m256i) -> __m256i = _mm256_mullo_epi32(a, b);
        shift_left(a: __m256i, b: __m256i) -> __m256i = _mm256_sllv_epi32(a, b);
        to_float(x: __m256i) -> __m256 = _mm256_cvtepi32_ps(x);
        zero_f() -> __m256 = _mm256_setzero_ps();
        load_f(from: *const f32) -> __m256 = _mm256_loadu_ps(from);
        store_f(to: *mut f32, x: __m256) -> () = _mm256_storeu_ps(to, x);
        splat_f(x: f32) -> __m256 = _mm256_set1_ps(x);
        mul_f(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        mul_add_f(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        sub_mul_f(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fnmadd_ps(a, b, c);
    }

    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { D::dot_bytes::<WIDE>(acc, w, a) }
    }

    #[inline(always)]
    unsafe fn dot_steps<const WIDE: bool, const T: usize>(
        steps: &Steps,
        sums: &mut [[__m256i; VECTORS]; T],
    ) {
        // SAFETY: as above.
        unsafe { D::dot_steps::<WIDE, T>(steps, sums) }
    }
}
