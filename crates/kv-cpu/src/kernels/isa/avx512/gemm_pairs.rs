//! GEMM tiles of super-blocks that multiply two sums by their factors at once.
//!
//! The sums of a block, or of half a block, have at most 17 bits, and mostly 16. Two of them in one
//! register, and their factors in another, take one multiplication: half as many as
//! [`tile::supers`] needs in the pipes of the dot products. Whether sums fit is known from the
//! activations' magnitudes.
//!
//! Invariant: the results of [`tile::supers`], bit for bit. Knows no format.

use std::arch::x86_64::*;

use super::dot::Avx512Tile;
use super::gemm_skinny::add_word;
use crate::kernels::gemm::tile::{self, VECTORS};
use crate::kernels::gemm::{BLOCKS, STEP, TileArgs};
use crate::operands::{BLOCK, SUPER_BLOCK};

/// Rows of a register.
const LANES: usize = 16;
/// Dot products of a block.
const STEPS: usize = BLOCK / STEP;

/// As [`tile::supers`], of `T` tokens.
///
/// # Safety
/// As for [`TileFn`](crate::kernels::gemm::TileFn).
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn supers<const PARTS: usize, const MINIMA: bool, const T: usize>(
    args: &TileArgs<'_>,
) {
    let n_supers = args.blocks.len().min(BLOCKS) / SUPER_BLOCK;
    tile::prefetch_outputs::<Avx512Tile, T>(args);
    for s in 0..n_supers {
        // SAFETY: as the caller promises.
        let fits = unsafe { fits::<T>(args, s) };
        for v in 0..VECTORS {
            // SAFETY: as the caller promises.
            unsafe {
                let totals = if fits {
                    totals::<PARTS, MINIMA, true, T>(args, s, v)
                } else {
                    totals::<PARTS, MINIMA, false, T>(args, s, v)
                };
                let minima = if MINIMA {
                    minima::<PARTS, T>(args, s, v)
                } else {
                    totals
                };
                add_super::<MINIMA, T>(args, s, v, &totals, &minima);
            }
        }
    }
}

/// True if all sums of super-block `s` fit into 16 bits.
///
/// # Safety
/// As for [`supers`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn fits<const T: usize>(args: &TileArgs<'_>, s: usize) -> bool {
    let acts = &args.acts;
    let first = args.token * acts.row_blocks + args.blocks.start + s * SUPER_BLOCK;
    let mut most = _mm_setzero_si128();
    for t in 0..T {
        // SAFETY: the eight magnitudes of a super-block, which exists; the load needs no alignment.
        let magnitudes = unsafe {
            let at = acts.magnitudes.add(first + t * acts.row_blocks);
            _mm_loadu_si128(at.cast())
        };
        most = _mm_max_epu16(most, magnitudes);
    }
    _mm_cmpgt_epu16_mask(most, _mm_set1_epi16(args.max_magnitude as i16)) == 0
}

/// The sums of super-block `s` times their factors, for register `v` of rows: in pairs if they fit.
///
/// # Safety
/// As for [`supers`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn totals<const PARTS: usize, const MINIMA: bool, const FIT: bool, const T: usize>(
    args: &TileArgs<'_>,
    s: usize,
    v: usize,
) -> [__m512i; T] {
    let n_pairs = SUPER_BLOCK / 2 * PARTS;
    let row = args.row + v * LANES;
    let mut totals = [_mm512_setzero_si512(); T];
    for pair in 0..n_pairs {
        // SAFETY: as the caller promises, the panel has these factors, and all tokens these blocks.
        unsafe {
            let low = sums::<PARTS, MINIMA, T>(args, s, 2 * pair, v);
            let high = sums::<PARTS, MINIMA, T>(args, s, 2 * pair + 1, v);
            let factors = args.panel.factors.as_ptr().add((s * n_pairs + pair) * 2);
            let first = _mm512_load_si512((*factors).as_ptr().add(row).cast());
            let second = _mm512_load_si512((*factors.add(1)).as_ptr().add(row).cast());
            for (t, total) in totals.iter_mut().enumerate() {
                *total = if FIT {
                    let factors = both(first, second);
                    _mm512_dpwssd_epi32(*total, both(low[t], high[t]), factors)
                } else {
                    let low = _mm512_mullo_epi32(low[t], first);
                    let high = _mm512_mullo_epi32(high[t], second);
                    _mm512_add_epi32(*total, _mm512_add_epi32(low, high))
                };
            }
        }
    }
    totals
}

/// The sums of part `part` of super-block `s`, a block or half of one, for register `v` of rows.
///
/// # Safety
/// As for [`supers`].
#[inline(always)] // or the compiler calls it, and registers go through memory
unsafe fn sums<const PARTS: usize, const MINIMA: bool, const T: usize>(
    args: &TileArgs<'_>,
    s: usize,
    part: usize,
    v: usize,
) -> [__m512i; T] {
    let (acts, row) = (&args.acts, args.row + v * LANES);
    let (b, steps) = (s * SUPER_BLOCK + part / PARTS, STEPS / PARTS);
    if v == 0 && part.is_multiple_of(PARTS) {
        tile::prefetch_next_tokens::<T>(args, b);
    }
    let first = args.token * acts.row_blocks + args.blocks.start + b;
    // SAFETY: as the caller promises, the panel has these steps, and all tokens these blocks.
    unsafe {
        let mut sums = [_mm512_setzero_si512(); T];
        if !MINIMA {
            for (t, sums) in sums.iter_mut().enumerate() {
                let sum = acts.negative_sum(PARTS, first + t * acts.row_blocks, part % PARTS);
                *sums = tile::offsets::<Avx512Tile>(args, sum);
            }
        }
        let begin = part % PARTS * steps;
        let quants = acts.quants.add(first).cast::<u8>().add(begin * STEP);
        let weights = args.panel.quants.as_ptr().add(b * STEPS + begin);
        for step in 0..steps {
            let weights = _mm512_load_si512((*weights.add(step)).as_ptr().add(row).cast());
            let at = (quants.add(step * STEP), acts.row_blocks * BLOCK);
            add_word(weights, at, &mut sums);
        }
        sums
    }
}

/// Two 16-bit numbers in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn both(low: __m512i, high: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_slli_epi32::<16>(high))
}

/// The minima of super-block `s` times the sums of their activations, for register `v` of rows.
///
/// # Safety
/// As for [`supers`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn minima<const PARTS: usize, const T: usize>(
    args: &TileArgs<'_>,
    s: usize,
    v: usize,
) -> [__m512i; T] {
    let n_pairs = SUPER_BLOCK / 2 * PARTS;
    let acts = &args.acts;
    let first = args.token * acts.row_blocks + args.blocks.start + s * SUPER_BLOCK;
    let mut totals = [_mm512_setzero_si512(); T];
    for pair in 0..n_pairs {
        // SAFETY: as the caller promises, the panel has these minima, and all tokens these blocks.
        unsafe {
            let minima = args.panel.int_minima.as_ptr().add(s * n_pairs + pair);
            let minima = _mm512_load_si512((*minima).as_ptr().add(args.row + v * LANES).cast());
            for (t, total) in totals.iter_mut().enumerate() {
                let sums = acts.two_sums(PARTS, first + t * acts.row_blocks, pair);
                let sums = _mm512_set1_epi32(sums.read_unaligned());
                *total = _mm512_dpwssd_epi32(*total, minima, sums);
            }
        }
    }
    totals
}

/// Adds the scaled sums of super-block `s` to the outputs of register `v` of rows, and subtracts
/// its scaled minima.
///
/// # Safety
/// As for [`supers`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_super<const MINIMA: bool, const T: usize>(
    args: &TileArgs<'_>,
    s: usize,
    v: usize,
    totals: &[__m512i; T],
    minima: &[__m512i; T],
) {
    let acts = &args.acts;
    let (continued, row) = (args.blocks.start + s > 0, args.row + v * LANES);
    let first = args.token * acts.row_blocks + args.blocks.start + s * SUPER_BLOCK;
    // SAFETY: the panel has these scales, all tokens these blocks, and there is room for the sums,
    // as the caller promises.
    unsafe {
        let of_rows =
            |scales: *const [f32; 2 * LANES]| _mm512_load_ps((*scales.add(s)).as_ptr().add(row));
        let scales = of_rows(args.panel.super_scales.as_ptr());
        let minimum_scales = of_rows(args.panel.super_minima.as_ptr());
        for t in 0..T {
            let act_scale = _mm512_set1_ps(*acts.scales.add(first + t * acts.row_blocks));
            let out = args.out.add(t * args.stride + v * LANES);
            let mut acc = _mm512_setzero_ps();
            if continued {
                acc = _mm512_loadu_ps(out);
            }
            let scale = _mm512_mul_ps(scales, act_scale);
            acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[t]), scale, acc);
            if MINIMA {
                let scale = _mm512_mul_ps(minimum_scales, act_scale);
                acc = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minima[t]), scale, acc);
            }
            _mm512_storeu_ps(out, acc);
        }
    }
}
