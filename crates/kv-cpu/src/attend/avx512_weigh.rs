//! Scores of a tile become weights in AVX-512, sixteen queries at a time: the largest score of each, and the sum of its
//! weights, are folded together with those of the others.
//!
//! Invariant: the same additions and products in the same order as in [`super::weigh`], so the same bits.

use core::arch::x86_64::*;

use super::spans::Softmax;
use super::tile::TILE;
use super::weigh::ROUNDING;
use crate::kernels::exp::{LEAST, LN_2, SERIES};

/// Numbers of a register, and queries that are taken together.
const LANES: usize = 16;

/// As [`super::weigh::weigh`].
#[target_feature(enable = "avx512f")]
pub(super) fn weigh(
    scores: &mut [[f32; TILE]],
    seen: u32,
    softmax: &mut [Softmax],
    keep: &mut [f32],
) {
    let (scores, few_scores) = scores.as_chunks_mut::<LANES>();
    let (softmax, few_softmax) = softmax.as_chunks_mut::<LANES>();
    let (keep, few_keep) = keep.as_chunks_mut::<LANES>();
    for ((scores, softmax), keep) in scores.iter_mut().zip(softmax).zip(keep) {
        weigh_sixteen(scores, seen, softmax, keep);
    }
    weigh_few(few_scores, seen, few_softmax, few_keep);
}

#[inline]
#[target_feature(enable = "avx512f")]
fn weigh_sixteen(
    scores: &mut [[f32; TILE]; LANES],
    seen: u32,
    softmax: &mut [Softmax; LANES],
    keep: &mut [f32; LANES],
) {
    let mut lanes = [_mm512_setzero_ps(); LANES];
    for (most, scores) in lanes.iter_mut().zip(&*scores) {
        *most = larger(load(scores, seen));
    }
    let mut now = [0.0; LANES];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(now.as_mut_ptr(), folded::<true>(lanes)) };
    for (now, softmax) in now.iter_mut().zip(&*softmax) {
        *now = softmax.max.max(*now);
    }
    if now.contains(&f32::NEG_INFINITY) {
        return weigh_few(scores, seen, softmax, keep);
    }
    for (sums, (scores, now)) in lanes.iter_mut().zip(scores.iter_mut().zip(now)) {
        *sums = weights(scores, seen, now);
    }
    let mut sums = [0.0; LANES];
    // SAFETY: as above.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), folded::<false>(lanes)) };
    for (((softmax, keep), now), sum) in softmax.iter_mut().zip(keep).zip(now).zip(sums) {
        *keep = softmax.shrink_to(now);
        softmax.sum += sum;
    }
}

/// The lanes of each of sixteen registers in one, the upper half to the lower, again and again: lane `i` has the largest
/// number of register `i`, or the sum.
#[inline]
#[target_feature(enable = "avx512f")]
fn folded<const LARGEST: bool>(r: [__m512; LANES]) -> __m512 {
    // Eight lanes of each, of two registers together.
    let eights = |i: usize| {
        let (a, b) = (r[i], r[i + 4]);
        let upper = _mm512_shuffle_f32x4::<0xee>(a, b);
        with::<LARGEST>(upper, _mm512_shuffle_f32x4::<0x44>(a, b))
    };
    // Four lanes of each: quarters belong to registers i, i + 4, i + 8 and i + 12.
    let fours = |i: usize| {
        let (a, b) = (eights(i), eights(i + 8));
        let upper = _mm512_shuffle_f32x4::<0xdd>(a, b);
        with::<LARGEST>(upper, _mm512_shuffle_f32x4::<0x88>(a, b))
    };
    // Two lanes of each.
    let twos = |i: usize| {
        let (a, b) = (_mm512_castps_pd(fours(i)), _mm512_castps_pd(fours(i + 1)));
        let upper = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        with::<LARGEST>(upper, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)))
    };
    let (a, b) = (twos(0), twos(2));
    let upper = _mm512_shuffle_ps::<0xdd>(a, b);
    with::<LARGEST>(upper, _mm512_shuffle_ps::<0x88>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn with<const LARGEST: bool>(a: __m512, b: __m512) -> __m512 {
    match LARGEST {
        true => _mm512_max_ps(a, b),
        false => _mm512_add_ps(a, b),
    }
}

/// The two registers of a query's scores; those that are not seen are the least there is.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(scores: &[f32; TILE], seen: u32) -> [__m512; 2] {
    let (nothing, at) = (_mm512_set1_ps(f32::NEG_INFINITY), scores.as_ptr());
    // SAFETY: there are two registers of scores.
    unsafe {
        [
            _mm512_mask_loadu_ps(nothing, seen as __mmask16, at),
            _mm512_mask_loadu_ps(nothing, (seen >> LANES) as __mmask16, at.add(LANES)),
        ]
    }
}

/// The larger scores, lane by lane; what is no number does not count.
#[inline]
#[target_feature(enable = "avx512f")]
fn larger([low, high]: [__m512; 2]) -> __m512 {
    let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
    // Of two the second, where the first is no number.
    _mm512_max_ps(high, _mm512_max_ps(low, nothing))
}

/// Scores become weights relative to `max`, which is a number: their sums, lane by lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn weights(scores: &mut [f32; TILE], seen: u32, max: f32) -> __m512 {
    let max = _mm512_set1_ps(max);
    let [low, high] = load(scores, seen);
    let [low, high] = [exp(_mm512_sub_ps(low, max)), exp(_mm512_sub_ps(high, max))];
    let at = scores.as_mut_ptr();
    // SAFETY: there are two registers of scores.
    unsafe {
        _mm512_storeu_ps(at, low);
        _mm512_storeu_ps(at.add(LANES), high);
    }
    _mm512_add_ps(low, high)
}

/// A few queries, one after the other.
#[target_feature(enable = "avx512f")]
fn weigh_few(scores: &mut [[f32; TILE]], seen: u32, softmax: &mut [Softmax], keep: &mut [f32]) {
    for ((scores, softmax), keep) in scores.iter_mut().zip(softmax).zip(keep) {
        let most = _mm512_reduce_max_ps(larger(load(scores, seen)));
        let now = softmax.max.max(most);
        *keep = 1.0;
        if now == f32::NEG_INFINITY {
            scores.fill(0.0);
            continue;
        }
        *keep = softmax.shrink_to(now);
        softmax.sum += _mm512_reduce_add_ps(weights(scores, seen, now));
    }
}

/// `e^x`, as [`super::weigh`] computes it.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: __m512) -> __m512 {
    let all = |x: f32| _mm512_set1_ps(x);
    // Of two the second, where it is no number.
    let x = _mm512_max_ps(all(LEAST), x);
    let rounded = _mm512_fmadd_ps(x, all(std::f32::consts::LOG2_E), all(ROUNDING));
    let n = _mm512_sub_ps(rounded, all(ROUNDING));
    let r = _mm512_fmadd_ps(n, all(LN_2[0]), x);
    let r = _mm512_fmadd_ps(n, all(LN_2[1]), r);
    let mut p = all(SERIES[0]);
    for c in &SERIES[1..] {
        p = _mm512_fmadd_ps(p, r, all(*c));
    }
    // Rounded once, as where two factors are multiplied of which the first is exact.
    _mm512_scalef_ps(p, n)
}
