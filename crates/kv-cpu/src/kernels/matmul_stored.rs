//! Products of stored weight rows with activations: GEMV on the blocks for one token, GEMM by
//! panels for more.
//!
//! Knows neither formats nor instructions.

/// Defines a function that multiplies stored rows with the tiles `$tile<$dot>`, for so many tokens
/// a tile; unquantized weights go to `$float`.
macro_rules! matmul_stored {
    ($name:ident: $tile:ident<$dot:ty>, $features:literal, $float:path, $($n:literal),+) => {
        #[target_feature(enable = $features)]
        pub(in crate::kernels) fn $name(
            weights: $crate::kernels::WeightRows<'_>,
            acts: $crate::operands::Activations<'_>,
            tokens: std::ops::Range<usize>,
            out: &mut $crate::output::OutputColumns<'_>,
        ) {
            use $crate::kernels::gemm::unpack_panel::unpack_panel;
            use $crate::kernels::quant_format::QuantFormat;
            use $crate::kernels::gemm::{UnpackPanelFn, dispatch, tile_isa::TileIsa};
            use $crate::kernels::gemv_stored;
            use $crate::operands::{Activations, Int8Row};

            type Tile = $tile<$dot>;
            type Interleave = <Tile as TileIsa>::Interleave;
            const ROWS: usize = <Tile as TileIsa>::ROWS;

            dispatch::tiles!(TILES: Tile, unpack_stored, $features, $($n),+);

            /// The way rows of a format are unpacked to panels, eight rows at a time.
            #[target_feature(enable = $features)]
            fn unpack_stored(format: kv_block::BlockFormat) -> UnpackPanelFn {
                dispatch::for_format!(format, unpack_rows(), else |_, _, _, _| ())
            }

            #[target_feature(enable = $features)]
            fn unpack_rows<F: QuantFormat<BYTES>, const BYTES: usize>() -> UnpackPanelFn {
                |weights, rows, blocks, panel| {
                    unpack_panel::<Interleave, F, BYTES>(weights, rows, blocks, panel)
                }
            }

            #[target_feature(enable = $features)]
            fn gemv_stored<F: QuantFormat<BYTES>, const BYTES: usize>(
                weights: &$crate::kernels::WeightRows<'_>,
                acts: &Int8Row<'_>,
                out: &mut [f32],
            ) {
                // SAFETY: this function has the features of its dot products.
                unsafe { gemv_stored::gemv::<Tile, F, ROWS, BYTES>(weights, acts, out) }
            }

            match acts {
                Activations::F32(values) => $float(&weights, values, tokens, out),
                Activations::Int8(rows) if tokens.len() == 1 => {
                    if let Some((row, out)) = weights.gemv_operands(&rows, tokens.start, out) {
                        dispatch::for_format!(weights.format, gemv_stored(&weights, &row, out));
                    }
                }
                // Only where there are dot products of BF16.
                Activations::Bf16(_) => {
                    $crate::kernels::isa::scalar::matmul::matmul(weights, acts, tokens, out);
                }
                // SAFETY: this function has the features of its tiles.
                Activations::Int8(rows) => unsafe {
                    dispatch::matmul(&TILES, &weights, &rows, tokens, out);
                },
            }
        }
    };
}
pub(in crate::kernels) use matmul_stored;
