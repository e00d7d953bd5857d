//! The inner loops of attention in AVX-512: what the compiler makes of their common text ([`super::tile`])
//! moves more than it multiplies.
//!
//! Invariant: the same additions and products in the same order, so the same bits.

use core::arch::x86_64::*;
use std::ops::Range;

use super::decode::{Heads, PIECE};
use super::tile::TILE;
use super::walk::{Ahead, Tile};

/// Queries whose scores are summed at once: two sums each.
const QUERIES: usize = 8;
/// Queries and registers of columns whose outputs are summed at once: half as many columns of up to
/// [`QUERIES`].
const ROWS: usize = 4;
const WIDE: usize = 4;
/// Numbers of a register.
const LANES: usize = 16;

/// As [`super::tile::TileKernels::scores`].
#[target_feature(enable = "avx512f")]
pub(super) fn scores(
    mut q: &[f32],
    k: &[[f32; TILE]],
    mut out: &mut [[f32; TILE]],
    ahead: &mut Ahead<'_>,
) {
    while !out.is_empty() {
        let n = out.len().min(QUERIES);
        let (q_now, q_later) = q.split_at(n * k.len());
        let (now, later) = out.split_at_mut(n);
        match n {
            8 => scores_of::<8>(q_now, k, now, ahead),
            7 => scores_of::<7>(q_now, k, now, ahead),
            6 => scores_of::<6>(q_now, k, now, ahead),
            5 => scores_of::<5>(q_now, k, now, ahead),
            4 => scores_of::<4>(q_now, k, now, ahead),
            3 => scores_of::<3>(q_now, k, now, ahead),
            2 => scores_of::<2>(q_now, k, now, ahead),
            _ => scores_of::<1>(q_now, k, now, ahead),
        }
        (q, out) = (q_later, later);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn scores_of<const N: usize>(
    q: &[f32],
    k: &[[f32; TILE]],
    out: &mut [[f32; TILE]],
    ahead: &mut Ahead<'_>,
) {
    let k_dim = k.len();
    assert!(q.len() == N * k_dim && out.len() == N);
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    let some = (k_dim / TILE).max(1);
    let mut d = 0;
    for chunk in k.chunks(some) {
        ahead.step();
        for column in chunk {
            // SAFETY: a column has two registers of numbers.
            let k = unsafe {
                let k = column.as_ptr();
                [_mm512_loadu_ps(k), _mm512_loadu_ps(k.add(LANES))]
            };
            for (i, [low, high]) in sums.iter_mut().enumerate() {
                // SAFETY: `i` is below `N` and `d` below `k_dim`: inside, as was asserted.
                let q = _mm512_set1_ps(unsafe { *q.get_unchecked(i * k_dim + d) });
                *low = _mm512_fmadd_ps(q, k[0], *low);
                *high = _mm512_fmadd_ps(q, k[1], *high);
            }
            d += 1;
        }
    }
    for (out, [low, high]) in out.iter_mut().zip(sums) {
        // SAFETY: an output has two registers of numbers.
        unsafe {
            _mm512_storeu_ps(out.as_mut_ptr(), low);
            _mm512_storeu_ps(out.as_mut_ptr().add(LANES), high);
        }
    }
}

/// Where the values of a tile are.
trait Values: Copy {
    /// Sixteen values of a cell from a column on, those that the mask names.
    ///
    /// # Safety
    /// The cell has them, and the features of [`accumulate`] are there.
    unsafe fn load(self, cell: usize, column: usize, mask: __mmask16) -> __m512;
}

/// `[TILE, v_dim]`.
#[derive(Clone, Copy)]
struct Decoded<'a> {
    values: &'a [f32],
    v_dim: usize,
}

impl Values for Decoded<'_> {
    #[inline(always)]
    unsafe fn load(self, cell: usize, column: usize, mask: __mmask16) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let from = self.values.as_ptr().add(cell * self.v_dim + column);
            _mm512_maskz_loadu_ps(mask, from)
        }
    }
}

/// `F16`, as it is stored.
#[derive(Clone, Copy)]
struct Halves<'a>(&'a [*const u8; TILE]);

impl Values for Halves<'_> {
    #[inline(always)]
    unsafe fn load(self, cell: usize, column: usize, mask: __mmask16) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let from = self.0.get_unchecked(cell).add(column * size_of::<u16>());
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast()))
        }
    }
}

/// As [`super::tile::TileKernels::accumulate`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn accumulate(
    out: &mut [f32],
    weights: &[[f32; TILE]],
    (cells, values): (Range<usize>, &[f32]),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    assert!(cells.end <= TILE && values.len() >= cells.end * v_dim);
    // SAFETY: each cell has its values, as was asserted.
    unsafe { accumulate_all(out, weights, (cells, Decoded { values, v_dim }), ahead) }
}

/// The same from `F16` values as they are stored.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn accumulate_f16(
    out: &mut [f32],
    weights: &[[f32; TILE]],
    (cells, (heads, tile)): (Range<usize>, (&Heads<'_>, &Tile)),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    assert!(cells.end <= TILE && heads.n_bytes >= v_dim * size_of::<u16>());
    let rows = rows_of(heads, tile);
    // SAFETY: each row has as many values as are asked for, as was asserted.
    unsafe { accumulate_all(out, weights, (cells, Halves(&rows)), ahead) }
}

/// Where the head of each cell of a tile begins.
#[inline]
pub(super) fn rows_of(heads: &Heads<'_>, tile: &Tile) -> [*const u8; TILE] {
    let mut rows = [std::ptr::null(); TILE];
    for (row, cell) in rows.iter_mut().zip(tile.cells()) {
        *row = heads.of(cell).as_ptr();
    }
    rows
}

/// Some queries at a time.
///
/// # Safety
/// There are at most [`TILE`] cells, and each has as many values as an output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn accumulate_all<V: Values>(
    mut out: &mut [f32],
    mut weights: &[[f32; TILE]],
    (cells, values): (Range<usize>, V),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    while !weights.is_empty() {
        let n = match weights.len() {
            left @ ROWS..=QUERIES => left,
            left => left.min(ROWS),
        };
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        let of_cells = (cells.clone(), values);
        // SAFETY: as the caller promises.
        unsafe {
            match n {
                8 => accumulate_of::<8, V>(out_now, now, of_cells, ahead),
                7 => accumulate_of::<7, V>(out_now, now, of_cells, ahead),
                6 => accumulate_of::<6, V>(out_now, now, of_cells, ahead),
                5 => accumulate_of::<5, V>(out_now, now, of_cells, ahead),
                4 => accumulate_of::<4, V>(out_now, now, of_cells, ahead),
                3 => accumulate_of::<3, V>(out_now, now, of_cells, ahead),
                2 => accumulate_of::<2, V>(out_now, now, of_cells, ahead),
                _ => accumulate_of::<1, V>(out_now, now, of_cells, ahead),
            }
        }
        (out, weights) = (out_later, later);
    }
}

/// # Safety
/// As for [`accumulate_all`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn accumulate_of<const N: usize, V: Values>(
    out: &mut [f32],
    weights: &[[f32; TILE]],
    (cells, values): (Range<usize>, V),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / N;
    // As many sums as there are registers for.
    let wide = if N > ROWS { WIDE / 2 } else { WIDE };
    for at in (0..v_dim).step_by(wide * LANES) {
        let of_cells = (cells.clone(), values);
        // SAFETY: as the caller promises.
        unsafe {
            match (v_dim - at).div_ceil(LANES).min(wide) {
                4.. => columns::<N, WIDE, V>((out, at), weights, of_cells, ahead),
                3 => columns::<N, 3, V>((out, at), weights, of_cells, ahead),
                2 => columns::<N, 2, V>((out, at), weights, of_cells, ahead),
                _ => columns::<N, 1, V>((out, at), weights, of_cells, ahead),
            }
        }
    }
}

/// `W` registers of columns from column `at` on, of which the last need not be full.
///
/// # Safety
/// As for [`accumulate_all`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn columns<const N: usize, const W: usize, V: Values>(
    (out, at): (&mut [f32], usize),
    weights: &[[f32; TILE]],
    (cells, values): (Range<usize>, V),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / N;
    assert!(weights.len() == N && at + (W - 1) * LANES < v_dim);
    let last = (v_dim - at - (W - 1) * LANES).min(LANES);
    let is_there = |w: usize| -> __mmask16 { if w + 1 < W { !0 } else { !0 >> (LANES - last) } };
    let mut sums = [[_mm512_setzero_ps(); W]; N];
    for (i, sums) in sums.iter_mut().enumerate() {
        for (w, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the columns that the mask names are in row `i` of the output.
            *sum = unsafe {
                let from = out.as_ptr().add(i * v_dim + at + w * LANES);
                _mm512_maskz_loadu_ps(is_there(w), from)
            };
        }
    }
    for cell in cells {
        ahead.step();
        let mut now = [_mm512_setzero_ps(); W];
        for (w, now) in now.iter_mut().enumerate() {
            // SAFETY: the cell has the columns that the mask names, as the caller promises.
            *now = unsafe { values.load(cell, at + w * LANES, is_there(w)) };
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `i` is below `N`, as was asserted, and the cell below `TILE`.
            let weight = _mm512_set1_ps(unsafe { *weights.get_unchecked(i).get_unchecked(cell) });
            for (sum, now) in sums.iter_mut().zip(now) {
                *sum = _mm512_fmadd_ps(weight, now, *sum);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            // SAFETY: as for loading.
            unsafe {
                let to = out.as_mut_ptr().add(i * v_dim + at + w * LANES);
                _mm512_mask_storeu_ps(to, is_there(w), *sum);
            }
        }
    }
}

/// `F16` keys as columns, eight values of 32 cells at a time, as 16-bit numbers: each register takes those
/// of four cells that are eight apart, so that turning squares of eight within its quarters leaves the
/// cells in order.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn f16_columns(heads: &Heads<'_>, tile: &Tile, k: &mut [[f32; TILE]]) {
    let rows = rows_of(heads, tile);
    assert!(heads.n_bytes >= k.len() * size_of::<u16>());
    for (piece, columns) in k.as_chunks_mut::<PIECE>().0.iter_mut().enumerate() {
        let at = piece * PIECE * size_of::<u16>();
        let mut eight = [_mm512_setzero_si512(); PIECE];
        for (row, eight) in eight.iter_mut().enumerate() {
            // SAFETY: the rows have as many values as there are columns, so these eight are inside.
            *eight = unsafe { quarters::<8>(&rows, row, at) };
        }
        for (column, halves) in columns.iter_mut().zip(turned(eight)) {
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
            let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves));
            // SAFETY: a column has two registers of numbers.
            unsafe {
                _mm512_storeu_ps(column.as_mut_ptr(), low);
                _mm512_storeu_ps(column.as_mut_ptr().add(LANES), high);
            }
        }
    }
}

/// The 16 bytes at `at` of four rows, `APART` from one to the next.
///
/// # Safety
/// The rows have them.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn quarters<const APART: usize>(
    rows: &[*const u8; TILE],
    first: usize,
    at: usize,
) -> __m512i {
    // SAFETY: as the caller promises.
    let [a, b, c, d] = unsafe {
        [
            _mm_loadu_si128(rows[first].add(at).cast()),
            _mm_loadu_si128(rows[first + APART].add(at).cast()),
            _mm_loadu_si128(rows[first + 2 * APART].add(at).cast()),
            _mm_loadu_si128(rows[first + 3 * APART].add(at).cast()),
        ]
    };
    let all = _mm512_castsi128_si512(a);
    let all = _mm512_mask_broadcast_i32x4(all, 0x00f0, b);
    let all = _mm512_mask_broadcast_i32x4(all, 0x0f00, c);
    _mm512_mask_broadcast_i32x4(all, 0xf000, d)
}

/// Squares of eight 16-bit numbers within the quarters of eight registers: rows become columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn turned(r: [__m512i; 8]) -> [__m512i; 8] {
    let mut twos = r;
    for i in [0, 2, 4, 6] {
        twos[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
    }
    let mut fours = twos;
    for (i, a) in [(0, 0), (2, 1), (4, 4), (6, 5)] {
        fours[i] = _mm512_unpacklo_epi32(twos[a], twos[a + 2]);
        fours[i + 1] = _mm512_unpackhi_epi32(twos[a], twos[a + 2]);
    }
    let mut eights = fours;
    for (i, a) in [(0, 0), (2, 1), (4, 2), (6, 3)] {
        eights[i] = _mm512_unpacklo_epi64(fours[a], fours[a + 4]);
        eights[i + 1] = _mm512_unpackhi_epi64(fours[a], fours[a + 4]);
    }
    eights
}
