//! Weights without a scale (`F32`, `F16`, `BF16`) against `f32` activations, in `f32`.
//!
//! Invariant: each output has two registers of eight sums, filled in turn from the first column to the
//! last, however many tokens are multiplied beside it. Knows no quantised format.

use std::ops::Range;

use half::{bf16, f16};
use kv_core::block::BlockFormat;

use super::Eight;
use super::slices::{Stored, padded};
use crate::kernels::WeightRows;
use crate::output::OutputColumns;

/// Tokens that share the conversion of a weight row.
const TILE: usize = 4;

#[inline(always)]
pub(in crate::kernels) fn multiply<E: Eight>(
    e: E,
    weights: WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match weights.format {
        BlockFormat::F32 => each::<E, f32, 32>(e, weights, acts, tokens, out),
        BlockFormat::F16 => each::<E, f16, 16>(e, weights, acts, tokens, out),
        BlockFormat::BF16 => each::<E, bf16, 16>(e, weights, acts, tokens, out),
        // `Matrix` gives other formats int8 activations.
        other => debug_assert!(false, "{other} against f32 activations"),
    }
}

/// Eight weights from `EIGHT` bytes.
#[inline(always)]
fn load<E: Eight, W: Stored, const EIGHT: usize>(e: E, bytes: &[u8; EIGHT]) -> E::F {
    const { assert!(size_of::<[W; 8]>() == EIGHT) };
    // SAFETY: the bytes of eight numbers, any of which are valid; the read needs no alignment.
    W::load(e, &unsafe {
        bytes.as_ptr().cast::<[W; 8]>().read_unaligned()
    })
}

/// Tokens in tiles of [`TILE`], then one by one.
#[inline(always)]
fn each<E: Eight, W: Stored, const EIGHT: usize>(
    e: E,
    weights: WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let mut token = tokens.start;
    while token < tokens.end {
        if tokens.end - token >= TILE {
            tile::<E, W, EIGHT, TILE>(e, weights, acts, token, out);
            token += TILE;
        } else {
            tile::<E, W, EIGHT, 1>(e, weights, acts, token, out);
            token += 1;
        }
    }
}

#[inline(always)]
fn tile<E: Eight, W: Stored, const EIGHT: usize, const TOKENS: usize>(
    e: E,
    weights: WeightRows<'_>,
    acts: &[f32],
    first: usize,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let acts: [&[f32]; TOKENS] = std::array::from_fn(|t| {
        acts.get((first + t) * n..(first + t + 1) * n)
            .unwrap_or_default()
    });
    debug_assert!(acts.iter().all(|row| row.len() == n));
    let rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    for (column, row) in (weights.first..).zip(rows) {
        let values = dot::<E, W, EIGHT, TOKENS>(e, row, &acts);
        for (t, value) in values.into_iter().enumerate() {
            out.set(first + t, column, value);
        }
    }
}

/// Two accumulators for each token, filled in turn.
#[inline(always)]
fn dot<E: Eight, W: Stored, const EIGHT: usize, const TOKENS: usize>(
    e: E,
    row: &[u8],
    acts: &[&[f32]; TOKENS],
) -> [f32; TOKENS] {
    let mut acc = [[e.splat(0.0); 2]; TOKENS];
    let (weights, w_rest) = row.as_chunks::<EIGHT>();
    let (pairs, w_single) = weights.as_chunks::<2>();
    let eights = acts.map(|a| a.as_chunks::<8>().0);
    let held = eights.iter().map(|a| a.len()).min().unwrap_or(0);
    for (i, pair) in pairs.iter().take(held / 2).enumerate() {
        let w = [
            load::<E, W, EIGHT>(e, &pair[0]),
            load::<E, W, EIGHT>(e, &pair[1]),
        ];
        for t in 0..TOKENS {
            for k in 0..2 {
                // SAFETY: `2i + k` is below `held`, hence below the length of every row.
                let a = e.load(unsafe { eights[t].get_unchecked(2 * i + k) });
                acc[t][k] = e.mul_add(w[k], a, acc[t][k]);
            }
        }
    }
    for t in 0..TOKENS {
        if let (Some(w), Some(a)) = (w_single.first(), eights[t].get(2 * pairs.len())) {
            acc[t][0] = e.mul_add(load::<E, W, EIGHT>(e, w), e.load(a), acc[t][0]);
        }
        let a_rest = acts[t].as_chunks::<8>().1;
        if !a_rest.is_empty() {
            let mut w = [0; EIGHT];
            let n = w_rest.len().min(EIGHT);
            w[..n].copy_from_slice(&w_rest[..n]);
            let a = e.load(&padded(a_rest, 0.0));
            acc[t][1] = e.mul_add(load::<E, W, EIGHT>(e, &w), a, acc[t][1]);
        }
    }
    acc.map(|[a, b]| e.sum(e.add(a, b)))
}
