//! Products with unquantized weights ([`gemm_float`]), sixteen columns at a time, in AVX-512.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::kernels::WeightRows;
use crate::kernels::gemm_float::{self, F32Isa, FloatIsa};
use crate::output::OutputColumns;

/// Weight rows that are multiplied with several tokens at a time.
const ROWS: usize = 6;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn matmul(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    // SAFETY: this function has the features of its registers.
    unsafe { gemm_float::matmul::<Avx512Float, ROWS>(weights, acts, tokens, out) }
}

pub(super) struct Avx512Float;

impl FloatIsa for Avx512Float {
    type Float = __m512;
    type Act = f32;
    const LANES: usize = 16;

    intrinsics! { unsafe;
        zero() -> __m512 = _mm512_setzero_ps();
        load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
        load_bf16(from: *const u8) -> __m512 = {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        };
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        sum(x: __m512) -> f32 = _mm512_reduce_add_ps(x);
    }

    #[inline(always)]
    unsafe fn sums<const N: usize>(x: [__m512; N]) -> [f32; N] {
        let mut sums = [0.0; N];
        if N == 4 {
            // In registers: chunks of an array are in memory.
            // SAFETY: as above.
            let four = unsafe { add_lanes_4([x[0], x[1], x[2], x[3]]) };
            sums.copy_from_slice(&four);
            return sums;
        }
        let (fours, rest) = x.as_chunks::<4>();
        let (of_fours, of_rest) = sums.as_chunks_mut::<4>();
        for (to, x) in of_fours.iter_mut().zip(fours) {
            // SAFETY: as above.
            *to = unsafe { add_lanes_4(*x) };
        }
        for (to, x) in of_rest.iter_mut().zip(rest) {
            // SAFETY: as above.
            *to = unsafe { Self::sum(*x) };
        }
        sums
    }
}

impl F32Isa for Avx512Float {
    intrinsics! { unsafe;
        load_f16(from: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
    }
}

/// The sums over the lanes of four registers: lanes 8 apart are added first, then 4, 2 and 1 apart,
/// as [`_mm512_reduce_add_ps`] does.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_lanes_4(x: [__m512; 4]) -> [f32; 4] {
    let halves = |a, b| {
        let (low, high) = (
            _mm512_shuffle_f32x4::<0x44>(a, b),
            _mm512_shuffle_f32x4::<0xee>(a, b),
        );
        _mm512_add_ps(low, high)
    };
    let (a, b) = (halves(x[0], x[1]), halves(x[2], x[3]));
    let (low, high) = (
        _mm512_shuffle_f32x4::<0x88>(a, b),
        _mm512_shuffle_f32x4::<0xdd>(a, b),
    );
    let quarters = _mm512_add_ps(low, high);
    let pairs = _mm512_add_ps(quarters, _mm512_permute_ps::<0b11_10_11_10>(quarters));
    let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0b01_01_01_01>(pairs));
    let mut words = [0.0; 16];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(words.as_mut_ptr(), sums) };
    [words[0], words[4], words[8], words[12]]
}
