//! Unpacks block formats to int8, 32 quants at a time.
//!
//! Where the bits of a value are is described at the formats' scalar decoders in `kv_core::block`.
//! Knows nothing of scales, nor of activations.

use std::arch::x86_64::*;

use half::f16;
use kv_core::block::{IQ4_VALUES, MXFP4_VALUES};

/// 32 quants.
pub(in crate::kernels) type Quants = __m256i;

/// How blocks of `BYTES` bytes are unpacked.
pub(in crate::kernels) trait Unpack<const BYTES: usize> {
    /// Groups of 32 values in a block.
    const GROUPS: usize;

    /// The quants of group `g`, signed.
    ///
    /// # Safety
    /// AVX2 is available.
    unsafe fn quants(block: &[u8; BYTES], g: usize) -> Quants;
}

/// Implements [`Unpack`] from a function of the block's bytes.
macro_rules! format {
    ($name:ident: $bytes:literal bytes, $groups:literal groups, $quants:expr) => {
        #[derive(Clone, Copy)]
        pub(in crate::kernels) struct $name;

        impl Unpack<$bytes> for $name {
            const GROUPS: usize = $groups;

            #[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn quants(block: &[u8; $bytes], g: usize) -> __m256i {
                $quants(block, g)
            }
        }
    };
}

format!(Q4_0: 18 bytes, 1 groups,
    |b: &[u8; 18], _| _mm256_sub_epi8(nibbles(load16(b, 2)), _mm256_set1_epi8(8)));
format!(Q4_1: 20 bytes, 1 groups,
    |b: &[u8; 20], _| nibbles(load16(b, 4)));
format!(Q5_0: 22 bytes, 1 groups,
    // Without its fifth bit a value is its low bits less 16: the upper four bits are set.
    |b: &[u8; 22], _| _mm256_or_si256(
        nibbles(load16(b, 6)),
        _mm256_andnot_si256(bit_mask(word(b, 2)), _mm256_set1_epi8(-16))));
format!(Q5_1: 24 bytes, 1 groups,
    |b: &[u8; 24], _| _mm256_or_si256(
        nibbles(load16(b, 8)),
        _mm256_and_si256(bit_mask(word(b, 4)), _mm256_set1_epi8(16))));
format!(Q8_0: 34 bytes, 1 groups,
    |b: &[u8; 34], _| load32(b, 2));
format!(Iq4Nl: 18 bytes, 1 groups,
    |b: &[u8; 18], _| lookup(&IQ4_VALUES, load16(b, 2)));
format!(Mxfp4: 17 bytes, 1 groups,
    |b: &[u8; 17], _| lookup(&MXFP4_VALUES, load16(b, 1)));
format!(Iq4Xs: 136 bytes, 8 groups,
    |b: &[u8; 136], g: usize| lookup(&IQ4_VALUES, load16(b, 8 + 16 * g)));
format!(Q2K: 84 bytes, 8 groups,
    |b: &[u8; 84], g: usize| two_bits(load32(b, 16 + 32 * (g / 4)), g));
format!(Q3K: 110 bytes, 8 groups,
|b: &[u8; 110], g: usize| {
    let third = bit(load32(b, 0), g);
    let q = two_bits(load32(b, 32 + 32 * (g / 4)), g);
    _mm256_sub_epi8(_mm256_or_si256(q, _mm256_slli_epi16::<2>(third)), _mm256_set1_epi8(4))
});
format!(Q4K: 144 bytes, 8 groups,
    |b: &[u8; 144], g: usize| nibble(load32(b, 16 + 32 * (g / 2)), g % 2));
format!(Q5K: 176 bytes, 8 groups,
    |b: &[u8; 176], g: usize| _mm256_or_si256(
        nibble(load32(b, 48 + 32 * (g / 2)), g % 2),
        _mm256_slli_epi16::<4>(bit(load32(b, 16), g))));
format!(Q6K: 210 bytes, 8 groups,
|b: &[u8; 210], g: usize| {
    let low = nibble(load32(b, 64 * (g / 4) + 32 * (g % 2)), (g / 2) % 2);
    let high = two_bits(load32(b, 128 + 32 * (g / 4)), g);
    _mm256_sub_epi8(_mm256_or_si256(low, _mm256_slli_epi16::<4>(high)), _mm256_set1_epi8(32))
});

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

/// The 32 values that 16 bytes of indices into a table stand for.
#[inline]
#[target_feature(enable = "avx2")]
fn lookup(table: &[i8; 16], bytes: __m128i) -> __m256i {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles(bytes))
}

/// Quants plus an offset.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn offset_by(quants: __m256i, offset: i8) -> __m256i {
    _mm256_add_epi8(quants, _mm256_set1_epi8(offset))
}

/// From eight rows of eight words to eight words of eight rows.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn transpose(r: [Quants; 8]) -> [Quants; 8] {
    let words = |a, b| [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)];
    let [a0, a1] = words(r[0], r[1]);
    let [b0, b1] = words(r[2], r[3]);
    let [c0, c1] = words(r[4], r[5]);
    let [d0, d1] = words(r[6], r[7]);
    let pairs = |a, b| [_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)];
    let [e0, e1] = pairs(a0, b0);
    let [e2, e3] = pairs(a1, b1);
    let [f0, f1] = pairs(c0, d0);
    let [f2, f3] = pairs(c1, d1);
    [
        _mm256_permute2x128_si256::<0x20>(e0, f0),
        _mm256_permute2x128_si256::<0x20>(e1, f1),
        _mm256_permute2x128_si256::<0x20>(e2, f2),
        _mm256_permute2x128_si256::<0x20>(e3, f3),
        _mm256_permute2x128_si256::<0x31>(e0, f0),
        _mm256_permute2x128_si256::<0x31>(e1, f1),
        _mm256_permute2x128_si256::<0x31>(e2, f2),
        _mm256_permute2x128_si256::<0x31>(e3, f3),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn store(step: __m256i, to: &mut [[u8; 4]; 8]) {
    // SAFETY: 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), step) };
}

/// A half-precision number, exactly.
#[inline]
#[target_feature(enable = "f16c")]
pub(in crate::kernels) fn number(x: f16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits()))))
}
