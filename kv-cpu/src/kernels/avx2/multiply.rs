//! Weight rows against activations: one token straight from the blocks, more through panels; with and
//! without VNNI.

use std::ops::Range;

use super::eight::{Eight, Pairs, Vnni};
use super::{floats, one_row};
use crate::activations::{Activations, Int8Row};
use crate::kernels::WeightRows;
use crate::kernels::panel::formats::{self, for_format, tiles};
use crate::kernels::panel::lanes::Lanes;
use crate::kernels::panel::pack::Packed;
use crate::output::OutputColumns;

/// A function that multiplies with some dot products and the features that they need.
macro_rules! multiply_by {
    ($name:ident: $dot:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        pub(in crate::kernels) fn $name(
            weights: WeightRows<'_>,
            acts: Activations<'_>,
            tokens: Range<usize>,
            out: &mut OutputColumns<'_>,
        ) {
            tiles!(TILES: Eight<$dot>, $features, 1, 2, 3, 4);

            #[target_feature(enable = $features)]
            fn one_token<F: Packed<BYTES>, const BYTES: usize>(
                weights: &WeightRows<'_>,
                acts: &Int8Row<'_>,
                out: &mut [f32],
            ) {
                // SAFETY: this function needs the features of its dot products.
                unsafe { one_row::multiply::<$dot, F, BYTES>(weights, acts, out) }
            }

            match acts {
                Activations::F32(values) => floats::multiply(&weights, values, tokens, out),
                Activations::Int8(rows) if tokens.len() == 1 => {
                    if let Some((row, out)) = weights.of_one_token(&rows, tokens.start, out) {
                        for_format!(weights.format, one_token(&weights, &row, out));
                    }
                }
                // SAFETY: this function needs the features of its tiles.
                Activations::Int8(rows) => unsafe {
                    formats::multiply(&TILES, &weights, &rows, tokens, out);
                },
            }
        }
    };
}

multiply_by!(multiply: Pairs, "avx2,fma,f16c");
multiply_by!(multiply_vnni: Vnni, "avx2,fma,f16c,avxvnni");
