//! Scans of recurrent layers, eight channels and eight values of their states at a time.
//!
//! A block of states is transposed when it is loaded, so that a register holds one value of eight
//! channels, and back when it is stored. Knows nothing of sequences.

use std::ops::Range;

use kv_rows::StateType;

use super::Vector8;
use super::functions::exp2;
use super::rounding::{Rounding, ToBf16, ToF16, ToF32};
use crate::kernels::scan::{Decay, F32x16, SCAN_WIDTH, ScanTile};

/// Channels, and values of a state, of one block.
const BLOCK: usize = 8;

/// One of the two halves of 16 lanes.
#[inline(always)]
fn half<E: Vector8>(e: E, lanes: &F32x16, at: usize) -> E::F {
    e.load(&lanes.as_chunks::<BLOCK>().0[at])
}

#[inline(always)]
pub(in crate::kernels) fn scan_tile<E: Vector8>(e: E, mut tile: ScanTile<'_>) {
    assert!(tile.is_sound(), "{tile:?}");
    match tile.rounding {
        StateType::F32 => blocks::<E, ToF32>(e, &mut tile),
        StateType::F16 => blocks::<E, ToF16>(e, &mut tile),
        StateType::BF16 => blocks::<E, ToBf16>(e, &mut tile),
    }
}

#[inline(always)]
fn blocks<E: Vector8, R: Rounding>(e: E, tile: &mut ScanTile<'_>) {
    let n = tile.d_state;
    let n_channels = tile.state.len() / n;
    for first in (0..n).step_by(BLOCK) {
        for at in 0..SCAN_WIDTH / BLOCK {
            if at * BLOCK < n_channels {
                let width = BLOCK.min(n - first);
                block::<E, R>(e, tile, at, first..first + width);
            }
        }
    }
}

/// All rows through some values of the states of eight channels.
#[inline(always)]
fn block<E: Vector8, R: Rounding>(e: E, tile: &mut ScanTile<'_>, at: usize, values: Range<usize>) {
    let n = tile.d_state;
    let channels = tile.state.chunks_exact_mut(n).skip(at * BLOCK).take(BLOCK);
    let mut padded = [[0.0f32; BLOCK]; BLOCK];
    for (padded, state) in padded.iter_mut().zip(channels) {
        padded[..values.len()].copy_from_slice(&state[values.clone()]);
    }
    let mut h = [e.splat(0.0); BLOCK];
    for (h, padded) in h.iter_mut().zip(&padded) {
        *h = e.load(padded);
    }
    let mut h = e.transpose(h);
    for t in 0..tile.rows.len() {
        step::<E, R>(e, tile, at, t, values.clone(), &mut h);
    }
    for (padded, h) in padded.iter_mut().zip(e.transpose(h)) {
        e.store(padded, h);
    }
    let channels = tile.state.chunks_exact_mut(n).skip(at * BLOCK).take(BLOCK);
    for (padded, state) in padded.iter().zip(channels) {
        state[values.clone()].copy_from_slice(&padded[..values.len()]);
    }
}

/// Row `t` through these values, `h`.
#[inline(always)]
fn step<E: Vector8, R: Rounding>(
    e: E,
    tile: &mut ScanTile<'_>,
    at: usize,
    t: usize,
    values: Range<usize>,
    h: &mut [E::F; BLOCK],
) {
    let first = tile.rows[t] as usize * tile.stride + values.start;
    let narrow = first..first + values.len();
    let (b, c) = (&tile.b[narrow.clone()], &tile.c[narrow]);
    let added = half(e, &tile.added[t], at);
    let mut out = half(e, &tile.out[t], at);
    let mut take = |h: &mut E::F, decay: E::F, b: f32, c: f32| {
        *h = e.mul_add(*h, decay, e.mul(added, e.splat(b)));
        out = e.mul_add(*h, e.splat(c), out);
        *h = R::round(e, *h);
    };
    match tile.decay {
        Decay::PerValue { steps, rates } => {
            let step = half(e, &steps[t], at);
            let rates = &rates[values.clone()];
            for (((h, rate), b), c) in h.iter_mut().zip(rates).zip(b).zip(c) {
                take(h, exp2(e, e.mul(step, half(e, rate, at))), *b, *c);
            }
        }
        Decay::PerChannel(factors) => {
            let decay = half(e, &factors[t], at);
            for ((h, b), c) in h.iter_mut().zip(b).zip(c) {
                take(h, decay, *b, *c);
            }
        }
    }
    e.store(&mut tile.out[t].as_chunks_mut::<BLOCK>().0[at], out);
}
