//! [`UnpackGroup`]: unpacks block formats to int8, four columns of each of sixteen rows at a time.
//!
//! Quants come out unsigned. Where the bits of a value are is described at the formats' scalar
//! decoders in `kv_block`.

use std::arch::x86_64::*;

use kv_block::{IQ4_VALUES, MXFP4_VALUES};

use super::block_scales::{self, GroupScales};
use super::row_group::GroupBlock;
use super::unpack_panel::STEPS;
use crate::kernels::quant_format::{self as g, QuantFormat};

/// Chunks that the same bytes hold, at most.
pub(super) const MOST: usize = 4;

/// Pieces of 16 bytes that are read together, at most.
pub(super) const PIECES: usize = 3;

/// Steps in which a block is read, at most.
const MOST_READS: usize = 8;

/// Words of a block, at most.
pub(super) const MOST_WORDS: usize = 52;

/// The way blocks of `BYTES` bytes are read: in `READS` steps, each of which finds `CHUNKS` chunks
/// of 16 columns, `APART` chunks from one to the next.
pub(in crate::kernels) trait UnpackGroup<const BYTES: usize>:
    QuantFormat<BYTES> + Copy
{
    const CHUNKS: usize;
    const APART: usize;
    const READS: usize = Self::GROUPS * 2 / Self::CHUNKS;
    /// Pieces of 16 bytes that a step takes.
    const TAKES: usize;
    /// The start of a word of fifth bits that is no piece, one for each of 32 columns.
    const FIFTH_BITS: Option<usize> = None;

    /// Chunks of a step that share a factor, and neighbouring steps that do.
    const SUM_CHUNKS: usize = match (Self::PARTS, Self::APART) {
        (1, 1) => Self::CHUNKS,
        _ => 1,
    };
    const SUM_READS: usize = match (Self::PARTS, Self::APART) {
        (1, 1) => 1,
        (1, _) => 2,
        _ => 1,
    };
    /// Sums of neighbouring steps, each with a factor of its own.
    const SUMS: usize = Self::CHUNKS / Self::SUM_CHUNKS;

    /// The number of the block's chunk that is found `k`th.
    #[inline(always)]
    fn chunk(read: usize, k: usize) -> usize {
        read / Self::APART * Self::APART * Self::CHUNKS + read % Self::APART + k * Self::APART
    }

    /// The start of each step's pieces; those over `TAKES` mean nothing.
    const PIECES_OF: [[usize; PIECES]; MOST_READS];
    /// The places of the block's words when it is packed: in the order in which products read them.
    const PLACES: [usize; MOST_WORDS] =
        places(BYTES / 4, (&Self::PIECES_OF, Self::TAKES, Self::READS));

    /// From word `w` of each piece of a step columns `4 · w` to `4 · w + 3` of each of its chunks;
    /// those over `CHUNKS` mean nothing.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn chunks(
        pieces: [__m512i; PIECES],
        read_and_word: (usize, usize),
        scales: &GroupScales,
    ) -> [__m512i; MOST];

    /// The scales of sixteen rows.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn scales(blocks: impl GroupBlock<BYTES>) -> GroupScales;
}

macro_rules! chunks {
    ($name:ident, $bytes:literal: $chunks:literal chunks, $apart:literal apart, $scales:path,
     $(fifth bits at $fifth:literal,)? $takes:literal of |$read:pat_param| $pieces:expr, $quants:expr) => {
        impl UnpackGroup<$bytes> for g::$name {
            const CHUNKS: usize = $chunks;
            const APART: usize = $apart;
            const TAKES: usize = $takes;
            $(const FIFTH_BITS: Option<usize> = Some($fifth);)?

            const PIECES_OF: [[usize; PIECES]; MOST_READS] = {
                let (mut all, mut read) = ([[0; PIECES]; MOST_READS], 0);
                while read < MOST_READS {
                    let $read = read;
                    all[read] = $pieces;
                    read += 1;
                }
                all
            };

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn chunks(
                pieces: [__m512i; PIECES],
                at: (usize, usize),
                scales: &GroupScales,
            ) -> [__m512i; MOST] {
                $quants(pieces, at, scales)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn scales(blocks: impl GroupBlock<$bytes>) -> GroupScales {
                $scales(blocks)
            }
        }
    };
}

/// Words without quants first (scales are read before them), then those of each step, word by word
/// of its pieces, except those that a step before has read.
const fn places(
    n_words: usize,
    (pieces, n_takes, n_reads): (&[[usize; PIECES]; MOST_READS], usize, usize),
) -> [usize; MOST_WORDS] {
    const NOWHERE: usize = usize::MAX;
    let mut places = [NOWHERE; MOST_WORDS];
    let (mut n_quants, mut i) = (0, 0);
    while i < n_reads * STEPS * n_takes {
        let (read, word, take) = (i / n_takes / STEPS, i / n_takes % STEPS, i % n_takes);
        let at = pieces[read][take] / 4 + word;
        if places[at] == NOWHERE {
            places[at] = n_quants;
            n_quants += 1;
        }
        i += 1;
    }
    let (mut n_other, mut at) = (0, 0);
    while at < n_words {
        if places[at] == NOWHERE {
            places[at] = n_other;
            n_other += 1;
        } else {
            places[at] += n_words - n_quants;
        }
        at += 1;
    }
    assert!(n_other + n_quants == n_words);
    places
}

chunks!(Q4_0, 18: 2 chunks, 1 apart, block_scales::blocks, 1 of |_| [2; 3],
    |[q, ..]: [_; 3], _, _| nibbles(q));
chunks!(Q4_1, 20: 2 chunks, 1 apart, block_scales::q4_1, 1 of |_| [4; 3],
    |[q, ..]: [_; 3], _, _| nibbles(q));
chunks!(Q5_0, 22: 2 chunks, 1 apart, block_scales::q5_0, fifth bits at 2, 1 of |_| [6; 3],
    |[q, ..]: [_; 3], (_, word), scales: &GroupScales| fifth_bits(nibbles(q), scales.fifth_bits, word));
chunks!(Q5_1, 24: 2 chunks, 1 apart, block_scales::q5_1, fifth bits at 4, 1 of |_| [8; 3],
    |[q, ..]: [_; 3], (_, word), scales: &GroupScales| fifth_bits(nibbles(q), scales.fifth_bits, word));
chunks!(Q8_0, 34: 1 chunks, 1 apart, block_scales::blocks, 1 of |read| [2 + 16 * read; 3],
    |[q, ..]: [_; 3], _, _| [_mm512_xor_si512(q, _mm512_set1_epi8(-128)); MOST]);
chunks!(Iq4Nl, 18: 2 chunks, 1 apart, block_scales::blocks, 1 of |_| [2; 3],
    |[q, ..]: [_; 3], _, _| lookup(&IQ4_VALUES, Self::OFFSET, q));
chunks!(Mxfp4, 17: 2 chunks, 1 apart, block_scales::mxfp4, 1 of |_| [1; 3],
    |[q, ..]: [_; 3], _, _| lookup(&MXFP4_VALUES, Self::OFFSET, q));
chunks!(Iq4Xs, 136: 2 chunks, 1 apart, block_scales::iq4_xs, 1 of |read| [8 + 16 * read; 3],
    |[q, ..]: [_; 3], _, _| lookup(&IQ4_VALUES, Self::OFFSET, q));
chunks!(Q2K, 84: 4 chunks, 2 apart, block_scales::q2_k, 1 of |read| [16 + 16 * read; 3],
    |[q, ..]: [_; 3], _, _| two_bits(q));
chunks!(Q3K, 110: 4 chunks, 2 apart, block_scales::q3_k,
2 of |read| [32 + 16 * read, 16 * (read % 2), 0],
|[q, third, _]: [_; 3], (read, _), _| {
    let third = _mm512_srl_epi16(third, _mm_cvtsi64_si128(4 * (read as i64 / 2)));
    let low = two_bits(q);
    [
        with::<4>(low[0], _mm512_slli_epi16::<2>(third)),
        with::<4>(low[1], _mm512_slli_epi16::<1>(third)),
        with::<4>(low[2], third),
        with::<4>(low[3], _mm512_srli_epi16::<1>(third)),
    ]
});
chunks!(Q4K, 144: 2 chunks, 2 apart, block_scales::q4_k, 1 of |read| [16 + 16 * read; 3],
    |[q, ..]: [_; 3], _, _| nibbles(q));
chunks!(Q5K, 176: 2 chunks, 2 apart, block_scales::q4_k,
2 of |read| [48 + 16 * read, 16 + 16 * (read % 2), 0],
|[q, fifth, _]: [_; 3], (read, _), _| {
    let fifth = _mm512_srl_epi16(fifth, _mm_cvtsi64_si128(2 * (read as i64 / 2)));
    let [low, high, ..] = nibbles(q);
    let low = with::<16>(low, _mm512_slli_epi16::<4>(fifth));
    let high = with::<16>(high, _mm512_slli_epi16::<3>(fifth));
    [low, high, low, high]
});
chunks!(Q6K, 210: 4 chunks, 2 apart, block_scales::q6_k,
3 of |read| {
    let at = 64 * (read / 2) + 16 * (read % 2);
    [at, at + 32, 128 + 16 * read]
},
|[q, other, high]: [_; 3], _, _| {
    let ([a, c, ..], [d, e, ..]) = (nibbles(q), nibbles(other));
    [
        with::<48>(a, _mm512_slli_epi16::<4>(high)),
        with::<48>(d, _mm512_slli_epi16::<2>(high)),
        with::<48>(c, high),
        with::<48>(e, _mm512_srli_epi16::<2>(high)),
    ]
});

// Plain functions, not closures: those would be compiled as calls, which spill every register.

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

/// Adds 16 to word `word` of two chunks where bits are set that lie as [`GroupBlock::bits`] has
/// them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fifth_bits([low, high, ..]: [__m512i; MOST], bits: __m512i, word: usize) -> [__m512i; MOST] {
    let by = |n: usize| _mm_cvtsi64_si128(n as i64);
    let low = with::<16>(low, _mm512_sll_epi32(bits, by(4 - word)));
    let high = with::<16>(high, _mm512_srl_epi32(bits, by(word)));
    [low, high, low, high]
}

/// The values of a table that nibbles stand for, plus an offset.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn lookup(table: &[i8; 16], offset: i32, bytes: __m512i) -> [__m512i; MOST] {
    let [low, high, ..] = nibbles(bytes);
    let (low, high) = (entries(table, offset, low), entries(table, offset, high));
    [low, high, low, high]
}

/// The table's values at these indices, plus the offset that makes them unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn entries(table: &[i8; 16], offset: i32, indices: __m512i) -> __m512i {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let table = _mm_add_epi8(table, _mm_set1_epi8(offset as i8));
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), indices)
}
