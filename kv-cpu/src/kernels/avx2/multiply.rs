//! Weight rows against activations: one pass over the blocks, several tokens at a time.
//!
//! Invariant: [`dot`] does the same additions in the same order for each token, however many there
//! are. Knows block formats only through [`Format`].

use std::arch::x86_64::*;
use std::ops::Range;

use kv_core::block::BlockFormat;

use super::groups::{self, Format, Head, Minima};
use super::lanes::{load, sum};
use super::multiply_f32;
use crate::activations::{Activations, BLOCK, Int8Row, Int8Rows};
use crate::kernels::WeightRows;
use crate::output::OutputColumns;

/// Tokens that share the unpacking of a weight row.
const TILE: usize = 4;
/// Bytes ahead of the current block that are asked for from memory.
pub(in crate::kernels) const PREFETCH: usize = 1024;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match acts {
        Activations::F32(values) => multiply_f32::multiply(weights, values, tokens, out),
        Activations::Int8(rows) => multiply_int8(weights, rows, tokens, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_int8(
    weights: WeightRows<'_>,
    acts: Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match weights.format {
        BlockFormat::Q4_0 => each::<groups::Q4_0, 18>(weights, acts, tokens, out),
        BlockFormat::Q4_1 => each::<groups::Q4_1, 20>(weights, acts, tokens, out),
        BlockFormat::Q5_0 => each::<groups::Q5_0, 22>(weights, acts, tokens, out),
        BlockFormat::Q5_1 => each::<groups::Q5_1, 24>(weights, acts, tokens, out),
        BlockFormat::Q8_0 => each::<groups::Q8_0, 34>(weights, acts, tokens, out),
        BlockFormat::Q2_K => each::<groups::Q2K, 84>(weights, acts, tokens, out),
        BlockFormat::Q3_K => each::<groups::Q3K, 110>(weights, acts, tokens, out),
        BlockFormat::Q4_K => each::<groups::Q4K, 144>(weights, acts, tokens, out),
        BlockFormat::Q5_K => each::<groups::Q5K, 176>(weights, acts, tokens, out),
        BlockFormat::Q6_K => each::<groups::Q6K, 210>(weights, acts, tokens, out),
        BlockFormat::IQ4_NL => each::<groups::Iq4Nl, 18>(weights, acts, tokens, out),
        BlockFormat::IQ4_XS => each::<groups::Iq4Xs, 136>(weights, acts, tokens, out),
        // `Matrix` gives other formats `f32` activations.
        other => debug_assert!(false, "{other} against int8 activations"),
    }
}

/// Tokens in tiles of [`TILE`], then one by one.
#[target_feature(enable = "avx2,fma,f16c")]
fn each<F: Format<BYTES>, const BYTES: usize>(
    weights: WeightRows<'_>,
    acts: Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let mut token = tokens.start;
    while token < tokens.end {
        if tokens.end - token >= TILE {
            tile::<F, BYTES, TILE>(weights, acts, token, out);
            token += TILE;
        } else {
            tile::<F, BYTES, 1>(weights, acts, token, out);
            token += 1;
        }
    }
}

/// All weight rows against the tokens from `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<F: Format<BYTES>, const BYTES: usize, const TOKENS: usize>(
    weights: WeightRows<'_>,
    acts: Int8Rows<'_>,
    first: usize,
    out: &mut OutputColumns<'_>,
) {
    let Some(acts) = acts.tile::<TOKENS>(first) else {
        debug_assert!(false, "tokens {first}..{}", first + TOKENS);
        return;
    };
    let rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    for (column, row) in (weights.first..).zip(rows) {
        for (t, value) in dot::<F, BYTES, TOKENS>(row, &acts).into_iter().enumerate() {
            out.set(first + t, column, value);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<F: Format<BYTES>, const BYTES: usize, const TOKENS: usize>(
    row: &[u8],
    acts: &[Int8Row<'_>; TOKENS],
) -> [f32; TOKENS] {
    let zero = _mm256_setzero_ps();
    let (mut acc, mut min_acc) = ([[zero; 2]; TOKENS], [zero; TOKENS]);
    let (blocks, _) = row.as_chunks::<BYTES>();
    let held = acts.iter().map(Int8Row::n_blocks).min().unwrap_or(0);
    debug_assert!(blocks.len() * F::GROUPS <= held);
    for (b, block) in blocks.iter().take(held / F::GROUPS).enumerate() {
        prefetch(block);
        // SAFETY: this function needs the same features.
        let head = unsafe { F::head(block) };
        for g in 0..F::GROUPS {
            // SAFETY: as above.
            let (q, scales) = unsafe { (F::quants(block, g), F::scales(&head, g)) };
            let magnitude = if F::SIGNED { _mm256_abs_epi8(q) } else { q };
            for t in 0..TOKENS {
                // SAFETY: `b · GROUPS + g` is below `held`, hence below every row's blocks.
                let (a, scale) = unsafe { acts[t].block(b * F::GROUPS + g) };
                let a = load_block(a);
                let a = if F::SIGNED { _mm256_sign_epi8(a, q) } else { a };
                // No sum of two products exceeds 2 · 128 · 127.
                let pairs = _mm256_maddubs_epi16(magnitude, a);
                let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                let scales = _mm256_mul_ps(scales, _mm256_set1_ps(scale));
                acc[t][g % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(fours), scales, acc[t][g % 2]);
            }
        }
        add_minima::<F, BYTES, TOKENS>(&head, b, acts, &mut min_acc);
    }
    std::array::from_fn(|t| {
        sum(_mm256_add_ps(
            _mm256_add_ps(acc[t][0], acc[t][1]),
            min_acc[t],
        ))
    })
}

/// Adds the minima of block `b` times the sums of the activations they belong to.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn add_minima<F: Format<BYTES>, const BYTES: usize, const TOKENS: usize>(
    head: &Head,
    b: usize,
    acts: &[Int8Row<'_>; TOKENS],
    acc: &mut [__m256; TOKENS],
) {
    let [low, high] = head.minima;
    for (acts, acc) in acts.iter().zip(acc) {
        match F::MINIMA {
            Minima::None => {}
            Minima::One => {
                let sum = acts.sums.get(b).copied().unwrap_or_default();
                let sum = _mm256_zextps128_ps256(_mm_set_ss(sum));
                *acc = _mm256_fmadd_ps(low, sum, *acc);
            }
            Minima::Groups => {
                let (sums, _) = acts.sums.as_chunks::<8>();
                if let Some(sums) = sums.get(b) {
                    *acc = _mm256_fmadd_ps(low, load(sums), *acc);
                }
            }
            Minima::HalfGroups => {
                let (sums, _) = acts.half_sums.as_flattened().as_chunks::<8>();
                if let Some([first, second]) = sums.as_chunks::<2>().0.get(b) {
                    *acc = _mm256_fmadd_ps(low, load(first), *acc);
                    *acc = _mm256_fmadd_ps(high, load(second), *acc);
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_block(quants: &[i8; BLOCK]) -> __m256i {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(quants.as_ptr().cast()) }
}

/// Asks for the bytes that will be needed soon; past the end of the weights this does nothing.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn prefetch<const BYTES: usize>(block: &[u8; BYTES]) {
    let ahead = block.as_ptr().wrapping_add(PREFETCH).cast::<i8>();
    for line in 0..BYTES.div_ceil(64) {
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line));
    }
}
