//! Weight rows against activations: one token straight from the blocks, more through panels.
//!
//! Knows neither formats nor instructions.

/// A function that multiplies with some lanes and dot products of bytes, through panels for so many
/// tokens. One token goes to `multiply` of the caller's module `one_row`, floats go to `$floats`.
macro_rules! multiply_by {
    ($name:ident: $lanes:ident<$dot:ty>, $features:literal, $floats:path, $($n:literal),+) => {
        #[target_feature(enable = $features)]
        pub(in crate::kernels) fn $name(
            weights: $crate::kernels::WeightRows<'_>,
            acts: $crate::activations::Activations<'_>,
            tokens: std::ops::Range<usize>,
            out: &mut $crate::output::OutputColumns<'_>,
        ) {
            use $crate::activations::{Activations, Int8Row};
            use $crate::kernels::panel::pack::{Packed, pack};
            use $crate::kernels::panel::{PackFn, formats, lanes::Lanes};

            type Interleave = <$lanes<$dot> as Lanes>::Interleave;

            formats::tiles!(TILES: $lanes<$dot>, by_eights, $features, $($n),+);

            /// How a format is unpacked to panels, eight rows at a time.
            #[target_feature(enable = $features)]
            fn by_eights(format: kv_core::block::BlockFormat) -> PackFn {
                formats::for_format!(format, eights(), else |_, _, _, _| ())
            }

            #[target_feature(enable = $features)]
            fn eights<F: Packed<BYTES>, const BYTES: usize>() -> PackFn {
                |weights, rows, blocks, panel| {
                    pack::<Interleave, F, BYTES>(weights, rows, blocks, panel)
                }
            }

            #[target_feature(enable = $features)]
            fn one_token<F: Packed<BYTES>, const BYTES: usize>(
                weights: &$crate::kernels::WeightRows<'_>,
                acts: &Int8Row<'_>,
                out: &mut [f32],
            ) {
                // SAFETY: this function needs the features of its dot products.
                unsafe { one_row::multiply::<$dot, F, BYTES>(weights, acts, out) }
            }

            match acts {
                Activations::F32(values) => $floats(&weights, values, tokens, out),
                Activations::Int8(rows) if tokens.len() == 1 => {
                    if let Some((row, out)) = weights.of_one_token(&rows, tokens.start, out) {
                        formats::for_format!(weights.format, one_token(&weights, &row, out));
                    }
                }
                // Only asked for where there are products of BF16.
                Activations::Bf16(_) => $crate::kernels::scalar::multiply(weights, acts, tokens, out),
                // SAFETY: this function needs the features of its tiles.
                Activations::Int8(rows) => unsafe {
                    formats::multiply(&TILES, &weights, &rows, tokens, out);
                },
            }
        }
    };
}
pub(in crate::kernels) use multiply_by;
