//! Scores of a tile become weights: one step of an online softmax (Milakov and Gimelshein,
//! arXiv 1805.02867) for some queries, in one text for every instruction set as in [`super::tile`].
//!
//! Invariant: a query's weights and sums depend on its own scores alone, bit for bit; a place that is
//! not seen has the weight 0, whatever stood there.

use super::spans::Softmax;
use super::tile::{TILE, multiply_add};
use crate::kernels::exp::{LEAST, LN_2, SERIES};

/// Where half of the lanes of a tile lie.
const HALF: usize = TILE / 2;
/// A number this large has no fraction: adding it rounds to the nearest whole number, which is
/// then in the low bits.
pub(super) const ROUNDING: f32 = 12_582_912.0;
/// `(scores, seen, softmax, keep)`: for each query the scores of the places in `seen` become weights
/// relative to the largest so far, and `keep` the factor by which what was added before must shrink.
pub(super) type Weigh = fn(&mut [[f32; TILE]], u32, &mut [Softmax], &mut [f32]);

/// See [`Weigh`].
#[inline(always)]
pub(super) fn weigh<const FUSED: u8>(
    scores: &mut [[f32; TILE]],
    seen: u32,
    softmax: &mut [Softmax],
    keep: &mut [f32],
) {
    for ((scores, softmax), keep) in scores.iter_mut().zip(softmax).zip(keep) {
        if seen != u32::MAX {
            for (lane, score) in scores.iter_mut().enumerate() {
                if seen >> lane & 1 == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        let now = softmax.max.max(largest(scores));
        *keep = 1.0;
        if now == f32::NEG_INFINITY {
            scores.fill(0.0);
            continue;
        }
        *keep = softmax.shrink_to(now);
        softmax.sum += exp_sum::<FUSED>(scores, now);
    }
}

/// The largest score; what is no number does not count.
#[inline(always)]
fn largest(scores: &[f32; TILE]) -> f32 {
    // Not `f32::max`, which takes three instructions.
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut most = [f32::NEG_INFINITY; HALF];
    for half in scores.as_chunks::<HALF>().0 {
        for (most, &score) in most.iter_mut().zip(half) {
            *most = larger(score, *most);
        }
    }
    folded(most, larger)
}

/// All lanes in one: the upper half to the lower, again and again.
#[inline(always)]
fn folded(lanes: [f32; HALF], with: impl Fn(f32, f32) -> f32) -> f32 {
    let a: [f32; 8] = std::array::from_fn(|lane| with(lanes[lane + 8], lanes[lane]));
    let b: [f32; 4] = std::array::from_fn(|lane| with(a[lane + 4], a[lane]));
    let c: [f32; 2] = std::array::from_fn(|lane| with(b[lane + 2], b[lane]));
    with(c[1], c[0])
}

/// `x[i] = e^(x[i] - max)` within 2 units in the last place, and their sum. No `x` is above `max`, which
/// is finite.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, the Taylor series of `e^r` up to `r^7 / 7!` (the next term
/// is below 6e-9), and `2^n` in two factors, so that neither is subnormal where the result is.
#[inline(always)]
fn exp_sum<const FUSED: u8>(scores: &mut [f32; TILE], max: f32) -> f32 {
    for score in scores.iter_mut() {
        let x = *score - max;
        // Not `f32::max`: what is no number stays so.
        let x = if x < LEAST { LEAST } else { x };
        let rounded = multiply_add::<FUSED>(x, std::f32::consts::LOG2_E, ROUNDING);
        let n = rounded - ROUNDING;
        let r = multiply_add::<FUSED>(n, LN_2[0], x);
        let r = multiply_add::<FUSED>(n, LN_2[1], r);
        let mut p = SERIES[0];
        for c in &SERIES[1..] {
            p = multiply_add::<FUSED>(p, r, *c);
        }
        let n = (rounded.to_bits() as i32).wrapping_sub(ROUNDING.to_bits() as i32);
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        *score = p * power(n >> 1) * power(n.wrapping_sub(n >> 1));
    }
    let mut sums = [0.0; HALF];
    for half in scores.as_chunks::<HALF>().0 {
        for (sum, &score) in sums.iter_mut().zip(half) {
            *sum += score;
        }
    }
    folded(sums, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::TileKernels;
    use crate::isa::Isa;

    fn wave(n: usize, by: f32) -> Vec<[f32; TILE]> {
        let value = |i: usize| (i as f32 * 0.7).sin() * by;
        (0..n)
            .map(|q| std::array::from_fn(|lane| value(q * TILE + lane)))
            .collect()
    }

    #[test]
    fn weights_are_those_of_the_definition() {
        for isa in Isa::all_available() {
            let weigh = TileKernels::for_isa(isa).weigh;
            for (by, seen) in [
                (1.0, u32::MAX),
                (50.0, u32::MAX),
                (400.0, 0x00ff_0f11),
                (0.0, 1 << 31),
            ] {
                let scores = wave(19, by);
                let (mut got, mut keep) = (scores.clone(), [9.0; 19]);
                let before = Softmax { max: 0.5, sum: 2.0 };
                let mut softmax = [before; 19];
                weigh(&mut got, seen, &mut softmax, &mut keep);
                for q in 0..19 {
                    let is_seen = |lane: &usize| seen >> lane & 1 == 1;
                    let own: Vec<f32> = (0..TILE).filter(is_seen).map(|l| scores[q][l]).collect();
                    let max = own.iter().copied().fold(0.5, f32::max);
                    // Differences are rounded; what is measured is what follows.
                    let weight = |score: f32| f64::from(score - max).exp();
                    let sum: f64 = own.iter().map(|&s| weight(s)).sum();
                    let keeps = weight(0.5);
                    assert_eq!(softmax[q].max, max);
                    let near = |got: f32, wanted: f64| {
                        assert!(
                            (f64::from(got) - wanted).abs() <= wanted * 1e-6 + 1e-44,
                            "{isa}: {got}, not {wanted}"
                        );
                    };
                    near(keep[q], keeps);
                    near(softmax[q].sum, 2.0 * keeps + sum);
                    for lane in 0..TILE {
                        let seen = is_seen(&lane);
                        near(
                            got[q][lane],
                            if seen { weight(scores[q][lane]) } else { 0.0 },
                        );
                    }
                }
            }
        }
    }

    /// Every instruction set with fused multiply-adds gives the same bits, subnormal weights too.
    #[test]
    fn weights_have_the_same_bits_wherever_products_are_fused() {
        let mut first = None;
        for isa in Isa::all_available()
            .into_iter()
            .filter(|&isa| isa != Isa::Scalar)
        {
            let mut all = vec![];
            for (by, seen) in [(1.0, u32::MAX), (60.0, 0x0fff_fff7), (103.0, u32::MAX)] {
                let (mut scores, mut keep) = (wave(45, by), [9.0; 45]);
                scores[4][7] = f32::NAN;
                scores[5][9] = f32::NEG_INFINITY;
                let mut softmax = [Softmax { max: 0.5, sum: 2.0 }; 45];
                (TileKernels::for_isa(isa).weigh)(&mut scores, seen, &mut softmax, &mut keep);
                let sums = softmax.iter().flat_map(|s| [s.max, s.sum]);
                let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
                let numbers = scores.as_flattened().iter().copied();
                all.extend(numbers.chain(sums).chain(keep).map(bits));
            }
            assert!(all.iter().any(|&bits| (1..0x0080_0000).contains(&bits)));
            assert_eq!(&all, first.get_or_insert_with(|| all.clone()), "{isa}");
        }
    }

    #[test]
    fn nothing_seen_is_nothing_added_and_no_number_is_not_hidden() {
        for isa in Isa::all_available() {
            let weigh = TileKernels::for_isa(isa).weigh;
            let mut scores = [[f32::NAN; TILE]; 17];
            let (mut softmax, mut keep) = ([Softmax::EMPTY; 17], [9.0; 17]);
            weigh(&mut scores, 0, &mut softmax, &mut keep);
            assert_eq!(
                (softmax, keep, scores),
                ([Softmax::EMPTY; 17], [1.0; 17], [[0.0; TILE]; 17])
            );
            // One query has nothing yet, others have.
            let mut scores = [[1.0; TILE]; 17];
            scores[3] = [f32::NEG_INFINITY; TILE];
            let mut softmax = [Softmax::EMPTY; 17];
            weigh(&mut scores, u32::MAX, &mut softmax, &mut keep);
            assert_eq!(softmax[3], Softmax::EMPTY, "{isa}");
            assert_eq!((scores[3], keep[3]), ([0.0; TILE], 1.0), "{isa}");
            assert_eq!((softmax[2].sum, keep[2]), (32.0, 0.0), "{isa}");
            let mut scores = [[1.0; TILE]];
            scores[0][17] = f32::NAN;
            let (mut softmax, mut keep) = ([Softmax::EMPTY], [9.0]);
            weigh(&mut scores, u32::MAX, &mut softmax, &mut keep);
            assert!(softmax[0].sum.is_nan() && softmax[0].max == 1.0, "{isa}");
        }
    }
}
