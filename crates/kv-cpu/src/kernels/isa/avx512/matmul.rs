//! Products of weight rows with activations on AVX-512: GEMV for one token, skinny GEMM for up to
//! [`MAX_SKINNY_TOKENS`], GEMM by panels for more.
//!
//! Packed rows have kernels of their own for each of these. Stored rows take the GEMV of grids or
//! AVX2's, and panels unpacked eight rows at a time. Knows neither formats nor instructions.

use std::ops::Range;

use kv_block::BlockFormat;

use super::dot::Avx512Tile;
use super::{bf16, float, gemm_pairs, gemm_skinny, gemv, grids, pack, packed_float};
use crate::kernels::gemm::UnpackPanelFn;
use crate::kernels::gemm::dispatch::{self, Tiles, for_format, for_packed_format, tiles};
use crate::kernels::gemm::tile_isa::TileIsa;
use crate::kernels::gemm::unpack_panel::{Words, unpack_panel};
use crate::kernels::gemv_stored;
use crate::kernels::isa::avx2::dot::{Avx2Tile, VnniEvex};
use crate::kernels::isa::scalar;
use crate::kernels::quant_format::QuantFormat;
use crate::kernels::{WeightLayout, WeightRows};
use crate::operands::{Activations, Int8Row, Int8Rows};
use crate::output::OutputColumns;

tiles!(PLAIN_TILES: Avx512Tile, unpack_stored, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", 1, 2, 3, 4, 5, 6);

/// Tiles of super-blocks: from five tokens on they multiply sums by factors in pairs.
macro_rules! with_pairs {
    ($plain:expr, $parts:literal, $minima:literal) => {
        [
            $plain[0],
            $plain[1],
            $plain[2],
            $plain[3],
            gemm_pairs::supers::<$parts, $minima, 5>,
            gemm_pairs::supers::<$parts, $minima, 6>,
            gemm_pairs::supers::<$parts, $minima, 7>,
            gemm_pairs::supers::<$parts, $minima, 8>,
        ]
    };
}

/// Tiles of panels from stored rows.
const STORED_TILES: Tiles = Tiles {
    supers_with_minima: [
        &with_pairs!(PLAIN_TILES.supers_with_minima[0], 1, true),
        PLAIN_TILES.supers_with_minima[1],
    ],
    supers: [
        &with_pairs!(PLAIN_TILES.supers[0], 1, false),
        PLAIN_TILES.supers[1],
    ],
    super_halves: [
        &with_pairs!(PLAIN_TILES.super_halves[0], 2, false),
        &with_pairs!(PLAIN_TILES.super_halves[1], 2, false),
    ],
    super_halves_with_minima: &with_pairs!(PLAIN_TILES.super_halves_with_minima, 2, true),
    ..PLAIN_TILES
};

/// The same tiles, of panels from packed rows.
const PACKED_TILES: Tiles = Tiles {
    pack: pack::unpack_panel_of,
    ..STORED_TILES
};

/// Up to this many tokens, packed rows are unpacked in registers again for each eight tokens: that
/// takes less time than writing panels.
const MAX_SKINNY_TOKENS: usize = 64;

/// All weight rows times some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn matmul(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let is_packed = weights.layout == WeightLayout::Packed;
    match acts {
        Activations::F32(values) if is_packed => {
            packed_float::f32::matmul(&weights, values, tokens, out);
        }
        Activations::F32(values) => float::matmul(&weights, values, tokens, out),
        // Only where there are dot products of BF16.
        Activations::Bf16(_) => scalar::matmul::matmul(weights, acts, tokens, out),
        Activations::Int8(rows) if tokens.len() == 1 => {
            let Some((row, out)) = weights.gemv_operands(&rows, tokens.start, out) else {
                return;
            };
            if is_packed {
                gemv_packed(&weights, &row, out)
            } else {
                matmul_one(&weights, &row, out)
            }
        }
        Activations::Int8(rows) if is_packed && tokens.len() <= MAX_SKINNY_TOKENS => {
            gemm_skinny_packed(&weights, &rows, tokens, out);
        }
        Activations::Int8(rows) => {
            let tiles = if is_packed {
                &PACKED_TILES
            } else {
                &STORED_TILES
            };
            // SAFETY: this function needs the features of its tiles.
            unsafe { dispatch::matmul(tiles, &weights, &rows, tokens, out) };
        }
    }
}

/// The same where there are dot products of BF16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
pub(super) fn matmul_bf16(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match acts {
        Activations::Bf16(rows) => bf16::matmul(&weights, &rows, tokens, out),
        _ => matmul(weights, acts, tokens, out),
    }
}

/// GEMV on packed rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn gemv_packed(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) {
    use gemv::gemv;
    for_packed_format!(weights.format, gemv(weights, acts, out));
}

/// Skinny GEMM on packed rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn gemm_skinny_packed(
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    use gemm_skinny::gemm_skinny;
    for_packed_format!(weights.format, gemm_skinny(weights, acts, tokens, out));
}

/// GEMV on stored rows: that of formats with grids, or AVX2's, with VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn matmul_one(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) {
    type Tile = Avx2Tile<VnniEvex>;
    const ROWS: usize = <Tile as TileIsa>::ROWS;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn gemv<F: QuantFormat<BYTES>, const BYTES: usize>(
        weights: &WeightRows<'_>,
        acts: &Int8Row<'_>,
        out: &mut [f32],
    ) {
        // SAFETY: this function has the features of `VnniEvex`.
        unsafe { gemv_stored::gemv::<Tile, F, ROWS, BYTES>(weights, acts, out) }
    }
    if !grids::gemv(weights, acts, out) {
        for_format!(weights.format, gemv(weights, acts, out));
    }
}

/// The function that unpacks stored rows of a format to panels, eight at a time.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn unpack_stored(format: BlockFormat) -> UnpackPanelFn {
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    fn of<F: QuantFormat<BYTES>, const BYTES: usize>() -> UnpackPanelFn {
        |weights, rows, blocks, panel| unpack_panel::<Words, F, BYTES>(weights, rows, blocks, panel)
    }
    for_format!(format, of(), else |_, _, _, _| ())
}
