//! Quantised weights, 32 at a time: int8 quants and the scale of each lane.
//!
//! Where the bits of a value lie is described at the formats' scalar decoders in `kv_core::block`.
//! Invariant: a group stands for `scale · quant` in each lane, less the block's minima, which are
//! negated here so that they are added. Knows nothing of activations.

use std::arch::x86_64::*;

use kv_core::block::{IQ4_VALUES, iq4_xs_scales};

/// Which minima a format has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::kernels) enum Minima {
    /// None: values are symmetric about zero.
    None,
    /// One for a block of 32, in lane 0; the other lanes are 0.
    One,
    /// One for each of the eight groups of 32.
    Groups,
    /// One for each of the sixteen half groups.
    HalfGroups,
}

/// Scales and minima of one block, decoded: of the first and the last 128 values where there are
/// sixteen, else only the first register is used.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Head {
    pub(in crate::kernels) scales: [__m256; 2],
    pub(in crate::kernels) minima: [__m256; 2],
}

/// How blocks of `BYTES` bytes are unpacked.
pub(in crate::kernels) trait Format<const BYTES: usize> {
    /// Groups of 32 values in a block.
    const GROUPS: usize;
    /// Whether quants may be negative.
    const SIGNED: bool;
    /// Which minima there are.
    const MINIMA: Minima = Minima::None;

    /// Scales and minima of a block.
    ///
    /// # Safety
    /// AVX2, FMA and F16C are available.
    unsafe fn head(block: &[u8; BYTES]) -> Head;

    /// The quants of group `g`.
    ///
    /// # Safety
    /// As for [`Format::head`].
    unsafe fn quants(block: &[u8; BYTES], g: usize) -> __m256i;

    /// The scale of each lane of group `g`.
    ///
    /// # Safety
    /// As for [`Format::head`].
    unsafe fn scales(head: &Head, g: usize) -> __m256;
}

/// Implements [`Format`] from functions of the block's bytes.
macro_rules! format {
    ($name:ident: $bytes:literal bytes, $groups:literal groups, $signed:literal, $minima:ident,
     $head:expr, $quants:expr, $scales:expr) => {
        pub(in crate::kernels) struct $name;

        impl Format<$bytes> for $name {
            const GROUPS: usize = $groups;
            const SIGNED: bool = $signed;
            const MINIMA: Minima = Minima::$minima;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn head(block: &[u8; $bytes]) -> Head {
                $head(block)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn quants(block: &[u8; $bytes], g: usize) -> __m256i {
                $quants(block, g)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn scales(head: &Head, g: usize) -> __m256 {
                $scales(head, g)
            }
        }
    };
}

format!(Q4_0: 18 bytes, 1 groups, true, None,
    |b: &[u8; 18]| one_scale(half(b, 0), _mm256_setzero_ps()),
    |b: &[u8; 18], _| _mm256_sub_epi8(nibbles(load16(b, 2)), _mm256_set1_epi8(8)),
    |head: &Head, _| head.scales[0]);
format!(Q4_1: 20 bytes, 1 groups, false, One,
    |b: &[u8; 20]| one_scale(half(b, 0), half(b, 2)),
    |b: &[u8; 20], _| nibbles(load16(b, 4)),
    |head: &Head, _| head.scales[0]);
format!(Q5_0: 22 bytes, 1 groups, true, None,
    |b: &[u8; 22]| one_scale(half(b, 0), _mm256_setzero_ps()),
    // Without its fifth bit a value is its low bits less 16: the upper four bits are set.
    |b: &[u8; 22], _| _mm256_or_si256(
        nibbles(load16(b, 6)),
        _mm256_andnot_si256(bit_mask(word(b, 2)), _mm256_set1_epi8(-16))),
    |head: &Head, _| head.scales[0]);
format!(Q5_1: 24 bytes, 1 groups, false, One,
    |b: &[u8; 24]| one_scale(half(b, 0), half(b, 2)),
    |b: &[u8; 24], _| _mm256_or_si256(
        nibbles(load16(b, 8)),
        _mm256_and_si256(bit_mask(word(b, 4)), _mm256_set1_epi8(16))),
    |head: &Head, _| head.scales[0]);
format!(Q8_0: 34 bytes, 1 groups, true, None,
    |b: &[u8; 34]| one_scale(half(b, 0), _mm256_setzero_ps()),
    |b: &[u8; 34], _| load32(b, 2),
    |head: &Head, _| head.scales[0]);
format!(Iq4Nl: 18 bytes, 1 groups, true, None,
    |b: &[u8; 18]| one_scale(half(b, 0), _mm256_setzero_ps()),
    |b: &[u8; 18], _| iq4(load16(b, 2)),
    |head: &Head, _| head.scales[0]);
format!(Iq4Xs: 136 bytes, 8 groups, true, None,
    iq4_xs_head,
    |b: &[u8; 136], g: usize| iq4(load16(b, 8 + 16 * g)),
    scale_of_group);
format!(Q2K: 84 bytes, 8 groups, false, HalfGroups,
    q2_k_head,
    |b: &[u8; 84], g: usize| two_bits(load32(b, 16 + 32 * (g / 4)), g),
    scales_of_halves);
format!(Q3K: 110 bytes, 8 groups, true, None,
    q3_k_head,
    |b: &[u8; 110], g: usize| {
        let third = bit(load32(b, 0), g);
        let q = two_bits(load32(b, 32 + 32 * (g / 4)), g);
        _mm256_sub_epi8(_mm256_or_si256(q, _mm256_slli_epi16::<2>(third)), _mm256_set1_epi8(4))
    },
    scales_of_halves);
format!(Q4K: 144 bytes, 8 groups, false, Groups,
    |b: &[u8; 144]| q4_k_head(half(b, 0), half(b, 2), [word(b, 4), word(b, 8), word(b, 12)]),
    |b: &[u8; 144], g: usize| nibble(load32(b, 16 + 32 * (g / 2)), g % 2),
    scale_of_group);
format!(Q5K: 176 bytes, 8 groups, false, Groups,
    |b: &[u8; 176]| q4_k_head(half(b, 0), half(b, 2), [word(b, 4), word(b, 8), word(b, 12)]),
    |b: &[u8; 176], g: usize| _mm256_or_si256(
        nibble(load32(b, 48 + 32 * (g / 2)), g % 2),
        _mm256_slli_epi16::<4>(bit(load32(b, 16), g))),
    scale_of_group);
format!(Q6K: 210 bytes, 8 groups, true, None,
    q6_k_head,
    |b: &[u8; 210], g: usize| {
        let low = nibble(load32(b, 64 * (g / 4) + 32 * (g % 2)), (g / 2) % 2);
        let high = two_bits(load32(b, 128 + 32 * (g / 4)), g);
        _mm256_sub_epi8(_mm256_or_si256(low, _mm256_slli_epi16::<4>(high)), _mm256_set1_epi8(32))
    },
    scales_of_halves);

/// The half-precision number at byte `at`, in all lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half(block: &[u8], at: usize) -> __m256 {
    _mm256_cvtph_ps(_mm_set1_epi16(i16::from_le_bytes([
        block[at],
        block[at + 1],
    ])))
}

#[inline]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

#[inline]
#[target_feature(enable = "avx2")]
fn load16(block: &[u8], at: usize) -> __m128i {
    let bytes = &block[at..at + 16];
    // SAFETY: 16 readable bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load32(block: &[u8], at: usize) -> __m256i {
    let bytes = &block[at..at + 32];
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(bytes: __m128i) -> __m256i {
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// The low (0) or high (1) nibbles of 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibble(bytes: __m256i, which: usize) -> __m256i {
    let bytes = if which == 0 {
        bytes
    } else {
        _mm256_srli_epi16::<4>(bytes)
    };
    _mm256_and_si256(bytes, _mm256_set1_epi8(15))
}

/// Bits `2·(g % 4)` and the next of 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn two_bits(bytes: __m256i, g: usize) -> __m256i {
    let bytes = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(2 * (g % 4) as i32));
    _mm256_and_si256(bytes, _mm256_set1_epi8(3))
}

/// Bit `g` of 32 bytes, as 0 or 1.
#[inline]
#[target_feature(enable = "avx2")]
fn bit(bytes: __m256i, g: usize) -> __m256i {
    let bytes = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(g as i32));
    _mm256_and_si256(bytes, _mm256_set1_epi8(1))
}

/// All bits of byte `i` set where bit `i` is.
#[inline]
#[target_feature(enable = "avx2")]
fn bit_mask(bits: u32) -> __m256i {
    let byte_of = _mm256_setr_epi64x(
        0,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), byte_of);
    let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of), bit_of)
}

/// The 32 values that 16 bytes of indices into the IQ4 table stand for.
#[inline]
#[target_feature(enable = "avx2")]
fn iq4(bytes: __m128i) -> __m256i {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(IQ4_VALUES.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles(bytes))
}

/// The scale and minimum of a block of 32.
#[inline]
#[target_feature(enable = "avx2")]
fn one_scale(scale: __m256, min: __m256) -> Head {
    let zero = _mm256_setzero_ps();
    Head {
        scales: [scale, zero],
        minima: [_mm256_blend_ps::<1>(zero, min), zero],
    }
}

/// Scale `g` of eight, in all lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn scale_of_group(head: &Head, g: usize) -> __m256 {
    _mm256_permutevar8x32_ps(head.scales[0], _mm256_set1_epi32(g as i32))
}

/// Scales `2g` and `2g + 1` of sixteen, in four lanes each.
#[inline]
#[target_feature(enable = "avx2")]
fn scales_of_halves(head: &Head, g: usize) -> __m256 {
    let low = 2 * (g % 4) as i32;
    let lanes = _mm256_set_m128i(_mm_set1_epi32(low + 1), _mm_set1_epi32(low));
    _mm256_permutevar8x32_ps(head.scales[g / 4], lanes)
}

/// Four small numbers in the bytes of each word, eight bytes in all, widened.
#[inline]
#[target_feature(enable = "avx2")]
fn widened(low: u32, high: u32) -> __m256i {
    _mm256_cvtepu8_epi32(_mm_set_epi64x(
        0,
        (u64::from(high) << 32 | u64::from(low)) as i64,
    ))
}

#[inline]
#[target_feature(enable = "avx2")]
fn times(factor: __m256, numbers: __m256i) -> __m256 {
    _mm256_mul_ps(factor, _mm256_cvtepi32_ps(numbers))
}

/// `-x`.
#[inline]
#[target_feature(enable = "avx2")]
fn negated(x: __m256) -> __m256 {
    _mm256_xor_ps(x, _mm256_set1_ps(-0.0))
}

/// The four bytes of a word, masked alike.
const fn bytes(mask: u8) -> u32 {
    u32::from_le_bytes([mask; 4])
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q4_k_head(d: __m256, dmin: __m256, [a, b, c]: [u32; 3]) -> Head {
    let scales = widened(a & bytes(63), (c & bytes(15)) | ((a >> 2) & bytes(0x30)));
    let minima = widened(
        b & bytes(63),
        ((c >> 4) & bytes(15)) | ((b >> 2) & bytes(0x30)),
    );
    let zero = _mm256_setzero_ps();
    Head {
        scales: [times(d, scales), zero],
        minima: [times(negated(dmin), minima), zero],
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q2_k_head(block: &[u8; 84]) -> Head {
    let (d, dmin) = (half(block, 80), negated(half(block, 82)));
    let packed = load16(block, 0);
    let scales = _mm_and_si128(packed, _mm_set1_epi8(15));
    let minima = _mm_and_si128(_mm_srli_epi16::<4>(packed), _mm_set1_epi8(15));
    Head {
        scales: times_signed(d, scales),
        minima: times_signed(dmin, minima),
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q3_k_head(block: &[u8; 110]) -> Head {
    let (a, b, c) = (word(block, 96), word(block, 100), word(block, 104));
    let high = |k: u32| ((c >> (2 * k)) & bytes(3)) << 4;
    let scales = _mm_setr_epi32(
        ((a & bytes(15)) | high(0)) as i32,
        ((b & bytes(15)) | high(1)) as i32,
        (((a >> 4) & bytes(15)) | high(2)) as i32,
        (((b >> 4) & bytes(15)) | high(3)) as i32,
    );
    let scales = _mm_sub_epi8(scales, _mm_set1_epi8(32));
    let zero = _mm256_setzero_ps();
    Head {
        scales: times_signed(half(block, 108), scales),
        minima: [zero; 2],
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn q6_k_head(block: &[u8; 210]) -> Head {
    let zero = _mm256_setzero_ps();
    let scales = times_signed(half(block, 208), load16(block, 192));
    Head {
        scales,
        minima: [zero; 2],
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn iq4_xs_head(block: &[u8; 136]) -> Head {
    let packed = [block[2], block[3], block[4], block[5], block[6], block[7]];
    let scales = iq4_xs_scales(&packed).map(|s| s as u8);
    let scales = _mm_set_epi64x(0, i64::from_le_bytes(scales));
    let zero = _mm256_setzero_ps();
    Head {
        scales: times_signed(half(block, 0), scales),
        minima: [zero; 2],
    }
}

/// `factor` times each of 16 signed bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn times_signed(factor: __m256, numbers: __m128i) -> [__m256; 2] {
    let low = _mm256_cvtepi8_epi32(numbers);
    let high = _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(numbers));
    [times(factor, low), times(factor, high)]
}
