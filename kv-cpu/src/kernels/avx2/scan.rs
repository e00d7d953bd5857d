//! Scans, eight channels and eight values of their states at a time.
//!
//! A block of states is turned around when it is loaded, so that a register holds one value of eight
//! channels, and back when it is stored. Knows nothing of sequences.

use std::arch::x86_64::*;

use super::functions::exp;
use super::lanes::{load, map, store};
use crate::kernels::scan::{Decay, LANES, Lanes, ScanTile};

/// Channels, and values of a state, of one block.
const BLOCK: usize = 8;

/// Coefficients of a polynomial in `f` for `2^f`, from that of `f^6` down to that of `f`: least
/// greatest relative error on −1/2..1/2 (2e-9).
pub(in crate::kernels) const EXP2: [f32; 6] = [
    0.000_153_533_59,
    0.001_339_887_4,
    0.009_618_437,
    0.055_503_324,
    0.240_226_48,
    std::f32::consts::LN_2,
];

/// `2^x` for `x` up to 0, within 2 units in the last place; 0 where that is below the normal range.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2(x: __m256) -> __m256 {
    let x = _mm256_max_ps(x, _mm256_set1_ps(-127.0));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm256_sub_ps(x, n);
    let mut p = _mm256_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(*c));
    }
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0));
    // An exponent of −127 gives 0.
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
}

/// One of the two halves of 16 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn half(lanes: &Lanes, at: usize) -> __m256 {
    load(&lanes.as_chunks::<8>().0[at])
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scan_tile(mut tile: ScanTile<'_>) {
    assert!(tile.is_sound(), "{tile:?}");
    let n = tile.d_state;
    let n_channels = tile.state.len() / n;
    for first in (0..n).step_by(BLOCK) {
        for at in 0..LANES / BLOCK {
            if at * BLOCK < n_channels {
                let width = BLOCK.min(n - first);
                block(&mut tile, at, first..first + width);
            }
        }
    }
}

/// All rows through some values of the states of eight channels.
#[target_feature(enable = "avx2,fma,f16c")]
fn block(tile: &mut ScanTile<'_>, at: usize, values: std::ops::Range<usize>) {
    let n = tile.d_state;
    let channels = tile.state.chunks_exact_mut(n).skip(at * BLOCK).take(BLOCK);
    let mut padded = [[0.0f32; BLOCK]; BLOCK];
    for (padded, state) in padded.iter_mut().zip(channels) {
        padded[..values.len()].copy_from_slice(&state[values.clone()]);
    }
    let mut h = transposed([0, 1, 2, 3, 4, 5, 6, 7].map(|i: usize| load(&padded[i])));
    for (t, &row) in tile.rows.iter().enumerate() {
        let first = row as usize * tile.stride + values.start;
        let narrow = first..first + values.len();
        let (b, c) = (&tile.b[narrow.clone()], &tile.c[narrow]);
        let added = half(&tile.added[t], at);
        let mut out = half(&tile.out[t], at);
        let mut take = |h: &mut __m256, decay: __m256, b: f32, c: f32| {
            let more = _mm256_mul_ps(added, _mm256_set1_ps(b));
            *h = _mm256_fmadd_ps(*h, decay, more);
            out = _mm256_fmadd_ps(*h, _mm256_set1_ps(c), out);
        };
        match tile.decay {
            Decay::PerValue { steps, rates } => {
                let step = half(&steps[t], at);
                let rates = &rates[values.clone()];
                for (((h, rate), b), c) in h.iter_mut().zip(rates).zip(b).zip(c) {
                    take(h, exp2(_mm256_mul_ps(step, half(rate, at))), *b, *c);
                }
            }
            Decay::PerChannel(factors) => {
                let decay = half(&factors[t], at);
                for ((h, b), c) in h.iter_mut().zip(b).zip(c) {
                    take(h, decay, *b, *c);
                }
            }
        }
        store(&mut tile.out[t].as_chunks_mut::<8>().0[at], out);
    }
    for (padded, h) in padded.iter_mut().zip(transposed(h)) {
        store(padded, h);
    }
    let channels = tile.state.chunks_exact_mut(n).skip(at * BLOCK).take(BLOCK);
    for (padded, state) in padded.iter().zip(channels) {
        state[values.clone()].copy_from_slice(&padded[..values.len()]);
    }
}

/// Rows as columns.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(r: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d] = [0, 2, 4, 6].map(|i: usize| {
        (
            _mm256_unpacklo_ps(r[i], r[i + 1]),
            _mm256_unpackhi_ps(r[i], r[i + 1]),
        )
    });
    // Four rows of columns j and j + 4.
    let four = |a: (__m256, __m256), b: (__m256, __m256)| {
        [
            _mm256_shuffle_ps::<0x44>(a.0, b.0),
            _mm256_shuffle_ps::<0xee>(a.0, b.0),
            _mm256_shuffle_ps::<0x44>(a.1, b.1),
            _mm256_shuffle_ps::<0xee>(a.1, b.1),
        ]
    };
    let (upper, lower) = (four(a, b), four(c, d));
    let mut columns = r;
    for j in 0..4 {
        columns[j] = _mm256_permute2f128_ps::<0x20>(upper[j], lower[j]);
        columns[j + 4] = _mm256_permute2f128_ps::<0x31>(upper[j], lower[j]);
    }
    columns
}

/// `max(x, 0) + ln(1 + t)` with `t = e^-|x|`, and `ln(1 + t) = 2 artanh(z)` with `z = t / (2 + t)`,
/// which is at most 1/3, so that seven terms of its series suffice (the next is below 2e-8).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn softplus(x: &mut [f32]) {
    let constant = |c: f32| _mm256_set1_ps(c);
    map(x, 0.0, |x| {
        let t = exp(_mm256_or_ps(x, constant(-0.0)));
        let z = _mm256_div_ps(t, _mm256_add_ps(constant(2.0), t));
        let square = _mm256_mul_ps(z, z);
        let mut p = constant(1.0 / 13.0);
        for odd in [11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
            p = _mm256_fmadd_ps(p, square, constant(1.0 / odd));
        }
        let log = _mm256_mul_ps(_mm256_add_ps(z, z), p);
        _mm256_add_ps(_mm256_max_ps(x, _mm256_setzero_ps()), log)
    });
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply_add(acc: &mut [f32], a: &[f32], b: &[f32]) {
    debug_assert!(acc.len() == a.len() && a.len() == b.len());
    let n = acc.len().min(a.len()).min(b.len());
    let (acc, acc_rest) = acc[..n].as_chunks_mut::<8>();
    let (a, a_rest) = a[..n].as_chunks::<8>();
    let (b, b_rest) = b[..n].as_chunks::<8>();
    for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
        let sum = _mm256_fmadd_ps(load(a), load(b), load(acc));
        store(acc, sum);
    }
    for ((acc, a), b) in acc_rest.iter_mut().zip(a_rest).zip(b_rest) {
        *acc = a.mul_add(*b, *acc);
    }
}
