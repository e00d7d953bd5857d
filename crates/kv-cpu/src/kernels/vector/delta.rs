//! The gated delta rule, as many channels at a time as a register has lanes.
//!
//! States are transposed once for all tokens, so that a register holds one key value of many
//! channels. What a state holds for a token's key is summed while the state is loaded, or while it
//! is updated with the token before, so every token passes over the state once; the last update is
//! stored as it is made. Either way a sum has the same bits. Knows nothing of sequences.

use kv_rows::StateType;

use super::Transpose;
use super::rounding::{Rounding, ToBf16, ToF16, ToF32};
use crate::kernels::delta::{DeltaDecay, DeltaScratch, DeltaTile};

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
    let mut scratch = std::mem::take(&mut tile.scratch);
    let n_channels = if tile.rows.is_empty() {
        0
    } else {
        tile.state.len() / tile.k_dim
    };
    for first in (0..n_channels).step_by(W) {
        channels::<W, E, R>(e, tile, &mut scratch, first);
    }
}

/// All tokens through the states of `W` channels.
#[inline(always)]
fn channels<const W: usize, E: Transpose<W>, R: Rounding>(
    e: E,
    tile: &mut DeltaTile<'_>,
    scratch: &mut DeltaScratch<'_>,
    first: usize,
) {
    let n = tile.k_dim;
    let lanes = &mut scratch.lanes.as_flattened_mut().as_chunks_mut::<W>().0[..n];
    let products = &mut scratch.products[..n];
    let mut held = {
        let key = summing_key(tile, 0, products);
        load_states(e, &tile.state[first * n..], lanes, key)
    };
    for at in 0..tile.rows.len() {
        let ([query, key], row) = (tile.query_key(at), tile.rows[at] as usize);
        let value = e.load(&tile.values[at].as_chunks::<W>().0[first / W]);
        // Not a closure, which would not be inlined.
        let next = if at + 1 < tile.rows.len() {
            Some(summing_key(tile, at + 1, products))
        } else {
            None
        };
        let sum = total(e, held);
        let part = (&mut *lanes, &mut tile.state[first * n..]);
        let update = |known| Update {
            query,
            key,
            next,
            change: e.mul(e.splat(tile.beta[at]), e.sub(value, known)),
        };
        let out = match tile.decay {
            DeltaDecay::PerHead(factors) => {
                let factor = e.splat(factors[at]);
                let update = update(e.mul(factor, sum));
                update.apply::<W, E, R>(e, part, &mut held, Decays::Same(factor))
            }
            DeltaDecay::PerKey { factors, stride } => {
                let decays = Decays::Each(&factors[row * stride..][..n]);
                update(sum).apply::<W, E, R>(e, part, &mut held, decays)
            }
        };
        let out = e.mul(total(e, out), e.splat(tile.scale));
        e.store(&mut tile.values[at].as_chunks_mut::<W>().0[first / W], out);
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

/// A token's factors on key values.
#[derive(Clone, Copy)]
enum Decays<'a, F> {
    Same(F),
    Each(&'a [f32]),
}

impl<F: Copy> Decays<'_, F> {
    #[inline(always)]
    fn at<const W: usize, E: Transpose<W, F = F>>(self, e: E, k: usize) -> F {
        match self {
            Self::Same(factor) => factor,
            Self::Each(factors) => e.splat(factors[k]),
        }
    }

    /// Those of the `four`-th four key values.
    #[inline(always)]
    fn four<const W: usize, E: Transpose<W, F = F>>(self, e: E, four: usize) -> [F; ACCUMULATORS] {
        match self {
            Self::Same(factor) => [factor; ACCUMULATORS],
            Self::Each(factors) => {
                let [a, b, c, d] = factors.as_chunks().0[four];
                [e.splat(a), e.splat(b), e.splat(c), e.splat(d)]
            }
        }
    }
}

/// A token's change of states, `s[k] = decay(k) s[k] + change key[k]`, and its reading of them.
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
        decays: Decays<'_, F>,
    ) -> Sums<F> {
        match self.next {
            Some(next) => {
                let (out, next_held) = self.advance::<W, E, R>(e, lanes, next, decays);
                *held = next_held;
                out
            }
            None => self.finish::<W, E, R>(e, lanes, state, decays),
        }
    }

    /// Updates states: the sums with the query, and those for the next token.
    #[inline(always)]
    fn advance<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        lanes: &mut [[f32; W]],
        next: &[f32],
        decays: Decays<'_, F>,
    ) -> (Sums<F>, Sums<F>) {
        let zeros = [e.splat(0.0); ACCUMULATORS];
        let (mut out, mut held) = (zeros, zeros);
        // Four at a time, so that nothing in the loop checks a length.
        let (s, s_rest) = lanes.as_chunks_mut::<ACCUMULATORS>();
        let read = [self.key, self.query, next].map(<[f32]>::as_chunks::<ACCUMULATORS>);
        let [key, query, next] = read.map(|(fours, _)| fours);
        let fours = s.iter_mut().zip(key).zip(query).zip(next).enumerate();
        let first_of_rest = fours.len() * ACCUMULATORS;
        for (four, (((s, key), query), next)) in fours {
            let decays = decays.four(e, four);
            for i in 0..ACCUMULATORS {
                let sums = [&mut out[i], &mut held[i]];
                self.step::<W, E, R>(e, &mut s[i], [key[i], query[i], next[i]], decays[i], sums);
            }
        }
        for (i, s) in s_rest.iter_mut().enumerate() {
            let decay = decays.at(e, first_of_rest + i);
            let sums = [&mut out[i], &mut held[i]];
            self.step::<W, E, R>(e, s, read.map(|(_, rest)| rest[i]), decay, sums);
        }
        (out, held)
    }

    /// Updates one key value of states: what that adds to the sums with the query and with the next
    /// token's key.
    #[inline(always)]
    fn step<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        s: &mut [f32; W],
        [key, query, next]: [f32; 3],
        decay: F,
        [out, held]: [&mut F; 2],
    ) {
        let new = self.updated::<W, E, R>(e, s, [key, query], decay, out);
        e.store(s, new);
        *held = e.mul_add(new, e.splat(next), *held);
    }

    /// Updates states and stores them, `[channels, k_dim]`: the sums with the query.
    #[inline(always)]
    fn finish<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        lanes: &[[f32; W]],
        state: &mut [f32],
        decays: Decays<'_, F>,
    ) -> Sums<F> {
        let n = lanes.len();
        let mut out = [e.splat(0.0); ACCUMULATORS];
        for (at, lanes) in lanes.chunks(W).enumerate() {
            let columns = at * W..at * W + lanes.len();
            let mut block = [e.splat(0.0); W];
            // A constant number of steps keeps the block in registers; a length that is checked
            // in each instead takes 5 to 10 % longer for a token in f16.
            match <&[[f32; W]; W]>::try_from(lanes) {
                Ok(lanes) => {
                    for i in 0..W {
                        let sum = &mut out[i % ACCUMULATORS];
                        block[i] = self.last_step::<W, E, R>(e, &lanes[i], at * W + i, decays, sum);
                    }
                }
                Err(_) => {
                    for (i, lanes) in lanes.iter().enumerate() {
                        let sum = &mut out[i % ACCUMULATORS];
                        block[i] = self.last_step::<W, E, R>(e, lanes, at * W + i, decays, sum);
                    }
                }
            }
            for (i, row) in e.transpose(block).into_iter().enumerate() {
                if let Some(to) = state.get_mut(i * n + columns.start..i * n + columns.end) {
                    store_part(e, to, row);
                }
            }
        }
        out
    }

    /// Key value `k` of the states, as by [`Self::updated`].
    #[inline(always)]
    fn last_step<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        s: &[f32; W],
        k: usize,
        decays: Decays<'_, F>,
        out: &mut F,
    ) -> F {
        let read = [self.key[k], self.query[k]];
        self.updated::<W, E, R>(e, s, read, decays.at(e, k), out)
    }

    /// One key value of updated states, rounded, after what it adds to the sum with the query.
    #[inline(always)]
    fn updated<const W: usize, E: Transpose<W, F = F>, R: Rounding>(
        &self,
        e: E,
        s: &[f32; W],
        [key, query]: [f32; 2],
        decay: F,
        out: &mut F,
    ) -> F {
        let new = e.mul_add(e.load(s), decay, e.mul(self.change, e.splat(key)));
        *out = e.mul_add(new, e.splat(query), *out);
        R::round(e, new)
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
        for (i, row) in block.iter_mut().enumerate() {
            if let Some(from) = state.get(i * n + columns.start..i * n + columns.end) {
                *row = load_part(e, from);
            }
        }
        let block = e.transpose(block);
        let key = &key[columns];
        match (
            <&mut [[f32; W]; W]>::try_from(&mut *lanes),
            <&[f32; W]>::try_from(key),
        ) {
            (Ok(lanes), Ok(key)) => {
                for i in 0..W {
                    take_lane(
                        e,
                        block[i],
                        &mut lanes[i],
                        key[i],
                        &mut sums[i % ACCUMULATORS],
                    );
                }
            }
            _ => {
                for (i, (lanes, key)) in lanes.iter_mut().zip(key).enumerate() {
                    take_lane(e, block[i], lanes, *key, &mut sums[i % ACCUMULATORS]);
                }
            }
        }
    }
    sums
}

#[inline(always)]
fn take_lane<const W: usize, E: Transpose<W>>(
    e: E,
    x: E::F,
    to: &mut [f32; W],
    key: f32,
    sum: &mut E::F,
) {
    *sum = e.mul_add(x, e.splat(key), *sum);
    e.store(to, x);
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
