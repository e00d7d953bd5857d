//! Scans of recurrent layers, sixteen channels and sixteen values of their states at a time.
//!
//! A block of states is transposed when it is loaded, so that a register holds one value of all
//! channels; it stays in registers for all rows and is transposed back when it is stored. Knows
//! nothing of sequences.

use std::arch::x86_64::*;
use std::ops::Range;

use kv_rows::StateType;

use crate::kernels::scan::{Decay, F32x16, SCAN_WIDTH, ScanTile};
use crate::kernels::vector::functions::EXP2;

/// `2^x` for `x` up to 0, within 2 units in the last place.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512) -> __m512 {
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*c));
    }
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0));
    _mm512_scalef_ps(p, n)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(x: &F32x16) -> __m512 {
    // SAFETY: `x` is 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: &mut F32x16, v: __m512) {
    // SAFETY: `x` is 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), v) }
}

#[target_feature(enable = "avx512f")]
pub(super) fn scan_tile(mut tile: ScanTile<'_>) {
    assert!(tile.is_sound(), "{tile:?}");
    let n = tile.d_state;
    for first in (0..n).step_by(SCAN_WIDTH) {
        let values = first..n.min(first + SCAN_WIDTH);
        match tile.rounding {
            StateType::F32 => block(&mut tile, &values, |h| h),
            StateType::F16 => block(&mut tile, &values, |h| round_f16(h)),
            StateType::BF16 => block(&mut tile, &values, |h| round_bf16(h)),
        }
    }
}

/// All rows through some values of the states, which `round` rounds.
#[inline]
#[target_feature(enable = "avx512f")]
fn block(tile: &mut ScanTile<'_>, values: &Range<usize>, round: impl Fn(__m512) -> __m512 + Copy) {
    let mut h = load_states(tile, values);
    match tile.decay {
        Decay::PerValue { steps, rates } => {
            let rates = &rates[values.clone()];
            let decay = |t: usize, k: usize| exp2(_mm512_mul_ps(load(&steps[t]), load(&rates[k])));
            rows(tile, values, &mut h, (decay, round));
        }
        Decay::PerChannel(factors) => {
            let decay = |t: usize, _: usize| load(&factors[t]);
            rows(tile, values, &mut h, (decay, round));
        }
    }
    store_states(tile, values, h);
}

/// To 16-bit IEEE floats.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_f16(x: __m512) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x))
}

/// To the upper halves of 32-bit floats.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_bf16(x: __m512) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let rounded = _mm512_mask_blend_epi32(nan, _mm512_add_epi32(bits, half), quiet);
    _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(-0x1_0000)))
}

/// All rows through some values of the states; `decay(row, value)` are factors, `round` rounds what
/// the next row begins with.
#[inline]
#[target_feature(enable = "avx512f")]
fn rows(
    tile: &mut ScanTile<'_>,
    values: &Range<usize>,
    h: &mut [__m512; SCAN_WIDTH],
    (decay, round): (impl Fn(usize, usize) -> __m512, impl Fn(__m512) -> __m512),
) {
    let outs = tile.out.iter_mut().zip(tile.added).zip(tile.rows);
    for (t, ((out, added), &row)) in outs.enumerate() {
        let first = row as usize * tile.stride + values.start;
        let narrow = first..first + values.len();
        let (b, c) = (&tile.b[narrow.clone()], &tile.c[narrow]);
        let added = load(added);
        let mut sum = load(out);
        let mut take = |k: usize, b: f32, c: f32| {
            let more = _mm512_mul_ps(added, _mm512_set1_ps(b));
            h[k] = _mm512_fmadd_ps(h[k], decay(t, k), more);
            sum = _mm512_fmadd_ps(h[k], _mm512_set1_ps(c), sum);
            h[k] = round(h[k]);
        };
        match (<&F32x16>::try_from(b), <&F32x16>::try_from(c)) {
            (Ok(b), Ok(c)) => (0..SCAN_WIDTH).for_each(|k| take(k, b[k], c[k])),
            _ => (0..b.len()).for_each(|k| take(k, b[k], c[k])),
        }
        store(out, sum);
    }
}

/// One register for each value, one lane for each channel; what is not there is 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_states(tile: &ScanTile<'_>, values: &Range<usize>) -> [__m512; SCAN_WIDTH] {
    let mask = mask(values.len());
    let mut rows = [_mm512_setzero_ps(); SCAN_WIDTH];
    for (row, state) in rows.iter_mut().zip(tile.state.chunks_exact(tile.d_state)) {
        let state = &state[values.clone()];
        // SAFETY: the mask has as many lanes as `state` has values.
        *row = unsafe { _mm512_maskz_loadu_ps(mask, state.as_ptr()) };
    }
    transpose(rows)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_states(tile: &mut ScanTile<'_>, values: &Range<usize>, h: [__m512; SCAN_WIDTH]) {
    let mask = mask(values.len());
    let states = tile.state.chunks_exact_mut(tile.d_state);
    for (row, state) in transpose(h).into_iter().zip(states) {
        let state = &mut state[values.clone()];
        // SAFETY: the mask has as many lanes as `state` has values.
        unsafe { _mm512_mask_storeu_ps(state.as_mut_ptr(), mask, row) };
    }
}

/// The first `n` of 16 lanes.
fn mask(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

/// Rows as columns.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(r: [__m512; SCAN_WIDTH]) -> [__m512; SCAN_WIDTH] {
    // Pairs of rows, then fours: four rows of the columns 4 l + j in the l-th quarter.
    let mut fours = r;
    for g in [0, 4, 8, 12] {
        let low = [0, 2].map(|i: usize| _mm512_unpacklo_ps(r[g + i], r[g + i + 1]));
        let high = [0, 2].map(|i: usize| _mm512_unpackhi_ps(r[g + i], r[g + i + 1]));
        for (j, [a, b]) in [(0, low), (2, high)] {
            let [a, b] = [_mm512_castps_pd(a), _mm512_castps_pd(b)];
            fours[g + j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            fours[g + j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    let mut columns = r;
    for j in 0..4 {
        let [a, b, c, d] = [0, 4, 8, 12].map(|g| fours[g + j]);
        let even = (
            _mm512_shuffle_f32x4::<0x88>(a, b),
            _mm512_shuffle_f32x4::<0x88>(c, d),
        );
        let odd = (
            _mm512_shuffle_f32x4::<0xdd>(a, b),
            _mm512_shuffle_f32x4::<0xdd>(c, d),
        );
        columns[j] = _mm512_shuffle_f32x4::<0x88>(even.0, even.1);
        columns[j + 8] = _mm512_shuffle_f32x4::<0xdd>(even.0, even.1);
        columns[j + 4] = _mm512_shuffle_f32x4::<0x88>(odd.0, odd.1);
        columns[j + 12] = _mm512_shuffle_f32x4::<0xdd>(odd.0, odd.1);
    }
    columns
}
