//! Skinny GEMM (2 to 64 tokens) on packed weights.
//!
//! Works on groups of sixteen weight rows, one in each lane. Each block is unpacked in registers
//! once and reused for up to eight tokens.
//!
//! Invariant: the additions of [`gemv`](super::gemv), in its order, for every token, so prefill and
//! decode give the same bits. Generic over the block format ([`UnpackGroup`]).

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::block_scales::GroupScales;
use super::gemv::{offset, prefetch_step, unpack_word, unrolled};
use super::pack::{PackedBlock, PackedGroup};
use super::row_group::ROWS;
use super::unpack::UnpackGroup;
use super::unpack_panel::STEPS;
use crate::kernels::WeightRows;
use crate::kernels::gemm::STEP;
use crate::operands::{BLOCK, Int8Acts, Int8Rows, SUPER_BLOCK};
use crate::output::OutputColumns;

/// Sixteen rows, the activations of some tokens, and where their products go.
struct Tile<'a, F, const BYTES: usize> {
    group: PackedGroup<'a, F, BYTES>,
    /// Blocks (or super-blocks) of a row.
    n_stored: usize,
    acts: Int8Acts,
    /// The start of the first token's blocks.
    first: usize,
    out: *mut f32,
    /// From one token's products to the next one's.
    stride: usize,
}

/// All weight rows times some tokens, at least two.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn gemm_skinny<F: UnpackGroup<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let inside =
        acts.n_columns() == weights.n_columns && tokens.len() > 1 && tokens.end <= acts.n_tokens();
    debug_assert!(inside);
    if !inside {
        return;
    }
    let acts = acts.pointers();
    let tile_tokens = tile_tokens(tokens.len());
    for (i, group) in PackedGroup::<F, BYTES>::all(weights).enumerate() {
        let rows = weights.first + i * ROWS..weights.first + (i + 1) * ROWS;
        for token in tokens.clone().step_by(tile_tokens) {
            // The last tile overlaps the one before, and computes the same bits again.
            let first = token.min(tokens.end - tile_tokens);
            let Some((start, stride)) = out.block(first..first + tile_tokens, rows.clone()) else {
                return;
            };
            let tile = Tile {
                group,
                n_stored: weights.n_columns / (F::GROUPS * BLOCK),
                acts,
                first: first * acts.row_blocks,
                out: start,
                stride,
            };
            // SAFETY: there are so many tokens; the outputs are `out`'s, of sixteen rows each.
            unsafe {
                match tile_tokens {
                    2 => multiply_tile::<F, BYTES, 2>(&tile),
                    3 => multiply_tile::<F, BYTES, 3>(&tile),
                    4 => multiply_tile::<F, BYTES, 4>(&tile),
                    6 => multiply_tile::<F, BYTES, 6>(&tile),
                    _ => multiply_tile::<F, BYTES, 8>(&tile),
                }
            }
        }
    }
}

/// The tokens of a tile, for so many tokens, so that few are computed twice: 2, 3, 4, 6 or 8.
fn tile_tokens(n_tokens: usize) -> usize {
    match n_tokens {
        ..=2 => 2,
        3 | 5 => 3,
        4 | 7 => 4,
        6 | 9..=12 | 17 | 18 => 6,
        _ => 8,
    }
}

/// One tile of `T` tokens.
///
/// # Safety
/// There are the activations of so many tokens, and room for their products.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply_tile<F: UnpackGroup<BYTES>, const BYTES: usize, const T: usize>(
    tile: &Tile<'_, F, BYTES>,
) {
    let acts = &tile.acts;
    let mut acc = [_mm512_setzero_ps(); T];
    for s in 0..tile.n_stored {
        // SAFETY: the group has all blocks of its columns, and so have the activations.
        unsafe {
            let block = tile.group.block(s);
            let scales = F::scales(block);
            let first = tile.first + s * F::GROUPS;
            match F::GROUPS {
                1 => add_block::<F, BYTES, T>((block, &scales), first, acts, &mut acc),
                _ => add_super::<F, BYTES, T>((block, &scales), first, acts, &mut acc),
            }
        }
    }
    for (t, acc) in acc.into_iter().enumerate() {
        // SAFETY: as the caller promises; the store needs no alignment.
        unsafe { _mm512_storeu_ps(tile.out.add(t * tile.stride), acc) };
    }
}

/// The address of the first token's activations of step `at` from block `b` on, and the distance to
/// the next token's in bytes.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn at_step(acts: &Int8Acts, b: usize, at: usize) -> (*const u8, usize) {
    // SAFETY: as the caller promises.
    let first = unsafe { acts.quants.add(b).cast::<u8>().add(at * STEP) };
    (first, acts.row_blocks * BLOCK)
}

/// Adds the products with four activations at an address to a sum.
///
/// Written as assembly because the compiler hoists many loads until it runs out of registers: that
/// took a third of the time.
macro_rules! add_dot {
    ($sum:ident, $quants:ident, $acts:ident, $address:literal $(, $apart:ident)?) => {
        asm!(concat!("vpdpbusd {sum}, {quants}, dword ptr [", $address, "]{{1to16}}"),
            sum = inout(zmm_reg) *$sum, quants = in(zmm_reg) $quants, acts = in(reg) $acts, $(apart = in(reg) $apart,)?
            options(readonly, nostack, preserves_flags))
    };
}

/// Adds one word of a chunk to the sums of all tokens, whose activations are `apart` bytes apart.
///
/// # Safety
/// All tokens have four activations at `acts`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn add_word<const T: usize>(
    quants: __m512i,
    (acts, apart): (*const u8, usize),
    sums: &mut [__m512i; T],
) {
    let thrice = 3 * apart;
    for (i, sums) in sums.chunks_mut(4).enumerate() {
        let acts = acts.wrapping_add(4 * i * apart);
        for (t, sum) in sums.iter_mut().enumerate() {
            // SAFETY: four bytes are read, which are there as the caller promises; this function
            // needs the features of the instruction.
            unsafe {
                match t {
                    0 => add_dot!(sum, quants, acts, "{acts}"),
                    1 => add_dot!(sum, quants, acts, "{acts} + {apart}", apart),
                    2 => add_dot!(sum, quants, acts, "{acts} + 2 * {apart}", apart),
                    _ => add_dot!(sum, quants, acts, "{acts} + {apart}", thrice),
                }
            }
        }
    }
}

/// Adds a block of 32.
///
/// # Safety
/// The activations of all tokens have it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_block<F: UnpackGroup<BYTES>, const BYTES: usize, const T: usize>(
    (block, scales): (PackedBlock<'_, F, BYTES>, &GroupScales),
    b: usize,
    acts: &Int8Acts,
    acc: &mut [__m512; T],
) {
    // SAFETY: as the caller promises, for all that is read of the activations.
    unsafe {
        let mut sums: [_; T] = std::array::from_fn(|t| {
            offset::<F, BYTES>(acts.negative_sums.add(b + t * acts.row_blocks))
        });
        unrolled!(read of F::READS => {
            unrolled!(word of STEPS => {
                // Into the second-level cache: so many products leave time for the way to the
                // first.
                prefetch_step::<F, BYTES, true>(block, read * STEPS + word);
                let chunks = unpack_word::<F, BYTES>((block, scales), (read, word));
                for (k, quants) in chunks.into_iter().enumerate().take(F::CHUNKS) {
                    let at = F::chunk(read, k) * STEPS + word;
                    add_word(quants, at_step(acts, b, at), &mut sums);
                }
            });
        });
        for (t, (acc, sum)) in acc.iter_mut().zip(sums).enumerate() {
            let b = b + t * acts.row_blocks;
            let scale = _mm512_mul_ps(scales.scales, _mm512_set1_ps(*acts.scales.add(b)));
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, *acc);
            if F::MINIMA {
                let sum = _mm512_set1_ps(*acts.sums.add(b));
                *acc = _mm512_fmadd_ps(scales.minimum_scales, sum, *acc);
            }
        }
    }
}

/// `totals += sums · factor`, lane by lane.
///
/// Written as assembly so that it is done here: later, the sums would occupy registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_factored<const T: usize>(sums: [__m512i; T], factor: __m512i, totals: &mut [__m512i; T]) {
    for (total, sum) in totals.iter_mut().zip(sums) {
        // SAFETY: this function needs the instructions' features; they touch no memory.
        unsafe {
            asm!("vpmulld {sum}, {sum}, {factor}", "vpaddd {total}, {total}, {sum}",
                sum = inout(zmm_reg) sum => _, factor = in(zmm_reg) factor, total = inout(zmm_reg) *total,
                options(nomem, nostack, preserves_flags));
        }
    }
}

/// The minima of a super-block times the sums of every token's activations.
///
/// # Safety
/// The activations of all tokens have the blocks from `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn sum_minima<F: UnpackGroup<BYTES>, const BYTES: usize, const T: usize>(
    scales: &GroupScales,
    first: usize,
    acts: &Int8Acts,
) -> [__m512i; T] {
    let mut minima = [_mm512_setzero_si512(); T];
    for pair in 0..SUPER_BLOCK / 2 * F::PARTS {
        let both = scales.minima(pair);
        for (t, minima) in minima.iter_mut().enumerate() {
            let first = first + t * acts.row_blocks;
            // SAFETY: two neighbouring sums, four bytes, are there as the caller promises; this
            // function needs the instruction's features.
            unsafe {
                let sums = acts.two_sums(F::PARTS, first, pair);
                asm!("vpdpwssd {minima}, {both}, dword ptr [{sums}]{{1to16}}",
                    minima = inout(zmm_reg) *minima, both = in(zmm_reg) both, sums = in(reg) sums,
                    options(readonly, nostack, preserves_flags));
            }
        }
    }
    minima
}

/// Adds a super-block, of which `first` is the first block.
///
/// # Safety
/// The activations of all tokens have it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_super<F: UnpackGroup<BYTES>, const BYTES: usize, const T: usize>(
    (block, scales): (PackedBlock<'_, F, BYTES>, &GroupScales),
    first: usize,
    acts: &Int8Acts,
    acc: &mut [__m512; T],
) {
    let mut totals = [_mm512_setzero_si512(); T];
    // SAFETY: as the caller promises, for all that is read of the activations.
    unsafe {
        unrolled!(sum of F::READS / F::SUM_READS * F::SUMS => {
            let (first_read, k) = (sum / F::SUMS * F::SUM_READS, sum % F::SUMS);
            let chunk = F::chunk(first_read, k);
            let mut sums: [_; T] = std::array::from_fn(|t| {
                let first = first + t * acts.row_blocks;
                offset::<F, BYTES>(acts.negative_sum(F::PARTS, first, chunk))
            });
            unrolled!(step of F::SUM_READS * STEPS => {
                let (read, word) = (first_read + step / STEPS, step % STEPS);
                if k == 0 {
                    prefetch_step::<F, BYTES, true>(block, read * STEPS + word);
                }
                let chunks = unpack_word::<F, BYTES>((block, scales), (read, word));
                for (i, quants) in chunks[k..].iter().enumerate().take(F::SUM_CHUNKS) {
                    let at = F::chunk(read, k + i) * STEPS + word;
                    add_word(*quants, at_step(acts, first, at), &mut sums);
                }
            });
            let factor = scales.factor(chunk * F::PARTS / 2);
            add_factored(sums, factor, &mut totals);
        } 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        let minima = if F::MINIMA {
            sum_minima::<F, BYTES, T>(scales, first, acts)
        } else {
            totals
        };
        for (t, acc) in acc.iter_mut().enumerate() {
            let act_scale = _mm512_set1_ps(*acts.scales.add(first + t * acts.row_blocks));
            let scale = _mm512_mul_ps(scales.scales, act_scale);
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[t]), scale, *acc);
            if F::MINIMA {
                let scale = _mm512_mul_ps(scales.minimum_scales, act_scale);
                *acc = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minima[t]), scale, *acc);
            }
        }
    }
}
