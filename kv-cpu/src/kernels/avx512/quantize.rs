//! Activations to int8 blocks of 32. Bit for bit what the scalar kernel does.

use std::arch::x86_64::*;

use crate::activations::{BLOCK, Int8RowMut};
use crate::kernels::scalar::Steps;

/// Numbers of a register.
const LANES: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize(values: &[f32], mut row: Int8RowMut<'_>) {
    for (first, values) in values.chunks(row.span.len()).enumerate() {
        let (whole, rest) = values.as_chunks::<BLOCK>();
        let mut last = [0.0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        let mut bits = _mm512_setzero_si512();
        for values in whole.iter().chain(last) {
            bits = _mm512_max_epu32(bits, magnitudes(values));
        }
        let steps = Steps::of(f32::from_bits(_mm512_reduce_max_epu32(bits)));
        for (b, values) in (first * row.span.len() / BLOCK..).zip(whole.iter().chain(last)) {
            let Some(quants) = row.quants.get_mut(b) else {
                return;
            };
            let sums = quantize_block(values, &steps, quants);
            row.set_marks(b, steps.scale, sums);
        }
    }
}

/// The two registers of a block.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32; BLOCK]) -> [__m512; 2] {
    let at = values.as_ptr();
    // SAFETY: 128 readable bytes; the loads need no alignment.
    unsafe { [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(LANES))] }
}

/// The larger bit patterns of magnitudes, lane by lane: their order is that of magnitudes, with
/// infinities and then NaN last.
#[inline]
#[target_feature(enable = "avx512f")]
fn magnitudes(values: &[f32; BLOCK]) -> __m512i {
    let [low, high] = load(values);
    let bits = |x: __m512| _mm512_castps_si512(_mm512_abs_ps(x));
    _mm512_max_epu32(bits(low), bits(high))
}

/// Writes the quants; gives the sums of the first and last 16 of them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn quantize_block(values: &[f32; BLOCK], steps: &Steps, quants: &mut [i8; BLOCK]) -> [i32; 2] {
    if steps.inverse == 0.0 {
        *quants = [0; BLOCK];
        return [0; 2];
    }
    let inverse = _mm512_set1_ps(steps.inverse);
    let whole = |x: __m512| _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
    let [low, high] = load(values);
    let q = _mm256_set_m128i(whole(high), whole(low));
    // SAFETY: `quants` is 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(quants.as_mut_ptr().cast(), q) };
    let fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
    let twos = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b10_11_00_01>(fours));
    let ones = _mm256_add_epi32(twos, _mm256_shuffle_epi32::<0b01_00_11_10>(twos));
    let low = _mm_cvtsi128_si32(_mm256_castsi256_si128(ones));
    [low, _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(ones))]
}
