//! GEMV and GEMM on unquantized weights (`F32`, `F16`, `BF16`), in one text for all instruction
//! sets.
//!
//! Invariant: each output has one register of sums, which takes the columns from first to last,
//! whatever other rows and tokens are multiplied with it. Knows no quantized format.

use std::ops::Range;

use kv_block::BlockFormat;

use super::WeightRows;
use super::prefetch::{CacheLevel, Prefetcher, prefetch_l1, prefetch_next_tile};
use crate::output::OutputColumns;

/// Bytes of the longest register.
const MAX_REGISTER_BYTES: usize = 64;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Tokens that are multiplied together.
const TILE_TOKENS: usize = 4;
/// Bytes of activations that a tile of weight rows is multiplied with before the next rows: they
/// stay in the second-level cache.
const MAX_NEAR_BYTES: usize = 128 * 1024;
/// Weight rows of a GEMV tile: enough sums to hide the latency of an addition.
const GEMV_ROWS: usize = 4;

/// Registers of `LANES` columns.
///
/// All functions need the instruction set that the type stands for, which is what makes them
/// unsafe to call; loads need `LANES` readable numbers.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(super) trait FloatIsa {
    /// A register: of sums in `f32`, or of what products take.
    type Float: Copy;
    /// An activation.
    type Act: Copy;
    /// At most [`MAX_REGISTER_BYTES`] of activations.
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
pub(super) trait F32Isa: FloatIsa<Act = f32> {
    unsafe fn load_f16(from: *const u8) -> Self::Float;
}

/// The way weights are stored.
trait WeightStorage<C: FloatIsa> {
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

        impl<C: $columns> WeightStorage<C> for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load(from: *const u8) -> C::Float {
                // SAFETY: as the caller promises.
                unsafe { C::$load(from.cast()) }
            }
        }
    };
}

stored!(F32: 4 bytes in F32Isa, load);
stored!(F16: 2 bytes in F32Isa, load_f16);
stored!(Bf16: 2 bytes in FloatIsa, load_bf16);

/// The last weights of a row, with zeros behind them.
///
/// # Safety
/// The instruction set is available, and `n` weights (at most a register) can be read.
#[inline(always)]
unsafe fn load_rest<C: FloatIsa, S: WeightStorage<C>>(from: *const u8, n: usize) -> C::Float {
    let mut bytes = [0; MAX_REGISTER_BYTES];
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
unsafe fn load_rest_of_acts<C: FloatIsa>(from: *const C::Act, n: usize) -> C::Float {
    let n_bytes = n.min(C::LANES) * size_of::<C::Act>();
    let mut bytes = [0; MAX_REGISTER_BYTES];
    // SAFETY: as above; loads need no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), bytes.as_mut_ptr(), n_bytes);
        C::load(bytes.as_ptr().cast())
    }
}

/// Rows of activations.
#[derive(Clone, Copy)]
pub(super) struct FloatRows<'a, A> {
    pub(super) values: &'a [A],
    /// From the first value of one row to that of the next.
    pub(super) stride: usize,
}

/// All weight rows times some tokens of `f32`, `ROWS` and [`TILE_TOKENS`] at a time: as many sums
/// as there are registers for.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub(super) unsafe fn matmul<C: F32Isa, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let acts = FloatRows {
        values: acts,
        stride: weights.n_columns,
    };
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

/// All weight rows of BF16 times some tokens, `ROWS` and [`TILE_TOKENS`] at a time.
///
/// # Safety
/// The instruction set is available.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn matmul_bf16<C: FloatIsa, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
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

/// Rows in tiles of `ROWS`, then what is left, for as many tokens as stay cached meanwhile.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn each<C: FloatIsa, S: WeightStorage<C>, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let FloatRows { values, stride } = acts;
    let inside =
        weights.row_bytes == n * S::BYTES && n <= stride && tokens.end * stride <= values.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let near = MAX_NEAR_BYTES / (stride * size_of::<C::Act>()).max(1);
    let near = (near / TILE_TOKENS).max(1) * TILE_TOKENS;
    for start in tokens.clone().step_by(near) {
        let some = start..tokens.end.min(start + near);
        let rows_at_once = if some.len() == 1 { GEMV_ROWS } else { ROWS };
        let mut row = 0;
        while row < n_rows {
            let left = n_rows - row;
            // What is left of a piece is taken in pairs, so that sums need not wait for one
            // another.
            let n = if left < rows_at_once {
                left.min(2)
            } else {
                rows_at_once
            };
            // SAFETY: these rows and tokens exist; the caller promises the instruction set.
            unsafe {
                match n {
                    1 => tiles::<C, S, 1>(weights, acts, row, some.clone(), out),
                    2 => tiles::<C, S, 2>(weights, acts, row, some.clone(), out),
                    _ if some.len() == 1 => {
                        tile::<C, S, 1, GEMV_ROWS, true>(weights, acts, row, start, out);
                    }
                    _ => tiles::<C, S, ROWS>(weights, acts, row, some.clone(), out),
                }
            }
            row += n;
        }
    }
}

/// `R` rows times some tokens, [`TILE_TOKENS`] at a time.
///
/// # Safety
/// They exist; the instruction set is available.
#[inline(always)]
unsafe fn tiles<C: FloatIsa, S: WeightStorage<C>, const R: usize>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    row: usize,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    for token in tokens.clone().step_by(TILE_TOKENS) {
        // SAFETY: as the caller promises.
        unsafe {
            match tokens.end - token {
                1 => tile::<C, S, 1, R, true>(weights, acts, row, token, out),
                2 => tile::<C, S, 2, R, true>(weights, acts, row, token, out),
                3 => tile::<C, S, 3, R, true>(weights, acts, row, token, out),
                _ if token == tokens.start => {
                    tile::<C, S, TILE_TOKENS, R, true>(weights, acts, row, token, out)
                }
                // The first tokens have prefetched the next rows.
                _ => tile::<C, S, TILE_TOKENS, R, false>(weights, acts, row, token, out),
            }
        }
    }
}

/// `R` rows times `T` tokens, from the given ones on; may prefetch the next rows.
///
/// # Safety
/// They exist; the instruction set is available.
#[inline(always)]
unsafe fn tile<
    C: FloatIsa,
    S: WeightStorage<C>,
    const T: usize,
    const R: usize,
    const PREFETCHES: bool,
>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    row: usize,
    token: usize,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let whole = n / C::LANES * C::LANES;
    // SAFETY: these columns of these rows and tokens exist.
    unsafe {
        let w = weights.bytes.as_ptr().add(row * weights.row_bytes);
        let a = acts.values.as_ptr().add(token * acts.stride);
        let mut acc = [[C::zero(); R]; T];
        let level = CacheLevel::for_streams();
        let first = weights.first + row;
        let to = out.block(token..token + T, first..first + R);
        if let Some((to, stride)) = to
            && T > 1
        {
            // They are far apart, and seldom cached.
            for t in 0..T {
                prefetch_l1(to.wrapping_add(t * stride).cast());
            }
        }
        for column in (0..whole).step_by(C::LANES) {
            let at = column * S::BYTES;
            let mut x = [C::zero(); R];
            for (r, x) in x.iter_mut().enumerate() {
                let from = w.add(r * weights.row_bytes + at);
                if PREFETCHES && at.is_multiple_of(LINE) {
                    match level {
                        CacheLevel::L1 => {
                            Prefetcher::new::<R>(at, LINE, weights.row_bytes).prefetch(from, r);
                        }
                        CacheLevel::L2 => prefetch_next_tile::<R>(w, at, r, weights.row_bytes),
                    }
                }
                *x = S::load(from);
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = C::load(a.add(t * acts.stride + column));
                for (acc, x) in acc.iter_mut().zip(x) {
                    *acc = C::mul_add(x, a, *acc);
                }
            }
        }
        if whole < n {
            for (t, acc) in acc.iter_mut().enumerate() {
                let a = load_rest_of_acts::<C>(a.add(t * acts.stride + whole), n - whole);
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
