//! Weights without a scale (`F32`, `F16`, `BF16`) against `f32` activations, in `f32`, in one text for
//! every instruction set.
//!
//! Invariant: each output has one register of sums, filled from the first column to the last, however
//! many rows and tokens are multiplied beside it. Knows no quantised format.

use std::ops::Range;

use kv_core::block::BlockFormat;

use super::WeightRows;
use super::ahead::{Ahead, ask_next_tile};
use super::fetch::{Level, fetch_line};
use crate::output::OutputColumns;

/// The longest register, in columns.
const MOST_LANES: usize = 16;
/// Bytes that are asked for at a time.
const LINE: usize = 64;
/// Tokens that are multiplied together.
const TOKENS: usize = 4;
/// Weight rows that are multiplied with one token: as many sums as hide the time of an addition.
const ROWS_ALONE: usize = 4;

/// Registers of `LANES` columns.
///
/// All functions need the instruction set that the type stands for, which is what makes them
/// unsafe to call; loads need `LANES` readable numbers.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(super) trait Columns {
    /// `f32`.
    type Float: Copy;
    /// At most [`MOST_LANES`].
    const LANES: usize;

    unsafe fn zero() -> Self::Float;
    unsafe fn load(from: *const f32) -> Self::Float;
    unsafe fn load_f16(from: *const u8) -> Self::Float;
    unsafe fn load_bf16(from: *const u8) -> Self::Float;
    /// `a · b + c`, rounded once.
    unsafe fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// Of all lanes.
    unsafe fn sum(x: Self::Float) -> f32;
    /// The same of several registers, with the same additions.
    #[inline(always)]
    unsafe fn sums<const N: usize>(x: [Self::Float; N]) -> [f32; N] {
        // Not `map`: its closure would not have the features of the caller.
        let mut sums = [0.0; N];
        for (sum, x) in sums.iter_mut().zip(x) {
            // SAFETY: as the caller promises.
            *sum = unsafe { Self::sum(x) };
        }
        sums
    }
}

/// How weights become `f32`.
trait Stored {
    const BYTES: usize;

    /// A register of weights.
    ///
    /// # Safety
    /// The instruction set is available, and the weights can be read.
    unsafe fn load<C: Columns>(from: *const u8) -> C::Float;
}

/// A way of storing weights, from the function that loads them.
macro_rules! stored {
    ($name:ident: $bytes:literal bytes, $load:ident) => {
        struct $name;

        impl Stored for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load<C: Columns>(from: *const u8) -> C::Float {
                // SAFETY: as the caller promises.
                unsafe { C::$load(from.cast()) }
            }
        }
    };
}

stored!(F32: 4 bytes, load);
stored!(F16: 2 bytes, load_f16);
stored!(Bf16: 2 bytes, load_bf16);

/// The last numbers of a row, with zeros behind them.
///
/// # Safety
/// The instruction set is available, and `n` numbers (at most a register) can be read.
#[inline(always)]
unsafe fn load_rest<C: Columns, S: Stored>(from: *const u8, n: usize) -> C::Float {
    let mut bytes = [0; 4 * MOST_LANES];
    // SAFETY: the caller promises `n` readable numbers; the copy has room for a register.
    unsafe {
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), n.min(C::LANES) * S::BYTES);
        S::load::<C>(bytes.as_ptr())
    }
}

/// All weight rows against some tokens, `ROWS` and [`TOKENS`] at a time: as many sums as there are
/// registers for.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub(super) unsafe fn multiply<C: Columns, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    // SAFETY: as the caller promises.
    unsafe {
        match weights.format {
            BlockFormat::F32 => each::<C, F32, ROWS>(weights, acts, tokens, out),
            BlockFormat::F16 => each::<C, F16, ROWS>(weights, acts, tokens, out),
            BlockFormat::BF16 => each::<C, Bf16, ROWS>(weights, acts, tokens, out),
            // `Matrix` gives other formats int8 activations.
            other => debug_assert!(false, "{other} against f32 activations"),
        }
    }
}

/// Tokens in tiles of [`TOKENS`], rows in tiles of `ROWS`, then what is left.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn each<C: Columns, S: Stored, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let inside = weights.row_bytes == n * S::BYTES && tokens.end * n <= acts.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    for token in tokens.clone().step_by(TOKENS) {
        // SAFETY: these tokens exist, as was checked above; the caller promises the instruction set.
        unsafe {
            match tokens.end - token {
                1 => rows::<C, S, 1, ROWS_ALONE>(weights, acts, token, out),
                2 => rows::<C, S, 2, ROWS>(weights, acts, token, out),
                3 => rows::<C, S, 3, ROWS>(weights, acts, token, out),
                _ => rows::<C, S, TOKENS, ROWS>(weights, acts, token, out),
            }
        }
    }
}

/// All rows against `T` tokens, `R` rows at a time; what is left of a piece is taken in pairs, so that
/// sums need not wait for one another.
///
/// # Safety
/// The tokens exist; the instruction set is available.
#[inline(always)]
unsafe fn rows<C: Columns, S: Stored, const T: usize, const R: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    token: usize,
    out: &mut OutputColumns<'_>,
) {
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let mut row = 0;
    while row < n_rows {
        // SAFETY: these rows exist; the rest as the caller promises.
        row += unsafe {
            match n_rows - row {
                left if left >= R => tile::<C, S, T, R>(weights, acts, (row, token), out),
                2.. => tile::<C, S, T, 2>(weights, acts, (row, token), out),
                _ => tile::<C, S, T, 1>(weights, acts, (row, token), out),
            }
        };
    }
}

/// `R` rows against `T` tokens, from the given ones on; gives the number of rows.
///
/// # Safety
/// They exist; the instruction set is available.
#[inline(always)]
unsafe fn tile<C: Columns, S: Stored, const T: usize, const R: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    (row, token): (usize, usize),
    out: &mut OutputColumns<'_>,
) -> usize {
    let n = weights.n_columns;
    let whole = n / C::LANES * C::LANES;
    // SAFETY: these columns of these rows and tokens exist.
    unsafe {
        let w = weights.bytes.as_ptr().add(row * weights.row_bytes);
        let a = acts.as_ptr().add(token * n);
        let mut acc = [[C::zero(); R]; T];
        let level = Level::of_streams();
        let first = weights.first + row;
        let to = out.block(token..token + T, first..first + R);
        if let Some((to, stride)) = to
            && T > 1
        {
            // They are far apart, and seldom near.
            for t in 0..T {
                fetch_line(to.wrapping_add(t * stride).cast());
            }
        }
        for column in (0..whole).step_by(C::LANES) {
            let at = column * S::BYTES;
            let ahead = Ahead::of::<R>(at, LINE, weights.row_bytes);
            let mut x = [C::zero(); R];
            for (r, x) in x.iter_mut().enumerate() {
                let from = w.add(r * weights.row_bytes + at);
                if T == 1 && at.is_multiple_of(LINE) {
                    match level {
                        Level::First => ahead.fetch(from, r),
                        Level::Second => ask_next_tile::<R>(w, (at, r), weights.row_bytes),
                    }
                }
                *x = S::load::<C>(from);
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = C::load(a.add(t * n + column));
                for (acc, x) in acc.iter_mut().zip(x) {
                    *acc = C::mul_add(x, a, *acc);
                }
            }
        }
        if whole < n {
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = load_rest::<C, F32>(a.add(t * n + whole).cast(), n - whole);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let from = w.add(r * weights.row_bytes + whole * S::BYTES);
                    *acc = C::mul_add(load_rest::<C, S>(from, n - whole), a, *acc);
                }
            }
        }
        let Some((to, stride)) = to else {
            return R;
        };
        if T == 1 {
            for (r, sum) in C::sums(acc[0]).into_iter().enumerate() {
                *to.add(r) = sum;
            }
            return R;
        }
        for r in 0..R {
            let mut of_row = [C::zero(); T];
            for (of_row, acc) in of_row.iter_mut().zip(&acc) {
                *of_row = acc[r];
            }
            for (t, sum) in C::sums(of_row).into_iter().enumerate() {
                *to.add(t * stride + r) = sum;
            }
        }
    }
    R
}
