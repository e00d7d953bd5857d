//! One step of the online softmax, sixteen queries at a time: the maxima and the sums of sixteen
//! queries are folded together in one register.
//!
//! Invariant: the same additions and products in the same order as in the scalar
//! [`softmax`](crate::kernels::isa::scalar::attend::softmax), so the same bits.
//!
//! No intrinsic here needs AVX512VL. It is named because LLVM vectorizes the loops over states to
//! eight lanes, and without it cannot compile that in a build with `lto = "off"`.

use core::arch::x86_64::*;

use super::F32_LANES;
use crate::attend::partial::SoftmaxState;
use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::exp::{LEAST, LN_2, SERIES};
use crate::kernels::isa::scalar::attend::softmax::ROUND_TO_INT;

/// See [`TileKernels::softmax`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "avx512f,avx512vl")]
pub(super) fn softmax(
    scores: &mut [[f32; KV_TILE]],
    visible: u32,
    states: &mut [SoftmaxState],
    rescale: &mut [f32],
) {
    let (scores, scores_left) = scores.as_chunks_mut::<F32_LANES>();
    let (states, states_left) = states.as_chunks_mut::<F32_LANES>();
    let (rescale, rescale_left) = rescale.as_chunks_mut::<F32_LANES>();
    for ((scores, states), rescale) in scores.iter_mut().zip(states).zip(rescale) {
        softmax_16(scores, visible, states, rescale);
    }
    softmax_one_by_one(scores_left, visible, states_left, rescale_left);
}

/// Sixteen queries.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn softmax_16(
    scores: &mut [[f32; KV_TILE]; F32_LANES],
    visible: u32,
    states: &mut [SoftmaxState; F32_LANES],
    rescale: &mut [f32; F32_LANES],
) {
    let mut lanes = [_mm512_setzero_ps(); F32_LANES];
    for (most, scores) in lanes.iter_mut().zip(&*scores) {
        *most = larger(load_visible(scores, visible));
    }
    let mut max = [0.0; F32_LANES];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(max.as_mut_ptr(), fold_16::<true>(lanes)) };
    for (max, state) in max.iter_mut().zip(&*states) {
        *max = state.max.max(*max);
    }
    if max.contains(&f32::NEG_INFINITY) {
        return softmax_one_by_one(scores, visible, states, rescale);
    }
    for (sums, (scores, max)) in lanes.iter_mut().zip(scores.iter_mut().zip(max)) {
        *sums = exp_in_place(scores, visible, max);
    }
    let mut sums = [0.0; F32_LANES];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), fold_16::<false>(lanes)) };
    for (((state, rescale), max), sum) in states.iter_mut().zip(rescale).zip(max).zip(sums) {
        *rescale = state.rescale_to(max);
        state.sum += sum;
    }
}

/// Reduces each of sixteen registers, the upper half with the lower, repeatedly: lane `i` of the
/// result is the maximum (or the sum) of register `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn fold_16<const MAX: bool>(r: [__m512; F32_LANES]) -> __m512 {
    // Eight lanes of each of two registers.
    let eights = |i: usize| {
        let (a, b) = (r[i], r[i + 4]);
        let upper = _mm512_shuffle_f32x4::<0xee>(a, b);
        combine::<MAX>(upper, _mm512_shuffle_f32x4::<0x44>(a, b))
    };
    // Four lanes of each: the quarters belong to registers i, i + 4, i + 8 and i + 12.
    let fours = |i: usize| {
        let (a, b) = (eights(i), eights(i + 8));
        let upper = _mm512_shuffle_f32x4::<0xdd>(a, b);
        combine::<MAX>(upper, _mm512_shuffle_f32x4::<0x88>(a, b))
    };
    // Two lanes of each.
    let twos = |i: usize| {
        let (a, b) = (_mm512_castps_pd(fours(i)), _mm512_castps_pd(fours(i + 1)));
        let upper = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        combine::<MAX>(upper, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)))
    };
    let (a, b) = (twos(0), twos(2));
    let upper = _mm512_shuffle_ps::<0xdd>(a, b);
    combine::<MAX>(upper, _mm512_shuffle_ps::<0x88>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn combine<const MAX: bool>(a: __m512, b: __m512) -> __m512 {
    if MAX {
        _mm512_max_ps(a, b)
    } else {
        _mm512_add_ps(a, b)
    }
}

/// The two registers of a query's scores; lanes that are not visible are minus infinity.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn load_visible(scores: &[f32; KV_TILE], visible: u32) -> [__m512; 2] {
    let (masked, at) = (_mm512_set1_ps(f32::NEG_INFINITY), scores.as_ptr());
    // SAFETY: a query's scores are two registers of `f32`.
    unsafe {
        [
            _mm512_mask_loadu_ps(masked, visible as __mmask16, at),
            _mm512_mask_loadu_ps(
                masked,
                (visible >> F32_LANES) as __mmask16,
                at.add(F32_LANES),
            ),
        ]
    }
}

/// The larger scores, lane by lane; NaN is ignored.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn larger([low, high]: [__m512; 2]) -> __m512 {
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    // `vmaxps` returns its second operand if the first is NaN.
    _mm512_max_ps(high, _mm512_max_ps(low, least))
}

/// Scores become weights relative to `max`, which is finite; returns their sums, lane by lane.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn exp_in_place(scores: &mut [f32; KV_TILE], visible: u32, max: f32) -> __m512 {
    let max = _mm512_set1_ps(max);
    let [low, high] = load_visible(scores, visible);
    let [low, high] = [exp(_mm512_sub_ps(low, max)), exp(_mm512_sub_ps(high, max))];
    let at = scores.as_mut_ptr();
    // SAFETY: a query's scores are two registers of `f32`.
    unsafe {
        _mm512_storeu_ps(at, low);
        _mm512_storeu_ps(at.add(F32_LANES), high);
    }
    _mm512_add_ps(low, high)
}

/// Queries that do not fill a register, one by one.
#[target_feature(enable = "avx512f,avx512vl")]
fn softmax_one_by_one(
    scores: &mut [[f32; KV_TILE]],
    visible: u32,
    states: &mut [SoftmaxState],
    rescale: &mut [f32],
) {
    for ((scores, state), rescale) in scores.iter_mut().zip(states).zip(rescale) {
        let most = _mm512_reduce_max_ps(larger(load_visible(scores, visible)));
        let max = state.max.max(most);
        *rescale = 1.0;
        if max == f32::NEG_INFINITY {
            scores.fill(0.0);
            continue;
        }
        *rescale = state.rescale_to(max);
        state.sum += _mm512_reduce_add_ps(exp_in_place(scores, visible, max));
    }
}

/// `e^x`, by the steps of the scalar code.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn exp(x: __m512) -> __m512 {
    let all = |x: f32| _mm512_set1_ps(x);
    // `vmaxps` returns its second operand if it is NaN.
    let x = _mm512_max_ps(all(LEAST), x);
    let rounded = _mm512_fmadd_ps(x, all(std::f32::consts::LOG2_E), all(ROUND_TO_INT));
    let n = _mm512_sub_ps(rounded, all(ROUND_TO_INT));
    let r = _mm512_fmadd_ps(n, all(LN_2[0]), x);
    let r = _mm512_fmadd_ps(n, all(LN_2[1]), r);
    let mut p = all(SERIES[0]);
    for c in &SERIES[1..] {
        p = _mm512_fmadd_ps(p, r, all(*c));
    }
    // Rounds once, like the scalar product by two powers, of which the first is exact.
    _mm512_scalef_ps(p, n)
}
