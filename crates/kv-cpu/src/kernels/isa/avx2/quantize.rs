//! Quantizes activations to int8 blocks of 32. Bit for bit what the scalar kernel does.

use std::arch::x86_64::*;

use crate::kernels::isa::scalar::quantize::Steps;
use crate::operands::{BLOCK, Int8RowMut};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize(values: &[f32], mut row: Int8RowMut<'_>) {
    for (first, values) in values.chunks(row.span.len()).enumerate() {
        let (whole, rest) = values.as_chunks::<BLOCK>();
        let mut last = [0.0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        let mut bits = _mm256_setzero_si256();
        for values in whole.iter().chain(last) {
            bits = _mm256_max_epu32(bits, magnitudes(values));
        }
        let steps = Steps::of(f32::from_bits(largest(bits)));
        for (b, values) in (first * row.span.len() / BLOCK..).zip(whole.iter().chain(last)) {
            let Some(quants) = row.quants.get_mut(b) else {
                return;
            };
            let sums;
            (*quants, sums) = quantize_block(values, &steps);
            row.set_scale_and_sums(b, steps.scale, sums);
        }
    }
}

/// Eight values.
#[inline]
#[target_feature(enable = "avx2")]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

/// The largest bit patterns of magnitudes, lane by lane: their order is that of magnitudes, with
/// infinities and then NaN last.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn magnitudes(values: &[f32; BLOCK]) -> __m256i {
    let (eights, _) = values.as_chunks::<8>();
    let magnitude = _mm256_set1_epi32(i32::MAX);
    let bits = |i: usize| _mm256_and_si256(_mm256_castps_si256(load(&eights[i])), magnitude);
    _mm256_max_epu32(
        _mm256_max_epu32(bits(0), bits(1)),
        _mm256_max_epu32(bits(2), bits(3)),
    )
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest(bits: __m256i) -> u32 {
    let most = _mm_max_epu32(
        _mm256_castsi256_si128(bits),
        _mm256_extracti128_si256::<1>(bits),
    );
    let most = _mm_max_epu32(most, _mm_shuffle_epi32::<0b00_00_11_10>(most));
    let most = _mm_max_epu32(most, _mm_shuffle_epi32::<0b00_00_00_01>(most));
    _mm_cvtsi128_si32(most) as u32
}

/// The quants, and the sums of the first and last 16 of them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_block(values: &[f32; BLOCK], steps: &Steps) -> ([i8; BLOCK], [i32; 2]) {
    if steps.inverse == 0.0 {
        return ([0; BLOCK], [0; 2]);
    }
    let (eights, _) = values.as_chunks::<8>();
    let x: [__m256; 4] = [
        load(&eights[0]),
        load(&eights[1]),
        load(&eights[2]),
        load(&eights[3]),
    ];
    let inverse = _mm256_set1_ps(steps.inverse);
    let q = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
    // Packing works on halves of a register: the permutation puts groups of four in order again.
    let words = [
        _mm256_packs_epi32(q[0], q[1]),
        _mm256_packs_epi32(q[2], q[3]),
    ];
    let bytes = _mm256_packs_epi16(words[0], words[1]);
    let q = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    let mut quants = [0; BLOCK];
    // SAFETY: `quants` is 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(quants.as_mut_ptr().cast(), q) };
    let low = add_four(_mm256_castsi256_si128(fours));
    let high = add_four(_mm256_extracti128_si256::<1>(fours));
    (quants, [low, high])
}

#[inline]
#[target_feature(enable = "avx2")]
fn add_four(v: __m128i) -> i32 {
    let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b00_00_11_10>(v));
    _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b00_00_00_01>(v)))
}
