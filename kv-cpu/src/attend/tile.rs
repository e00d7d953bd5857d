//! The two inner loops of attention over one tile of cells, in one text for every instruction set:
//! the compiler makes vector code of it for the features that a wrapper names.
//!
//! Invariant: a score is summed over the dimensions in order, an output over the cells in order, in
//! one accumulator each, whichever instruction set; with fused multiply-adds where it has them.

use std::ops::Range;

use crate::isa::Isa;

/// Cells of one tile.
pub(crate) const TILE: usize = 32;

/// `scores[i][c] = Σ_d q[i][d] · k[d][c]`: `(q, k, scores)`.
type Scores = fn(&[f32], &[[f32; TILE]], &mut [[f32; TILE]]);
/// `out[j] += Σ_c weights[c] · v[c][j]` over a range of cells: `(out, weights, cells, v)`.
type Accumulate = fn(&mut [f32], &[f32; TILE], Range<usize>, &[f32]);

/// The loops for one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKernels {
    pub(crate) scores: Scores,
    pub(crate) accumulate: Accumulate,
}

impl TileKernels {
    /// The loops for `isa`, which must be available.
    pub(crate) fn for_isa(isa: Isa) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if isa.is_available() => x86::AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni if isa.is_available() => x86::AVX512,
            _ => Self {
                scores: scores::<PLAIN>,
                accumulate: accumulate::<PLAIN>,
            },
        }
    }
}

const PLAIN: u8 = 0;

/// `a · b + c`, fused where `FUSED` is not [`PLAIN`]: without the instruction it would be a call.
#[inline(always)]
fn multiply_add<const FUSED: u8>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED == PLAIN {
        a * b + c
    } else {
        a.mul_add(b, c)
    }
}

#[inline(always)]
fn scores<const FUSED: u8>(q: &[f32], k: &[[f32; TILE]], scores: &mut [[f32; TILE]]) {
    let k_dim = k.len();
    if k_dim == 0 {
        return scores.as_flattened_mut().fill(0.0);
    }
    let (q4, q1) = q.split_at(q.len() / (4 * k_dim) * 4 * k_dim);
    let (s4, s1) = scores.as_chunks_mut::<4>();
    for (q, s) in q4.chunks_exact(4 * k_dim).zip(s4) {
        scores_of::<FUSED, 4>(q, k, s);
    }
    for (q, s) in q1.chunks_exact(k_dim).zip(s1) {
        scores_of::<FUSED, 1>(q, k, std::array::from_mut(s));
    }
}

/// `N` query vectors at once, so that a row of `k` is loaded once for all.
#[inline(always)]
fn scores_of<const FUSED: u8, const N: usize>(
    q: &[f32],
    k: &[[f32; TILE]],
    out: &mut [[f32; TILE]; N],
) {
    let mut sums = [[0.0; TILE]; N];
    for (d, k) in k.iter().enumerate() {
        for (i, sum) in sums.iter_mut().enumerate() {
            let q = q[i * (q.len() / N) + d];
            for (s, &k) in sum.iter_mut().zip(k) {
                *s = multiply_add::<FUSED>(q, k, *s);
            }
        }
    }
    *out = sums;
}

#[inline(always)]
fn accumulate<const FUSED: u8>(
    out: &mut [f32],
    weights: &[f32; TILE],
    cells: Range<usize>,
    v: &[f32],
) {
    let v_dim = out.len();
    let (wide, narrow) = out.as_chunks_mut::<64>();
    let n_wide = wide.len() * 64;
    for (at, out) in wide.iter_mut().enumerate() {
        accumulate_columns::<FUSED, 64>(out, (weights, cells.clone()), &v[at * 64..], v_dim);
    }
    let (chunks, rest) = narrow.as_chunks_mut::<16>();
    let n_chunked = n_wide + chunks.len() * 16;
    for (at, out) in chunks.iter_mut().enumerate() {
        let v = &v[n_wide + at * 16..];
        accumulate_columns::<FUSED, 16>(out, (weights, cells.clone()), v, v_dim);
    }
    for (j, out) in rest.iter_mut().enumerate() {
        for cell in cells.clone() {
            let v = v[cell * v_dim + n_chunked + j];
            *out = multiply_add::<FUSED>(weights[cell], v, *out);
        }
    }
}

#[inline(always)]
fn accumulate_columns<const FUSED: u8, const N: usize>(
    out: &mut [f32; N],
    (weights, cells): (&[f32; TILE], Range<usize>),
    v: &[f32],
    v_dim: usize,
) {
    let mut sums = *out;
    for cell in cells {
        let weight = weights[cell];
        for (s, &v) in sums.iter_mut().zip(&v[cell * v_dim..][..N]) {
            *s = multiply_add::<FUSED>(weight, v, *s);
        }
    }
    *out = sums;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Range, TILE, TileKernels, accumulate, scores};

    const FUSED: u8 = 1;

    macro_rules! with_features {
        ($table:ident, $features:literal) => {
            pub(super) const $table: TileKernels = {
                #[target_feature(enable = $features)]
                fn scores_inner(q: &[f32], k: &[[f32; TILE]], out: &mut [[f32; TILE]]) {
                    scores::<FUSED>(q, k, out);
                }
                #[target_feature(enable = $features)]
                fn accumulate_inner(
                    out: &mut [f32],
                    weights: &[f32; TILE],
                    cells: Range<usize>,
                    v: &[f32],
                ) {
                    accumulate::<FUSED>(out, weights, cells, v);
                }
                TileKernels {
                    // SAFETY: `for_isa` gives this table out only where the features are there.
                    scores: |q, k, out| unsafe { scores_inner(q, k, out) },
                    // SAFETY: as above.
                    accumulate: |out, w, cells, v| unsafe { accumulate_inner(out, w, cells, v) },
                }
            };
        };
    }

    with_features!(AVX2, "avx2,fma");
    with_features!(AVX512, "avx512f,avx512vl,fma");
}
