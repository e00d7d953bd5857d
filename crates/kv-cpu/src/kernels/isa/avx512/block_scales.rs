//! [`GroupScales`]: the scales of the blocks of sixteen packed rows, unpacked together, a row in
//! each lane.
//!
//! Where the bits are is described at the formats' scalar decoders in `kv_block`; the
//! arithmetic is that of [`gemm::block_scales`](crate::kernels::gemm::block_scales).

use std::arch::x86_64::*;

use super::row_group::GroupBlock;

/// As [`BlockScales`](crate::kernels::gemm::block_scales::BlockScales), of sixteen rows. Fields
/// that a format does not have hold anything.
pub(super) struct GroupScales {
    pub(super) scales: __m512,
    pub(super) minimum_scales: __m512,
    /// Fifth bits of 32 nibbles, as [`GroupBlock::bits`] has them.
    pub(super) fifth_bits: __m512i,
    /// Signed bytes, four to a word.
    factors: [__m512i; 4],
    /// As many, never negative.
    minima: [__m512i; 4],
}

impl GroupScales {
    /// Factor `part`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn factor(&self, part: usize) -> __m512i {
        let up = _mm_cvtsi64_si128(24 - 8 * (part as i64 % 4));
        _mm512_srai_epi32::<24>(_mm512_sll_epi32(self.factors[part / 4 % 4], up))
    }

    /// Minima `2 · pair` and `2 · pair + 1`, in 16 bits each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn minima(&self, pair: usize) -> __m512i {
        let down = _mm_cvtsi64_si128(16 * (pair as i64 % 2));
        let both = _mm512_srl_epi32(self.minima[pair / 2 % 4], down);
        let low = _mm512_and_si512(both, _mm512_set1_epi32(0xff));
        let high = _mm512_and_si512(_mm512_slli_epi32::<8>(both), _mm512_set1_epi32(0xff_0000));
        _mm512_or_si512(low, high)
    }
}

// SAFETY (of all calls of `GroupBlock`): these functions need its features.

/// Blocks of 32 with a scale.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn blocks<const BYTES: usize>(blocks: impl GroupBlock<BYTES>) -> GroupScales {
    // SAFETY: as said above.
    let scale = unsafe { blocks.before() };
    of(scale, [scale; 4], [scale; 4])
}

/// Blocks of 32 with a scale and a minimum.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q4_1(blocks: impl GroupBlock<20>) -> GroupScales {
    // SAFETY: as said above.
    let both = unsafe { blocks.word(0) };
    of(both, [both; 4], [both; 4])
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q5_0(blocks: impl GroupBlock<22>) -> GroupScales {
    // SAFETY: as said above.
    let (scale, fifth_bits) = unsafe { (blocks.before(), blocks.bits(2)) };
    GroupScales {
        fifth_bits,
        ..of(scale, [scale; 4], [scale; 4])
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q5_1(blocks: impl GroupBlock<24>) -> GroupScales {
    // SAFETY: as said above.
    let (both, fifth_bits) = unsafe { (blocks.word(0), blocks.bits(4)) };
    GroupScales {
        fifth_bits,
        ..of(both, [both; 4], [both; 4])
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn mxfp4(blocks: impl GroupBlock<17>) -> GroupScales {
    // SAFETY: as said above.
    let exponents = unsafe { blocks.before() };
    let scales = exp2_scales(exponents);
    GroupScales {
        scales,
        minimum_scales: scales,
        fifth_bits: exponents,
        factors: [exponents; 4],
        minima: [exponents; 4],
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q4_k<const BYTES: usize>(blocks: impl GroupBlock<BYTES>) -> GroupScales {
    // SAFETY: as said above.
    let [both, a, b, c] = unsafe { blocks.words(0) };
    let high = |low: __m512i, word| or(low, masked(_mm512_srli_epi32::<2>(word), 0x30));
    let factors = [masked(a, 63), high(masked(c, 15), a)];
    let minima = [
        masked(b, 63),
        high(masked(_mm512_srli_epi32::<4>(c), 15), b),
    ];
    of(
        both,
        [factors[0], factors[1], both, both],
        [minima[0], minima[1], both, both],
    )
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q2_k(blocks: impl GroupBlock<84>) -> GroupScales {
    // SAFETY: as said above.
    let ([a, b, c, d], both) = unsafe { (blocks.words(0), blocks.word(80)) };
    let high = |word| masked(_mm512_srli_epi32::<4>(word), 15);
    of(
        both,
        [masked(a, 15), masked(b, 15), masked(c, 15), masked(d, 15)],
        [high(a), high(b), high(c), high(d)],
    )
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q3_k(blocks: impl GroupBlock<110>) -> GroupScales {
    // SAFETY: as said above.
    let [a, b, c] = unsafe { [blocks.word(96), blocks.word(100), blocks.word(104)] };
    let factor = |low: __m512i, high: __m512i| {
        let both = or(masked(low, 15), _mm512_slli_epi32::<4>(masked(high, 3)));
        _mm512_sub_epi8(both, _mm512_set1_epi8(32))
    };
    let factors = [
        factor(a, c),
        factor(b, _mm512_srli_epi32::<2>(c)),
        factor(_mm512_srli_epi32::<4>(a), _mm512_srli_epi32::<4>(c)),
        factor(_mm512_srli_epi32::<4>(b), _mm512_srli_epi32::<6>(c)),
    ];
    // SAFETY: as said above.
    of(unsafe { blocks.behind() }, factors, factors)
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn q6_k(blocks: impl GroupBlock<210>) -> GroupScales {
    // SAFETY: as said above.
    let (factors, scale) = unsafe { (blocks.words(192), blocks.behind()) };
    of(scale, factors, factors)
}

#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn iq4_xs(blocks: impl GroupBlock<136>) -> GroupScales {
    // SAFETY: as said above.
    let (both, low) = unsafe { (blocks.word(0), blocks.word(4)) };
    let high = _mm512_srli_epi32::<16>(both);
    // From four numbers of so many bits to four bytes.
    let spread = |word: __m512i, bits: i64| {
        let by = |i: i64| _mm_cvtsi64_si128(i * (8 - bits));
        let byte = |i: i64| {
            let mask = _mm512_set1_epi32(((1 << bits) - 1) << (8 * i));
            _mm512_and_si512(_mm512_sll_epi32(word, by(i)), mask)
        };
        or(or(byte(0), byte(1)), or(byte(2), byte(3)))
    };
    let factor = |low: __m512i, high: __m512i| {
        let both = or(spread(low, 4), _mm512_slli_epi32::<4>(spread(high, 2)));
        _mm512_sub_epi8(both, _mm512_set1_epi8(32))
    };
    let factors = [
        factor(low, high),
        factor(_mm512_srli_epi32::<16>(low), _mm512_srli_epi32::<8>(high)),
    ];
    of(both, [factors[0], factors[1], both, both], [both; 4])
}

/// From a scale and a minimum's scale in each word.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
fn of(both: __m512i, factors: [__m512i; 4], minima: [__m512i; 4]) -> GroupScales {
    GroupScales {
        scales: _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)),
        minimum_scales: _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(both))),
        fifth_bits: both,
        factors,
        minima,
    }
}

/// As [`mxfp4_scale`](kv_block::mxfp4_scale), of sixteen exponents.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_scales(e: __m512i) -> __m512 {
    let one = _mm512_set1_epi32(1);
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, one));
    // From 2 on, shifted by more bits than there are.
    let subnormal = _mm512_srlv_epi32(_mm512_set1_epi32(1 << 22), _mm512_sub_epi32(one, e));
    _mm512_castsi512_ps(_mm512_max_epi32(normal, subnormal))
}

/// Some bits of every byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn masked(bytes: __m512i, mask: i8) -> __m512i {
    _mm512_and_si512(bytes, _mm512_set1_epi8(mask))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn or(a: __m512i, b: __m512i) -> __m512i {
    _mm512_or_si512(a, b)
}
