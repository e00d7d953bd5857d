//! One step of the online softmax, eight queries at a time: the maxima and the sums of eight
//! queries are folded together in one vector.
//!
//! Invariant: the same additions and products in the same order as in the scalar
//! [`softmax`](crate::kernels::isa::scalar::attend::softmax), so the same bits.

use super::{Fold, Lanes, N_LANES, N_VECTORS};
use crate::attend::partial::SoftmaxState;
use crate::attend::tile_kernels::KV_TILE;
use crate::kernels::exp::{LEAST, LN_2, SERIES};
use crate::kernels::isa::scalar::attend::softmax::ROUND_TO_INT;

/// See [`TileKernels::softmax`](crate::attend::tile_kernels::TileKernels).
///
/// # Safety
/// The CPU has the features of `V`.
#[inline(always)]
pub(crate) unsafe fn softmax<V: Lanes>(
    scores: &mut [[f32; KV_TILE]],
    visible: u32,
    states: &mut [SoftmaxState],
    rescale: &mut [f32],
) {
    // SAFETY: the CPU has the features, as the caller promises.
    let step = unsafe { Step::<V>::new(visible) };
    let (scores, scores_left) = scores.as_chunks_mut::<N_LANES>();
    let (states, states_left) = states.as_chunks_mut::<N_LANES>();
    let (rescale, rescale_left) = rescale.as_chunks_mut::<N_LANES>();
    for ((scores, states), rescale) in scores.iter_mut().zip(states).zip(rescale) {
        step.eight(scores, states, rescale);
    }
    step.one_by_one(scores_left, states_left, rescale_left);
}

/// The values that all queries of a step share.
struct Step<V: Lanes> {
    visible: [V::Mask; N_VECTORS],
    /// Minus infinity.
    least: V,
    exp: Exp<V>,
}

impl<V: Lanes> Step<V> {
    /// # Safety
    /// The CPU has the features of `V`.
    #[inline(always)]
    unsafe fn new(visible: u32) -> Self {
        // SAFETY: the CPU has the features, as the caller promises.
        unsafe {
            let mut lanes = [V::mask(visible); N_VECTORS];
            for (at, lanes) in lanes.iter_mut().enumerate() {
                *lanes = V::mask(visible >> (at * N_LANES));
            }
            let mut series = [V::splat(0.0); SERIES.len()];
            for (c, coefficient) in series.iter_mut().zip(SERIES) {
                *c = V::splat(coefficient);
            }
            Self {
                visible: lanes,
                least: V::splat(f32::NEG_INFINITY),
                exp: Exp {
                    least: V::splat(LEAST),
                    log2_e: V::splat(std::f32::consts::LOG2_E),
                    round: V::splat(ROUND_TO_INT),
                    ln_2: [V::splat(LN_2[0]), V::splat(LN_2[1])],
                    series,
                },
            }
        }
    }

    #[inline(always)]
    fn eight(
        &self,
        scores: &mut [[f32; KV_TILE]; N_LANES],
        states: &mut [SoftmaxState; N_LANES],
        rescale: &mut [f32; N_LANES],
    ) {
        let mut lanes = [self.least; N_LANES];
        for (most, scores) in lanes.iter_mut().zip(&*scores) {
            *most = self.largest(scores);
        }
        let mut max = V::fold(lanes, Fold::Larger).to_array();
        for (max, state) in max.iter_mut().zip(&*states) {
            *max = state.max.max(*max);
        }
        if max.contains(&f32::NEG_INFINITY) {
            return self.one_by_one(scores, states, rescale);
        }
        for (sums, (scores, max)) in lanes.iter_mut().zip(scores.iter_mut().zip(max)) {
            *sums = self.exp_in_place(scores, max);
        }
        let sums = V::fold(lanes, Fold::Sum).to_array();
        for (((state, rescale), max), sum) in states.iter_mut().zip(rescale).zip(max).zip(sums) {
            *rescale = state.rescale_to(max);
            state.sum += sum;
        }
    }

    /// Queries that do not fill a vector, one by one.
    #[inline(always)]
    fn one_by_one(
        &self,
        scores: &mut [[f32; KV_TILE]],
        states: &mut [SoftmaxState],
        rescale: &mut [f32],
    ) {
        for ((scores, state), rescale) in scores.iter_mut().zip(states).zip(rescale) {
            let most = V::fold([self.largest(scores); N_LANES], Fold::Larger);
            let max = state.max.max(most.to_array()[0]);
            *rescale = 1.0;
            if max == f32::NEG_INFINITY {
                scores.fill(0.0);
                continue;
            }
            *rescale = state.rescale_to(max);
            let sums = self.exp_in_place(scores, max);
            state.sum += V::fold([sums; N_LANES], Fold::Sum).to_array()[0];
        }
    }

    /// A query's scores; hidden lanes are minus infinity.
    #[inline(always)]
    fn visible(&self, scores: &[f32; KV_TILE]) -> [V; N_VECTORS] {
        let mut visible = [self.least; N_VECTORS];
        for (at, lanes) in visible.iter_mut().enumerate() {
            // SAFETY: a `Step` exists only where the CPU has the features; a query's scores are
            // `N_VECTORS` vectors.
            let all = unsafe { V::load(scores.as_ptr().add(at * N_LANES)) };
            *lanes = all.or_else(self.visible[at], self.least);
        }
        visible
    }

    /// The largest scores of four vectors, lane by lane; NaN is ignored.
    #[inline(always)]
    fn largest(&self, scores: &[f32; KV_TILE]) -> V {
        let [a, b, c, d] = self.visible(scores);
        let halves = [
            c.larger(a.larger(self.least)),
            d.larger(b.larger(self.least)),
        ];
        halves[1].larger(halves[0])
    }

    /// Scores become weights relative to `max`, which is finite; returns their sums, lane by lane.
    #[inline(always)]
    fn exp_in_place(&self, scores: &mut [f32; KV_TILE], max: f32) -> V {
        // SAFETY: a `Step` exists only where the CPU has the features.
        let max = unsafe { V::splat(max) };
        let mut weights = self.visible(scores);
        for (at, weights) in weights.iter_mut().enumerate() {
            *weights = self.exp.of(weights.subtract(max));
            // SAFETY: a query's scores are `N_VECTORS` vectors.
            unsafe { weights.store(scores.as_mut_ptr().add(at * N_LANES)) };
        }
        let [a, b, c, d] = weights;
        b.add(d).add(a.add(c))
    }
}

/// `e^x`, by the steps of the scalar code.
struct Exp<V> {
    least: V,
    log2_e: V,
    round: V,
    ln_2: [V; 2],
    series: [V; SERIES.len()],
}

impl<V: Lanes> Exp<V> {
    #[inline(always)]
    fn of(&self, x: V) -> V {
        // NaN stays NaN.
        let x = self.least.larger(x);
        let rounded = x.multiply_add(self.log2_e, self.round);
        let n = rounded.subtract(self.round);
        let r = n.multiply_add(self.ln_2[0], x);
        let r = n.multiply_add(self.ln_2[1], r);
        let mut p = self.series[0];
        for c in &self.series[1..] {
            p = p.multiply_add(r, *c);
        }
        p.times_power(rounded)
    }
}
