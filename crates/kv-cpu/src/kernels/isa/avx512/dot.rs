//! [`Avx512Tile`]: GEMM tiles of sixteen lanes, with VNNI.

use std::arch::x86_64::*;

use crate::kernels::gemm::tile_isa::TileIsa;
use crate::kernels::gemm::unpack_panel::Words;

/// 512-bit registers.
pub(super) struct Avx512Tile;

impl TileIsa for Avx512Tile {
    type Int = __m512i;
    type Float = __m512;
    type Interleave = Words;
    const ROWS: usize = 16;

    intrinsics! { unsafe;
        zero() -> __m512i = _mm512_setzero_si512();
        load(from: *const i32) -> __m512i = _mm512_loadu_si512(from.cast());
        splat(x: i32) -> __m512i = _mm512_set1_epi32(x);
        dot_pairs(acc: __m512i, w: __m512i, a: __m512i) -> __m512i = _mm512_dpwssd_epi32(acc, w, a);
        add(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        mul(a: __m512i, b: __m512i) -> __m512i = _mm512_mullo_epi32(a, b);
        shift_left(a: __m512i, b: __m512i) -> __m512i = _mm512_sllv_epi32(a, b);
        to_float(x: __m512i) -> __m512 = _mm512_cvtepi32_ps(x);
        zero_f() -> __m512 = _mm512_setzero_ps();
        load_f(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
        store_f(to: *mut f32, x: __m512) -> () = _mm512_storeu_ps(to, x);
        splat_f(x: f32) -> __m512 = _mm512_set1_ps(x);
        mul_f(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        mul_add_f(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        sub_mul_f(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fnmadd_ps(a, b, c);
    }

    #[inline(always)]
    unsafe fn dot_bytes<const WIDE: bool>(acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_dpbusd_epi32(acc, w, a) }
    }
}
