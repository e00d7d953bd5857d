//! Encoding with the importance of columns: the scale of each block is searched for, so that the
//! squared errors, weighted, become small.
//!
//! The weight of a value `x` is `importance · √(σ² + x²)`, where `σ²` is the mean of the squares of
//! the row (twice that of the block, for `IQ4_NL` and the K formats), as in llama.cpp.
//! Invariant: a block whose weights are all 0 is encoded as without them.

use super::fit::{Affine, Group, Minimum};
use super::grid_formats;
use super::k_formats::{self, Encode};
use super::{
    BlockFormat, QuantizeError, check_range, encode_iq4_nl, encode_q4_0, encode_q4_1, encode_q5_0,
    encode_q5_1, fifth_bits, half, inverse, joined, mean_square, nearest_iq4, nibbles, quantize,
    stored,
};

/// The formats that [`quantize_weighted`] encodes by the importance of columns; for others it makes
/// no difference.
pub const WEIGHTED_FORMATS: [BlockFormat; 18] = [
    BlockFormat::Q4_0,
    BlockFormat::Q4_1,
    BlockFormat::Q5_0,
    BlockFormat::Q5_1,
    BlockFormat::IQ4_NL,
    BlockFormat::Q2_K,
    BlockFormat::Q3_K,
    BlockFormat::Q4_K,
    BlockFormat::Q5_K,
    BlockFormat::Q6_K,
    BlockFormat::IQ4_XS,
    BlockFormat::IQ1_S,
    BlockFormat::IQ1_M,
    BlockFormat::IQ2_XXS,
    BlockFormat::IQ2_XS,
    BlockFormat::IQ2_S,
    BlockFormat::IQ3_XXS,
    BlockFormat::IQ3_S,
];

/// Encodes one row of `values` as whole blocks of `format`, with the importance of each column, in
/// any unit: 0 or more. Formats of more than 7 bits take no weights: [`quantize`] encodes them.
///
/// # Errors
/// [`QuantizeError`] for the formats that [`quantize`] cannot write; where the values are no whole
/// number of blocks, there are not as many importances, or a value is beyond what the format holds.
pub fn quantize_weighted(
    format: BlockFormat,
    values: &[f32],
    importance: &[f32],
) -> Result<Vec<u8>, QuantizeError> {
    let (n_values, got) = (values.len(), importance.len());
    if n_values != got {
        return Err(QuantizeError::WrongImportance { n_values, got });
    }
    let block_len = format.block_len();
    if !n_values.is_multiple_of(block_len) {
        return Err(QuantizeError::PartialBlock {
            format,
            n_values,
            block_len,
        });
    }
    check_range(format, values)?;
    let row = Row {
        values,
        importance,
        variance: mean_square(values),
    };
    Ok(match format {
        BlockFormat::Q4_0 => row.encode(|b| b.symmetric(8.0), encode_q4_0, symmetric_q4),
        BlockFormat::Q5_0 => row.encode(|b| b.symmetric(16.0), encode_q5_0, symmetric_q5),
        BlockFormat::Q4_1 => row.encode(|b| b.affine(15.0, Minimum::Any), encode_q4_1, affine_q4),
        BlockFormat::Q5_1 => row.encode(|b| b.affine(31.0, Minimum::Any), encode_q5_1, affine_q5),
        BlockFormat::IQ4_NL => row.iq4_nl(),
        BlockFormat::Q2_K => row.k(k_formats::encode_q2_k),
        BlockFormat::Q3_K => row.k(k_formats::encode_q3_k),
        BlockFormat::Q4_K => row.k(k_formats::encode_q4_k),
        BlockFormat::Q5_K => row.k(k_formats::encode_q5_k),
        BlockFormat::Q6_K => row.k(k_formats::encode_q6_k),
        BlockFormat::IQ4_XS => row.k(k_formats::encode_iq4_xs),
        BlockFormat::IQ1_S => row.k(grid_formats::encode_iq1_s),
        BlockFormat::IQ1_M => row.k(grid_formats::encode_iq1_m),
        BlockFormat::IQ2_XXS => row.k(grid_formats::encode_iq2_xxs),
        BlockFormat::IQ2_XS => row.k(grid_formats::encode_iq2_xs),
        BlockFormat::IQ2_S => row.k(grid_formats::encode_iq2_s),
        BlockFormat::IQ3_XXS => row.k(grid_formats::encode_iq3_xxs),
        BlockFormat::IQ3_S => row.k(grid_formats::encode_iq3_s),
        _ => return quantize(format, values),
    })
}

/// A row of a matrix.
struct Row<'a> {
    values: &'a [f32],
    importance: &'a [f32],
    variance: f32,
}

impl Row<'_> {
    /// Each block with the fit that the search finds, or `plain` where it finds none.
    fn encode<Fit, const BYTES: usize>(
        &self,
        search: impl Fn(&Group<'_, 32>) -> Option<Fit>,
        plain: impl Fn(&[f32; 32]) -> [u8; BYTES],
        pack: impl Fn(&[f32; 32], Fit) -> [u8; BYTES],
    ) -> Vec<u8> {
        let blocks = self.blocks(|_| self.variance);
        let bytes = blocks.flat_map(|block| match search(&block) {
            Some(fit) => pack(block.values, fit),
            None => plain(block.values),
        });
        bytes.collect()
    }

    fn iq4_nl(&self) -> Vec<u8> {
        let blocks = self.blocks(|values| 2.0 * mean_square(values));
        let bytes = blocks.flat_map(|block| match block.table() {
            Some(d) => {
                let inverse = inverse(d);
                let indices = block.values.map(|x| nearest_iq4(x * inverse));
                joined(&[&half(d), &nibbles(&indices)])
            }
            None => encode_iq4_nl(block.values),
        });
        bytes.collect()
    }

    fn k<const BYTES: usize>(&self, encode: Encode<BYTES>) -> Vec<u8> {
        let blocks = self.values.as_chunks().0.iter();
        let blocks = blocks.zip(self.importance.as_chunks().0);
        let bytes = blocks.flat_map(|(values, importance)| encode(values, importance));
        bytes.collect()
    }

    /// The blocks with their weights, given the variance of a block.
    fn blocks(&self, variance: impl Fn(&[f32; 32]) -> f32) -> impl Iterator<Item = Group<'_, 32>> {
        let values = self.values.as_chunks::<32>().0;
        let importance = self.importance.as_chunks::<32>().0;
        let blocks = values.iter().zip(importance);
        blocks.map(move |(values, importance)| Group::new(values, importance, variance(values)))
    }
}

fn symmetric_q4(values: &[f32; 32], d: f32) -> [u8; 18] {
    let indices = symmetric_indices(values, d, 8.0);
    joined(&[&half(d), &nibbles(&indices)])
}

fn symmetric_q5(values: &[f32; 32], d: f32) -> [u8; 22] {
    let indices = symmetric_indices(values, d, 16.0);
    joined(&[&half(d), &fifth_bits(&indices), &nibbles(&indices)])
}

fn affine_q4(values: &[f32; 32], fit: Affine) -> [u8; 20] {
    let indices = affine_indices(values, fit, 15.0);
    joined(&[&half(fit.d), &half(fit.min), &nibbles(&indices)])
}

fn affine_q5(values: &[f32; 32], fit: Affine) -> [u8; 24] {
    let indices = affine_indices(values, fit, 31.0);
    let (fifth, nibbles) = (fifth_bits(&indices), nibbles(&indices));
    joined(&[&half(fit.d), &half(fit.min), &fifth, &nibbles])
}

/// The nearest indices, shifted by `offset` to begin at 0.
fn symmetric_indices(values: &[f32; 32], d: f32, offset: f32) -> [u8; 32] {
    let inverse = inverse(stored(d));
    values.map(|x| {
        (x * inverse + offset)
            .round()
            .clamp(0.0, 2.0 * offset - 1.0) as u8
    })
}

fn affine_indices(values: &[f32; 32], fit: Affine, last: f32) -> [u8; 32] {
    let (inverse, min) = (inverse(stored(fit.d)), stored(fit.min));
    values.map(|x| ((x - min) * inverse).round().clamp(0.0, last) as u8)
}

#[cfg(test)]
mod tests {
    use super::super::tests::noise;
    use super::*;
    use crate::dequantize;

    /// A few columns matter a hundred times as much as others.
    fn importance(n: usize) -> Vec<f32> {
        let noise = noise(n, 7).into_iter();
        noise.map(|x| (2.5 * x).exp()).collect()
    }

    fn error(format: BlockFormat, bytes: &[u8], values: &[f32], importance: &[f32]) -> f64 {
        let mut read = vec![f32::NAN; values.len()];
        dequantize(format, bytes, &mut read);
        let each = values.iter().zip(&read).zip(importance);
        each.map(|((a, b), w)| f64::from(w * (a - b) * (a - b)))
            .sum()
    }

    /// The weighted error goes down for every format, with weights by a tenth or more; where all
    /// columns are equal it does not rise, as a scale is searched for.
    #[test]
    fn the_weighted_error_goes_down() {
        let values = noise(32 * 64, 1);
        for (importance, most) in [(importance(values.len()), 0.9), (vec![1.0; 2048], 1.0)] {
            for format in WEIGHTED_FORMATS {
                let plain = quantize(format, &values).unwrap();
                let weighted = quantize_weighted(format, &values, &importance).unwrap();
                assert_eq!(plain.len(), weighted.len());
                let [before, after] =
                    [plain, weighted].map(|bytes| error(format, &bytes, &values, &importance));
                assert!(after <= most * before, "{format}: {before} became {after}");
            }
        }
    }

    #[test]
    fn blocks_without_weights_or_values_are_encoded_as_without() {
        let values = noise(256, 3);
        for format in WEIGHTED_FORMATS {
            for (values, importance) in [
                (values.clone(), vec![0.0; 256]),
                (vec![0.0; 256], vec![1.0; 256]),
                (vec![-2.5; 256], vec![1.0; 256]),
            ] {
                let weighted = quantize_weighted(format, &values, &importance).unwrap();
                let plain = quantize(format, &values).unwrap();
                let wanted = error(format, &plain, &values, &[1.0; 256]);
                let found = error(format, &weighted, &values, &[1.0; 256]);
                assert!(found <= wanted, "{format}: {found} above {wanted}");
            }
        }
    }

    #[test]
    fn extremes_stay_finite() {
        let mut one = [0.0f32; 256];
        one[3] = 65504.0;
        for values in [one, [-65504.0; 256], [1e-42; 256], [1e4; 256]] {
            for format in WEIGHTED_FORMATS {
                for weight in [1e-30, 1.0, 1e30] {
                    let bytes = quantize_weighted(format, &values, &[weight; 256]).unwrap();
                    let mut read = [f32::NAN; 256];
                    dequantize(format, &bytes, &mut read);
                    assert!(read.iter().all(|v| v.is_finite()), "{format}: {read:?}");
                }
            }
        }
    }

    #[test]
    fn other_formats_take_no_weights() {
        let values = noise(32, 5);
        let weighted = quantize_weighted(BlockFormat::Q8_0, &values, &importance(32));
        assert_eq!(weighted, quantize(BlockFormat::Q8_0, &values));
        let refused = quantize_weighted(BlockFormat::Q4_0, &values, &[1.0; 31]);
        let (n_values, got) = (32, 31);
        assert_eq!(
            refused,
            Err(QuantizeError::WrongImportance { n_values, got })
        );
        let refused = quantize_weighted(BlockFormat::Q4_0, &values[..31], &[1.0; 31]);
        assert!(matches!(refused, Err(QuantizeError::PartialBlock { .. })));
    }

    /// Importance makes no difference to the formats that are not listed.
    #[test]
    fn all_weighted_formats_are_listed() {
        let values = noise(256, 9);
        let importance: Vec<f32> = (1..=256u16).map(f32::from).collect();
        for format in BlockFormat::ALL {
            if !WEIGHTED_FORMATS.contains(&format) {
                let weighted = quantize_weighted(format, &values, &importance).ok();
                assert_eq!(weighted, quantize(format, &values).ok(), "{format}");
            }
        }
    }
}
