//! GEMV (one token) on stored blocks: the weight rows of a tile in lock-step, one row in each lane
//! of the sums.
//!
//! Invariant: the additions of [`gemm::tile`](super::gemm::tile), in its order. Generic over the
//! block format ([`QuantFormat`]) and the instruction set ([`GemvIsa`]).

use super::WeightRows;
use super::gemm::block_scales::BlockScales;
use super::gemm::tile_isa::TileIsa;
use super::prefetch::Prefetcher;
use super::quant_format::QuantFormat;
use crate::operands::{BLOCK, Int8Row, SUPER_BLOCK};

/// The operations that GEMV needs of an instruction set in addition to tiles: `ROWS` is that of the
/// tiles. `ROWS` is that of the tiles.
///
/// All functions need the instruction set that the type stands for, which is what makes them
/// unsafe to call.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(super) trait GemvIsa<const ROWS: usize>: TileIsa {
    /// Integer sums of the minima of one row, to be added over lanes.
    type Minima: Copy;

    unsafe fn zero_minima() -> Self::Minima;
    /// The dot product of group `g` of a block, to be added over lanes.
    unsafe fn dot_block<F: QuantFormat<BYTES>, const BYTES: usize>(
        block: &[u8; BYTES],
        g: usize,
        acts: &[i8; BLOCK],
    ) -> Self::Int;
    /// Sums of a super-block, which begins at activation block `first`: of quants times factors,
    /// and (where the format has minima) of minima.
    unsafe fn dot_super<F: QuantFormat<BYTES>, const BYTES: usize>(
        block: &[u8; BYTES],
        scales: &BlockScales,
        acts: &Int8Row<'_>,
        first: usize,
    ) -> (Self::Int, Self::Minima);
    /// The sums over the lanes of each register, a row in each lane.
    unsafe fn add_lanes(rows: [Self::Int; ROWS]) -> Self::Int;
    unsafe fn add_lanes_of_minima(rows: [Self::Minima; ROWS]) -> Self::Int;
    unsafe fn sub(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Half-precision numbers as `f32`: scales, and those of minima.
    unsafe fn f16_to_f32(bits: &[[u16; ROWS]; 2]) -> [Self::Float; 2];
    /// As [`mxfp4_scale`](kv_block::mxfp4_scale), of the first exponents.
    unsafe fn exp2_scales(exponents: &[[u16; ROWS]; 2]) -> Self::Float;
}

/// All weight rows times one token: `out[row]`.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub(super) unsafe fn gemv<I, F, const ROWS: usize, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) where
    I: GemvIsa<ROWS>,
    F: QuantFormat<BYTES>,
{
    let row_bytes = weights.row_bytes.max(1);
    let n_stored = (row_bytes / BYTES).min(acts.n_blocks() / F::GROUPS);
    let tiles = weights.bytes.chunks(ROWS * row_bytes);
    let tiles = tiles.filter(|bytes| bytes.len() >= row_bytes);
    for (bytes, out) in tiles.zip(out.chunks_mut(ROWS)) {
        // In the last tile the last row stands in for missing ones.
        let last = bytes.len() / row_bytes - 1;
        let tile = RowTile::<ROWS, BYTES> {
            rows: std::array::from_fn(|r| bytes[r.min(last) * row_bytes..].as_ptr().cast()),
            row_bytes,
            n_stored,
        };
        let mut sums = [0.0; ROWS];
        // SAFETY: `n_stored` blocks can be read from the start of each row on; the store is of
        // `ROWS` values.
        unsafe {
            let acc = if F::LAYOUT.has_supers() {
                supers::<I, F, ROWS, BYTES>(&tile, acts)
            } else {
                blocks::<I, F, ROWS, BYTES>(&tile, acts)
            };
            I::store_f(sums.as_mut_ptr(), acc);
        }
        let n = out.len().min(ROWS);
        out[..n].copy_from_slice(&sums[..n]);
    }
}

/// Neighbouring weight rows.
struct RowTile<const ROWS: usize, const BYTES: usize> {
    /// The start of each row.
    rows: [*const [u8; BYTES]; ROWS],
    row_bytes: usize,
    /// Blocks of a row.
    n_stored: usize,
}

/// Formats with a scale for each block, of one or more groups of 32 values, and perhaps a minimum.
///
/// # Safety
/// As for [`gemv`]; the rows have their blocks, the activations at least as many.
#[inline(always)]
unsafe fn blocks<I, F, const ROWS: usize, const BYTES: usize>(
    tile: &RowTile<ROWS, BYTES>,
    acts: &Int8Row<'_>,
) -> I::Float
where
    I: GemvIsa<ROWS>,
    F: QuantFormat<BYTES>,
{
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = I::zero_f();
        for b in 0..tile.n_stored * F::GROUPS {
            let (s, g) = (b / F::GROUPS, b % F::GROUPS);
            let prefetcher = Prefetcher::new::<ROWS>(s * BYTES, BYTES, tile.row_bytes);
            let a = acts.quants.get_unchecked(b);
            // Scales, then minima.
            let mut scale_bits = [[0; ROWS]; 2];
            let mut dots = [I::zero(); ROWS];
            for (r, dot) in dots.iter_mut().enumerate() {
                let block = &*tile.rows[r].add(s);
                if g == 0 {
                    prefetcher.prefetch(block, r);
                }
                scale_bits[0][r] = F::scale_bits(block);
                if F::MINIMA {
                    scale_bits[1][r] = F::minimum_bits(block);
                }
                *dot = I::dot_block::<F, BYTES>(block, g, a);
            }
            let offset = if I::SIGNED_WIDE {
                F::SIGNED_OFFSET
            } else {
                F::OFFSET
            };
            let mut dots = I::add_lanes(dots);
            if offset != 0 {
                let taken = offset * i32::from(*acts.int_sums.get_unchecked(b));
                dots = I::sub(dots, I::splat(taken));
            }
            let [mut scales, minima] = I::f16_to_f32(&scale_bits);
            if F::POWERS {
                scales = I::exp2_scales(&scale_bits);
            }
            let scale = I::mul_f(scales, I::splat_f(*acts.scales.get_unchecked(b)));
            acc = I::mul_add_f(I::to_float(dots), scale, acc);
            if F::MINIMA {
                let sum = I::splat_f(*acts.sums.get_unchecked(b));
                acc = I::mul_add_f(minima, sum, acc);
            }
        }
        acc
    }
}

/// Formats with integer factors in super-blocks, and perhaps integer minima.
///
/// # Safety
/// As for [`blocks`].
#[inline(always)]
unsafe fn supers<I, F, const ROWS: usize, const BYTES: usize>(
    tile: &RowTile<ROWS, BYTES>,
    acts: &Int8Row<'_>,
) -> I::Float
where
    I: GemvIsa<ROWS>,
    F: QuantFormat<BYTES>,
{
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = I::zero_f();
        for s in 0..tile.n_stored {
            let first = s * SUPER_BLOCK;
            let prefetcher = Prefetcher::new::<ROWS>(s * BYTES, BYTES, tile.row_bytes);
            // Scales, then those of minima.
            let mut scale_bits = [[0; ROWS]; 2];
            let (mut sums, mut minima) = ([I::zero(); ROWS], [I::zero_minima(); ROWS]);
            for (r, row) in tile.rows.iter().enumerate() {
                let block = &*row.add(s);
                prefetcher.prefetch(block, r);
                let Some(scales) = F::super_scales_of(block) else {
                    return acc;
                };
                scale_bits[0][r] = scales.scale.to_bits();
                scale_bits[1][r] = scales.minimum.to_bits();
                (sums[r], minima[r]) = I::dot_super::<F, BYTES>(block, &scales, acts, first);
            }
            let act_scale = I::splat_f(*acts.scales.get_unchecked(first));
            let [mut scale, minimum_scale] = I::f16_to_f32(&scale_bits);
            if F::UNIT != 1.0 {
                scale = I::mul_f(scale, I::splat_f(F::UNIT));
            }
            let sums = I::to_float(I::add_lanes(sums));
            acc = I::mul_add_f(sums, I::mul_f(scale, act_scale), acc);
            if F::MINIMA {
                let minima = I::to_float(I::add_lanes_of_minima(minima));
                acc = I::sub_mul_f(minima, I::mul_f(minimum_scale, act_scale), acc);
            }
        }
        acc
    }
}
