//! One token against weights in small blocks of 32, where the processor moves bytes freely (VBMI, GFNI).
//!
//! Two blocks of a row lie in one register as they are stored. One permutation brings their nibbles into
//! place; another one brings scales, minima and fifth bits, so that no number passes through memory.
//!
//! Invariant: the additions of [`one_row`](super::one_row), hence its bits. Knows block formats through
//! [`Stored`].

use std::arch::x86_64::*;

use super::by_rows::by_rows;
use super::heads::powers;
use super::reduce::{ROWS, halves, quarters};
use super::stored::{Stored, load, readable};
use super::table::entries;
use crate::activations::Int8Row;
use crate::kernels::ahead::{Ahead, in_next_tile, in_order_somewhere};

/// Two blocks of a row.
#[derive(Clone, Copy)]
struct Pair {
    /// Quants, unsigned.
    quants: __m512i,
    /// See [`Stored::HEAD_BYTES`].
    head: __m512i,
}

impl Pair {
    /// From the blocks as they are stored.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
    fn of<F: Stored<BYTES>, const BYTES: usize>(blocks: __m512i) -> Self {
        let nibbles = _mm512_permutexvar_epi8(load(&F::NIBBLE_BYTES), blocks);
        let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
        let nibbles = _mm512_srlv_epi64(nibbles, shifts);
        let places = load(&F::HEAD_BYTES);
        let head = _mm512_permutexvar_epi8(places, blocks);
        let low = _mm512_set1_epi8(15);
        let quants = match F::FIFTH_BITS {
            // Where a bit of `low` is set that of the nibbles, elsewhere that of the fifth bits.
            Some(_) => _mm512_ternarylogic_epi64::<0xca>(low, nibbles, fifth_bits(head)),
            None => _mm512_and_si512(nibbles, low),
        };
        let quants = match F::TABLE {
            Some(table) => entries(table, F::OFFSET, quants),
            None => quants,
        };
        Self { quants, head }
    }
}

/// The fourth of every eight bytes as the fifth bits of eight; their lower bits mean nothing.
///
/// An affine map of GF(2)^8 has a row of its matrix for each bit of the result, byte `7 − i` for bit `i`:
/// the numbers 1, 2, 4, … select a column each.
#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn fifth_bits(matrices: __m512i) -> __m512i {
    let columns = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
    _mm512_gf2p8affine_epi64_epi8::<0>(columns, matrices)
}

by_rows!(
    Stored,
    1,
    in_order_somewhere,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
);

/// The sums of `N` rows, at most [`ROWS`]; the other lanes mean nothing.
///
/// # Safety
/// The rows have `n_blocks` blocks; the activations at least as many.
#[inline]
#[target_feature(
    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
unsafe fn tile<F: Stored<BYTES>, const BYTES: usize, const N: usize>(
    rows: &[*const [u8; BYTES]; N],
    (n_blocks, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> __m512 {
    let mut acc = _mm512_setzero_ps();
    for b in (0..n_blocks).step_by(2) {
        let n = (n_blocks - b).min(2);
        // Only the blocks of this row are read.
        let readable = readable(n * BYTES);
        let ahead = Ahead::of::<N>(b * BYTES, 2 * BYTES, row_bytes);
        let next_tile = in_next_tile::<N>(rows[0].cast(), b * BYTES, row_bytes);
        // SAFETY: rows of activations are padded to a multiple of eight blocks.
        let (a, _) = unsafe { acts.two_blocks(b) };
        // SAFETY: 64 readable bytes; the load needs no alignment.
        let a = unsafe { _mm512_loadu_si512(a.as_ptr().cast()) };
        let mut sums = [_mm512_setzero_si512(); 4];
        let mut heads = [_mm512_setzero_si512(); 4];
        for quarter in 0..N / 4 {
            let mut dots = [_mm512_setzero_si512(); 4];
            let mut of_rows = [_mm512_setzero_si512(); 4];
            for (r, (dots, head)) in dots.iter_mut().zip(&mut of_rows).enumerate() {
                let at = 4 * quarter + r;
                // SAFETY: the blocks that are read are inside the row.
                let blocks = unsafe {
                    let from = rows[at].add(b);
                    match N {
                        ROWS => ahead
                            .level
                            .fetch(next_tile.wrapping_add(at * 2 * BYTES), 2 * BYTES),
                        _ => ahead.fetch(from, at),
                    }
                    _mm512_maskz_loadu_epi8(readable, from.cast())
                };
                let pair = Pair::of::<F, BYTES>(blocks);
                *dots = _mm512_dpbusd_epi32(*dots, pair.quants, a);
                *head = pair.head;
            }
            sums[quarter] = quarters(dots);
            heads[quarter] = last_words(of_rows);
        }
        acc = add::<F, BYTES>(halves(sums), heads, (b, n), acts, acc);
    }
    acc
}

/// The last word of every quarter of four registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn last_words(r: [__m512i; 4]) -> __m512i {
    let (a, b) = (
        _mm512_unpackhi_epi32(r[0], r[1]),
        _mm512_unpackhi_epi32(r[2], r[3]),
    );
    _mm512_unpackhi_epi64(a, b)
}

/// From the [`last_words`] of sixteen heads one word of each, of columns of block `block`; of every word
/// the lower 16 bits, then the upper ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn beside(heads: [__m512i; 4], block: usize) -> [__m256i; 2] {
    // Two quarters of each have the same words.
    let (a, b) = match block {
        0 => (
            _mm512_shuffle_i32x4::<0b00_00_00_00>(heads[0], heads[1]),
            _mm512_shuffle_i32x4::<0b00_00_00_00>(heads[2], heads[3]),
        ),
        _ => (
            _mm512_shuffle_i32x4::<0b10_10_10_10>(heads[0], heads[1]),
            _mm512_shuffle_i32x4::<0b10_10_10_10>(heads[2], heads[3]),
        ),
    };
    let words = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
    [
        _mm512_cvtepi32_epi16(words),
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(words)),
    ]
}

/// Adds `n` blocks, of which `b` is the first.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn add<F: Stored<BYTES>, const BYTES: usize>(
    dots: [__m512i; 2],
    heads: [__m512i; 4],
    (b, n): (usize, usize),
    acts: &Int8Row<'_>,
    acc: __m512,
) -> __m512 {
    let (scales, minima) = (beside(heads, 0), beside(heads, 1));
    let acc = add_block::<F, BYTES>(dots[0], (scales[0], minima[0]), (b, acts), acc);
    match n {
        2 => add_block::<F, BYTES>(dots[1], (scales[1], minima[1]), (b + 1, acts), acc),
        _ => acc,
    }
}

/// Adds one block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn add_block<F: Stored<BYTES>, const BYTES: usize>(
    dots: __m512i,
    (scales, minima): (__m256i, __m256i),
    (b, acts): (usize, &Int8Row<'_>),
    acc: __m512,
) -> __m512 {
    let offset = -F::OFFSET * i32::from(acts.int_sums[b]);
    let dots = _mm512_add_epi32(dots, _mm512_set1_epi32(offset));
    let scales = match F::POWERS {
        true => powers(_mm512_cvtepu16_epi32(scales)),
        false => _mm512_cvtph_ps(scales),
    };
    let scale = _mm512_mul_ps(scales, _mm512_set1_ps(acts.scales[b]));
    let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, acc);
    match F::MINIMA {
        true => _mm512_fmadd_ps(_mm512_cvtph_ps(minima), _mm512_set1_ps(acts.sums[b]), acc),
        false => acc,
    }
}
