//! Weighted values of a KV tile, `out += weights · v`, of dequantized values and of stored F16.

use core::arch::x86_64::*;
use std::ops::Range;

use super::F32_LANES;
use crate::attend::kv_reader::StoredLanes;
use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::tile_kernels::{KV_TILE, ValueLanes};

/// Queries whose outputs are summed together at most, with two registers of columns each.
const MAX_QUERIES: usize = 8;
/// Queries that are summed together with four registers of columns each.
const WIDE_QUERIES: usize = 4;
/// Registers of columns that are summed together at most.
const MAX_REGISTERS: usize = 4;

/// The source of the values of a tile.
trait ValueSource: Copy {
    /// Sixteen values of a lane's row from `column` on, those that `mask` selects.
    ///
    /// # Safety
    /// The row has them, and the CPU has the features of [`accumulate`].
    unsafe fn load(self, lane: usize, column: usize, mask: __mmask16) -> __m512;
}

/// Dequantized, `[KV_TILE, v_dim]`.
#[derive(Clone, Copy)]
struct DequantizedValues<'a> {
    values: &'a [f32],
    v_dim: usize,
}

impl ValueSource for DequantizedValues<'_> {
    #[inline(always)]
    unsafe fn load(self, lane: usize, column: usize, mask: __mmask16) -> __m512 {
        // SAFETY: the row has the columns that the mask selects, as the caller promises.
        unsafe {
            let from = self.values.as_ptr().add(lane * self.v_dim + column);
            _mm512_maskz_loadu_ps(mask, from)
        }
    }
}

/// `F16`, as stored: one row pointer per lane.
#[derive(Clone, Copy)]
struct StoredF16<'a>(&'a [*const u8; KV_TILE]);

impl ValueSource for StoredF16<'_> {
    #[inline(always)]
    unsafe fn load(self, lane: usize, column: usize, mask: __mmask16) -> __m512 {
        // SAFETY: the row has the columns that the mask selects, as the caller promises.
        unsafe {
            let from = self.0.get_unchecked(lane).add(column * size_of::<u16>());
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast()))
        }
    }
}

/// See [`TileKernels::accumulate`](crate::attend::tile_kernels::TileKernels).
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn accumulate(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    values: ValueLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    let ValueLanes { lanes, values } = values;
    assert!(lanes.end <= KV_TILE && values.len() >= lanes.end * v_dim);
    let source = DequantizedValues { values, v_dim };
    // SAFETY: each lane has its row of `v_dim` values, as asserted.
    unsafe { accumulate_all(out, weights, Lanes { lanes, source }, prefetch) }
}

/// As [`accumulate`], of `F16` values as they are stored.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) fn accumulate_f16(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    values: StoredLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    let StoredLanes { lanes, stored } = values;
    assert!(lanes.end <= KV_TILE && stored.head.n_bytes >= v_dim * size_of::<u16>());
    let rows = stored.row_pointers();
    let source = StoredF16(&rows);
    // SAFETY: each lane's row has `v_dim` values, as asserted.
    unsafe { accumulate_all(out, weights, Lanes { lanes, source }, prefetch) }
}

/// The lanes to add and their values.
#[derive(Clone)]
struct Lanes<S> {
    lanes: Range<usize>,
    source: S,
}

/// All queries, up to [`MAX_QUERIES`] at a time.
///
/// # Safety
/// No lane is beyond the tile, and each lane's row has as many values as a query's output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn accumulate_all<S: ValueSource>(
    mut out: &mut [f32],
    mut weights: &[[f32; KV_TILE]],
    values: Lanes<S>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    while !weights.is_empty() {
        let n = match weights.len() {
            left @ WIDE_QUERIES..=MAX_QUERIES => left,
            left => left.min(WIDE_QUERIES),
        };
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        let values = values.clone();
        // SAFETY: as the caller promises.
        unsafe {
            match n {
                8 => accumulate_of::<8, S>(out_now, now, values, prefetch),
                7 => accumulate_of::<7, S>(out_now, now, values, prefetch),
                6 => accumulate_of::<6, S>(out_now, now, values, prefetch),
                5 => accumulate_of::<5, S>(out_now, now, values, prefetch),
                4 => accumulate_of::<4, S>(out_now, now, values, prefetch),
                3 => accumulate_of::<3, S>(out_now, now, values, prefetch),
                2 => accumulate_of::<2, S>(out_now, now, values, prefetch),
                _ => accumulate_of::<1, S>(out_now, now, values, prefetch),
            }
        }
        (out, weights) = (out_later, later);
    }
}

/// All columns of `N` queries.
///
/// # Safety
/// As for [`accumulate_all`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn accumulate_of<const N: usize, S: ValueSource>(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    values: Lanes<S>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    let v_dim = out.len() / N;
    // As many accumulators as registers allow.
    let max_registers = if N > WIDE_QUERIES {
        MAX_REGISTERS / 2
    } else {
        MAX_REGISTERS
    };
    for first in (0..v_dim).step_by(max_registers * F32_LANES) {
        let columns = Columns {
            out: &mut *out,
            first,
            weights,
            values: values.clone(),
        };
        // SAFETY: as the caller promises.
        unsafe {
            match (v_dim - first).div_ceil(F32_LANES).min(max_registers) {
                4.. => columns.accumulate::<N, MAX_REGISTERS>(prefetch),
                3 => columns.accumulate::<N, 3>(prefetch),
                2 => columns.accumulate::<N, 2>(prefetch),
                _ => columns.accumulate::<N, 1>(prefetch),
            }
        }
    }
}

/// Some columns of the outputs of some queries.
struct Columns<'a, S> {
    /// `[queries, v_dim]`.
    out: &'a mut [f32],
    /// The first column.
    first: usize,
    weights: &'a [[f32; KV_TILE]],
    values: Lanes<S>,
}

impl<S: ValueSource> Columns<'_, S> {
    /// `W` registers of columns of `N` queries; the last register may be partly filled.
    ///
    /// # Safety
    /// As for [`accumulate_all`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn accumulate<const N: usize, const W: usize>(self, prefetch: &mut KvPrefetcher<'_>) {
        let Self {
            out,
            first,
            weights,
            values: Lanes { lanes, source },
        } = self;
        let v_dim = out.len() / N;
        assert!(weights.len() == N && first + (W - 1) * F32_LANES < v_dim);
        let n_last = (v_dim - first - (W - 1) * F32_LANES).min(F32_LANES);
        let mask = |w: usize| -> __mmask16 {
            if w + 1 < W {
                !0
            } else {
                !0 >> (F32_LANES - n_last)
            }
        };
        let mut sums = [[_mm512_setzero_ps(); W]; N];
        for (i, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the columns that the mask selects are in row `i` of the output.
                *sum = unsafe {
                    let from = out.as_ptr().add(i * v_dim + first + w * F32_LANES);
                    _mm512_maskz_loadu_ps(mask(w), from)
                };
            }
        }
        for lane in lanes {
            prefetch.prefetch_next();
            let mut v = [_mm512_setzero_ps(); W];
            for (w, v) in v.iter_mut().enumerate() {
                // SAFETY: the row has the columns that the mask selects, as the caller promises.
                *v = unsafe { source.load(lane, first + w * F32_LANES, mask(w)) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `i < N`, as asserted, and the lane is inside the tile.
                let weight =
                    _mm512_set1_ps(unsafe { *weights.get_unchecked(i).get_unchecked(lane) });
                for (sum, v) in sums.iter_mut().zip(v) {
                    *sum = _mm512_fmadd_ps(weight, v, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (w, sum) in sums.iter().enumerate() {
                // SAFETY: the columns that the mask selects are in row `i` of the output.
                unsafe {
                    let to = out.as_mut_ptr().add(i * v_dim + first + w * F32_LANES);
                    _mm512_mask_storeu_ps(to, mask(w), *sum);
                }
            }
        }
    }
}
