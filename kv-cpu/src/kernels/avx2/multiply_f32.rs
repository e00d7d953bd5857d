//! Weights without a scale (`F32`, `F16`, `BF16`) against `f32` activations, in `f32`.
//!
//! Invariant: [`dot`] does the same additions in the same order for each token, however many there
//! are. Knows no quantised format.

use std::arch::x86_64::*;
use std::ops::Range;

use kv_core::block::BlockFormat;

use super::lanes::{load, padded, sum};
use crate::kernels::WeightRows;
use crate::output::OutputColumns;

/// Tokens that share the conversion of a weight row.
const TILE: usize = 4;

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn multiply(
    weights: WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match weights.format {
        BlockFormat::F32 => each::<32>(weights, acts, tokens, out, |w| load_f32(w)),
        BlockFormat::F16 => each::<16>(weights, acts, tokens, out, |w| load_f16(w)),
        BlockFormat::BF16 => each::<16>(weights, acts, tokens, out, |w| load_bf16(w)),
        // `Matrix` gives other formats int8 activations.
        other => debug_assert!(false, "{other} against f32 activations"),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f32(w: &[u8; 32]) -> __m256 {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_ps(w.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f16(w: &[u8; 16]) -> __m256 {
    // SAFETY: 16 readable bytes; the load needs no alignment.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(w.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_bf16(w: &[u8; 16]) -> __m256 {
    // SAFETY: 16 readable bytes; the load needs no alignment.
    let upper = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(w.as_ptr().cast()) });
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))
}

/// Tokens in tiles of [`TILE`], then one by one. `EIGHT` bytes are eight weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn each<const EIGHT: usize>(
    weights: WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
    load_w: impl Fn(&[u8; EIGHT]) -> __m256,
) {
    let mut token = tokens.start;
    while token < tokens.end {
        if tokens.end - token >= TILE {
            tile::<EIGHT, TILE>(weights, acts, token, out, &load_w);
            token += TILE;
        } else {
            tile::<EIGHT, 1>(weights, acts, token, out, &load_w);
            token += 1;
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const EIGHT: usize, const TOKENS: usize>(
    weights: WeightRows<'_>,
    acts: &[f32],
    first: usize,
    out: &mut OutputColumns<'_>,
    load_w: &impl Fn(&[u8; EIGHT]) -> __m256,
) {
    let n = weights.n_columns;
    let acts: [&[f32]; TOKENS] = std::array::from_fn(|t| {
        acts.get((first + t) * n..(first + t + 1) * n)
            .unwrap_or_default()
    });
    debug_assert!(acts.iter().all(|row| row.len() == n));
    let rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    for (column, row) in (weights.first..).zip(rows) {
        for (t, value) in dot(row, &acts, load_w).into_iter().enumerate() {
            out.set(first + t, column, value);
        }
    }
}

/// Two accumulators for each token, filled in turn.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const EIGHT: usize, const TOKENS: usize>(
    row: &[u8],
    acts: &[&[f32]; TOKENS],
    load_w: &impl Fn(&[u8; EIGHT]) -> __m256,
) -> [f32; TOKENS] {
    let mut acc = [[_mm256_setzero_ps(); 2]; TOKENS];
    let (weights, w_rest) = row.as_chunks::<EIGHT>();
    let (pairs, w_single) = weights.as_chunks::<2>();
    let eights = acts.map(|a| a.as_chunks::<8>().0);
    let held = eights.iter().map(|a| a.len()).min().unwrap_or(0);
    for (i, pair) in pairs.iter().take(held / 2).enumerate() {
        let w = [load_w(&pair[0]), load_w(&pair[1])];
        for t in 0..TOKENS {
            for k in 0..2 {
                // SAFETY: `2i + k` is below `held`, hence below the length of every row.
                let a = load(unsafe { eights[t].get_unchecked(2 * i + k) });
                acc[t][k] = _mm256_fmadd_ps(w[k], a, acc[t][k]);
            }
        }
    }
    for t in 0..TOKENS {
        if let (Some(w), Some(a)) = (w_single.first(), eights[t].get(2 * pairs.len())) {
            acc[t][0] = _mm256_fmadd_ps(load_w(w), load(a), acc[t][0]);
        }
        let a_rest = acts[t].as_chunks::<8>().1;
        if !a_rest.is_empty() {
            let mut w = [0; EIGHT];
            let n = w_rest.len().min(EIGHT);
            w[..n].copy_from_slice(&w_rest[..n]);
            acc[t][1] = _mm256_fmadd_ps(load_w(&w), load(&padded(a_rest, 0.0)), acc[t][1]);
        }
    }
    acc.map(|[a, b]| sum(_mm256_add_ps(a, b)))
}
