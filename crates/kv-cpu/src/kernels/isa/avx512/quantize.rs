//! Quantizes activations to int8, four blocks at a time. Bit for bit what the scalar kernel does.

use std::arch::x86_64::*;

use crate::kernels::isa::scalar::quantize::Steps;
use crate::operands::{BLOCK, Int8RowMut, ScaleSpan};

/// Numbers of a register.
const LANES: usize = 16;
/// Blocks that are written together, and their values. Rows are padded to as many.
const BLOCKS: usize = 4;
const VALUES: usize = BLOCKS * BLOCK;
/// The largest quant.
const MOST: f32 = 127.0;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize(values: &[f32], mut row: Int8RowMut<'_>) {
    let span = row.span.len();
    if span < VALUES {
        each_four(values, 0, &mut row, |values| steps_of(most_of_each(values)));
        return;
    }
    for (at, values) in values.chunks(span).enumerate() {
        let mut most = _mm512_setzero_si512();
        let (whole, rest) = values.as_chunks::<BLOCK>();
        for values in whole {
            most = _mm512_max_epu32(most, magnitudes(values));
        }
        let mut last = [0.0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        most = _mm512_max_epu32(most, magnitudes(&last));
        let most = _mm512_reduce_max_epu32(most);
        let steps = steps_of(_mm_set1_epi32(most as i32));
        each_four(values, at * span / BLOCK, &mut row, |_| steps);
    }
}

/// The steps between neighbouring int8 values of four blocks, and their inverses.
#[derive(Clone, Copy)]
struct FourSteps {
    scales: __m128,
    inverses: [f32; BLOCKS],
}

/// Writes blocks from `first` on, with the steps that `steps` says; blocks beyond the values are
/// zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn each_four(
    values: &[f32],
    first: usize,
    row: &mut Int8RowMut<'_>,
    steps: impl Fn(&[f32; VALUES]) -> FourSteps,
) {
    let (whole, rest) = values.as_chunks::<VALUES>();
    for (at, values) in whole.iter().enumerate() {
        write(values, &steps(values), row, first + at * BLOCKS);
    }
    if !rest.is_empty() {
        let mut last = [0.0; VALUES];
        last[..rest.len()].copy_from_slice(rest);
        let mut steps = steps(&last);
        let there = !0 >> (8 - rest.len().div_ceil(BLOCK));
        steps.scales = _mm_maskz_mov_ps(there, steps.scales);
        write(&last, &steps, row, first + whole.len() * BLOCKS);
    }
}

/// As [`Steps::of`], for the largest magnitudes of four blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn steps_of(most: __m128i) -> FourSteps {
    let most = _mm_castsi128_ps(most);
    let all = |x: f32| _mm_set1_ps(x);
    let finite = _mm_cmp_ps_mask::<_CMP_LE_OQ>(most, all(f32::MAX));
    let small = _mm_cmp_ps_mask::<_CMP_LT_OQ>(most, all(Steps::SMALLEST));
    let scales = _mm_maskz_div_ps(!small, most, all(MOST));
    let inverses = _mm_maskz_div_ps(finite & !small, all(MOST), most);
    let mut steps = FourSteps {
        scales: _mm_mask_blend_ps(finite, all(f32::NAN), scales),
        inverses: [0.0; BLOCKS],
    };
    // SAFETY: 16 writable bytes; the store needs no alignment.
    unsafe { _mm_storeu_ps(steps.inverses.as_mut_ptr(), inverses) };
    steps
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

/// The largest of each block.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn most_of_each(values: &[f32; VALUES]) -> __m128i {
    let (blocks, _) = values.as_chunks::<BLOCK>();
    let four = |block: &[f32; BLOCK]| {
        let m = magnitudes(block);
        let m = _mm256_max_epu32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64::<1>(m));
        _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m))
    };
    let [a, b, c, d] = [&blocks[0], &blocks[1], &blocks[2], &blocks[3]].map(four);
    // Pairs of lanes of two blocks, then of four.
    let ab = _mm_max_epu32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    let cd = _mm_max_epu32(_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
    _mm_max_epu32(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd))
}

/// Writes four blocks from the `first`-th of the row on, where it has them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn write(values: &[f32; VALUES], steps: &FourSteps, row: &mut Int8RowMut<'_>, first: usize) {
    let span = row.span;
    let Some(to) = row.four(first) else {
        return;
    };
    let (blocks, _) = values.as_chunks::<BLOCK>();
    let mut q = [_mm256_setzero_si256(); BLOCKS];
    for (i, q) in q.iter_mut().enumerate() {
        *q = quants(&blocks[i], steps.inverses[i]);
        // SAFETY: 32 writable bytes; the store needs no alignment.
        unsafe { _mm256_storeu_si256(to.quants[i].as_mut_ptr().cast(), *q) };
    }
    if span == ScaleSpan::SuperBlock {
        // Not `map`: its closure would be called.
        let magnitudes = [
            _mm256_abs_epi8(q[0]),
            _mm256_abs_epi8(q[1]),
            _mm256_abs_epi8(q[2]),
            _mm256_abs_epi8(q[3]),
        ];
        let [low, high] = half_sums(&magnitudes);
        let most = _mm_max_epi32(low, high);
        // SAFETY: eight writable bytes; the store needs no alignment.
        unsafe {
            _mm_storel_epi64(
                to.magnitudes.as_mut_ptr().cast(),
                _mm_packus_epi32(most, most),
            );
        }
    }
    let [low, high] = half_sums(&q);
    let all = _mm_add_epi32(low, high);
    // 32 quants of at most 127 fit into 16 bits.
    let both = _mm_mask_blend_epi16(0b1010_1010, low, _mm_slli_epi32::<16>(high));
    // SAFETY: there are four of each to be written; stores need no alignment.
    unsafe {
        _mm_storeu_ps(to.scales.as_mut_ptr(), steps.scales);
        let scaled = _mm_mul_ps(steps.scales, _mm_cvtepi32_ps(all));
        _mm_storeu_ps(to.sums.as_mut_ptr(), scaled);
        _mm_storel_epi64(to.int_sums.as_mut_ptr().cast(), _mm_packs_epi32(all, all));
        _mm_storeu_si128(to.int_half_sums.as_mut_ptr().cast(), both);
        let negative = _mm_sub_epi32(_mm_setzero_si128(), all);
        _mm_storeu_si128(to.negative_sums.as_mut_ptr().cast(), negative);
        let pairs = _mm256_set_m128i(_mm_unpackhi_epi32(low, high), _mm_unpacklo_epi32(low, high));
        let negative = _mm256_sub_epi32(_mm256_setzero_si256(), pairs);
        _mm256_storeu_si256(to.negative_half_sums.as_mut_ptr().cast(), negative);
    }
}

/// The sums of the first and of the last 16 bytes of four blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn half_sums(q: &[__m256i; BLOCKS]) -> [__m128i; 2] {
    let fours = |q| _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
    let pairs = [
        _mm256_hadd_epi32(fours(q[0]), fours(q[1])),
        _mm256_hadd_epi32(fours(q[2]), fours(q[3])),
    ];
    let halves = _mm256_hadd_epi32(pairs[0], pairs[1]);
    [
        _mm256_castsi256_si128(halves),
        _mm256_extracti128_si256::<1>(halves),
    ]
}

/// The quants of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn quants(values: &[f32; BLOCK], inverse: f32) -> __m256i {
    if inverse == 0.0 {
        return _mm256_setzero_si256();
    }
    let inverse = _mm512_set1_ps(inverse);
    let whole = |x: __m512| _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
    let [low, high] = load(values);
    _mm256_set_m128i(whole(high), whole(low))
}
