//! The inner loops of GEMM: some tokens times two registers of weight rows, over the blocks of a
//! panel.
//!
//! Invariant: each output has one chain of `f32` additions, over its blocks (or super-blocks) in
//! order; everything within a block is exact. Knows no instruction set ([`TileIsa`] does).

use super::tile_isa::{Steps, TileIsa};
use super::{BLOCKS, SIGNED, TileArgs};
use crate::kernels::prefetch::prefetch_l1;
use crate::operands::{BLOCK, SUPER_BLOCK};

/// Registers of weight rows of a tile.
pub(in crate::kernels) const VECTORS: usize = 2;
/// Dot products of a block.
const STEPS: usize = BLOCK / super::STEP;

/// So many blocks before its end a tile prefetches its outputs again: a panel and its activations
/// fill a first-level cache and evict what was prefetched when the tile began.
const LATE: usize = 3;

/// Sums of `T` tokens.
type Sums<X, const T: usize> = [[X; VECTORS]; T];

/// Prefetches the lines of the outputs, which are far apart and seldom cached: a store that misses
/// holds up the stores after it.
#[inline(always)]
pub(in crate::kernels) fn prefetch_outputs<L: TileIsa, const T: usize>(args: &TileArgs<'_>) {
    for t in 0..T {
        let first = args.out.wrapping_add(t * args.stride);
        prefetch_l1(first.cast());
        prefetch_l1(first.wrapping_add(VECTORS * L::ROWS - 1).cast());
    }
}

#[inline(always)]
unsafe fn load_sums<L: TileIsa, const T: usize>(args: &TileArgs<'_>) -> Sums<L::Float, T> {
    // SAFETY: the caller promises the instruction set and room for the sums.
    unsafe {
        let mut acc = [[L::zero_f(); VECTORS]; T];
        if args.blocks.start > 0 {
            for (t, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = L::load_f(args.out.add(t * args.stride + v * L::ROWS));
                }
            }
        }
        acc
    }
}

#[inline(always)]
unsafe fn store_sums<L: TileIsa, const T: usize>(args: &TileArgs<'_>, acc: &Sums<L::Float, T>) {
    for (t, acc) in acc.iter().enumerate() {
        for (v, acc) in acc.iter().enumerate() {
            // SAFETY: the caller promises the instruction set and room for the sums.
            unsafe { L::store_f(args.out.add(t * args.stride + v * L::ROWS), *acc) };
        }
    }
}

/// Adds the integer dot products of [`TileArgs::steps`] steps, the first of which is `step` of
/// block `b`.
#[inline(always)]
unsafe fn dot_steps<L: TileIsa, const WIDE: bool, const T: usize>(
    args: &TileArgs<'_>,
    b: usize,
    step: usize,
    sums: &mut Sums<L::Int, T>,
) {
    let acts = &args.acts;
    // SAFETY: the caller promises the instruction set, and that tokens and blocks exist.
    unsafe {
        let first = args.token * acts.row_blocks + args.blocks.start + b;
        let weights = args.panel.quants.as_ptr().add(b * STEPS + step);
        let steps = Steps {
            weights: (*weights).as_ptr().add(args.row),
            acts: acts.quants.add(first).cast::<i32>().add(step),
            stride: acts.row_blocks * STEPS,
            n: args.steps,
            n_narrow: args.narrow_steps,
        };
        L::dot_steps::<WIDE, T>(&steps, sums);
    }
}

/// Formats with a scale for each block, and perhaps a minimum. Those with minima have no offset.
///
/// # Safety
/// As for [`super::TileFn`].
#[inline(always)]
pub(in crate::kernels) unsafe fn blocks<
    L: TileIsa,
    const WIDE: bool,
    const MINIMA: bool,
    const T: usize,
>(
    args: &TileArgs<'_>,
) {
    let acts = &args.acts;
    prefetch_outputs::<L, T>(args);
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = load_sums::<L, T>(args);
        let n_blocks = args.blocks.len().min(BLOCKS);
        for b in 0..n_blocks {
            if b + LATE == n_blocks {
                prefetch_outputs::<L, T>(args);
            }
            let first = args.token * acts.row_blocks + args.blocks.start + b;
            let mut sums = [[L::zero(); VECTORS]; T];
            if !MINIMA && !SIGNED {
                for (t, sums) in sums.iter_mut().enumerate() {
                    let sum = acts.negative_sums.add(first + t * acts.row_blocks);
                    *sums = [offsets::<L>(args, sum); VECTORS];
                }
            }
            prefetch_next_tokens::<T>(args, b);
            dot_steps::<L, WIDE, T>(args, b, 0, &mut sums);
            let scales = args.panel.scales.as_ptr().add(b);
            let scales = (*scales).as_ptr().add(args.row);
            let minima = args.panel.minima.as_ptr().add(b);
            let minima = (*minima).as_ptr().add(args.row);
            for t in 0..T {
                let at = first + t * acts.row_blocks;
                let scale = L::splat_f(*acts.scales.add(at));
                for v in 0..VECTORS {
                    let scale = L::mul_f(L::load_f(scales.add(v * L::ROWS)), scale);
                    acc[t][v] = L::mul_add_f(L::to_float(sums[t][v]), scale, acc[t][v]);
                    if MINIMA {
                        let minimum = L::load_f(minima.add(v * L::ROWS));
                        let sum = L::splat_f(*acts.sums.add(at));
                        acc[t][v] = L::mul_add_f(minimum, sum, acc[t][v]);
                    }
                }
            }
        }
        store_sums::<L, T>(args, &acc);
    }
}

/// Formats with integer factors in super-blocks, one for each block or (`PARTS` = 2) each half of
/// one, and perhaps as many integer minima. Those with minima have no offset.
///
/// # Safety
/// As for [`super::TileFn`].
#[inline(always)]
pub(in crate::kernels) unsafe fn supers<
    L: TileIsa,
    const WIDE: bool,
    const PARTS: usize,
    const MINIMA: bool,
    const T: usize,
>(
    args: &TileArgs<'_>,
) {
    let n_supers = args.blocks.len().min(BLOCKS) / SUPER_BLOCK;
    prefetch_outputs::<L, T>(args);
    for s in 0..n_supers {
        // SAFETY: as the caller promises.
        let mut total = unsafe { [[L::zero(); VECTORS]; T] };
        for b in s * SUPER_BLOCK..(s + 1) * SUPER_BLOCK {
            // SAFETY: as the caller promises.
            unsafe {
                prefetch_next_tokens::<T>(args, b);
                for part in 0..PARTS {
                    let mut sums = [[L::zero(); VECTORS]; T];
                    if !MINIMA && !SIGNED {
                        set_offsets::<L, PARTS, T>(args, b, part, &mut sums);
                    }
                    dot_steps::<L, WIDE, T>(args, b, part * STEPS / PARTS, &mut sums);
                    add_factored::<L, T>(args, b * PARTS + part, &sums, &mut total);
                }
            }
        }
        // SAFETY: as the caller promises.
        unsafe {
            let minima = MINIMA.then(|| sum_minima::<L, PARTS, T>(args, s));
            add_super::<L, T>(args, s, &total, minima.as_ref());
        }
    }
}

/// Prefetches the next tokens' columns of block `b`, which hardware prefetchers do not foresee.
#[inline(always)]
pub(in crate::kernels) fn prefetch_next_tokens<const T: usize>(args: &TileArgs<'_>, b: usize) {
    let acts = &args.acts;
    let first = args.token * acts.row_blocks + args.blocks.start + b;
    for t in T..2 * T {
        prefetch_l1(acts.quants.wrapping_add(first + t * acts.row_blocks).cast());
    }
}

/// The initial sum, which subtracts the weights' offset: `sum` is the negative sum of the
/// activations. Neither instruction takes time from those that multiply.
#[inline(always)]
pub(in crate::kernels) unsafe fn offsets<L: TileIsa>(
    args: &TileArgs<'_>,
    sum: *const i32,
) -> L::Int {
    // SAFETY: the caller promises the instruction set, and that `sum` can be read.
    unsafe { L::shift_left(L::splat(*sum), L::splat(args.offset_bits)) }
}

/// The same for part `part` of block `b` of all tokens.
#[inline(always)]
unsafe fn set_offsets<L: TileIsa, const PARTS: usize, const T: usize>(
    args: &TileArgs<'_>,
    b: usize,
    part: usize,
    sums: &mut Sums<L::Int, T>,
) {
    let acts = &args.acts;
    let first = args.token * acts.row_blocks + args.blocks.start + b;
    for (t, sums) in sums.iter_mut().enumerate() {
        let at = first + t * acts.row_blocks;
        // SAFETY: the caller promises that tokens and blocks exist.
        unsafe {
            let sum = acts.negative_sum(PARTS, at, part);
            *sums = [offsets::<L>(args, sum); VECTORS];
        }
    }
}

/// `total += sums * factor`, by the factors of a block, or of half a block.
#[inline(always)]
unsafe fn add_factored<L: TileIsa, const T: usize>(
    args: &TileArgs<'_>,
    part: usize,
    sums: &Sums<L::Int, T>,
    total: &mut Sums<L::Int, T>,
) {
    // SAFETY: the caller promises the instruction set; the panel has this part.
    unsafe {
        let factors = args.panel.factors.as_ptr().add(part);
        let factors = (*factors).as_ptr().add(args.row);
        for v in 0..VECTORS {
            let factor = L::load(factors.add(v * L::ROWS));
            for (total, sums) in total.iter_mut().zip(sums) {
                total[v] = L::add(total[v], L::mul(sums[v], factor));
            }
        }
    }
}

/// The minima of super-block `s` times the sums of their activations, as integers.
#[inline(always)]
unsafe fn sum_minima<L: TileIsa, const PARTS: usize, const T: usize>(
    args: &TileArgs<'_>,
    s: usize,
) -> Sums<L::Int, T> {
    let acts = &args.acts;
    // Pairs are two blocks or the two halves of one.
    let n_pairs = SUPER_BLOCK / 2 * PARTS;
    // SAFETY: as the caller of `supers` promises.
    unsafe {
        let mut total = [[L::zero(); VECTORS]; T];
        for pair in 0..n_pairs {
            let minima = args.panel.int_minima.as_ptr().add(s * n_pairs + pair);
            let minima = (*minima).as_ptr().add(args.row).cast::<i32>();
            let minima = [L::load(minima), L::load(minima.add(L::ROWS))];
            for (t, total) in total.iter_mut().enumerate() {
                let at = (args.token + t) * acts.row_blocks + args.blocks.start + s * SUPER_BLOCK;
                let sums = L::splat(acts.two_sums(PARTS, at, pair).read_unaligned());
                total[0] = L::dot_pairs(total[0], minima[0], sums);
                total[1] = L::dot_pairs(total[1], minima[1], sums);
            }
        }
        total
    }
}

/// Adds the scaled sums of super-block `s` to the outputs, and subtracts its scaled minima.
#[inline(always)]
unsafe fn add_super<L: TileIsa, const T: usize>(
    args: &TileArgs<'_>,
    s: usize,
    total: &Sums<L::Int, T>,
    minima: Option<&Sums<L::Int, T>>,
) {
    let acts = &args.acts;
    let continued = args.blocks.start + s > 0;
    // SAFETY: the caller promises the instruction set and room for the sums.
    unsafe {
        let scales = args.panel.super_scales.as_ptr().add(s);
        let scales = (*scales).as_ptr().add(args.row);
        let minimum_scales = args.panel.super_minima.as_ptr().add(s);
        let minimum_scales = (*minimum_scales).as_ptr().add(args.row);
        for t in 0..T {
            let at = (args.token + t) * acts.row_blocks + args.blocks.start + s * SUPER_BLOCK;
            let act_scale = L::splat_f(*acts.scales.add(at));
            for v in 0..VECTORS {
                let out = args.out.add(t * args.stride + v * L::ROWS);
                let mut acc = L::zero_f();
                if continued {
                    acc = L::load_f(out);
                }
                let scale = L::mul_f(L::load_f(scales.add(v * L::ROWS)), act_scale);
                acc = L::mul_add_f(L::to_float(total[t][v]), scale, acc);
                if let Some(minima) = minima {
                    let scale = L::load_f(minimum_scales.add(v * L::ROWS));
                    let scale = L::mul_f(scale, act_scale);
                    acc = L::sub_mul_f(L::to_float(minima[t][v]), scale, acc);
                }
                L::store_f(out, acc);
            }
        }
    }
}
