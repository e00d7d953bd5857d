//! Weight rows against activations: one token straight from the blocks, more through panels.

use std::ops::Range;

use kv_core::block::BlockFormat;

use super::lanes::Wide;
use super::{floats, one_row, one_row_super};
use crate::activations::{Activations, Int8Row, Int8Rows};
use crate::kernels::WeightRows;
use crate::kernels::avx2::groups;
use crate::kernels::panel::pack::{Packed, pack};
use crate::kernels::panel::{Layout, Multiplier, ROWS, TileArgs, TileFn, tile};
use crate::output::OutputColumns;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn multiply(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match acts {
        Activations::F32(values) => floats::multiply(&weights, values, tokens, out),
        Activations::Int8(rows) if tokens.len() == 1 => {
            let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
            let columns = weights.first..weights.first + n_rows;
            if let Some(row) = rows.row(tokens.start)
                && let Some(out) = out.values(tokens.start, columns)
            {
                one_token(&weights, &row, out);
            }
        }
        Activations::Int8(rows) => many_tokens(&weights, &rows, tokens, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn one_token(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) {
    use {one_row as o, one_row_super as s};
    match weights.format {
        BlockFormat::Q4_0 => o::multiply::<o::Q4_0, 18>(weights, acts, out),
        BlockFormat::Q4_1 => o::multiply::<o::Q4_1, 20>(weights, acts, out),
        BlockFormat::Q5_0 => o::multiply::<o::Q5_0, 22>(weights, acts, out),
        BlockFormat::Q5_1 => o::multiply::<o::Q5_1, 24>(weights, acts, out),
        BlockFormat::Q8_0 => o::multiply::<o::Q8_0, 34>(weights, acts, out),
        BlockFormat::IQ4_NL => o::multiply::<o::Iq4Nl, 18>(weights, acts, out),
        BlockFormat::Q2_K => s::multiply::<s::Q2K, 84>(weights, acts, out),
        BlockFormat::Q3_K => s::multiply::<s::Q3K, 110>(weights, acts, out),
        BlockFormat::Q4_K => s::multiply::<s::Q4K, 144>(weights, acts, out),
        BlockFormat::Q5_K => s::multiply::<s::Q5K, 176>(weights, acts, out),
        BlockFormat::Q6_K => s::multiply::<s::Q6K, 210>(weights, acts, out),
        BlockFormat::IQ4_XS => s::multiply::<s::Iq4Xs, 136>(weights, acts, out),
        // `Matrix` gives other formats `f32` activations.
        other => debug_assert!(false, "{other} against int8 activations"),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn many_tokens(
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match weights.format {
        BlockFormat::Q4_0 => run::<groups::Q4_0, 18>(weights, acts, tokens, out),
        BlockFormat::Q4_1 => run::<groups::Q4_1, 20>(weights, acts, tokens, out),
        BlockFormat::Q5_0 => run::<groups::Q5_0, 22>(weights, acts, tokens, out),
        BlockFormat::Q5_1 => run::<groups::Q5_1, 24>(weights, acts, tokens, out),
        BlockFormat::Q8_0 => run::<groups::Q8_0, 34>(weights, acts, tokens, out),
        BlockFormat::Q2_K => run::<groups::Q2K, 84>(weights, acts, tokens, out),
        BlockFormat::Q3_K => run::<groups::Q3K, 110>(weights, acts, tokens, out),
        BlockFormat::Q4_K => run::<groups::Q4K, 144>(weights, acts, tokens, out),
        BlockFormat::Q5_K => run::<groups::Q5K, 176>(weights, acts, tokens, out),
        BlockFormat::Q6_K => run::<groups::Q6K, 210>(weights, acts, tokens, out),
        BlockFormat::IQ4_NL => run::<groups::Iq4Nl, 18>(weights, acts, tokens, out),
        BlockFormat::IQ4_XS => run::<groups::Iq4Xs, 136>(weights, acts, tokens, out),
        other => debug_assert!(false, "{other} against int8 activations"),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run<F: Packed<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let multiplier = Multiplier {
        pack: |weights, rows, blocks, panel| pack::<F, BYTES>(weights, rows, blocks, panel),
        offset: F::OFFSET,
        steps: F::LAYOUT.steps(),
        tiles: match F::LAYOUT {
            Layout::Blocks => &BLOCKS,
            Layout::BlocksWithMinima => &BLOCKS_WITH_MINIMA,
            Layout::Supers => &SUPERS,
            Layout::SupersWithMinima => &SUPERS_WITH_MINIMA,
            Layout::SuperHalves => &SUPER_HALVES,
            Layout::SuperHalvesWithMinima => &SUPER_HALVES_WITH_MINIMA,
        },
        tile_rows: ROWS,
    };
    // SAFETY: this function needs the features of its tiles.
    unsafe { multiplier.run(weights, acts, tokens, out) };
}

/// Tiles for one to six tokens, from a body that takes their number.
macro_rules! tiles {
    ($($table:ident = $name:ident: $body:ident($($parameter:literal),+);)+) => {
        $(
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            unsafe fn $name<const T: usize>(args: &TileArgs<'_>) {
                // SAFETY: as the caller promises.
                unsafe { tile::$body::<Wide, $($parameter),+, T>(args) }
            }

            static $table: [TileFn; 6] =
                [$name::<1>, $name::<2>, $name::<3>, $name::<4>, $name::<5>, $name::<6>];
        )+
    };
}

tiles! {
    BLOCKS = blocks: blocks(true, false);
    BLOCKS_WITH_MINIMA = blocks_with_minima: blocks(true, true);
    SUPERS = supers: supers(true, 1, false);
    SUPERS_WITH_MINIMA = supers_with_minima: supers(true, 1, true);
    SUPER_HALVES = super_halves: supers(true, 2, false);
    SUPER_HALVES_WITH_MINIMA = super_halves_with_minima: supers(true, 2, true);
}
