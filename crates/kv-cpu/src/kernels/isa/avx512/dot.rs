//! [`Avx512Tile`]: GEMM tiles of sixteen lanes, with VNNI.

use std::arch::x86_64::*;

use crate::kernels::gemm::tile_isa::TileIsa;
use crate::kernels::gemm::unpack_panel::Words;

/// 512-bit registers.
pub(super) struct Avx512Tile;

// The intrinsics are inlined where the caller has their features, as the trait demands.
#[rustfmt::skip]
impl TileIsa for Avx512Tile {
    type Int = __m512i;
    type Float = __m512;
    type Interleave = Words;
    const ROWS: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: the caller has AVX-512, as for all functions here.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn load(from: *const i32) -> __m512i {
        // SAFETY: as above; the caller promises 64 readable bytes.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(x: i32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_dpbusd_epi32(acc, w, a) }
    }
    #[inline(always)]
    unsafe fn dot_pairs(acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_dpwssd_epi32(acc, w, a) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_mullo_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn shift_left(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_sllv_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn to_float(x: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn zero_f() -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load_f(from: *const f32) -> __m512 {
        // SAFETY: as above; the caller promises 64 readable bytes.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store_f(to: *mut f32, x: __m512) {
        // SAFETY: as above; the caller promises 64 writable bytes.
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn splat_f(x: f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn mul_f(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add_f(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sub_mul_f(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
}
