//! Unpacks quants of few bits to int8, 32 at a time. Knows no format.

use std::arch::x86_64::*;

use half::f16;
use kv_block::{FourIndices, IQ4_VALUES, Quants32};

/// 32 quants.
pub(in crate::kernels) type Quants = __m256i;

/// The same: quants need no other type than bytes.
#[inline(always)]
pub(in crate::kernels) fn signed(bytes: __m256i) -> Quants {
    bytes
}

#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn load16(block: &[u8], at: usize) -> __m128i {
    let bytes = &block[at..at + 16];
    // SAFETY: 16 readable bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn load32(block: &[u8], at: usize) -> __m256i {
    let bytes = &block[at..at + 32];
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn nibbles(bytes: __m128i) -> __m256i {
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// The low (0) or high (1) nibbles of 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn nibble(bytes: __m256i, which: usize) -> __m256i {
    let bytes = if which == 0 {
        bytes
    } else {
        _mm256_srli_epi16::<4>(bytes)
    };
    _mm256_and_si256(bytes, _mm256_set1_epi8(15))
}

/// Bits `2·which` and the next of 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn two_bits(bytes: __m256i, which: usize) -> __m256i {
    let bytes = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(2 * which as i32));
    _mm256_and_si256(bytes, _mm256_set1_epi8(3))
}

/// Bit `g` of 32 bytes, as 0 or 1.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn bit(bytes: __m256i, g: usize) -> __m256i {
    let bytes = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(g as i32));
    _mm256_and_si256(bytes, _mm256_set1_epi8(1))
}

/// Values below `2^AT`, with more bits from there on.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn high_bits<const AT: i32>(low: __m256i, more: __m256i) -> __m256i {
    _mm256_or_si256(low, _mm256_slli_epi16::<AT>(more))
}

/// Less an offset.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn less(q: __m256i, offset: i8) -> __m256i {
    _mm256_sub_epi8(q, _mm256_set1_epi8(offset))
}

/// Nibbles with their fifth bits, which are those of a word.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn fives(q: __m256i, fifth: u32) -> __m256i {
    _mm256_or_si256(q, _mm256_and_si256(bit_mask(fifth), _mm256_set1_epi8(16)))
}

/// The same, less 16: without its fifth bit, a value has the upper four bits set.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn signed_fives(q: __m256i, fifth: u32) -> __m256i {
    _mm256_or_si256(
        q,
        _mm256_andnot_si256(bit_mask(fifth), _mm256_set1_epi8(-16)),
    )
}

/// The values of bytes that are negated or not.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn negated(quants: Quants32) -> __m256i {
    let [a, b, c, d] = quants.bytes.map(|bytes| bytes as i64);
    let (bytes, mask) = (_mm256_setr_epi64x(a, b, c, d), bit_mask(quants.signs));
    _mm256_sub_epi8(_mm256_xor_si256(bytes, mask), mask)
}

/// The values of eight entries of a grid, negated or not.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn fours<const N: usize>(grid: &[u32; N], indices: FourIndices) -> __m256i {
    const { assert!(N == 256 || N == 512) };
    let low = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(indices.low as i64));
    let shifts = _mm256_setr_epi32(8, 7, 6, 5, 4, 3, 2, 1);
    let high = _mm256_sllv_epi32(_mm256_set1_epi32(indices.high.into()), shifts);
    let high = _mm256_and_si256(high, _mm256_set1_epi32(N as i32 - 256));
    let mut at = [0u32; 8];
    // SAFETY: 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(at.as_mut_ptr().cast(), _mm256_or_si256(low, high)) };
    // SAFETY: of eight bits, or of nine where there are so many entries.
    let entry = |k: usize| unsafe { *grid.get_unchecked(at[k] as usize) as i32 };
    let (a, b, c, d) = (entry(0), entry(1), entry(2), entry(3));
    let bytes = _mm256_setr_epi32(a, b, c, d, entry(4), entry(5), entry(6), entry(7));
    let mask = bit_mask(indices.signs);
    _mm256_sub_epi8(_mm256_xor_si256(bytes, mask), mask)
}

/// The first digits to base three of bytes times powers of three.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn digits(bytes: __m256i, powers: __m256i) -> __m256i {
    let low_bytes = _mm256_set1_epi16(255);
    let first = |products: __m256i| {
        let products = _mm256_and_si256(products, low_bytes);
        _mm256_mullo_epi16(products, _mm256_set1_epi16(3))
    };
    let even = first(_mm256_mullo_epi16(bytes, powers));
    let odd = first(_mm256_mullo_epi16(
        _mm256_srli_epi16::<8>(bytes),
        _mm256_srli_epi16::<8>(powers),
    ));
    _mm256_or_si256(
        _mm256_srli_epi16::<8>(even),
        _mm256_andnot_si256(low_bytes, odd),
    )
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
pub(in crate::kernels) fn lookup(table: &[i8; 16], bytes: __m128i) -> __m256i {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles(bytes))
}

/// The table's entries of a block of `IQ4_NL`.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn iq4_entries(block: &[u8; 18]) -> [i8; 32] {
    let mut entries = [0; 32];
    let quants = lookup(&IQ4_VALUES, load16(block, 2));
    // SAFETY: 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(entries.as_mut_ptr().cast(), quants) };
    entries
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
