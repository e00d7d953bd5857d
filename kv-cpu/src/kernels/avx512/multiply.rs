//! Weight rows against int8 activations, two groups of 32 at a time.
//!
//! Invariant: [`dot`] does the same additions in the same order for each token, however many there
//! are. Knows block formats only through [`Format`].

use std::arch::x86_64::*;
use std::ops::Range;

use kv_core::block::BlockFormat;

use crate::activations::{Activations, Int8Row, Int8Rows};
use crate::kernels::WeightRows;
use crate::kernels::avx2::groups::{self, Format, Head, Minima};
use crate::kernels::avx2::lanes::sum;
use crate::kernels::avx2::multiply::{add_minima, prefetch};
use crate::kernels::avx2::multiply_f32;
use crate::output::OutputColumns;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
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

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
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

/// Tokens in tiles of eight, and what is left in smaller ones: weights are unpacked once a tile.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn each<F: Format<BYTES>, const BYTES: usize>(
    weights: WeightRows<'_>,
    acts: Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let mut token = tokens.start;
    while token < tokens.end {
        token += match tokens.end - token {
            8.. => tile::<F, BYTES, 8>(weights, acts, token, out),
            4.. => tile::<F, BYTES, 4>(weights, acts, token, out),
            2.. => tile::<F, BYTES, 2>(weights, acts, token, out),
            _ => tile::<F, BYTES, 1>(weights, acts, token, out),
        };
    }
}

/// All weight rows against `TOKENS` tokens from `first` on; returns their number.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tile<F: Format<BYTES>, const BYTES: usize, const TOKENS: usize>(
    weights: WeightRows<'_>,
    acts: Int8Rows<'_>,
    first: usize,
    out: &mut OutputColumns<'_>,
) -> usize {
    let Some(acts) = acts.tile::<TOKENS>(first) else {
        debug_assert!(false, "tokens {first}..{}", first + TOKENS);
        return TOKENS;
    };
    let rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    for (column, row) in (weights.first..).zip(rows) {
        for (t, value) in dot::<F, BYTES, TOKENS>(row, &acts).into_iter().enumerate() {
            out.set(first + t, column, value);
        }
    }
    TOKENS
}

/// Blocks of 32 values go in pairs; a last one without a partner is paired with zeros (activation
/// rows are padded with zero blocks, so there is something to multiply them with).
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot<F: Format<BYTES>, const BYTES: usize, const TOKENS: usize>(
    row: &[u8],
    acts: &[Int8Row<'_>; TOKENS],
) -> [f32; TOKENS] {
    let mut acc = [[_mm512_setzero_ps(); 2]; TOKENS];
    let mut min_acc = [_mm256_setzero_ps(); TOKENS];
    let (blocks, _) = row.as_chunks::<BYTES>();
    let held = acts.iter().map(Int8Row::n_blocks).min().unwrap_or(0) / 2 * 2;
    debug_assert!((blocks.len() * F::GROUPS).next_multiple_of(2) <= held);
    let blocks = &blocks[..blocks.len().min(held / F::GROUPS)];
    let zero = (_mm256_setzero_si256(), _mm256_setzero_ps());
    let (pairs, last) = if F::GROUPS == 1 {
        blocks.as_chunks::<2>()
    } else {
        (&[][..], blocks)
    };
    for (i, [first, second]) in pairs.iter().enumerate() {
        prefetch(first);
        prefetch(second);
        // SAFETY: this function needs the same features.
        let (one, other) = unsafe { (F::head(first), F::head(second)) };
        // SAFETY: as above.
        let both = unsafe {
            (
                group::<F, BYTES>(first, &one, 0),
                group::<F, BYTES>(second, &other, 0),
            )
        };
        // SAFETY: `2i + 1` is below `held`, hence below every row's blocks.
        unsafe { add_products::<F, BYTES, TOKENS>(join(both), acts, 2 * i, &mut acc) };
        if F::MINIMA == Minima::One {
            let minima = _mm256_unpacklo_ps(one.minima[0], other.minima[0]);
            add_two_minima(minima, i, acts, &mut min_acc);
        }
    }
    for (b, block) in (2 * pairs.len()..).zip(last) {
        prefetch(block);
        // SAFETY: this function needs the same features.
        let head = unsafe { F::head(block) };
        for g in (0..F::GROUPS).step_by(2) {
            // SAFETY: as above.
            let first = unsafe { group::<F, BYTES>(block, &head, g) };
            let second = if g + 1 < F::GROUPS {
                // SAFETY: as above.
                unsafe { group::<F, BYTES>(block, &head, g + 1) }
            } else {
                zero
            };
            // SAFETY: `held` is even, so a pair that begins below it ends below it.
            unsafe {
                add_products::<F, BYTES, TOKENS>(
                    join((first, second)),
                    acts,
                    b * F::GROUPS + g,
                    &mut acc,
                )
            };
        }
        add_minima::<F, BYTES, TOKENS>(&head, b, acts, &mut min_acc);
    }
    std::array::from_fn(|t| {
        _mm512_reduce_add_ps(_mm512_add_ps(acc[t][0], acc[t][1])) + sum(min_acc[t])
    })
}

/// Adds the minima of blocks `2 · pair` and the next, in lanes 0 and 1, times the sums of the
/// activations they belong to.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_two_minima<const TOKENS: usize>(
    minima: __m256,
    pair: usize,
    acts: &[Int8Row<'_>; TOKENS],
    acc: &mut [__m256; TOKENS],
) {
    for (acts, acc) in acts.iter().zip(acc) {
        let [low, high] = acts
            .sums
            .as_chunks::<2>()
            .0
            .get(pair)
            .copied()
            .unwrap_or_default();
        let sums = _mm256_zextps128_ps256(_mm_setr_ps(low, high, 0.0, 0.0));
        *acc = _mm256_fmadd_ps(minima, sums, *acc);
    }
}

/// Quants and scales of one group.
///
/// # Safety
/// The features below are available: [`Format`]'s functions are not safe.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn group<F: Format<BYTES>, const BYTES: usize>(
    block: &[u8; BYTES],
    head: &Head,
    g: usize,
) -> (__m256i, __m256) {
    // SAFETY: this function needs more than the same features.
    unsafe { (F::quants(block, g), F::scales(head, g)) }
}

/// Two groups side by side.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn join(pair: ((__m256i, __m256), (__m256i, __m256))) -> (__m512i, __m512) {
    let ((q, scales), (q_high, scales_high)) = pair;
    let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(q), q_high);
    let scales = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(scales), scales_high);
    (q, scales)
}

/// Adds the products of two groups with blocks `b` and `b + 1` of each token's activations. The
/// accumulators take turns.
///
/// # Safety
/// `b + 1` is below the number of blocks of every row of `acts`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_products<F: Format<BYTES>, const BYTES: usize, const TOKENS: usize>(
    (q, scales): (__m512i, __m512),
    acts: &[Int8Row<'_>; TOKENS],
    b: usize,
    acc: &mut [[__m512; 2]; TOKENS],
) {
    let zero = _mm512_setzero_si512();
    let (magnitude, negative) = if F::SIGNED {
        (_mm512_abs_epi8(q), _mm512_movepi8_mask(q))
    } else {
        (q, 0)
    };
    // Of two neighbouring scales, the first for the lower lanes and the second for the upper.
    let choice = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi32(1));
    for (acts, acc) in acts.iter().zip(acc) {
        // SAFETY: the caller promises that both blocks exist.
        let (quants, act_scales) = unsafe { acts.two_blocks(b) };
        // SAFETY: 64 readable bytes; the load needs no alignment.
        let a = unsafe { _mm512_loadu_si512(quants.as_ptr().cast()) };
        let a = if F::SIGNED {
            _mm512_mask_sub_epi8(a, negative, zero, a)
        } else {
            a
        };
        let fours = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(zero, magnitude, a));
        let act_scales = _mm512_castpd_ps(_mm512_set1_pd(act_scales));
        let act_scales = _mm512_permutevar_ps(act_scales, choice);
        let acc = &mut acc[b / 2 % 2];
        *acc = _mm512_fmadd_ps(fours, _mm512_mul_ps(scales, act_scales), *acc);
    }
}
