//! One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867): scores of a KV tile
//! become weights relative to the largest score so far.
//!
//! Invariant: a query's weights and sums depend on its own scores only, bit for bit; a lane that
//! is not visible gets the weight 0, whatever its score was.

use crate::attend::partial::SoftmaxState;
use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::exp::{LEAST, LN_2, SERIES};

/// Half the lanes of a tile: sums and maxima are folded from two halves.
const HALF: usize = KV_TILE / 2;
/// `1.5 · 2^23`: adding it to a small `f32` rounds to the nearest integer, which is then in the
/// low bits.
pub(crate) const ROUND_TO_INT: f32 = 12_582_912.0;

/// See [`TileKernels::softmax`](crate::attend::tile_kernels::TileKernels).
#[inline(always)]
pub(crate) fn softmax(
    scores: &mut [[f32; KV_TILE]],
    visible: u32,
    states: &mut [SoftmaxState],
    rescale: &mut [f32],
) {
    for ((scores, state), rescale) in scores.iter_mut().zip(states).zip(rescale) {
        if visible != u32::MAX {
            for (lane, score) in scores.iter_mut().enumerate() {
                if visible >> lane & 1 == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        let max = state.max.max(largest(scores));
        *rescale = 1.0;
        if max == f32::NEG_INFINITY {
            scores.fill(0.0);
            continue;
        }
        *rescale = state.rescale_to(max);
        state.sum += exp_and_sum(scores, max);
    }
}

/// The largest score; NaN is ignored.
#[inline(always)]
fn largest(scores: &[f32; KV_TILE]) -> f32 {
    // One instruction; `f32::max` takes three.
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut most = [f32::NEG_INFINITY; HALF];
    for half in scores.as_chunks::<HALF>().0 {
        for (most, &score) in most.iter_mut().zip(half) {
            *most = larger(score, *most);
        }
    }
    fold(most, larger)
}

/// Combines all lanes to one: the upper half with the lower, repeatedly.
#[inline(always)]
fn fold(lanes: [f32; HALF], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let a: [f32; 8] = std::array::from_fn(|lane| combine(lanes[lane + 8], lanes[lane]));
    let b: [f32; 4] = std::array::from_fn(|lane| combine(a[lane + 4], a[lane]));
    let c: [f32; 2] = std::array::from_fn(|lane| combine(b[lane + 2], b[lane]));
    combine(c[1], c[0])
}

/// `x[i] = e^(x[i] - max)` within 2 ulp; returns their sum. No `x` is above `max`, which is finite.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, the Taylor series of `e^r` up to `r^7 / 7!` (the next
/// term is below 6e-9), and `2^n` in two factors, so that neither is subnormal if the result is.
#[inline(always)]
fn exp_and_sum(scores: &mut [f32; KV_TILE], max: f32) -> f32 {
    for score in scores.iter_mut() {
        let x = *score - max;
        // Not `f32::max`: NaN stays NaN.
        let x = if x < LEAST { LEAST } else { x };
        let rounded = x * std::f32::consts::LOG2_E + ROUND_TO_INT;
        let n = rounded - ROUND_TO_INT;
        let r = n * LN_2[0] + x;
        let r = n * LN_2[1] + r;
        let mut p = SERIES[0];
        for c in &SERIES[1..] {
            p = p * r + *c;
        }
        let n = (rounded.to_bits() as i32).wrapping_sub(ROUND_TO_INT.to_bits() as i32);
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        *score = p * power(n >> 1) * power(n.wrapping_sub(n >> 1));
    }
    let mut sums = [0.0; HALF];
    for half in scores.as_chunks::<HALF>().0 {
        for (sum, &score) in sums.iter_mut().zip(half) {
            *sum += score;
        }
    }
    fold(sums, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::tile_kernels::TileKernels;
    use crate::isa::Isa;

    fn wave(n: usize, by: f32) -> Vec<[f32; KV_TILE]> {
        let value = |i: usize| (i as f32 * 0.7).sin() * by;
        (0..n)
            .map(|q| std::array::from_fn(|lane| value(q * KV_TILE + lane)))
            .collect()
    }

    #[test]
    fn weights_are_those_of_the_definition() {
        for isa in Isa::all_available() {
            let step = TileKernels::for_isa(isa).softmax;
            for (by, visible) in [
                (1.0, u32::MAX),
                (50.0, u32::MAX),
                (400.0, 0x00ff_0f11),
                (0.0, 1 << 31),
            ] {
                let scores = wave(19, by);
                let (mut got, mut rescale) = (scores.clone(), [9.0; 19]);
                let before = SoftmaxState { max: 0.5, sum: 2.0 };
                let mut states = [before; 19];
                step(&mut got, visible, &mut states, &mut rescale);
                for q in 0..19 {
                    let is_visible = |lane: &usize| visible >> lane & 1 == 1;
                    let own: Vec<f32> = (0..KV_TILE)
                        .filter(is_visible)
                        .map(|l| scores[q][l])
                        .collect();
                    let max = own.iter().copied().fold(0.5, f32::max);
                    // Differences are rounded in `f32`; the rest is checked in `f64`.
                    let weight = |score: f32| f64::from(score - max).exp();
                    let sum: f64 = own.iter().map(|&s| weight(s)).sum();
                    let kept = weight(0.5);
                    assert_eq!(states[q].max, max);
                    let near = |got: f32, wanted: f64| {
                        assert!(
                            (f64::from(got) - wanted).abs() <= wanted * 1e-6 + 1e-44,
                            "{isa}: {got}, not {wanted}"
                        );
                    };
                    near(rescale[q], kept);
                    near(states[q].sum, 2.0 * kept + sum);
                    for lane in 0..KV_TILE {
                        let visible = is_visible(&lane);
                        near(
                            got[q][lane],
                            if visible {
                                weight(scores[q][lane])
                            } else {
                                0.0
                            },
                        );
                    }
                }
            }
        }
    }

    /// Every ISA with fused multiply-adds gives the same bits, subnormal weights included.
    #[test]
    fn weights_have_the_same_bits_wherever_products_are_fused() {
        let mut first = None;
        for isa in Isa::all_available()
            .into_iter()
            .filter(|&isa| isa != Isa::Scalar)
        {
            let mut all = vec![];
            for (by, visible) in [(1.0, u32::MAX), (60.0, 0x0fff_fff7), (103.0, u32::MAX)] {
                let (mut scores, mut rescale) = (wave(45, by), [9.0; 45]);
                scores[4][7] = f32::NAN;
                scores[5][9] = f32::NEG_INFINITY;
                let mut states = [SoftmaxState { max: 0.5, sum: 2.0 }; 45];
                (TileKernels::for_isa(isa).softmax)(
                    &mut scores,
                    visible,
                    &mut states,
                    &mut rescale,
                );
                let sums = states.iter().flat_map(|s| [s.max, s.sum]);
                let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
                let numbers = scores.as_flattened().iter().copied();
                all.extend(numbers.chain(sums).chain(rescale).map(bits));
            }
            assert!(all.iter().any(|&bits| (1..0x0080_0000).contains(&bits)));
            assert_eq!(&all, first.get_or_insert_with(|| all.clone()), "{isa}");
        }
    }

    #[test]
    fn no_visible_lane_adds_nothing_and_nan_is_not_hidden() {
        for isa in Isa::all_available() {
            let step = TileKernels::for_isa(isa).softmax;
            let mut scores = [[f32::NAN; KV_TILE]; 17];
            let (mut states, mut rescale) = ([SoftmaxState::EMPTY; 17], [9.0; 17]);
            step(&mut scores, 0, &mut states, &mut rescale);
            assert_eq!(
                (states, rescale, scores),
                ([SoftmaxState::EMPTY; 17], [1.0; 17], [[0.0; KV_TILE]; 17])
            );
            // One query has only scores of minus infinity so far, the others have more.
            let mut scores = [[1.0; KV_TILE]; 17];
            scores[3] = [f32::NEG_INFINITY; KV_TILE];
            let mut states = [SoftmaxState::EMPTY; 17];
            step(&mut scores, u32::MAX, &mut states, &mut rescale);
            assert_eq!(states[3], SoftmaxState::EMPTY, "{isa}");
            assert_eq!((scores[3], rescale[3]), ([0.0; KV_TILE], 1.0), "{isa}");
            assert_eq!((states[2].sum, rescale[2]), (32.0, 0.0), "{isa}");
            let mut scores = [[1.0; KV_TILE]];
            scores[0][17] = f32::NAN;
            let (mut states, mut rescale) = ([SoftmaxState::EMPTY], [9.0]);
            step(&mut scores, u32::MAX, &mut states, &mut rescale);
            assert!(states[0].sum.is_nan() && states[0].max == 1.0, "{isa}");
        }
    }
}
