//! Weights without a scale (`F32`, `F16`, `BF16`) against activations without one, summed in `f32`, in one text
//! for every instruction set.
//!
//! Invariant: each output has one register of sums, filled from the first column to the last, however
//! many rows and tokens are multiplied beside it. Knows no quantised format.

use std::ops::Range;

use kv_core::block::BlockFormat;

use super::WeightRows;
use super::ahead::{Ahead, ask_next_tile};
use super::fetch::{Level, fetch_line};
use crate::output::OutputColumns;

/// Bytes of the longest register.
const MOST_BYTES: usize = 64;
/// Bytes that are asked for at a time.
const LINE: usize = 64;
/// Tokens that are multiplied together.
const TOKENS: usize = 4;
/// Bytes of the activations that some weight rows meet before the next ones do: they stay in the second-level cache.
const NEAR: usize = 128 * 1024;
/// Weight rows that are multiplied with one token: as many sums as hide the time of an addition.
const ROWS_ALONE: usize = 4;

/// Registers of `LANES` columns.
///
/// All functions need the instruction set that the type stands for, which is what makes them
/// unsafe to call; loads need `LANES` readable numbers.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(super) trait Columns {
    /// A register: of sums in `f32`, or of what products take.
    type Float: Copy;
    /// An activation.
    type Act: Copy;
    /// At most [`MOST_BYTES`] of activations.
    const LANES: usize;

    unsafe fn zero() -> Self::Float;
    unsafe fn load(from: *const Self::Act) -> Self::Float;
    unsafe fn load_bf16(from: *const u8) -> Self::Float;
    /// `acc` and the products of weights and activations.
    unsafe fn mul_add(weights: Self::Float, acts: Self::Float, acc: Self::Float) -> Self::Float;
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

/// Those that multiply `f32`, `a · b + c` rounded once.
#[allow(clippy::missing_safety_doc)] // as above
pub(super) trait FloatColumns: Columns<Act = f32> {
    unsafe fn load_f16(from: *const u8) -> Self::Float;
}

/// How weights are stored.
trait Stored<C: Columns> {
    const BYTES: usize;

    /// A register of weights.
    ///
    /// # Safety
    /// The instruction set is available, and the weights can be read.
    unsafe fn load(from: *const u8) -> C::Float;
}

/// A way of storing weights, from the function that loads them.
macro_rules! stored {
    ($name:ident: $bytes:literal bytes in $columns:path, $load:ident) => {
        struct $name;

        impl<C: $columns> Stored<C> for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load(from: *const u8) -> C::Float {
                // SAFETY: as the caller promises.
                unsafe { C::$load(from.cast()) }
            }
        }
    };
}

stored!(F32: 4 bytes in FloatColumns, load);
stored!(F16: 2 bytes in FloatColumns, load_f16);
stored!(Bf16: 2 bytes in Columns, load_bf16);

/// The last weights of a row, with zeros behind them.
///
/// # Safety
/// The instruction set is available, and `n` weights (at most a register) can be read.
#[inline(always)]
unsafe fn load_rest<C: Columns, S: Stored<C>>(from: *const u8, n: usize) -> C::Float {
    let mut bytes = [0; MOST_BYTES];
    // SAFETY: the caller promises `n` readable numbers; the copy has room for a register.
    unsafe {
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), n.min(C::LANES) * S::BYTES);
        S::load(bytes.as_ptr())
    }
}

/// The same of activations.
///
/// # Safety
/// As for [`load_rest`].
#[inline(always)]
unsafe fn load_rest_of_acts<C: Columns>(from: *const C::Act, n: usize) -> C::Float {
    let n_bytes = n.min(C::LANES) * size_of::<C::Act>();
    let mut bytes = [0; MOST_BYTES];
    // SAFETY: as above; loads need no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), bytes.as_mut_ptr(), n_bytes);
        C::load(bytes.as_ptr().cast())
    }
}

/// Rows of activations, and how far one begins after the other.
type Acts<'a, C> = (&'a [<C as Columns>::Act], usize);

/// All weight rows against some tokens of `f32`, `ROWS` and [`TOKENS`] at a time: as many sums as there are
/// registers for.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub(super) unsafe fn multiply<C: FloatColumns, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let acts = (acts, weights.n_columns);
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

/// All weight rows of BF16 against some tokens, `ROWS` and [`TOKENS`] at a time.
///
/// # Safety
/// The instruction set is available.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn multiply_bf16<C: Columns, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: Acts<'_, C>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let is_bf16 = weights.format == BlockFormat::BF16;
    // `Matrix` gives other formats other activations.
    debug_assert!(is_bf16);
    if is_bf16 {
        // SAFETY: as the caller promises.
        unsafe { each::<C, Bf16, ROWS>(weights, acts, tokens, out) }
    }
}

/// Rows in tiles of `ROWS`, then what is left, for as many tokens as stay near meanwhile.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn each<C: Columns, S: Stored<C>, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: Acts<'_, C>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let (values, stride) = acts;
    let inside =
        weights.row_bytes == n * S::BYTES && n <= stride && tokens.end * stride <= values.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let near = NEAR / (stride * size_of::<C::Act>()).max(1);
    let near = (near / TOKENS).max(1) * TOKENS;
    for start in tokens.clone().step_by(near) {
        let some = start..tokens.end.min(start + near);
        let rows_at_once = if some.len() == 1 { ROWS_ALONE } else { ROWS };
        let mut row = 0;
        while row < n_rows {
            let left = n_rows - row;
            // What is left of a piece is taken in pairs, so that sums need not wait for one another.
            let n = if left < rows_at_once {
                left.min(2)
            } else {
                rows_at_once
            };
            // SAFETY: these rows and tokens exist; the caller promises the instruction set.
            unsafe {
                match n {
                    1 => tiles::<C, S, 1>(weights, acts, (row, some.clone()), out),
                    2 => tiles::<C, S, 2>(weights, acts, (row, some.clone()), out),
                    _ if some.len() == 1 => {
                        tile::<C, S, 1, ROWS_ALONE, true>(weights, acts, (row, start), out);
                    }
                    _ => tiles::<C, S, ROWS>(weights, acts, (row, some.clone()), out),
                }
            }
            row += n;
        }
    }
}

/// `R` rows against some tokens, [`TOKENS`] at a time.
///
/// # Safety
/// They exist; the instruction set is available.
#[inline(always)]
unsafe fn tiles<C: Columns, S: Stored<C>, const R: usize>(
    weights: &WeightRows<'_>,
    acts: Acts<'_, C>,
    (row, tokens): (usize, Range<usize>),
    out: &mut OutputColumns<'_>,
) {
    for token in tokens.clone().step_by(TOKENS) {
        let at = (row, token);
        // SAFETY: as the caller promises.
        unsafe {
            match tokens.end - token {
                1 => tile::<C, S, 1, R, true>(weights, acts, at, out),
                2 => tile::<C, S, 2, R, true>(weights, acts, at, out),
                3 => tile::<C, S, 3, R, true>(weights, acts, at, out),
                _ if token == tokens.start => tile::<C, S, TOKENS, R, true>(weights, acts, at, out),
                // The first ones have asked for what comes next.
                _ => tile::<C, S, TOKENS, R, false>(weights, acts, at, out),
            }
        }
    }
}

/// `R` rows against `T` tokens, from the given ones on, which may ask for the next rows.
///
/// # Safety
/// They exist; the instruction set is available.
#[inline(always)]
unsafe fn tile<C: Columns, S: Stored<C>, const T: usize, const R: usize, const ASKS: bool>(
    weights: &WeightRows<'_>,
    (acts, stride_of_acts): Acts<'_, C>,
    (row, token): (usize, usize),
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let whole = n / C::LANES * C::LANES;
    // SAFETY: these columns of these rows and tokens exist.
    unsafe {
        let w = weights.bytes.as_ptr().add(row * weights.row_bytes);
        let a = acts.as_ptr().add(token * stride_of_acts);
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
            let mut x = [C::zero(); R];
            for (r, x) in x.iter_mut().enumerate() {
                let from = w.add(r * weights.row_bytes + at);
                if ASKS && at.is_multiple_of(LINE) {
                    match level {
                        Level::First => {
                            Ahead::of::<R>(at, LINE, weights.row_bytes).fetch(from, r);
                        }
                        Level::Second => ask_next_tile::<R>(w, (at, r), weights.row_bytes),
                    }
                }
                *x = S::load(from);
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = C::load(a.add(t * stride_of_acts + column));
                for (acc, x) in acc.iter_mut().zip(x) {
                    *acc = C::mul_add(x, a, *acc);
                }
            }
        }
        if whole < n {
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = load_rest_of_acts::<C>(a.add(t * stride_of_acts + whole), n - whole);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let from = w.add(r * weights.row_bytes + whole * S::BYTES);
                    *acc = C::mul_add(load_rest::<C, S>(from, n - whole), a, *acc);
                }
            }
        }
        let Some((to, stride)) = to else {
            return;
        };
        if T == 1 {
            for (r, sum) in C::sums(acc[0]).into_iter().enumerate() {
                *to.add(r) = sum;
            }
            return;
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
}
