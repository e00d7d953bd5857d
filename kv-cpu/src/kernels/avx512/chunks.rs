//! Quants of weights, 16 of each of four rows at a time, unsigned.
//!
//! Where the bits of a value lie is described at the formats' scalar decoders in `kv_core::block`.

use std::arch::x86_64::*;

use kv_core::block::{IQ4_VALUES, MXFP4_VALUES};

use super::heads::{self, Heads};
use super::sixteen::{Four, Sixteen};
use super::table::entries;
use crate::kernels::groups as g;
use crate::kernels::panel::pack::Packed;

/// Chunks that the same bytes hold, at most.
pub(super) const MOST: usize = 4;

/// How blocks of `BYTES` bytes are read: in `READS` steps, each of which finds `CHUNKS` chunks of 16
/// columns, `APART` chunks from one to the next.
pub(in crate::kernels) trait Chunks<const BYTES: usize>: Packed<BYTES> {
    const CHUNKS: usize;
    const APART: usize;
    const READS: usize = Self::GROUPS * 2 / Self::CHUNKS;

    /// Which of the block's chunks is found `k`th.
    #[inline(always)]
    fn chunk(read: usize, k: usize) -> usize {
        read / Self::APART * Self::APART * Self::CHUNKS + read % Self::APART + k * Self::APART
    }

    /// The chunks of one step; those over `CHUNKS` mean nothing.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn chunks(rows: Four<'_, BYTES>, read: usize) -> [__m512i; MOST];

    /// The scales of sixteen rows.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn heads(blocks: Sixteen<'_, BYTES>) -> Heads;
}

macro_rules! chunks {
    ($name:ident, $bytes:literal: $chunks:literal chunks, $apart:literal apart, $heads:path, $quants:expr) => {
        impl Chunks<$bytes> for g::$name {
            const CHUNKS: usize = $chunks;
            const APART: usize = $apart;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn chunks(rows: Four<'_, $bytes>, read: usize) -> [__m512i; MOST] {
                $quants(rows, read)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn heads(blocks: Sixteen<'_, $bytes>) -> Heads {
                $heads(blocks)
            }
        }
    };
}

chunks!(Q4_0, 18: 2 chunks, 1 apart, heads::blocks,
    |b: Four<'_, 18>, _| nibbles(b.load(2)));
chunks!(Q4_1, 20: 2 chunks, 1 apart, heads::blocks,
    |b: Four<'_, 20>, _| nibbles(b.load(4)));
chunks!(Q5_0, 22: 2 chunks, 1 apart, heads::blocks,
    |b: Four<'_, 22>, _| fifth_bits(nibbles(b.load(6)), b.load(0), 2));
chunks!(Q5_1, 24: 2 chunks, 1 apart, heads::blocks,
    |b: Four<'_, 24>, _| fifth_bits(nibbles(b.load(8)), b.load(0), 4));
chunks!(Q8_0, 34: 1 chunks, 1 apart, heads::blocks,
    |b: Four<'_, 34>, read| one(_mm512_xor_si512(b.load(2 + 16 * read), _mm512_set1_epi8(-128))));
chunks!(Iq4Nl, 18: 2 chunks, 1 apart, heads::blocks,
    |b: Four<'_, 18>, _| looked_up(&IQ4_VALUES, Self::OFFSET, b.load(2)));
chunks!(Mxfp4, 17: 2 chunks, 1 apart, heads::mxfp4,
    |b: Four<'_, 17>, _| looked_up(&MXFP4_VALUES, Self::OFFSET, b.load(1)));
chunks!(Iq4Xs, 136: 2 chunks, 1 apart, heads::iq4_xs,
    |b: Four<'_, 136>, read| looked_up(&IQ4_VALUES, Self::OFFSET, b.load(8 + 16 * read)));
chunks!(Q2K, 84: 4 chunks, 2 apart, heads::q2_k,
    |b: Four<'_, 84>, read| two_bits(b.load(16 + 16 * read)));
chunks!(Q3K, 110: 4 chunks, 2 apart, heads::q3_k,
|b: Four<'_, 110>, read: usize| {
    let third = b.load(16 * (read % 2));
    let third = _mm512_srl_epi16(third, _mm_cvtsi64_si128(4 * (read as i64 / 2)));
    let low = two_bits(b.load(32 + 16 * read));
    [
        with::<4>(low[0], _mm512_slli_epi16::<2>(third)),
        with::<4>(low[1], _mm512_slli_epi16::<1>(third)),
        with::<4>(low[2], third),
        with::<4>(low[3], _mm512_srli_epi16::<1>(third)),
    ]
});
chunks!(Q4K, 144: 2 chunks, 2 apart, heads::q4_k,
    |b: Four<'_, 144>, read| nibbles(b.load(16 + 16 * read)));
chunks!(Q5K, 176: 2 chunks, 2 apart, heads::q4_k,
|b: Four<'_, 176>, read: usize| {
    let fifth = b.load(16 + 16 * (read % 2));
    let fifth = _mm512_srl_epi16(fifth, _mm_cvtsi64_si128(2 * (read as i64 / 2)));
    let [low, high, ..] = nibbles(b.load(48 + 16 * read));
    let low = with::<16>(low, _mm512_slli_epi16::<4>(fifth));
    let high = with::<16>(high, _mm512_slli_epi16::<3>(fifth));
    [low, high, low, high]
});
chunks!(Q6K, 210: 4 chunks, 2 apart, heads::q6_k,
|b: Four<'_, 210>, read: usize| {
    let at = 64 * (read / 2) + 16 * (read % 2);
    let [a, c, ..] = nibbles(b.load(at));
    let [d, e, ..] = nibbles(b.load(at + 32));
    let high = b.load(128 + 16 * read);
    [
        with::<48>(a, _mm512_slli_epi16::<4>(high)),
        with::<48>(d, _mm512_slli_epi16::<2>(high)),
        with::<48>(c, high),
        with::<48>(e, _mm512_srli_epi16::<2>(high)),
    ]
});

// Plain functions, not closures: those would be compiled as calls, which spill every register.

#[inline(always)]
fn one(chunk: __m512i) -> [__m512i; MOST] {
    [chunk; MOST]
}

/// The low nibbles, then the high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(bytes: __m512i) -> [__m512i; MOST] {
    let mask = _mm512_set1_epi8(15);
    let low = _mm512_and_si512(bytes, mask);
    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
    [low, high, low, high]
}

/// Two bits of every byte, from the lowest on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn two_bits(bytes: __m512i) -> [__m512i; MOST] {
    let mask = _mm512_set1_epi8(3);
    [
        _mm512_and_si512(bytes, mask),
        _mm512_and_si512(_mm512_srli_epi16::<2>(bytes), mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask),
        _mm512_and_si512(_mm512_srli_epi16::<6>(bytes), mask),
    ]
}

/// Numbers with some more bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn with<const BITS: i8>(numbers: __m512i, bits: __m512i) -> __m512i {
    _mm512_or_si512(numbers, _mm512_and_si512(bits, _mm512_set1_epi8(BITS)))
}

/// Adds 16 to two chunks where the 32 bits from byte `at` of the head on are set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fifth_bits(mut chunks: [__m512i; MOST], head: __m512i, at: i64) -> [__m512i; MOST] {
    let each = |byte: i64| byte * 0x0101_0101_0101_0101;
    let bit_of = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
    let fifth = _mm512_set1_epi8(16);
    for (chunk, byte) in chunks.iter_mut().take(2).zip([at, at + 2]) {
        let (low, high) = (each(byte), each(byte + 1));
        let bytes = _mm512_setr_epi64(low, high, low, high, low, high, low, high);
        let mask = _mm512_test_epi8_mask(_mm512_shuffle_epi8(head, bytes), bit_of);
        *chunk = _mm512_mask_add_epi8(*chunk, mask, *chunk, fifth);
    }
    chunks
}

/// The values of a table that nibbles stand for, plus an offset.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn looked_up(table: &[i8; 16], offset: i32, bytes: __m512i) -> [__m512i; MOST] {
    let [low, high, ..] = nibbles(bytes);
    let (low, high) = (entries(table, offset, low), entries(table, offset, high));
    [low, high, low, high]
}
