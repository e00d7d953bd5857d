//! Chooses the tiles of a block format for GEMM, by the layout of its scales.
//!
//! Knows formats by name, but nothing of their bits.

use std::ops::Range;

use kv_block::BlockFormat;

use super::{Layout, PanelGemm, TileFn, UnpackPanelFn};
use crate::kernels::WeightRows;
use crate::kernels::quant_format::QuantFormat;
use crate::operands::Int8Rows;
use crate::output::OutputColumns;

/// The tiles of one instruction set, for 1, 2, … tokens each.
pub(in crate::kernels) struct Tiles {
    /// Formats with a scale for each block: weights below 64, and any weights.
    pub(in crate::kernels) blocks: [&'static [TileFn]; 2],
    pub(in crate::kernels) blocks_with_minima: &'static [TileFn],
    /// Weights below 64, and any weights.
    pub(in crate::kernels) supers: [&'static [TileFn]; 2],
    /// Weights below 16, and any weights.
    pub(in crate::kernels) supers_with_minima: [&'static [TileFn]; 2],
    /// Weights below 64, and any weights.
    pub(in crate::kernels) super_halves: [&'static [TileFn]; 2],
    pub(in crate::kernels) super_halves_with_minima: &'static [TileFn],
    /// The way a format is unpacked to panels, where the instruction set is available.
    pub(in crate::kernels) pack: unsafe fn(BlockFormat) -> UnpackPanelFn,
    /// Weight rows that a tile takes.
    pub(in crate::kernels) rows: usize,
    /// As [`TileIsa::SIGNED_WIDE`](super::tile_isa::TileIsa::SIGNED_WIDE).
    pub(in crate::kernels) signed_wide: bool,
}

/// The [`Tiles`] of some lanes with the features that they need, for so many tokens.
macro_rules! tiles {
    ($table:ident: $lanes:ty, $pack:path, $features:literal, $($n:literal),+) => {
        const $table: $crate::kernels::gemm::dispatch::Tiles = {
            use $crate::kernels::gemm::{TileArgs, tile};

            /// True if narrow weights have tiles of their own.
            const WIDE: bool = !<$lanes as TileIsa>::SIGNED_WIDE;

            #[target_feature(enable = $features)]
            unsafe fn blocks<const WIDE: bool, const MINIMA: bool, const T: usize>(
                args: &TileArgs<'_>,
            ) {
                // SAFETY: as the caller promises.
                unsafe { tile::blocks::<$lanes, WIDE, MINIMA, T>(args) }
            }

            #[target_feature(enable = $features)]
            unsafe fn supers<
                const WIDE: bool,
                const PARTS: usize,
                const MINIMA: bool,
                const T: usize,
            >(
                args: &TileArgs<'_>,
            ) {
                // SAFETY: as the caller promises.
                unsafe { tile::supers::<$lanes, WIDE, PARTS, MINIMA, T>(args) }
            }

            $crate::kernels::gemm::dispatch::Tiles {
                blocks: [&[$(blocks::<WIDE, false, $n>),+], &[$(blocks::<true, false, $n>),+]],
                blocks_with_minima: &[$(blocks::<WIDE, true, $n>),+],
                supers: [&[$(supers::<WIDE, 1, false, $n>),+], &[$(supers::<true, 1, false, $n>),+]],
                supers_with_minima: [&[$(supers::<WIDE, 1, true, $n>),+]; 2],
                super_halves: [&[$(supers::<WIDE, 2, false, $n>),+], &[$(supers::<true, 2, false, $n>),+]],
                super_halves_with_minima: &[$(supers::<WIDE, 2, true, $n>),+],
                pack: $pack,
                rows: tile::VECTORS * <$lanes as TileIsa>::ROWS,
                signed_wide: <$lanes as TileIsa>::SIGNED_WIDE,
            }
        };
    };
}
pub(in crate::kernels) use tiles;

/// Calls a function with the type and the block's bytes of a format that is multiplied as int8.
macro_rules! for_format {
    ($format:expr, $function:ident($($argument:expr),*) $(, else $otherwise:expr)?) => {{
        use kv_block::BlockFormat as B;
        use $crate::kernels::quant_format as g;
        match $format {
            B::IQ1_S => $function::<g::Iq1S, 50>($($argument),*),
            B::IQ1_M => $function::<g::Iq1M, 56>($($argument),*),
            B::IQ2_XXS => $function::<g::Iq2Xxs, 66>($($argument),*),
            B::IQ2_XS => $function::<g::Iq2Xs, 74>($($argument),*),
            B::IQ2_S => $function::<g::Iq2S, 82>($($argument),*),
            B::IQ3_XXS => $function::<g::Iq3Xxs, 98>($($argument),*),
            B::IQ3_S => $function::<g::Iq3S, 110>($($argument),*),
            B::TQ1_0 => $function::<g::Tq1_0, 54>($($argument),*),
            B::TQ2_0 => $function::<g::Tq2_0, 66>($($argument),*),
            B::Q1_0 => $function::<g::Q1_0, 18>($($argument),*),
            B::Q2_0 => $function::<g::Q2_0, 18>($($argument),*),
            packed => $crate::kernels::gemm::dispatch::for_packed_format!(
                packed, $function($($argument),*) $(, else $otherwise)?),
        }
    }};
}
pub(in crate::kernels) use for_format;

/// The same, of those formats only whose rows can be packed.
macro_rules! for_packed_format {
    ($format:expr, $function:ident($($argument:expr),*)) => {
        $crate::kernels::gemm::dispatch::for_packed_format!(
            $format, $function($($argument),*), else {
                // `Matrix` gives other formats `f32` activations.
                debug_assert!(false, "{} against int8 activations", $format);
            })
    };
    ($format:expr, $function:ident($($argument:expr),*), else $otherwise:expr) => {{
        use kv_block::BlockFormat as B;
        use $crate::kernels::quant_format as g;
        match $format {
            B::Q4_0 => $function::<g::Q4_0, 18>($($argument),*),
            B::Q4_1 => $function::<g::Q4_1, 20>($($argument),*),
            B::Q5_0 => $function::<g::Q5_0, 22>($($argument),*),
            B::Q5_1 => $function::<g::Q5_1, 24>($($argument),*),
            B::Q8_0 => $function::<g::Q8_0, 34>($($argument),*),
            B::Q2_K => $function::<g::Q2K, 84>($($argument),*),
            B::Q3_K => $function::<g::Q3K, 110>($($argument),*),
            B::Q4_K => $function::<g::Q4K, 144>($($argument),*),
            B::Q5_K => $function::<g::Q5K, 176>($($argument),*),
            B::Q6_K => $function::<g::Q6K, 210>($($argument),*),
            B::IQ4_NL => $function::<g::Iq4Nl, 18>($($argument),*),
            B::IQ4_XS => $function::<g::Iq4Xs, 136>($($argument),*),
            B::MXFP4 => $function::<g::Mxfp4, 17>($($argument),*),
            _ => $otherwise,
        }
    }};
}
pub(in crate::kernels) use for_packed_format;

/// All weight rows times some tokens.
///
/// # Safety
/// AVX2, FMA and F16C are available, or NEON, and what the tiles need.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(in crate::kernels) unsafe fn matmul(
    tiles: &Tiles,
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let format: BlockFormat = weights.format;
    // SAFETY: as the caller promises.
    unsafe { for_format!(format, run(tiles, weights, acts, tokens, out)) }
}

/// # Safety
/// As for [`multiply`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
unsafe fn run<F: QuantFormat<BYTES>, const BYTES: usize>(
    tiles: &Tiles,
    weights: &WeightRows<'_>,
    acts: &Int8Rows<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let multiplier = PanelGemm {
        // SAFETY: as the caller promises.
        pack: unsafe { (tiles.pack)(weights.format) },
        offset_bits: if tiles.signed_wide {
            F::SIGNED_OFFSET.trailing_zeros() as i32
        } else {
            F::OFFSET.trailing_zeros() as i32
        },
        steps: F::LAYOUT.steps(),
        narrow_steps: F::NARROW_STEPS,
        max_magnitude: F::MAX_MAGNITUDE,
        tiles: match F::LAYOUT {
            Layout::Blocks | Layout::BlocksByPowers => tiles.blocks[usize::from(F::WIDE)],
            Layout::BlocksWithMinima => tiles.blocks_with_minima,
            Layout::Supers => tiles.supers[usize::from(F::WIDE)],
            Layout::SupersWithMinima => tiles.supers_with_minima[usize::from(F::BITS > 4)],
            Layout::SuperHalves => tiles.super_halves[usize::from(F::WIDE)],
            Layout::SuperHalvesWithMinima => tiles.super_halves_with_minima,
        },
        tile_rows: tiles.rows,
    };
    // SAFETY: as the caller promises.
    unsafe { multiplier.run(weights, acts, tokens, out) };
}
