//! One token against weights in blocks of 32: sixteen rows and two blocks at a time.
//!
//! Invariant: the additions of [`panel::tile::blocks`](crate::kernels::panel::tile::blocks), in its
//! order. Knows block formats only through [`Pair`].

use std::arch::x86_64::*;

use kv_core::block::IQ4_VALUES;

use super::ahead::{Ahead, ROWS};
use super::reduce::{halves, quarters, widened};
use crate::activations::{BLOCK, Int8Row};
use crate::kernels::WeightRows;

/// How two blocks of `BYTES` bytes are unpacked; each begins with its scale.
pub(super) trait Pair<const BYTES: usize> {
    /// What makes the quants unsigned.
    const OFFSET: i32;
    /// Whether a minimum follows the scale.
    const MINIMA: bool = false;

    /// The quants of two blocks, unsigned.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn quants(blocks: [&[u8; BYTES]; 2]) -> __m512i;
}

macro_rules! pair {
    ($name:ident: $bytes:literal bytes, $offset:literal, $minima:literal, $quants:expr) => {
        pub(super) struct $name;

        impl Pair<$bytes> for $name {
            const OFFSET: i32 = $offset;
            const MINIMA: bool = $minima;

            #[inline]
            #[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn quants(blocks: [&[u8; $bytes]; 2]) -> __m512i {
                $quants(blocks)
            }
        }
    };
}

pair!(Q4_0: 18 bytes, 8, false, |b: [&[u8; 18]; 2]| nibbles(b, 2));
pair!(Q4_1: 20 bytes, 0, true, |b: [&[u8; 20]; 2]| nibbles(b, 4));
pair!(Q5_0: 22 bytes, 16, false, |b: [&[u8; 22]; 2]| fifth_bits(nibbles(b, 6), b, 2));
pair!(Q5_1: 24 bytes, 0, true, |b: [&[u8; 24]; 2]| fifth_bits(nibbles(b, 8), b, 4));
pair!(Q8_0: 34 bytes, 128, false, |b: [&[u8; 34]; 2]| {
    let both = two_halves(load32(b[0], 2), load32(b[1], 2));
    _mm512_xor_si512(both, _mm512_set1_epi8(-128))
});
pair!(Iq4Nl: 18 bytes, 128, false, |b: [&[u8; 18]; 2]| {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(IQ4_VALUES.as_ptr().cast()) };
    let table = _mm_xor_si128(table, _mm_set1_epi8(-128));
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles(b, 2))
});

#[inline]
#[target_feature(enable = "avx2,avx512f")]
fn two_halves(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

// Plain functions, not closures: those would be compiled as calls, which spill every register.

#[inline]
#[target_feature(enable = "avx2")]
fn load32<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> __m256i {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(block[at..at + 32].as_ptr().cast()) }
}

/// 16 bytes, in both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn twice16<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> __m256i {
    // SAFETY: 16 readable bytes; the load needs no alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(block[at..at + 16].as_ptr().cast()) })
}

#[inline(always)]
fn word<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> u64 {
    u64::from(u32::from_le_bytes([
        block[at],
        block[at + 1],
        block[at + 2],
        block[at + 3],
    ]))
}

#[inline(always)]
fn half<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> i32 {
    i32::from(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Low nibbles of 16 bytes from byte `at` of either block on, then their high nibbles.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512vl")]
fn nibbles<const BYTES: usize>(blocks: [&[u8; BYTES]; 2], at: usize) -> __m512i {
    let bytes = two_halves(twice16(blocks[0], at), twice16(blocks[1], at));
    let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    _mm512_and_si512(_mm512_srlv_epi64(bytes, shifts), _mm512_set1_epi8(15))
}

/// Adds 16 where the 32 bits from byte `at` of either block on are set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fifth_bits<const BYTES: usize>(
    quants: __m512i,
    blocks: [&[u8; BYTES]; 2],
    at: usize,
) -> __m512i {
    let mask = word(blocks[1], at) << 32 | word(blocks[0], at);
    _mm512_mask_add_epi8(quants, mask, quants, _mm512_set1_epi8(16))
}

/// All weight rows against one token: `out[row]`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn multiply<F: Pair<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let row_bytes = weights.row_bytes.max(1);
    let n_blocks = (row_bytes / BYTES).min(acts.n_blocks());
    for (bytes, out) in weights
        .bytes
        .chunks(ROWS * row_bytes)
        .zip(out.chunks_mut(ROWS))
    {
        // The last row stands in for those that are missing.
        let last = (bytes.len() / row_bytes).saturating_sub(1);
        if bytes.len() < row_bytes {
            return;
        }
        let rows: [*const [u8; BYTES]; ROWS] =
            std::array::from_fn(|r| bytes[r.min(last) * row_bytes..].as_ptr().cast());
        // SAFETY: `n_blocks` blocks can be read from the start of each row on.
        let sums = unsafe { sixteen::<F, BYTES>(&rows, (n_blocks, row_bytes), acts) };
        let mut values = [0.0; ROWS];
        // SAFETY: 64 writable bytes; the store needs no alignment.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), sums) };
        let n = out.len();
        out.copy_from_slice(&values[..n]);
    }
}

/// # Safety
/// The rows have `n_blocks` blocks; the activations at least as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn sixteen<F: Pair<BYTES>, const BYTES: usize>(
    rows: &[*const [u8; BYTES]; ROWS],
    (n_blocks, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> __m512 {
    let mut acc = _mm512_setzero_ps();
    let zero = _mm_setzero_si128();
    for b in (0..n_blocks).step_by(2) {
        // An odd last block is its own neighbour, whose sums are left out.
        let next = (b + 1).min(n_blocks - 1);
        let ahead = Ahead::new(b * BYTES, 2 * BYTES, row_bytes);
        // SAFETY: rows of activations are padded to a multiple of eight blocks.
        let (a, _) = unsafe { acts.two_blocks(b) };
        // SAFETY: 64 readable bytes; the load needs no alignment.
        let a = unsafe { _mm512_loadu_si512(a.as_ptr().cast()) };
        let (mut scales, mut minima) = ([[zero; 2]; 2], [[zero; 2]; 2]);
        let mut sums = [_mm512_setzero_si512(); 4];
        // Unrolled: lanes are named by constants.
        macro_rules! row {
            ($quarter:literal, $r:literal, $lane:literal) => {{
                let row = rows[4 * $quarter + $r];
                // SAFETY: both blocks are inside the row.
                let blocks = unsafe { [&*row.add(b), &*row.add(next)] };
                ahead.fetch(row.wrapping_add(b), 2);
                for k in 0..2 {
                    let to = &mut scales[k][$quarter / 2];
                    *to = _mm_insert_epi16::<$lane>(*to, half(blocks[k], 0));
                    if F::MINIMA {
                        let to = &mut minima[k][$quarter / 2];
                        *to = _mm_insert_epi16::<$lane>(*to, half(blocks[k], 2));
                    }
                }
                // SAFETY: this function needs the same features.
                let w = unsafe { F::quants(blocks) };
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, a)
            }};
        }
        macro_rules! quarter {
            ($quarter:literal, $a:literal, $b:literal, $c:literal, $d:literal) => {
                sums[$quarter] = quarters([
                    row!($quarter, 0, $a),
                    row!($quarter, 1, $b),
                    row!($quarter, 2, $c),
                    row!($quarter, 3, $d),
                ]);
            };
        }
        quarter!(0, 0, 1, 2, 3);
        quarter!(1, 4, 5, 6, 7);
        quarter!(2, 0, 1, 2, 3);
        quarter!(3, 4, 5, 6, 7);
        for (k, dots) in halves(sums).into_iter().enumerate().take(n_blocks - b) {
            let offset = -F::OFFSET * i32::from(acts.int_sums[b + k]);
            let dots = _mm512_add_epi32(dots, _mm512_set1_epi32(offset));
            let scale = _mm512_mul_ps(widened(scales[k]), _mm512_set1_ps(acts.scales[b + k]));
            acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, acc);
            if F::MINIMA {
                let sum = _mm512_set1_ps(acts.sums[b + k]);
                acc = _mm512_fmadd_ps(widened(minima[k]), sum, acc);
            }
        }
    }
    acc
}

const _: () = assert!(BLOCK == 32);
