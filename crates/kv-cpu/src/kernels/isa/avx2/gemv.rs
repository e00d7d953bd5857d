//! What GEMV on stored blocks ([`gemv_stored`](crate::kernels::gemv_stored)) needs of AVX2: eight
//! weight rows in lock-step.
//!
//! Integers, exactly. Generic over the block format ([`QuantFormat`]).

use std::arch::x86_64::*;

use super::dot::{Avx2Tile, Dot, times};
use super::min_correction::{MinCorrection, add_lanes_4};
use crate::kernels::gemm::block_scales::BlockScales;
use crate::kernels::gemv_stored::GemvIsa;
use crate::kernels::quant_format::QuantFormat;
use crate::operands::{BLOCK, Int8Row, SUPER_BLOCK};

/// Weight rows of a tile.
const ROWS: usize = 8;

impl<D: Dot> GemvIsa<ROWS> for Avx2Tile<D> {
    type Minima = __m128i;

    intrinsics! { unsafe;
        zero_minima() -> __m128i = _mm_setzero_si128();
        add_lanes(rows: [__m256i; ROWS]) -> __m256i = add_lanes_8(rows);
        add_lanes_of_minima(rows: [__m128i; ROWS]) -> __m256i = {
            let [a, b, c, d, e, f, g, h] = rows;
            _mm256_set_m128i(add_lanes_4([e, f, g, h]), add_lanes_4([a, b, c, d]))
        };
        sub(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi32(a, b);
        f16_to_f32(bits: &[[u16; ROWS]; 2]) -> [__m256; 2] = [
            _mm256_cvtph_ps(_mm_loadu_si128(bits[0].as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(bits[1].as_ptr().cast())),
        ];
        exp2_scales(exponents: &[[u16; ROWS]; 2]) -> __m256 = {
            let e = _mm256_cvtepu16_epi32(_mm_loadu_si128(exponents[0].as_ptr().cast()));
            let one = _mm256_set1_epi32(1);
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, one));
            // From 2 on, shifted by more bits than there are.
            let subnormal = _mm256_srlv_epi32(_mm256_set1_epi32(1 << 22), _mm256_sub_epi32(one, e));
            _mm256_castsi256_ps(_mm256_max_epi32(normal, subnormal))
        };
    }

    #[inline(always)]
    unsafe fn dot_block<F: QuantFormat<BYTES>, const BYTES: usize>(
        block: &[u8; BYTES],
        g: usize,
        acts: &[i8; BLOCK],
    ) -> __m256i {
        // SAFETY: as the caller promises; 32 readable bytes.
        unsafe {
            let (zero, w) = (_mm256_setzero_si256(), unsigned::<F, BYTES>(block, g));
            let a = _mm256_loadu_si256(acts.as_ptr().cast());
            if F::WIDE {
                D::dot_bytes::<true>(zero, w, a)
            } else {
                D::dot_bytes::<false>(zero, w, a)
            }
        }
    }

    /// Factors are multiplied in where pairs of products are added, which VNNI has no use for.
    #[inline(always)]
    unsafe fn dot_super<F: QuantFormat<BYTES>, const BYTES: usize>(
        block: &[u8; BYTES],
        scales: &BlockScales,
        acts: &Int8Row<'_>,
        first: usize,
    ) -> (__m256i, __m128i) {
        // SAFETY: as the caller promises.
        unsafe {
            let min_correction = MinCorrection::of(scales, F::PARTS, acts, first);
            let factors = by_group::<F, BYTES>(min_correction.factors);
            let mut sum = _mm256_setzero_si256();
            for (g, a) in acts.quants[first..first + SUPER_BLOCK].iter().enumerate() {
                let a = _mm256_loadu_si256(a.as_ptr().cast());
                let w = unsigned::<F, BYTES>(block, g);
                let pair = _mm256_set1_epi16(0x0100 + 0x0202 * g as i16);
                let factor = _mm256_shuffle_epi8(factors, pair);
                let more = if F::WIDE {
                    times::<true>(w, a, factor)
                } else {
                    times::<false>(w, a, factor)
                };
                sum = _mm256_add_epi32(sum, more);
            }
            if F::SIGNED_OFFSET != 0 {
                sum = _mm256_sub_epi32(sum, min_correction.offsets(F::SIGNED_OFFSET));
            }
            let minima = if F::MINIMA {
                min_correction.minima()
            } else {
                _mm_setzero_si128()
            };
            (sum, minima)
        }
    }
}

/// The quants of group `g`, unsigned.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn unsigned<F: QuantFormat<BYTES>, const BYTES: usize>(
    block: &[u8; BYTES],
    g: usize,
) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe { _mm256_add_epi8(F::quants(block, g), _mm256_set1_epi8(F::OFFSET as i8)) }
}

/// The factor of group `g` as the `g`-th number of 16 bits of both halves, or those of its halves
/// in the halves.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn by_group<F: QuantFormat<BYTES>, const BYTES: usize>(factors: __m128i) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let order = match F::PARTS {
            1 => _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7),
            _ => _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15),
        };
        _mm256_cvtepi8_epi16(_mm_shuffle_epi8(factors, order))
    }
}

/// The sums over the lanes of eight registers.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn add_lanes_8([a, b, c, d, e, f, g, h]: [__m256i; ROWS]) -> __m256i {
    let (low, high) = (
        add_half_lanes_4([a, b, c, d]),
        add_half_lanes_4([e, f, g, h]),
    );
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    )
}

/// In each half of the result, the sums of that half of four registers.
#[inline]
#[target_feature(enable = "avx2")]
fn add_half_lanes_4(r: [__m256i; 4]) -> __m256i {
    let a = _mm256_add_epi32(
        _mm256_unpacklo_epi32(r[0], r[1]),
        _mm256_unpackhi_epi32(r[0], r[1]),
    );
    let b = _mm256_add_epi32(
        _mm256_unpacklo_epi32(r[2], r[3]),
        _mm256_unpackhi_epi32(r[2], r[3]),
    );
    _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}
