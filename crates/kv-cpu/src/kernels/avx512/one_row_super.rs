//! One token against weights in super-blocks of 256: sixteen rows at a time.
//!
//! Invariant: the additions of [`panel::tile::supers`](crate::kernels::panel::tile::supers), in its
//! order. Knows block formats only through [`Super`].

use std::arch::x86_64::*;

use kv_core::block::IQ4_VALUES;

use super::by_rows::by_rows;
use super::reduce::{ROWS, halves, quarters, widened};
use super::table::entries;
use crate::activations::{Int8Row, SUPER_BLOCK};
use crate::kernels::ahead::{Ahead, in_order};
use crate::kernels::avx2::beside::{Beside, Numbers, sums_of_four};
use crate::kernels::panel::heads::{self, Head};

/// Registers of quants of a super-block.
const QUARTERS: usize = 4;

/// How super-blocks of `BYTES` bytes are unpacked.
pub(super) trait Super<const BYTES: usize> {
    /// What makes the quants unsigned.
    const OFFSET: i32;
    /// Factors of a block: of the whole, or of its halves.
    const PARTS: usize;
    /// Whether there are minima.
    const MINIMA: bool;

    /// Scales and factors.
    fn head(block: &[u8; BYTES]) -> Head;

    /// The head's factors and minima.
    ///
    /// # Safety
    /// AVX2 is available.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn numbers(block: &[u8; BYTES]) -> Numbers {
        Numbers::of(&Self::head(block))
    }

    /// The quants in order, unsigned.
    ///
    /// # Safety
    /// AVX-512 is available.
    unsafe fn quants(block: &[u8; BYTES]) -> [__m512i; QUARTERS];
}

macro_rules! super_block {
    ($name:ident: $bytes:literal bytes, $offset:literal, $parts:literal, $minima:literal, $head:path
     $(=> $numbers:path)?, $quants:expr) => {
        pub(super) struct $name;

        impl Super<$bytes> for $name {
            const OFFSET: i32 = $offset;
            const PARTS: usize = $parts;
            const MINIMA: bool = $minima;

            #[inline(always)]
            fn head(block: &[u8; $bytes]) -> Head {
                $head(block)
            }

            $(#[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn numbers(block: &[u8; $bytes]) -> Numbers {
                $numbers(block)
            })?

            #[inline]
            #[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn quants(block: &[u8; $bytes]) -> [__m512i; QUARTERS] {
                $quants(block)
            }
        }
    };
}

super_block!(Q4K: 144 bytes, 0, 1, true, heads::q4_k => Numbers::q4_k, |b: &[u8; 144]| {
    let [low, high] = [load(b, 16), load(b, 80)];
    let [a, c] = nibbles(low);
    let [d, e] = nibbles(high);
    [lower(a, c), upper(a, c), lower(d, e), upper(d, e)]
});
super_block!(Q5K: 176 bytes, 0, 1, true, heads::q4_k => Numbers::q4_k, |b: &[u8; 176]| {
    let [low, high] = [load(b, 48), load(b, 112)];
    let [a, c] = nibbles(low);
    let [d, e] = nibbles(high);
    // Bits 2·i and 2·i + 1 of 32 bytes belong to register i, and move to bit 4.
    let fifth = twice(b, 16);
    [
        _mm512_or_si512(lower(a, c), _mm512_slli_epi16::<4>(bits::<1>(fifth, 0, 1))),
        _mm512_or_si512(upper(a, c), _mm512_slli_epi16::<4>(bits::<1>(fifth, 2, 3))),
        _mm512_or_si512(lower(d, e), _mm512_slli_epi16::<4>(bits::<1>(fifth, 4, 5))),
        _mm512_or_si512(upper(d, e), _mm512_slli_epi16::<4>(bits::<1>(fifth, 6, 7))),
    ]
});
super_block!(Q6K: 210 bytes, 32, 2, false, heads::q6_k, |b: &[u8; 210]| {
    let [a, c] = nibbles(load(b, 0));
    let [d, e] = nibbles(load(b, 64));
    let [low, high] = [twice(b, 128), twice(b, 160)];
    [
        _mm512_or_si512(a, _mm512_slli_epi16::<4>(bits::<3>(low, 0, 2))),
        _mm512_or_si512(c, _mm512_slli_epi16::<4>(bits::<3>(low, 4, 6))),
        _mm512_or_si512(d, _mm512_slli_epi16::<4>(bits::<3>(high, 0, 2))),
        _mm512_or_si512(e, _mm512_slli_epi16::<4>(bits::<3>(high, 4, 6))),
    ]
});
super_block!(Q3K: 110 bytes, 4, 2, false, heads::q3_k, |b: &[u8; 110]| {
    let third = twice(b, 0);
    let [low, high] = [twice(b, 32), twice(b, 64)];
    [
        _mm512_or_si512(bits::<3>(low, 0, 2), _mm512_slli_epi16::<2>(bits::<1>(third, 0, 1))),
        _mm512_or_si512(bits::<3>(low, 4, 6), _mm512_slli_epi16::<2>(bits::<1>(third, 2, 3))),
        _mm512_or_si512(bits::<3>(high, 0, 2), _mm512_slli_epi16::<2>(bits::<1>(third, 4, 5))),
        _mm512_or_si512(bits::<3>(high, 4, 6), _mm512_slli_epi16::<2>(bits::<1>(third, 6, 7))),
    ]
});
super_block!(Q2K: 84 bytes, 0, 2, true, heads::q2_k, |b: &[u8; 84]| {
    let [low, high] = [twice(b, 16), twice(b, 48)];
    [
        bits::<3>(low, 0, 2),
        bits::<3>(low, 4, 6),
        bits::<3>(high, 0, 2),
        bits::<3>(high, 4, 6),
    ]
});
super_block!(Iq4Xs: 136 bytes, 128, 1, false, heads::iq4_xs, |b: &[u8; 136]| {
    let ([a, c], [d, e]) = (alternating(load(b, 8)), alternating(load(b, 72)));
    [
        entries(&IQ4_VALUES, Self::OFFSET, a),
        entries(&IQ4_VALUES, Self::OFFSET, c),
        entries(&IQ4_VALUES, Self::OFFSET, d),
        entries(&IQ4_VALUES, Self::OFFSET, e),
    ]
});

// Plain functions, not closures: those would be compiled as calls, which spill every register.

/// Of each quarter the low nibbles, then the high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn alternating(bytes: __m512i) -> [__m512i; 2] {
    let [low, high] = nibbles(bytes);
    let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    [
        _mm512_permutex2var_epi64(low, first, high),
        _mm512_permutex2var_epi64(low, second, high),
    ]
}

/// Some bits of every byte (`MASK` when shifted down): from bit `low` on in the lower half, from bit
/// `high` on in the upper.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn bits<const MASK: i8>(bytes: __m512i, low: i64, high: i64) -> __m512i {
    let shifts = _mm512_setr_epi64(low, low, low, low, high, high, high, high);
    _mm512_and_si512(_mm512_srlv_epi64(bytes, shifts), _mm512_set1_epi8(MASK))
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(block: &[u8], at: usize) -> __m512i {
    // SAFETY: 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(block[at..at + 64].as_ptr().cast()) }
}

/// 32 bytes, in both halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn twice(block: &[u8], at: usize) -> __m512i {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    let bytes = unsafe { _mm256_loadu_si256(block[at..at + 32].as_ptr().cast()) };
    _mm512_broadcast_i64x4(bytes)
}

/// The low nibbles, and the high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    let high = _mm512_srli_epi16::<4>(bytes);
    [_mm512_and_si512(bytes, mask), _mm512_and_si512(high, mask)]
}

/// The lower halves of both.
#[inline]
#[target_feature(enable = "avx512f")]
fn lower(a: __m512i, b: __m512i) -> __m512i {
    _mm512_inserti64x4::<1>(a, _mm512_castsi512_si256(b))
}

/// The upper halves of both.
#[inline]
#[target_feature(enable = "avx512f")]
fn upper(a: __m512i, b: __m512i) -> __m512i {
    _mm512_shuffle_i64x2::<0b11_10_11_10>(a, b)
}

by_rows!(
    Super,
    SUPER_BLOCK,
    in_order,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);

/// The sums of `N` rows, at most [`ROWS`]; the other lanes mean nothing.
///
/// # Safety
/// The rows have `n_supers` blocks; the activations at least as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<F: Super<BYTES>, const BYTES: usize, const N: usize>(
    rows: &[*const [u8; BYTES]; N],
    (n_supers, row_bytes): (usize, usize),
    acts: &Int8Row<'_>,
) -> __m512 {
    let mut acc = _mm512_setzero_ps();
    for s in 0..n_supers {
        let first = s * SUPER_BLOCK;
        let ahead = Ahead::of::<N>(s * BYTES, BYTES, row_bytes);
        // SAFETY: the activations have all blocks of this super-block.
        let a = unsafe { activations(acts, first) };
        let (mut scales, mut scale_minima) = ([0u16; ROWS], [0u16; ROWS]);
        let mut sums = [_mm512_setzero_si512(); 4];
        let mut minima = [_mm_setzero_si128(); 4];
        for quarter in 0..N / 4 {
            let (mut dots, mut mins) = ([a[0]; 4], [_mm_setzero_si128(); 4]);
            for r in 0..4 {
                let row = 4 * quarter + r;
                // SAFETY: the block is inside the row.
                let block = unsafe { &*rows[row].add(s) };
                ahead.fetch(block, row);
                let head = F::head(block);
                scales[row] = head.scale.to_bits();
                scale_minima[row] = head.minimum.to_bits();
                // SAFETY: this function needs the same features.
                let (q, numbers) = unsafe { (F::quants(block), F::numbers(block)) };
                (dots[r], mins[r]) = dot::<F, BYTES>(&q, &a, numbers, acts, first);
            }
            sums[quarter] = quarters(dots);
            if F::MINIMA {
                minima[quarter] = sums_of_four(mins);
            }
        }
        let scales = (&scales, &scale_minima);
        acc = add::<F, BYTES>((sums, minima), scales, acts.scales[first], acc);
    }
    acc
}

/// Adds a super-block of sixteen rows: the sums of its quants and of its minima, four rows in each, times
/// their scales, as stored.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn add<F: Super<BYTES>, const BYTES: usize>(
    (sums, minima): ([__m512i; 4], [__m128i; 4]),
    (scales, scale_minima): (&[u16; ROWS], &[u16; ROWS]),
    act_scale: f32,
    acc: __m512,
) -> __m512 {
    let [low, high] = halves(sums);
    let act_scale = _mm512_set1_ps(act_scale);
    let scale = _mm512_mul_ps(widened(scales), act_scale);
    let total = _mm512_cvtepi32_ps(_mm512_add_epi32(low, high));
    let acc = _mm512_fmadd_ps(total, scale, acc);
    if !F::MINIMA {
        return acc;
    }
    let low = _mm256_set_m128i(minima[1], minima[0]);
    let high = _mm256_set_m128i(minima[3], minima[2]);
    let total = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    let scale = _mm512_mul_ps(widened(scale_minima), act_scale);
    _mm512_fnmadd_ps(_mm512_cvtepi32_ps(total), scale, acc)
}

/// The 256 quants from block `first` on.
///
/// # Safety
/// The activations have all blocks of this super-block.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn activations(acts: &Int8Row<'_>, first: usize) -> [__m512i; QUARTERS] {
    // SAFETY: as the caller promises; loads need no alignment.
    unsafe {
        let a = acts.quants.as_ptr().add(first).cast::<u8>();
        [
            _mm512_loadu_si512(a.cast()),
            _mm512_loadu_si512(a.add(64).cast()),
            _mm512_loadu_si512(a.add(128).cast()),
            _mm512_loadu_si512(a.add(192).cast()),
        ]
    }
}

/// The integer sums of one row, to be added over lanes: of quants, and of minima.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn dot<F: Super<BYTES>, const BYTES: usize>(
    q: &[__m512i; QUARTERS],
    a: &[__m512i; QUARTERS],
    numbers: Numbers,
    acts: &Int8Row<'_>,
    first: usize,
) -> (__m512i, __m128i) {
    let beside = Beside::of(numbers, F::PARTS, acts, first);
    let mut sums = [_mm512_setzero_si512(); 2];
    let pairs = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(beside.factors));
    let fours = _mm512_cvtepi8_epi32(beside.factors);
    for i in 0..QUARTERS {
        let sum = &mut sums[i % 2];
        if F::OFFSET < 64 {
            // No sum of two products exceeds 2 · 63 · 127.
            let dots = _mm512_maddubs_epi16(q[i], a[i]);
            let factor = _mm512_permutexvar_epi16(lanes_of_pairs::<F, BYTES>(i), pairs);
            *sum = _mm512_dpwssd_epi32(*sum, dots, factor);
        } else {
            let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[i], a[i]);
            let factor = _mm512_permutexvar_epi32(lanes_of_fours::<F, BYTES>(i), fours);
            *sum = _mm512_add_epi32(*sum, _mm512_mullo_epi32(dots, factor));
        }
    }
    let mut sum = _mm512_add_epi32(sums[0], sums[1]);
    if F::OFFSET != 0 {
        let taken = beside.offsets(F::OFFSET);
        sum = _mm512_sub_epi32(sum, _mm512_zextsi256_si512(taken));
    }
    let minima = if F::MINIMA {
        beside.minima()
    } else {
        _mm_setzero_si128()
    };
    (sum, minima)
}

/// Which factor belongs to each lane of the registers of quants, where a register has `LANES` and a
/// block has `parts` factors.
const fn factor_lanes<const LANES: usize>(parts: usize) -> [[u16; LANES]; QUARTERS] {
    let mut lanes = [[0; LANES]; QUARTERS];
    let mut i = 0;
    while i < QUARTERS * LANES {
        // A register is two blocks long.
        lanes[i / LANES][i % LANES] = (2 * parts * i / LANES) as u16;
        i += 1;
    }
    lanes
}

/// Which factor belongs to each two columns of register `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn lanes_of_pairs<F: Super<BYTES>, const BYTES: usize>(i: usize) -> __m512i {
    let lanes = &const { factor_lanes::<32>(F::PARTS) }[i];
    // SAFETY: 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

/// Which factor belongs to each four columns of register `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn lanes_of_fours<F: Super<BYTES>, const BYTES: usize>(i: usize) -> __m512i {
    let lanes = &const { factor_lanes::<16>(F::PARTS) }[i];
    // SAFETY: 32 readable bytes; the load needs no alignment.
    _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) })
}
