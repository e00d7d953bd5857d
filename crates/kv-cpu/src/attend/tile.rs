//! The inner loops of attention over one tile of cells, in one text for every instruction set: the
//! compiler makes vector code of it for the features that a wrapper names. Only turning rows of keys
//! into columns is written by hand, and AVX-512 ([`super::avx512`](super)).
//!
//! Invariant: a score is summed over the dimensions in order, an output over the cells in order, in
//! one accumulator each, whichever instruction set and however many queries are taken at once; with
//! fused multiply-adds where there are any.

use std::ops::Range;

use super::walk::Ahead;
use super::weigh::{Weigh, weigh};
use crate::isa::Isa;

/// Columns of an output that are summed at once.
const WIDE: usize = 32;

/// Cells of one tile.
pub(crate) const TILE: usize = 32;

/// `scores[i][c] = Σ_d q[i][d] · k[d][c]`: `(q, k, scores)`; meanwhile the next tile is asked for.
type Scores = fn(&[f32], &[[f32; TILE]], &mut [[f32; TILE]], &mut Ahead<'_>);
/// `out[i][j] += Σ_c weights[i][c] · v[c][j]` over a range of cells: `(out, weights, (cells, v))`.
type Accumulate = fn(&mut [f32], &[[f32; TILE]], (Range<usize>, &[f32]), &mut Ahead<'_>);
/// `k[d][c] = rows[c - cells.start][d]` for a range of cells: `(rows, cells, k)`.
type Place = fn(&[f32], Range<usize>, &mut [[f32; TILE]]);

/// The loops for one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKernels {
    pub(crate) scores: Scores,
    pub(super) weigh: Weigh,
    pub(crate) accumulate: Accumulate,
    pub(crate) place: Place,
}

impl TileKernels {
    /// The loops for `isa`, which must be available.
    pub(crate) fn for_isa(isa: Isa) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni if isa.is_available() => x86::AVX2,
            #[cfg(target_arch = "x86_64")]
            _ if isa.is_avx512() && isa.is_available() => x86::AVX512,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm if isa.is_available() => arm::NEON,
            _ => Self {
                scores: scores::<PLAIN>,
                weigh: weigh::<PLAIN>,
                accumulate: accumulate::<PLAIN>,
                place,
            },
        }
    }
}

const PLAIN: u8 = 0;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FUSED: u8 = 1;

/// `a · b + c`, fused where `FUSED` is not [`PLAIN`]: without the instruction it would be a call.
#[inline(always)]
pub(super) fn multiply_add<const FUSED: u8>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED == PLAIN {
        a * b + c
    } else {
        a.mul_add(b, c)
    }
}

/// Two queries at once, so that a row of `k` is loaded once for both and as many sums are on their way
/// as the multipliers need.
#[inline(always)]
fn scores<const FUSED: u8>(
    mut q: &[f32],
    k: &[[f32; TILE]],
    mut scores: &mut [[f32; TILE]],
    ahead: &mut Ahead<'_>,
) {
    let k_dim = k.len();
    if k_dim == 0 {
        return scores.as_flattened_mut().fill(0.0);
    }
    while !scores.is_empty() {
        let n = scores.len().min(2);
        let (q_now, q_later) = q.split_at(n * k_dim);
        let (now, later) = scores.split_at_mut(n);
        match n {
            2 => scores_of::<FUSED, 2>(q_now, (k, ahead), now),
            _ => scores_of::<FUSED, 1>(q_now, (k, ahead), now),
        }
        (q, scores) = (q_later, later);
    }
}

#[inline(always)]
fn scores_of<const FUSED: u8, const N: usize>(
    q: &[f32],
    (k, ahead): (&[[f32; TILE]], &mut Ahead<'_>),
    out: &mut [[f32; TILE]],
) {
    let mut sums = [[0.0; TILE]; N];
    let k_dim = k.len();
    assert_eq!(q.len(), N * k_dim);
    let some = (k_dim / TILE).max(1);
    for (chunk, k) in k.chunks(some).enumerate() {
        ahead.step();
        for (d, k) in (chunk * some..).zip(k) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `i` is below `N` and `d` below `k_dim`: inside, as was asserted. (A check
                // here would take longer than the product.)
                let q = unsafe { *q.get_unchecked(i * k_dim + d) };
                for (s, &k) in sum.iter_mut().zip(k) {
                    *s = multiply_add::<FUSED>(q, k, *s);
                }
            }
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = sum;
    }
}

/// Two queries and [`WIDE`] columns at once.
#[inline(always)]
fn accumulate<const FUSED: u8>(
    mut out: &mut [f32],
    mut weights: &[[f32; TILE]],
    (cells, v): (Range<usize>, &[f32]),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    while !weights.is_empty() {
        let n = weights.len().min(2);
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        let cells = cells.clone();
        match n {
            2 => accumulate_of::<FUSED, 2>(out_now, (now, cells), v, ahead),
            _ => accumulate_of::<FUSED, 1>(out_now, (now, cells), v, ahead),
        }
        (out, weights) = (out_later, later);
    }
}

#[inline(always)]
fn accumulate_of<const FUSED: u8, const N: usize>(
    out: &mut [f32],
    (weights, cells): (&[[f32; TILE]], Range<usize>),
    v: &[f32],
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / N;
    let mut at = 0;
    while at + WIDE <= v_dim {
        columns::<FUSED, N, WIDE>((out, at), (weights, cells.clone()), v, ahead);
        at += WIDE;
    }
    while at + 16 <= v_dim {
        columns::<FUSED, N, 16>((out, at), (weights, cells.clone()), v, ahead);
        at += 16;
    }
    while at < v_dim {
        columns::<FUSED, N, 1>((out, at), (weights, cells.clone()), v, ahead);
        at += 1;
    }
}

/// `W` columns from column `at` on.
#[inline(always)]
fn columns<const FUSED: u8, const N: usize, const W: usize>(
    (out, at): (&mut [f32], usize),
    (weights, cells): (&[[f32; TILE]], Range<usize>),
    v: &[f32],
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / N;
    let mut sums = [[0.0; W]; N];
    for (i, sum) in sums.iter_mut().enumerate() {
        sum.copy_from_slice(&out[i * v_dim + at..][..W]);
    }
    for cell in cells {
        ahead.step();
        let v = &v[cell * v_dim + at..][..W];
        for (sum, weights) in sums.iter_mut().zip(weights) {
            let weight = weights[cell];
            for (s, &v) in sum.iter_mut().zip(v) {
                *s = multiply_add::<FUSED>(weight, v, *s);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        out[i * v_dim + at..][..W].copy_from_slice(sum);
    }
}

/// Rows of keys become columns, value by value.
fn place(rows: &[f32], cells: Range<usize>, k: &mut [[f32; TILE]]) {
    let k_dim = k.len();
    for (row, cell) in rows.chunks_exact(k_dim.max(1)).zip(cells) {
        for (places, value) in k.iter_mut().zip(row) {
            places[cell] = *value;
        }
    }
}

/// Squares of `N` cells and dimensions go through `square(rows, k_dim, columns, cell)`, what is
/// left over value by value.
#[inline(always)]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn squares<const N: usize>(
    rows: &[f32],
    cells: Range<usize>,
    k: &mut [[f32; TILE]],
    square: impl Fn(&[f32], usize, &mut [[f32; TILE]; N], usize),
) {
    let k_dim = k.len();
    if !cells.start.is_multiple_of(N) || !cells.len().is_multiple_of(N) || cells.end > TILE {
        return place(rows, cells, k);
    }
    let (squares, rest) = k.as_chunks_mut::<N>();
    let n_whole = squares.len() * N;
    for (c, cell) in cells.clone().step_by(N).enumerate() {
        let rows = &rows[c * N * k_dim..(c + 1) * N * k_dim];
        for (s, columns) in squares.iter_mut().enumerate() {
            square(&rows[s * N..], k_dim, columns, cell);
        }
    }
    for (row, cell) in rows.chunks_exact(k_dim.max(1)).zip(cells) {
        for (places, value) in rest.iter_mut().zip(&row[n_whole..]) {
            places[cell] = *value;
        }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
/// The loops compiled for some features.
macro_rules! with_features {
    ($table:ident, $features:literal, $place:ident) => {
        pub(super) const $table: TileKernels = {
            #[target_feature(enable = $features)]
            fn scores_inner(
                q: &[f32],
                k: &[[f32; TILE]],
                out: &mut [[f32; TILE]],
                ahead: &mut Ahead<'_>,
            ) {
                scores::<FUSED>(q, k, out, ahead);
            }
            #[target_feature(enable = $features)]
            fn accumulate_inner(
                out: &mut [f32],
                weights: &[[f32; TILE]],
                of_cells: (Range<usize>, &[f32]),
                ahead: &mut Ahead<'_>,
            ) {
                accumulate::<FUSED>(out, weights, of_cells, ahead);
            }
            #[target_feature(enable = $features)]
            fn weigh_inner(
                scores: &mut [[f32; TILE]],
                seen: u32,
                softmax: &mut [Softmax],
                keep: &mut [f32],
            ) {
                weigh::<FUSED>(scores, seen, softmax, keep);
            }
            TileKernels {
                // SAFETY: `for_isa` gives this table out only where the features are there.
                scores: |q, k, out, ahead| unsafe { scores_inner(q, k, out, ahead) },
                // SAFETY: as above.
                weigh: |scores, seen, softmax, keep| unsafe {
                    weigh_inner(scores, seen, softmax, keep)
                },
                // SAFETY: as above.
                accumulate: |out, w, cells, ahead| unsafe {
                    accumulate_inner(out, w, cells, ahead)
                },
                // SAFETY: as above.
                place: |rows, cells, k| unsafe { $place(rows, cells, k) },
            }
        };
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    use super::super::spans::Softmax;
    use super::super::{avx512, avx512_weigh};
    use super::{Ahead, FUSED, Range, TILE, TileKernels, accumulate, scores, squares, weigh};

    with_features!(AVX2, "avx2,fma", place_by_8);

    pub(super) const AVX512: TileKernels = {
        TileKernels {
            // SAFETY: `for_isa` gives this table out only where the features are there.
            scores: |q, k, out, ahead| unsafe { avx512::scores(q, k, out, ahead) },
            // SAFETY: as above.
            weigh: |scores, seen, softmax, keep| unsafe {
                avx512_weigh::weigh(scores, seen, softmax, keep)
            },
            // SAFETY: as above.
            accumulate: |out, w, cells, ahead| unsafe { avx512::accumulate(out, w, cells, ahead) },
            // SAFETY: as above.
            place: |rows, cells, k| unsafe { place_by_16(rows, cells, k) },
        }
    };

    #[target_feature(enable = "avx512f")]
    fn place_by_16(rows: &[f32], cells: Range<usize>, k: &mut [[f32; TILE]]) {
        squares::<16>(rows, cells, k, |rows, k_dim, columns, cell| {
            let row = |i: usize| {
                let values: &[f32] = &rows[i * k_dim..][..16];
                // SAFETY: 16 values are read from a slice of 16.
                unsafe { _mm512_loadu_ps(values.as_ptr()) }
            };
            let turned = turn_16(std::array::from_fn(row));
            for (column, values) in columns.iter_mut().zip(turned) {
                let to: &mut [f32] = &mut column[cell..][..16];
                // SAFETY: 16 values are written to a slice of 16.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) };
            }
        });
    }

    /// Rows become columns: pairs of values, then pairs of pairs within the four quarters of each
    /// register, then the quarters.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn turn_16(r: [__m512; 16]) -> [__m512; 16] {
        let pairs: [__m512; 16] = std::array::from_fn(|i| match i % 2 {
            0 => _mm512_unpacklo_ps(r[i], r[i + 1]),
            _ => _mm512_unpackhi_ps(r[i - 1], r[i]),
        });
        // Quarter `l` of `fours[4 * g + c]` is column `4 * l + c` of rows `4 * g ..`.
        let fours: [__m512; 16] = std::array::from_fn(|i| {
            let first = i / 4 * 4 + i % 4 / 2;
            let [a, b] = [pairs[first], pairs[first + 2]].map(|x| _mm512_castps_pd(x));
            _mm512_castpd_ps(match i % 2 {
                0 => _mm512_unpacklo_pd(a, b),
                _ => _mm512_unpackhi_pd(a, b),
            })
        });
        std::array::from_fn(|column| {
            let [a, b, c, d] = std::array::from_fn(|g| fours[4 * g + column % 4]);
            // Even quarters of two registers, or odd ones; of these the first or the second.
            let [ab, cd] = match column / 4 % 2 {
                0 => [
                    _mm512_shuffle_f32x4::<0x88>(a, b),
                    _mm512_shuffle_f32x4::<0x88>(c, d),
                ],
                _ => [
                    _mm512_shuffle_f32x4::<0xdd>(a, b),
                    _mm512_shuffle_f32x4::<0xdd>(c, d),
                ],
            };
            match column / 8 {
                0 => _mm512_shuffle_f32x4::<0x88>(ab, cd),
                _ => _mm512_shuffle_f32x4::<0xdd>(ab, cd),
            }
        })
    }

    #[target_feature(enable = "avx2")]
    fn place_by_8(rows: &[f32], cells: Range<usize>, k: &mut [[f32; TILE]]) {
        squares::<8>(rows, cells, k, |rows, k_dim, columns, cell| {
            let row = |i: usize| {
                let values: &[f32] = &rows[i * k_dim..][..8];
                // SAFETY: 8 values are read from a slice of 8.
                unsafe { _mm256_loadu_ps(values.as_ptr()) }
            };
            let turned = turn_8(std::array::from_fn(row));
            for (column, values) in columns.iter_mut().zip(turned) {
                let to: &mut [f32] = &mut column[cell..][..8];
                // SAFETY: 8 values are written to a slice of 8.
                unsafe { _mm256_storeu_ps(to.as_mut_ptr(), values) };
            }
        });
    }

    /// As [`turn_16`], with two halves instead of four quarters.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn turn_8(r: [__m256; 8]) -> [__m256; 8] {
        let pairs: [__m256; 8] = std::array::from_fn(|i| match i % 2 {
            0 => _mm256_unpacklo_ps(r[i], r[i + 1]),
            _ => _mm256_unpackhi_ps(r[i - 1], r[i]),
        });
        let fours: [__m256; 8] = std::array::from_fn(|i| {
            let first = i / 4 * 4 + i % 4 / 2;
            let [a, b] = [pairs[first], pairs[first + 2]].map(|x| _mm256_castps_pd(x));
            _mm256_castpd_ps(match i % 2 {
                0 => _mm256_unpacklo_pd(a, b),
                _ => _mm256_unpackhi_pd(a, b),
            })
        });
        std::array::from_fn(|column| {
            let (a, b) = (fours[column % 4], fours[4 + column % 4]);
            match column / 4 {
                0 => _mm256_permute2f128_ps::<0x20>(a, b),
                _ => _mm256_permute2f128_ps::<0x31>(a, b),
            }
        })
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::super::spans::Softmax;
    use super::{Ahead, FUSED, Range, TILE, TileKernels, accumulate, scores, squares, weigh};
    use crate::kernels::neon::transposed;

    with_features!(NEON, "neon", place_by_8);

    #[target_feature(enable = "neon")]
    fn place_by_8(rows: &[f32], cells: Range<usize>, k: &mut [[f32; TILE]]) {
        squares::<8>(rows, cells, k, |rows, k_dim, columns, cell| {
            let mut square = [[0.0; 8]; 8];
            for (i, row) in square.iter_mut().enumerate() {
                row.copy_from_slice(&rows[i * k_dim..][..8]);
            }
            for (column, values) in columns.iter_mut().zip(transposed(&square)) {
                column[cell..][..8].copy_from_slice(&values);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::decode::Heads;
    use super::super::walk::Tile;
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
    }

    #[test]
    fn keys_are_placed_as_by_plain_code() {
        for (k_dim, cells) in [
            (64, 0..32),
            (64, 16..32),
            (80, 0..16),
            (20, 8..24),
            (5, 0..32),
            (16, 3..17),
            (256, 8..16),
        ] {
            let rows = wave(cells.len() * k_dim);
            let mut wanted = vec![[7.0; TILE]; k_dim];
            place(&rows, cells.clone(), &mut wanted);
            for isa in Isa::all_available() {
                let mut got = vec![[7.0; TILE]; k_dim];
                (TileKernels::for_isa(isa).place)(&rows, cells.clone(), &mut got);
                assert_eq!(got, wanted, "{isa}: {k_dim} values of cells {cells:?}");
            }
        }
    }

    /// A query's scores and outputs do not depend on how many others are taken beside it, nor on which
    /// instruction set with fused multiply-adds there is.
    #[test]
    fn queries_at_once_give_the_bits_of_one_alone() {
        let (k_dim, v_dim) = (40, 88);
        let k: Vec<[f32; TILE]> = wave(k_dim * TILE).as_chunks().0.to_vec();
        let v = wave(TILE * v_dim);
        let (none, nothing) = (Tile::default(), [Heads::default(); 2]);
        let mut ahead = Ahead::new(&none, &nothing);
        let mut of_fused: Option<(Vec<[f32; TILE]>, Vec<f32>)> = None;
        for isa in Isa::all_available() {
            let kernels = TileKernels::for_isa(isa);
            for n in 1..=21 {
                let q = wave(n * k_dim);
                let mut all = vec![[0.0; TILE]; n];
                (kernels.scores)(&q, &k, &mut all, &mut ahead);
                let mut out = wave(n * v_dim);
                (kernels.accumulate)(&mut out, &all, (3..29, &v), &mut ahead);
                for (i, (q, scores)) in q.chunks(k_dim).zip(&all).enumerate() {
                    let mut alone = [[0.0; TILE]];
                    (kernels.scores)(q, &k, &mut alone, &mut ahead);
                    assert_eq!(alone[0], *scores, "{isa}: query {i} of {n}");
                    let mut own = wave(n * v_dim)[i * v_dim..][..v_dim].to_vec();
                    (kernels.accumulate)(&mut own, &alone, (3..29, &v), &mut ahead);
                    assert_eq!(own, out[i * v_dim..][..v_dim], "{isa}: query {i} of {n}");
                }
                if n == 21 && isa != Isa::Scalar {
                    let wanted = of_fused.get_or_insert_with(|| (all.clone(), out.clone()));
                    assert_eq!((&all, &out), (&wanted.0, &wanted.1), "{isa}");
                }
            }
        }
    }
}
