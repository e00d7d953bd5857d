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

/// Registers of columns of a panel: those of a tile of weight rows stay in the first-level cache,
/// converted once for all tokens.
const PANEL_STEPS: usize = 32;
/// The fewest tokens for which panels pay.
const MIN_PANEL_TOKENS: usize = 16;
/// Tiles of tokens of a panel at most.
const PANEL_TILES: usize = 8;
/// Bytes of activations of the tokens of a panel, as far as there are [`MIN_PANEL_TOKENS`].
const MAX_PANEL_BYTES: usize = 512 * 1024;

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
    if tokens.len() >= MIN_PANEL_TOKENS && n_rows >= ROWS {
        // SAFETY: as the caller promises.
        return unsafe { panels::<C, S, ROWS>(weights, acts, tokens, out) };
    }
    let near = MAX_NEAR_BYTES / (stride * size_of::<C::Act>()).max(1);
    let near = (near / TILE_TOKENS).max(1) * TILE_TOKENS;
    for start in tokens.clone().step_by(near) {
        let some = start..tokens.end.min(start + near);
        let rows_at_once = if some.len() == 1 { GEMV_ROWS } else { ROWS };
        let mut row = 0;
        // SAFETY: these rows and tokens exist; the caller promises the instruction set.
        unsafe {
            while row + rows_at_once <= n_rows {
                if some.len() == 1 {
                    tile::<C, S, 1, GEMV_ROWS, true>(weights, acts, row, start, out);
                } else {
                    tiles::<C, S, ROWS>(weights, acts, row, some.clone(), out);
                }
                row += rows_at_once;
            }
            in_pairs::<C, S>(weights, acts, row..n_rows, some, out);
        }
    }
}

/// The last rows of a piece, two at a time, so that sums need not wait for one another.
///
/// # Safety
/// They exist; the instruction set is available.
#[inline(always)]
unsafe fn in_pairs<C: FloatIsa, S: WeightStorage<C>>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    rows: Range<usize>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    for row in rows.clone().step_by(2) {
        // SAFETY: as the caller promises.
        unsafe {
            match rows.end - row {
                1 => tiles::<C, S, 1>(weights, acts, row, tokens.clone(), out),
                _ => tiles::<C, S, 2>(weights, acts, row, tokens.clone(), out),
            }
        }
    }
}

/// The sums of a tile of tokens and weight rows.
type Sums<C, const ROWS: usize> = [[<C as FloatIsa>::Float; ROWS]; TILE_TOKENS];

/// As [`each`], of many tokens: weights of a tile of rows are converted once for the tokens that
/// stay cached, [`PANEL_STEPS`] registers of columns at a time. Sums wait in memory meanwhile.
///
/// # Safety
/// The instruction set is available; the rows and tokens exist.
#[inline(always)]
unsafe fn panels<C: FloatIsa, S: WeightStorage<C>, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let tile_bytes = TILE_TOKENS * acts.stride * size_of::<C::Act>();
    let n_tiles = MAX_PANEL_BYTES / tile_bytes.max(1);
    let n_tiles = n_tiles.clamp(MIN_PANEL_TOKENS / TILE_TOKENS, PANEL_TILES);
    // SAFETY: as the caller promises.
    unsafe {
        let mut panel = [[C::zero(); ROWS]; PANEL_STEPS];
        let mut sums = [[[C::zero(); ROWS]; TILE_TOKENS]; PANEL_TILES];
        for start in tokens.clone().step_by(n_tiles * TILE_TOKENS) {
            let some = start..tokens.end.min(start + n_tiles * TILE_TOKENS);
            let end_of_tiles = some.end - some.len() % TILE_TOKENS;
            let (in_tiles, rest) = (start..end_of_tiles, end_of_tiles..some.end);
            let mut row = 0;
            while row + ROWS <= n_rows {
                let done = in_tiles.clone();
                rows_in_panels::<C, S, ROWS>(weights, acts, row, done, &mut panel, &mut sums);
                for (token, sums) in in_tiles.clone().step_by(TILE_TOKENS).zip(&sums) {
                    let first = weights.first + row;
                    let to = out.block(token..token + TILE_TOKENS, first..first + ROWS);
                    if let Some((to, stride)) = to {
                        store::<C, TILE_TOKENS, ROWS>(sums, to, stride);
                    }
                }
                tiles::<C, S, ROWS>(weights, acts, row, rest.clone(), out);
                row += ROWS;
            }
            in_pairs::<C, S>(weights, acts, row..n_rows, some, out);
        }
    }
}

/// The sums of `ROWS` rows and of whole tiles of tokens, of all columns.
///
/// # Safety
/// As for [`panels`].
#[inline(always)]
unsafe fn rows_in_panels<C: FloatIsa, S: WeightStorage<C>, const ROWS: usize>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    row: usize,
    tokens: Range<usize>,
    panel: &mut [[C::Float; ROWS]; PANEL_STEPS],
    sums: &mut [Sums<C, ROWS>; PANEL_TILES],
) {
    let n = weights.n_columns;
    let whole = n / C::LANES * C::LANES;
    let width = PANEL_STEPS * C::LANES;
    // SAFETY: these columns of these rows and tokens exist.
    unsafe {
        let w = weights.bytes.as_ptr().add(row * weights.row_bytes);
        *sums = [[[C::zero(); ROWS]; TILE_TOKENS]; PANEL_TILES];
        for first in (0..whole).step_by(width) {
            let n_steps = (whole - first).min(width) / C::LANES;
            let is_last = first + width >= whole;
            for (step, x) in panel.iter_mut().enumerate().take(n_steps) {
                let at = (first + step * C::LANES) * S::BYTES;
                for (r, x) in x.iter_mut().enumerate() {
                    let from = w.add(r * weights.row_bytes + at);
                    *x = S::load(from);
                    if at.is_multiple_of(LINE) {
                        // The same of the next panel, which is of the next rows behind the last.
                        let next = if is_last {
                            (ROWS * weights.row_bytes).wrapping_sub(first * S::BYTES)
                        } else {
                            width * S::BYTES
                        };
                        prefetch_l1(from.wrapping_add(next).cast());
                    }
                }
            }
            for (token, sums) in tokens.clone().step_by(TILE_TOKENS).zip(&mut *sums) {
                let a = acts.values.as_ptr().add(token * acts.stride + first);
                let mut acc = [[C::zero(); ROWS]; TILE_TOKENS];
                // By index: what iterators copy stays in memory, at half of the speed.
                #[allow(clippy::needless_range_loop)]
                for t in 0..TILE_TOKENS {
                    for r in 0..ROWS {
                        acc[t][r] = sums[t][r];
                    }
                }
                for (step, x) in panel.iter().enumerate().take(n_steps) {
                    let x = *x;
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let a = C::load(a.add(t * acts.stride + step * C::LANES));
                        for (acc, x) in acc.iter_mut().zip(x) {
                            *acc = C::mul_add(x, a, *acc);
                        }
                    }
                }
                *sums = acc;
            }
        }
        if whole < n {
            for (token, sums) in tokens.step_by(TILE_TOKENS).zip(&mut *sums) {
                add_rest::<C, S, TILE_TOKENS, ROWS>(weights, acts, row, token, sums);
            }
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
            add_rest::<C, S, T, R>(weights, acts, row, token, &mut acc);
        }
        if let Some((to, stride)) = to {
            store::<C, T, R>(&acc, to, stride);
        }
    }
}

/// Adds the products of the last columns, which are fewer than a register has.
///
/// # Safety
/// The rows and tokens exist; the instruction set is available.
#[inline(always)]
unsafe fn add_rest<C: FloatIsa, S: WeightStorage<C>, const T: usize, const R: usize>(
    weights: &WeightRows<'_>,
    acts: FloatRows<'_, C::Act>,
    row: usize,
    token: usize,
    sums: &mut [[C::Float; R]; T],
) {
    let n = weights.n_columns % C::LANES;
    let whole = weights.n_columns - n;
    // SAFETY: these columns of these rows and tokens exist.
    unsafe {
        for (t, sums) in sums.iter_mut().enumerate() {
            let a = acts.values.as_ptr().add((token + t) * acts.stride + whole);
            let a = load_rest_of_acts::<C>(a, n);
            for (r, sum) in sums.iter_mut().enumerate() {
                let at = (row + r) * weights.row_bytes + whole * S::BYTES;
                let x = load_rest::<C, S>(weights.bytes.as_ptr().add(at), n);
                *sum = C::mul_add(x, a, *sum);
            }
        }
    }
}

/// Writes sums of `T` tokens and `R` rows, of which those of two tokens are `stride` apart.
///
/// # Safety
/// They can be written; the instruction set is available.
#[inline(always)]
unsafe fn store<C: FloatIsa, const T: usize, const R: usize>(
    sums: &[[C::Float; R]; T],
    to: *mut f32,
    stride: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        if T == 1 {
            for (r, sum) in C::sums(sums[0]).into_iter().enumerate() {
                *to.add(r) = sum;
            }
            return;
        }
        for r in 0..R {
            let mut of_row = [C::zero(); T];
            for (of_row, sums) in of_row.iter_mut().zip(sums) {
                *of_row = sums[r];
            }
            for (t, sum) in C::sums(of_row).into_iter().enumerate() {
                *to.add(t * stride + r) = sum;
            }
        }
    }
}
