//! [`MinCorrection`]: what GEMV adds to a super-block's dot products for the weights' offset and
//! minima.
//!
//! Integers only. Knows nothing of quants.

use std::arch::x86_64::*;

use crate::kernels::gemm::block_scales::BlockScales;
use crate::operands::{Int8Row, SUPER_BLOCK};

/// One super-block's factors and minima, and the sums of its activations.
#[derive(Clone, Copy)]
pub(super) struct MinCorrection<'a> {
    /// Signed bytes.
    pub(super) factors: __m128i,
    minima: __m128i,
    /// Factors of a block: of the whole, or of its halves.
    parts: usize,
    sums: &'a [i16],
    half_sums: &'a [[i16; 2]],
}

impl<'a> MinCorrection<'a> {
    /// For the super-block whose first block of activations is `first`.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn of(scales: &BlockScales, parts: usize, acts: &Int8Row<'a>, first: usize) -> Self {
        let blocks = first..first + SUPER_BLOCK;
        Self {
            factors: register(scales.factors),
            minima: register(scales.minima),
            parts,
            sums: &acts.int_sums[blocks.clone()],
            half_sums: &acts.int_half_sums[blocks],
        }
    }

    /// `offset · Σ factor · Σ activations`, to be added over lanes.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn offsets(&self, offset: i32) -> __m256i {
        let sums = match self.parts {
            1 => _mm256_zextsi128_si256(self.by_blocks(self.factors)),
            _ => self.by_halves(self.factors),
        };
        _mm256_mullo_epi32(sums, _mm256_set1_epi32(offset))
    }

    /// `Σ minimum · Σ activations`, to be added over lanes.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn minima(&self) -> __m128i {
        if self.parts == 1 {
            return self.by_blocks(self.minima);
        }
        let both = self.by_halves(self.minima);
        let upper = _mm256_extracti128_si256::<1>(both);
        _mm_add_epi32(_mm256_castsi256_si128(both), upper)
    }

    /// Eight numbers times the sums of eight blocks, added in pairs.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn by_blocks(&self, numbers: __m128i) -> __m128i {
        // SAFETY: eight readable numbers; the load needs no alignment.
        let sums = unsafe { _mm_loadu_si128(self.sums.as_ptr().cast()) };
        _mm_madd_epi16(_mm_cvtepi8_epi16(numbers), sums)
    }

    /// Sixteen numbers times the sums of sixteen half blocks, added in pairs.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn by_halves(&self, numbers: __m128i) -> __m256i {
        // SAFETY: sixteen readable numbers; the load needs no alignment.
        let sums = unsafe { _mm256_loadu_si256(self.half_sums.as_ptr().cast()) };
        _mm256_madd_epi16(_mm256_cvtepi8_epi16(numbers), sums)
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn register(bytes: u128) -> __m128i {
    _mm_set_epi64x((bytes >> 64) as i64, bytes as i64)
}

/// The sums over the lanes of four registers.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn add_lanes_4(r: [__m128i; 4]) -> __m128i {
    let a = _mm_add_epi32(
        _mm_unpacklo_epi32(r[0], r[1]),
        _mm_unpackhi_epi32(r[0], r[1]),
    );
    let b = _mm_add_epi32(
        _mm_unpacklo_epi32(r[2], r[3]),
        _mm_unpackhi_epi32(r[2], r[3]),
    );
    _mm_add_epi32(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b))
}
