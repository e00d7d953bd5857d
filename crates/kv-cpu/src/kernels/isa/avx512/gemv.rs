//! GEMV (one token) on packed weights: groups of sixteen weight rows, one in each lane.
//!
//! Invariant: the additions of [`gemm::tile`](crate::kernels::gemm::tile), in its order; everything
//! within a block (or super-block) is exact. Generic over the block format ([`UnpackGroup`]).

use std::arch::asm;
use std::arch::x86_64::*;

use super::block_scales::GroupScales;
use super::pack::{PackedBlock, PackedGroup};
use super::row_group::{GroupBlock, ROWS};
use super::unpack::{MOST, PIECES, UnpackGroup};
use super::unpack_panel::STEPS;
use crate::kernels::WeightRows;
use crate::kernels::prefetch::CacheLevel;
use crate::kernels::prefetch::prefetch_stream;
use crate::operands::{BLOCK, Int8Acts, Int8Row, SUPER_BLOCK};

/// Unrolls a block for every number below a constant, at most eight (or as many as are listed after
/// the block), so that what depends on the number is a constant.
///
/// Nested uses multiply the code: better number the iterations of two loops together.
macro_rules! unrolled {
    ($read:ident of $n_reads:expr => $body:block) => {
        unrolled!($read of $n_reads => $body 0 1 2 3 4 5 6 7)
    };
    ($read:ident of $n_reads:expr => $body:block $($i:literal)+) => {
        const { assert!($n_reads <= [$($i),+].len()) };
        $(if $i < $n_reads {
            let $read: usize = $i;
            $body
            // Keeps the next read's loads out: lines are prefetched and read a few at a time.
            std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
        })+
    };
}
pub(super) use unrolled;

/// All weight rows times one token: `out[row]`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn gemv<F: UnpackGroup<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    match CacheLevel::for_streams() {
        CacheLevel::L1 => gemv_groups::<F, BYTES, false>(weights, acts, out),
        CacheLevel::L2 => gemv_groups::<F, BYTES, true>(weights, acts, out),
    }
}

/// The same, with prefetches into the second-level cache or into the first.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn gemv_groups<F: UnpackGroup<BYTES>, const BYTES: usize, const L2: bool>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let n_stored = (weights.n_columns / (F::GROUPS * BLOCK)).min(acts.n_blocks() / F::GROUPS);
    let acts = acts.pointers();
    for (group, out) in PackedGroup::<F, BYTES>::all(weights).zip(out.chunks_mut(ROWS)) {
        let mut acc = _mm512_setzero_ps();
        for s in 0..n_stored {
            // SAFETY: groups have all blocks of their columns; this function needs the same
            // features.
            unsafe {
                let block = group.block(s);
                let scales = F::scales(block);
                acc = match F::GROUPS {
                    1 => add_block::<F, BYTES, L2>((block, &scales), s, &acts, acc),
                    _ => add_super::<F, BYTES, L2>((block, &scales), s * SUPER_BLOCK, &acts, acc),
                };
            }
        }
        store_sums(acc, out);
    }
}

/// Writes as many of the sums as there is room for.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_sums(sums: __m512, out: &mut [f32]) {
    let mut values = [0.0; ROWS];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), sums) };
    let n = out.len().min(ROWS);
    out[..n].copy_from_slice(&values[..n]);
}

/// The quants of word `word` of read `read`, chunk by chunk.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpack_word<F: UnpackGroup<BYTES>, const BYTES: usize>(
    (block, scales): (PackedBlock<'_, F, BYTES>, &GroupScales),
    (read, word): (usize, usize),
) -> [__m512i; MOST] {
    let mut pieces = [_mm512_setzero_si512(); PIECES];
    for (words, piece) in pieces.iter_mut().zip(F::PIECES_OF[read]).take(F::TAKES) {
        // SAFETY: this function needs the same features.
        *words = unsafe { block.word(piece + 4 * word) };
    }
    // SAFETY: as above.
    unsafe { F::chunks(pieces, (read, word), scales) }
}

/// Prefetches what follows the lines of a block that belong to this one of its steps.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn prefetch_step<F: UnpackGroup<BYTES>, const BYTES: usize, const L2: bool>(
    block: PackedBlock<'_, F, BYTES>,
    step: usize,
) {
    let (n_lines, n_steps) = (BYTES / 4, F::READS * STEPS);
    let of_step = step * n_lines / n_steps..(step + 1) * n_lines / n_steps;
    for line in of_step {
        prefetch_stream::<L2>(block.line(line));
    }
    if step == 0 && !BYTES.is_multiple_of(4) {
        prefetch_stream::<L2>(block.narrow_line());
    }
}

/// Activations of step `step` from block `first` on.
///
/// # Safety
/// There are so many.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn step(acts: &Int8Acts, first: usize, step: usize) -> __m512i {
    // SAFETY: as the caller promises; blocks lie one after the other.
    let four = unsafe { acts.quants.add(first).cast::<i32>().add(step).read() };
    _mm512_set1_epi32(four)
}

/// The initial sum, which subtracts the weights' offset.
///
/// # Safety
/// `negative_sum` can be read.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn offset<F: UnpackGroup<BYTES>, const BYTES: usize>(
    negative_sum: *const i32,
) -> __m512i {
    if F::OFFSET == 0 {
        return _mm512_setzero_si512();
    }
    let sum;
    // SAFETY: four bytes are read, as the caller promises; this function needs the instruction's
    // features.
    unsafe {
        asm!("vpslld {sum}, dword ptr [{negative}]{{1to16}}, {bits}",
            sum = out(zmm_reg) sum, negative = in(reg) negative_sum, bits = const F::OFFSET.trailing_zeros(),
            options(pure, readonly, nostack, preserves_flags));
    }
    sum
}

/// Adds a block of 32.
///
/// # Safety
/// The activations have it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_block<F: UnpackGroup<BYTES>, const BYTES: usize, const L2: bool>(
    (block, scales): (PackedBlock<'_, F, BYTES>, &GroupScales),
    b: usize,
    acts: &Int8Acts,
    acc: __m512,
) -> __m512 {
    // SAFETY: as the caller promises, for all that is read of the activations.
    unsafe {
        let mut sum = offset::<F, BYTES>(acts.negative_sums.add(b));
        unrolled!(read of F::READS => {
            for word in 0..STEPS {
                prefetch_step::<F, BYTES, L2>(block, read * STEPS + word);
                let chunks = unpack_word::<F, BYTES>((block, scales), (read, word));
                for (k, quants) in chunks.into_iter().enumerate().take(F::CHUNKS) {
                    let a = step(acts, b, F::chunk(read, k) * STEPS + word);
                    sum = _mm512_dpbusd_epi32(sum, quants, a);
                }
            }
        });
        let scale = _mm512_mul_ps(scales.scales, _mm512_set1_ps(*acts.scales.add(b)));
        let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc);
        if F::MINIMA {
            let sum = _mm512_set1_ps(*acts.sums.add(b));
            _mm512_fmadd_ps(scales.minimum_scales, sum, acc)
        } else {
            acc
        }
    }
}

/// Adds a super-block, of which `first` is the first block.
///
/// # Safety
/// The activations have it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_super<F: UnpackGroup<BYTES>, const BYTES: usize, const L2: bool>(
    (block, scales): (PackedBlock<'_, F, BYTES>, &GroupScales),
    first: usize,
    acts: &Int8Acts,
    acc: __m512,
) -> __m512 {
    // All chunks of a read go to one sum, or each to its own.
    let apart = usize::from(F::SUM_CHUNKS == 1);
    let mut total = _mm512_setzero_si512();
    let mut sums = [_mm512_setzero_si512(); MOST];
    // SAFETY: as the caller promises, for all that is read of the activations.
    unsafe {
        unrolled!(read of F::READS => {
            for (k, sum) in sums.iter_mut().enumerate().take(F::CHUNKS) {
                let chunk = F::chunk(read, k);
                let negative_sum = acts.negative_sum(F::PARTS, first, chunk);
                if read.is_multiple_of(F::SUM_READS) {
                    *sum = offset::<F, BYTES>(negative_sum);
                }
            }
            for word in 0..STEPS {
                prefetch_step::<F, BYTES, L2>(block, read * STEPS + word);
                let chunks = unpack_word::<F, BYTES>((block, scales), (read, word));
                for (k, quants) in chunks.into_iter().enumerate().take(F::CHUNKS) {
                    let a = step(acts, first, F::chunk(read, k) * STEPS + word);
                    sums[k * apart] = _mm512_dpbusd_epi32(sums[k * apart], quants, a);
                }
            }
            let n_sums = if read % F::SUM_READS + 1 == F::SUM_READS {
                F::SUMS
            } else {
                0
            };
            for (k, sum) in sums.into_iter().enumerate().take(n_sums) {
                let factor = scales.factor(F::chunk(read, k) * F::PARTS / 2);
                total = _mm512_add_epi32(total, _mm512_mullo_epi32(sum, factor));
            }
        });
        let act_scale = _mm512_set1_ps(*acts.scales.add(first));
        let scale = _mm512_mul_ps(scales.scales, act_scale);
        let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, acc);
        if !F::MINIMA {
            return acc;
        }
        let mut minima = _mm512_setzero_si512();
        for pair in 0..SUPER_BLOCK / 2 * F::PARTS {
            let sums = _mm512_set1_epi32(acts.two_sums(F::PARTS, first, pair).read_unaligned());
            minima = _mm512_dpwssd_epi32(minima, scales.minima(pair), sums);
        }
        let scale = _mm512_mul_ps(scales.minimum_scales, act_scale);
        _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minima), scale, acc)
    }
}
