//! Weights without a scale (`F32`, `F16`, `BF16`) against `f32` activations, in `f32`.
//!
//! Invariant: each output has one register of sixteen sums, filled from the first column to the last,
//! however many rows and tokens are multiplied beside it. Knows no quantised format.

use std::arch::x86_64::*;
use std::ops::Range;

use kv_core::block::BlockFormat;

use crate::kernels::WeightRows;
use crate::kernels::ahead::RowsAhead;
use crate::output::OutputColumns;

/// Columns of a register.
const LANES: usize = 16;
/// Weight rows that are multiplied together.
const ROWS: usize = 6;
/// Tokens that are multiplied together.
const TOKENS: usize = 4;
/// Weight rows that are multiplied with one token: as many sums as hide the time of an addition.
const ROWS_ALONE: usize = 4;

/// How sixteen weights become `f32`.
trait Stored {
    const BYTES: usize;

    /// Sixteen weights.
    ///
    /// # Safety
    /// AVX-512 is available, and the weights can be read.
    unsafe fn load(from: *const u8) -> __m512;
}

/// A way of storing weights, from the expression that loads them.
macro_rules! stored {
    ($name:ident: $bytes:literal bytes, $load:expr) => {
        struct $name;

        impl Stored for $name {
            const BYTES: usize = $bytes;

            #[inline]
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
            unsafe fn load(from: *const u8) -> __m512 {
                // SAFETY: as the caller promises; the load needs no alignment.
                unsafe { $load(from) }
            }
        }
    };
}

stored!(F32: 4 bytes, |from: *const u8| _mm512_loadu_ps(from.cast()));
stored!(F16: 2 bytes, |from: *const u8| _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
stored!(Bf16: 2 bytes, |from: *const u8| {
    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
});

/// The last weights of a row, with zeros behind them.
///
/// # Safety
/// AVX-512 is available, and `n` weights (at most sixteen) can be read.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
unsafe fn load_rest<S: Stored>(from: *const u8, n: usize) -> __m512 {
    let mut bytes = [0; 4 * LANES];
    // SAFETY: the caller promises `n` readable weights; the copy has room for sixteen.
    unsafe {
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), n.min(LANES) * S::BYTES);
        S::load(bytes.as_ptr())
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn multiply(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match weights.format {
        BlockFormat::F32 => each::<F32>(weights, acts, tokens, out),
        BlockFormat::F16 => each::<F16>(weights, acts, tokens, out),
        BlockFormat::BF16 => each::<Bf16>(weights, acts, tokens, out),
        // `Matrix` gives other formats int8 activations.
        other => debug_assert!(false, "{other} against f32 activations"),
    }
}

/// Tokens in tiles of [`TOKENS`], rows in tiles of [`ROWS`], then what is left.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn each<S: Stored>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let inside = weights.row_bytes == n * S::BYTES && tokens.end * n <= acts.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    let mut token = tokens.start;
    while token < tokens.end {
        let left = tokens.end - token;
        let mut row = 0;
        while row < n_rows {
            let rows = if left == 1 { ROWS_ALONE } else { ROWS };
            let whole = n_rows - row >= rows;
            let at = (row, token);
            // SAFETY: these rows and tokens exist, as was checked above and here.
            unsafe {
                match (whole, left) {
                    (true, TOKENS..) => tile::<S, TOKENS, ROWS>(weights, acts, at, out),
                    (true, 3) => tile::<S, 3, ROWS>(weights, acts, at, out),
                    (true, 2) => tile::<S, 2, ROWS>(weights, acts, at, out),
                    (true, _) => tile::<S, 1, ROWS_ALONE>(weights, acts, at, out),
                    (false, TOKENS..) => tile::<S, TOKENS, 1>(weights, acts, at, out),
                    (false, 3) => tile::<S, 3, 1>(weights, acts, at, out),
                    (false, 2) => tile::<S, 2, 1>(weights, acts, at, out),
                    (false, _) => tile::<S, 1, 1>(weights, acts, at, out),
                }
            }
            row += if whole { rows } else { 1 };
        }
        token += left.min(TOKENS);
    }
}

/// `R` rows against `T` tokens, from the given ones on.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile<S: Stored, const T: usize, const R: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    (row, token): (usize, usize),
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let mut acc = [[_mm512_setzero_ps(); R]; T];
    // SAFETY: the first row and the first token exist.
    let (w, a) = unsafe {
        let w = weights.bytes.as_ptr().add(row * weights.row_bytes);
        (w, acts.as_ptr().add(token * n))
    };
    let whole = n / LANES * LANES;
    let ahead = RowsAhead::new(R, weights.row_bytes);
    for column in (0..whole).step_by(LANES) {
        // SAFETY: these columns of these rows and tokens exist.
        unsafe {
            let mut x = [_mm512_setzero_ps(); R];
            for (r, x) in x.iter_mut().enumerate() {
                let from = w.add(r * weights.row_bytes + column * S::BYTES);
                // Once for each line.
                if T == 1 && (column * S::BYTES).is_multiple_of(64) {
                    ahead.fetch_line(from, column * S::BYTES);
                }
                *x = S::load(from);
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = _mm512_loadu_ps(a.add(t * n + column));
                for (acc, x) in acc.iter_mut().zip(x) {
                    *acc = _mm512_fmadd_ps(x, a, *acc);
                }
            }
        }
    }
    if whole < n {
        let mask = (1 << (n - whole)) - 1;
        for (t, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the lanes in `mask` are values of token `token + t`, which exists.
            let a = unsafe { _mm512_maskz_loadu_ps(mask, a.add(t * n + whole)) };
            for (r, acc) in acc.iter_mut().enumerate() {
                // SAFETY: row `row + r` has `n` columns.
                let x = unsafe {
                    let from = w.add(r * weights.row_bytes + whole * S::BYTES);
                    load_rest::<S>(from, n - whole)
                };
                *acc = _mm512_fmadd_ps(x, a, *acc);
            }
        }
    }
    for (t, acc) in acc.into_iter().enumerate() {
        for (r, acc) in acc.into_iter().enumerate() {
            out.set(
                token + t,
                weights.first + row + r,
                _mm512_reduce_add_ps(acc),
            );
        }
    }
}
