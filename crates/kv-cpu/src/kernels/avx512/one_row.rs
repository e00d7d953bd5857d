//! One token against weights in blocks of 32: sixteen rows and two blocks at a time.
//!
//! Invariant: the additions of [`panel::tile::blocks`](crate::kernels::panel::tile::blocks), in its
//! order. Knows block formats only through [`Pair`].

use std::arch::x86_64::*;

use kv_core::block::{IQ4_VALUES, MXFP4_VALUES};

use super::by_rows::by_rows;
use super::heads::powers;
use super::reduce::{ROWS, halves, quarters, widened};
use super::table::entries;
use crate::activations::{BLOCK, Int8Row};
use crate::kernels::ahead::{Ahead, in_order};
use crate::kernels::groups as g;
use crate::kernels::panel::pack::Packed;

/// How two blocks of `BYTES` bytes are unpacked.
pub(super) trait Pair<const BYTES: usize>: Packed<BYTES> {
    /// The quants of two blocks, unsigned.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn pair(blocks: [&[u8; BYTES]; 2]) -> __m512i;
}

macro_rules! pair {
    ($name:ident: $bytes:literal bytes, $quants:expr) => {
        impl Pair<$bytes> for g::$name {
            #[inline]
            #[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn pair(blocks: [&[u8; $bytes]; 2]) -> __m512i {
                $quants(blocks)
            }
        }
    };
}

pair!(Q4_0: 18 bytes, |b: [&[u8; 18]; 2]| nibbles(b, 2));
pair!(Q4_1: 20 bytes, |b: [&[u8; 20]; 2]| nibbles(b, 4));
pair!(Q5_0: 22 bytes, |b: [&[u8; 22]; 2]| fifth_bits(nibbles(b, 6), b, 2));
pair!(Q5_1: 24 bytes, |b: [&[u8; 24]; 2]| fifth_bits(nibbles(b, 8), b, 4));
pair!(Q8_0: 34 bytes, |b: [&[u8; 34]; 2]| {
    let both = two_halves(load32(b[0], 2), load32(b[1], 2));
    _mm512_xor_si512(both, _mm512_set1_epi8(-128))
});
pair!(Iq4Nl: 18 bytes,
    |b: [&[u8; 18]; 2]| entries(&IQ4_VALUES, Self::OFFSET, nibbles(b, 2)));
pair!(Mxfp4: 17 bytes,
    |b: [&[u8; 17]; 2]| entries(&MXFP4_VALUES, Self::OFFSET, nibbles(b, 1)));

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

by_rows!(
    Pair,
    1,
    in_order,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);

/// What is known of two blocks of sixteen rows before it is added.
#[derive(Clone, Copy)]
struct Pending {
    dots: [__m512i; 2],
    /// Scales and minima, as stored.
    scales: [[u16; ROWS]; 2],
    minima: [[u16; ROWS]; 2],
}

/// The sums of `N` rows, at most [`ROWS`]; the other lanes mean nothing.
///
/// # Safety
/// The rows have `n_blocks` blocks; the activations at least as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<F: Pair<BYTES>, const BYTES: usize, const N: usize>(
    rows: &[*const [u8; BYTES]; N],
    (n_blocks, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> __m512 {
    // Not a constant, so that the loop stays one: unrolled, the compiler would load all at once
    // until nothing fits in registers.
    let n_quarters = std::hint::black_box(N / 4);
    let none = Pending {
        dots: [_mm512_setzero_si512(); 2],
        scales: [[0; ROWS]; 2],
        minima: [[0; ROWS]; 2],
    };
    let (mut acc, mut pending) = (_mm512_setzero_ps(), [none; 2]);
    for b in (0..n_blocks).step_by(2) {
        // An odd last block is its own neighbour, whose sums are left out.
        let next = (b + 1).min(n_blocks - 1);
        let ahead = Ahead::of::<N>(b * BYTES, 2 * BYTES, row_bytes);
        // SAFETY: rows of activations are padded to a multiple of eight blocks.
        let (a, _) = unsafe { acts.two_blocks(b) };
        // SAFETY: 64 readable bytes; the load needs no alignment.
        let a = unsafe { _mm512_loadu_si512(a.as_ptr().cast()) };
        let now = &mut pending[b / 2 % 2];
        let mut sums = [_mm512_setzero_si512(); 4];
        for (quarter, sums) in sums.iter_mut().enumerate().take(n_quarters) {
            let mut dots = [_mm512_setzero_si512(); 4];
            for (r, dots) in dots.iter_mut().enumerate() {
                let at = 4 * quarter + r;
                // SAFETY: both blocks are inside the row.
                let blocks = unsafe { [&*rows[at].add(b), &*rows[at].add(next)] };
                ahead.fetch(blocks[0], at);
                for (k, block) in blocks.into_iter().enumerate() {
                    now.scales[k][at] = F::scale_bits(block);
                    if F::MINIMA {
                        now.minima[k][at] = F::minimum_bits(block);
                    }
                }
                // SAFETY: this function needs the same features.
                let w = unsafe { F::pair(blocks) };
                *dots = _mm512_dpbusd_epi32(*dots, w, a);
            }
            *sums = quarters(dots);
        }
        now.dots = halves(sums);
        // What was written a step ago can be read in one piece by now.
        if b > 0 {
            acc = add::<F, BYTES>(&pending[(b / 2 + 1) % 2], (b - 2, 2), acts, acc);
        }
    }
    let last = n_blocks.saturating_sub(1) / 2 * 2;
    let rest = (last, n_blocks - last);
    add::<F, BYTES>(&pending[last / 2 % 2], rest, acts, acc)
}

/// Adds `n` blocks, of which `b` is the first.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add<F: Pair<BYTES>, const BYTES: usize>(
    pending: &Pending,
    (b, n): (usize, usize),
    acts: &Int8Row<'_>,
    mut acc: __m512,
) -> __m512 {
    for k in 0..n.min(2) {
        let offset = -F::OFFSET * i32::from(acts.int_sums[b + k]);
        let dots = _mm512_add_epi32(pending.dots[k], _mm512_set1_epi32(offset));
        let scales = match F::POWERS {
            true => powers(exponents(&pending.scales[k])),
            false => widened(&pending.scales[k]),
        };
        let scale = _mm512_mul_ps(scales, _mm512_set1_ps(acts.scales[b + k]));
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, acc);
        if F::MINIMA {
            let sum = _mm512_set1_ps(acts.sums[b + k]);
            acc = _mm512_fmadd_ps(widened(&pending.minima[k]), sum, acc);
        }
    }
    acc
}

/// Sixteen numbers, widened.
#[inline]
#[target_feature(enable = "avx512f")]
fn exponents(stored: &[u16; ROWS]) -> __m512i {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(stored.as_ptr().cast()) })
}

const _: () = assert!(BLOCK == 32);
