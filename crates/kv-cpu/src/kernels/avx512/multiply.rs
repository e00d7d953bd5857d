//! Weight rows against activations: one token straight from the blocks, more through panels.

use std::ops::Range;

use kv_core::block::BlockFormat;

use super::lanes::Wide;
use super::{
    bf16, few_tokens_repacked, floats, one_row, one_row_repacked, one_row_super, one_row_vbmi,
};
use super::{pack, pack_vbmi, paired, repacked, row_after_row, short};
use crate::activations::{Activations, Int8Row, Int8Rows};
use crate::kernels::groups as g;
use crate::kernels::panel::formats::{self, Tiles, for_format, tiles};
use crate::kernels::panel::lanes::Lanes;
use crate::kernels::{Arrangement, WeightRows, scalar};
use crate::output::OutputColumns;

tiles!(PLAIN_TILES: Wide, pack::by_sixteens, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", 1, 2, 3, 4, 5, 6);

/// Tiles of super-blocks, of which those of more than four tokens multiply in pairs.
macro_rules! with_pairs {
    ($plain:expr, $parts:literal, $minima:literal) => {
        [
            $plain[0],
            $plain[1],
            $plain[2],
            $plain[3],
            paired::supers::<$parts, $minima, 5>,
            paired::supers::<$parts, $minima, 6>,
            paired::supers::<$parts, $minima, 7>,
            paired::supers::<$parts, $minima, 8>,
        ]
    };
}

/// The tiles, of which larger ones multiply sums by factors in pairs.
const TILES: Tiles = Tiles {
    supers_with_minima: [
        &with_pairs!(PLAIN_TILES.supers_with_minima[0], 1, true),
        PLAIN_TILES.supers_with_minima[1],
    ],
    super_halves: &with_pairs!(PLAIN_TILES.super_halves, 2, false),
    super_halves_with_minima: &with_pairs!(PLAIN_TILES.super_halves_with_minima, 2, true),
    ..PLAIN_TILES
};

/// The same tiles of other panels.
const VBMI_TILES: Tiles = Tiles {
    pack: pack_vbmi::by_words,
    ..TILES
};

/// The same tiles of panels from repacked rows.
const REPACKED_TILES: Tiles = Tiles {
    pack: repacked::to_panels,
    ..TILES
};

/// All weight rows against some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn multiply(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let one: OneToken = |weights, acts, out| one_token(weights, acts, out);
    with((one, &TILES), weights, acts, (tokens, out));
}

/// The same with VBMI and GFNI.
#[target_feature(
    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
pub(super) fn multiply_vbmi(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let one: OneToken = |weights, acts, out| one_token_vbmi(weights, acts, out);
    with((one, &VBMI_TILES), weights, acts, (tokens, out));
}

/// The same with dot products of BF16.
#[target_feature(
    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx512bf16"
)]
pub(super) fn multiply_bf16(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    match acts {
        Activations::Bf16(rows) => bf16::multiply(&weights, &rows, tokens, out),
        _ => multiply_vbmi(weights, acts, tokens, out),
    }
}

/// So many tokens are multiplied with repacked rows as they lie: unpacking them for each eight tokens takes less time than
/// writing panels does.
const FEW: usize = 64;

/// The products of one token.
type OneToken = fn(&WeightRows<'_>, &Int8Row<'_>, &mut [f32]);

/// All weight rows against some tokens, where one is multiplied by `one`, and more are by tiles.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn with(
    (one, tiles): (OneToken, &Tiles),
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    (tokens, out): (Range<usize>, &mut OutputColumns<'_>),
) {
    let (one, tiles): (OneToken, _) = match weights.arrangement {
        Arrangement::Stored => (one, tiles),
        Arrangement::Repacked => (
            |weights, acts, out| one_repacked(weights, acts, out),
            &REPACKED_TILES,
        ),
    };
    match acts {
        Activations::F32(values) => match weights.arrangement {
            Arrangement::Stored => floats::multiply(&weights, values, tokens, out),
            Arrangement::Repacked if short::fifteen::has(&weights) => {
                short::fifteen::multiply(&weights, values, tokens, out);
            }
            Arrangement::Repacked => short::floats::multiply(&weights, values, tokens, out),
        },
        // Only asked for where there are products of BF16.
        Activations::Bf16(_) => scalar::multiply(weights, acts, tokens, out),
        Activations::Int8(rows) if tokens.len() == 1 => {
            if let Some((row, out)) = weights.of_one_token(&rows, tokens.start, out) {
                one(&weights, &row, out);
            }
        }
        Activations::Int8(rows)
            if tokens.len() <= FEW && weights.arrangement == Arrangement::Repacked =>
        {
            few_repacked(&weights, &rows, tokens, out);
        }
        // SAFETY: this function needs the features of its tiles.
        Activations::Int8(rows) => unsafe {
            formats::multiply(tiles, &weights, &rows, tokens, out);
        },
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn few_repacked(
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    use few_tokens_repacked::multiply;
    for_format!(weights.format, multiply(weights, acts, tokens, out));
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn one_repacked(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) {
    use one_row_repacked::multiply;
    for_format!(weights.format, multiply(weights, acts, out));
}

#[target_feature(
    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"
)]
fn one_token_vbmi(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) {
    use one_row_vbmi as v;
    match weights.format {
        BlockFormat::Q4_0 => v::multiply::<g::Q4_0, 18>(weights, acts, out),
        BlockFormat::Q4_1 => v::multiply::<g::Q4_1, 20>(weights, acts, out),
        BlockFormat::Q5_0 => v::multiply::<g::Q5_0, 22>(weights, acts, out),
        BlockFormat::Q5_1 => v::multiply::<g::Q5_1, 24>(weights, acts, out),
        BlockFormat::IQ4_NL => v::multiply::<g::Iq4Nl, 18>(weights, acts, out),
        BlockFormat::MXFP4 => v::multiply::<g::Mxfp4, 17>(weights, acts, out),
        _ => one_token(weights, acts, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn one_token(weights: &WeightRows<'_>, acts: &Int8Row<'_>, out: &mut [f32]) {
    use one_row as o;
    use one_row_super as f;
    use row_after_row as s;
    match weights.format {
        BlockFormat::Q4_0 => o::multiply::<g::Q4_0, 18>(weights, acts, out),
        BlockFormat::Q4_1 => o::multiply::<g::Q4_1, 20>(weights, acts, out),
        BlockFormat::Q5_0 => o::multiply::<g::Q5_0, 22>(weights, acts, out),
        BlockFormat::Q5_1 => o::multiply::<g::Q5_1, 24>(weights, acts, out),
        BlockFormat::Q8_0 => o::multiply::<g::Q8_0, 34>(weights, acts, out),
        BlockFormat::IQ4_NL => o::multiply::<g::Iq4Nl, 18>(weights, acts, out),
        BlockFormat::MXFP4 => o::multiply::<g::Mxfp4, 17>(weights, acts, out),
        BlockFormat::Q2_K => s::multiply::<f::Q2K, 84>(weights, acts, out),
        BlockFormat::Q3_K => s::multiply::<f::Q3K, 110>(weights, acts, out),
        BlockFormat::Q4_K => s::multiply::<f::Q4K, 144>(weights, acts, out),
        BlockFormat::Q5_K => s::multiply::<f::Q5K, 176>(weights, acts, out),
        BlockFormat::Q6_K => s::multiply::<f::Q6K, 210>(weights, acts, out),
        BlockFormat::IQ4_XS => s::multiply::<f::Iq4Xs, 136>(weights, acts, out),
        // `Matrix` gives other formats `f32` activations.
        other => debug_assert!(false, "{other} against int8 activations"),
    }
}
