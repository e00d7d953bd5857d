//! The gated delta rule, as many channels at a time as a register has lanes.
//!
//! States are transposed once for all tokens, so that a register holds one key value of many
//! channels. What a state holds for a token's key is summed while the state is loaded, or while it
//! is updated with the token before, so every token passes over the state once; the last update is
//! stored as it is made. Either way a sum has the same bits. Knows nothing of sequences.

use kv_core::StateType;

use super::Transpose;
use super::rounding::{Rounding, ToBf16, ToF16, ToF32};
use crate::kernels::delta::{DeltaDecay, DeltaTile};

/// Sums run in four accumulators, by the key value's number modulo four.
const ACCUMULATORS: usize = 4;

/// A sum over a state in parts.
type Sums<F> = [F; ACCUMULATORS];

#[inline(always)]
pub(in crate::kernels) fn delta_tile<const W: usize, E: Transpose<W>>(
    e: E,
    mut tile: DeltaTile<'_>,
) {
    assert!(tile.is_sound(), "{tile:?}");
    match tile.rounding {
        StateType::F32 => all_channels::<W, E, ToF32>(e, &mut tile),
        StateType::F16 => all_channels::<W, E, ToF16>(e, &mut tile),
        StateType::BF16 => all_channels::<W, E, ToBf16>(e, &mut tile),
    }
}

#[inline(always)]
fn all_channels<const W: usize, E: Transpose<W>, R: Rounding>(e: E, tile: &mut DeltaTile<'_>) {
    let n_channels = match tile.rows.is_empty() {
        true => 0,
        false => tile.state.len() / tile.k_dim,
    };
    for first in (0..n_channels).step_by(W) {
        match tile.k_dim {
            0..=128 => channels::<128, W, E, R>(e, tile, first),
            _ => channels::<1024, W, E, R>(e, tile, first),
        }
    }
}

/// All tokens through the states of `W` channels, with keys of at most `N` values.
#[inline(always)]
fn channels<const N: usize, const W: usize, E: Transpose<W>, R: Rounding>(
    e: E,
    tile: &mut DeltaTile<'_>,
    first: usize,
) {
    let n = tile.k_dim;
    let (mut lanes, mut products) = ([[0.0; W]; N], [0.0; N]);
    let lanes = &mut lanes[..n];
    let mut held = {
        let key = summing_key(tile, 0, &mut products[..n]);
        load_states(e, &tile.state[first * n..], lanes, key)
    };
    for at in 0..tile.rows.len() {
        let ([query, key], row) = (tile.query_key(at), tile.rows[at] as usize);
        let beta = e.splat(tile.beta[at]);
        let value = e.load(&tile.v[at].as_chunks::<W>().0[first / W]);
        let next =
            (at + 1 < tile.rows.len()).then(|| summing_key(tile, at + 1, &mut products[..n]));
        let sum = total(e, held);
        let update = |change| Update {
            query,
            key,
            next,
            change,
        };
        let state = &mut tile.state[first * n..];
        let out = match tile.decay {
            DeltaDecay::PerHead(factors) => {
                let factor = e.splat(factors[at]);
                let change = e.mul(beta, e.sub(value, e.mul(factor, sum)));
                let part = (&mut *lanes, state);
                update(change).apply::<W, E, R>(
                    e,
                    part,
                    &mut held,
                    #[inline(always)]
                    |_| factor,
                )
            }
            DeltaDecay::PerKey { factors, stride } => {
                let factors = &factors[row * stride..][..n];
                let change = e.mul(beta, e.sub(value, sum));
                let part = (&mut *lanes, state);
                update(change).apply::<W, E, R>(
                    e,
                    part,
                    &mut held,
                    #[inline(always)]
                    |k: usize| e.splat(factors[k]),
                )
            }
        };
        let out = e.mul(total(e, out), e.splat(tile.scale));
        e.store(&mut tile.out[at].as_chunks_mut::<W>().0[first / W], out);
    }
}

/// The key that a token's sum is made with: times its decay where that is one for each key value.
#[inline(always)]
fn summing_key<'p, 'a: 'p>(tile: &DeltaTile<'a>, at: usize, products: &'p mut [f32]) -> &'p [f32] {
    let [_, key] = tile.query_key(at);
    match tile.decay {
        DeltaDecay::PerHead(_) => key,
        DeltaDecay::PerKey { factors, stride } => {
            let factors = &factors[tile.rows[at] as usize * stride..];
            for ((product, k), factor) in products.iter_mut().zip(key).zip(factors) {
                *product = k * factor;
            }
            products
        }
    }
}

#[inline(always)]
fn total<const W: usize, E: Transpose<W>>(e: E, [a, b, c, d]: Sums<E::F>) -> E::F {
    e.add(e.add(a, b), e.add(c, d))
}

/// How a token changes states, `s[k] = decay(k) s[k] + change key[k]`, and what is read of them
/// then.
struct Update<'a, F> {
    query: &'a [f32],
    key: &'a [f32],
    /// The key that the next token's sum is made with, where one follows.
    next: Option<&'a [f32]>,
    /// `beta (v - Σ s[k] key[k])`.
    change: F,
}

impl<F: Copy> Update<'_, F> {
    /// Updates states and returns the sums with the query. `held` becomes the sums for the next
    /// token; where none follows, the states go where they came from.
    #[inline(always)]
    fn apply<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        (lanes, state): (&mut [[f32; W]], &mut [f32]),
        held: &mut Sums<F>,
        decay: impl Fn(usize) -> F,
    ) -> Sums<F> {
        match self.next {
            Some(next) => {
                let (out, next_held) = self.advance::<W, E, R>(e, lanes, next, decay);
                *held = next_held;
                out
            }
            None => self.finish::<W, E, R>(e, lanes, state, decay),
        }
    }

    /// What is added to a state.
    #[inline(always)]
    fn added<const W: usize, E: Transpose<W, F = F>>(&self, e: E, k: usize) -> F {
        e.mul(self.change, e.splat(self.key[k]))
    }

    /// Updates states: the sums with the query, and those for the next token.
    #[inline(always)]
    fn advance<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        lanes: &mut [[f32; W]],
        next: &[f32],
        decay: impl Fn(usize) -> F,
    ) -> (Sums<F>, Sums<F>) {
        let zeros = [e.splat(0.0); ACCUMULATORS];
        let (mut out, mut held) = (zeros, zeros);
        let (fours, rest) = lanes.as_chunks_mut::<ACCUMULATORS>();
        let n_fours = fours.len();
        for (four, s) in fours.iter_mut().enumerate() {
            for i in 0..ACCUMULATORS {
                let k = four * ACCUMULATORS + i;
                let new = e.mul_add(e.load(&s[i]), decay(k), self.added(e, k));
                out[i] = e.mul_add(new, e.splat(self.query[k]), out[i]);
                let new = R::round(e, new);
                e.store(&mut s[i], new);
                held[i] = e.mul_add(new, e.splat(next[k]), held[i]);
            }
        }
        for (i, s) in rest.iter_mut().enumerate() {
            let k = n_fours * ACCUMULATORS + i;
            let new = e.mul_add(e.load(s), decay(k), self.added(e, k));
            out[i] = e.mul_add(new, e.splat(self.query[k]), out[i]);
            let new = R::round(e, new);
            e.store(s, new);
            held[i] = e.mul_add(new, e.splat(next[k]), held[i]);
        }
        (out, held)
    }

    /// Updates states and stores them, `[channels, k_dim]`: the sums with the query.
    #[inline(always)]
    fn finish<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        lanes: &[[f32; W]],
        state: &mut [f32],
        decay: impl Fn(usize) -> F,
    ) -> Sums<F> {
        let n = lanes.len();
        let mut out = [e.splat(0.0); ACCUMULATORS];
        for (at, lanes) in lanes.chunks(W).enumerate() {
            let mut block = [e.splat(0.0); W];
            for (i, (block, s)) in block.iter_mut().zip(lanes).enumerate() {
                let k = at * W + i;
                *block = e.mul_add(e.load(s), decay(k), self.added(e, k));
                let sum = &mut out[i % ACCUMULATORS];
                *sum = e.mul_add(*block, e.splat(self.query[k]), *sum);
                *block = R::round(e, *block);
            }
            let columns = at * W..at * W + lanes.len();
            for (row, state) in e
                .transpose(block)
                .into_iter()
                .zip(state.chunks_exact_mut(n))
            {
                store_part(e, &mut state[columns.clone()], row);
            }
        }
        out
    }
}

/// States of as many channels as there are, at most `W`, one row of lanes for each key value, and
/// their sums with a key. Channels that are not there are 0.
#[inline(always)]
fn load_states<const W: usize, E: Transpose<W>>(
    e: E,
    state: &[f32],
    lanes: &mut [[f32; W]],
    key: &[f32],
) -> Sums<E::F> {
    let n = lanes.len();
    let mut sums = [e.splat(0.0); ACCUMULATORS];
    for (at, lanes) in lanes.chunks_mut(W).enumerate() {
        let columns = at * W..at * W + lanes.len();
        let mut block = [e.splat(0.0); W];
        for (row, state) in block.iter_mut().zip(state.chunks_exact(n)) {
            *row = load_part(e, &state[columns.clone()]);
        }
        let block = e.transpose(block);
        for (i, (s, key)) in lanes.iter_mut().zip(&key[columns]).enumerate() {
            e.store(s, block[i]);
            let sum = &mut sums[i % ACCUMULATORS];
            *sum = e.mul_add(block[i], e.splat(*key), *sum);
        }
    }
    sums
}

/// At most `W` values; zeros behind them.
#[inline(always)]
fn load_part<const W: usize, E: Transpose<W>>(e: E, values: &[f32]) -> E::F {
    match <&[f32; W]>::try_from(values) {
        Ok(values) => e.load(values),
        Err(_) => {
            let mut padded = [0.0; W];
            padded[..values.len()].copy_from_slice(values);
            e.load(&padded)
        }
    }
}

/// The first values of `x`, at most `W`.
#[inline(always)]
fn store_part<const W: usize, E: Transpose<W>>(e: E, values: &mut [f32], x: E::F) {
    match <&mut [f32; W]>::try_from(&mut *values) {
        Ok(values) => e.store(values, x),
        Err(_) => {
            let mut padded = [0.0; W];
            e.store(&mut padded, x);
            values.copy_from_slice(&padded[..values.len()]);
        }
    }
}
