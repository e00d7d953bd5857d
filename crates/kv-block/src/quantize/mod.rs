//! Encoding values into the simple block formats: for conversions, K/V rows and test data.
//!
//! One scale is chosen per block from its extreme values, as described at each function; there is
//! no search for a better one, except for the K formats and with the importance of columns
//! ([`quantize_weighted`]). NVFP4 cannot be written.

mod few_bits;
mod fit;
mod grid_fit;
mod grid_formats;
mod grid_search;
mod integers;
mod k_formats;
mod weighted;

use half::{bf16, f16};

use super::{BlockFormat, IQ4_VALUES};

use self::few_bits::{encode_mxfp4, encode_q1_0, encode_q2_0, encode_tq1_0, encode_tq2_0};
use self::grid_formats::{
    encode_iq1_m, encode_iq1_s, encode_iq2_s, encode_iq2_xs, encode_iq2_xxs, encode_iq3_s,
    encode_iq3_xxs,
};
use self::k_formats::{
    encode_iq4_xs, encode_q2_k, encode_q3_k, encode_q4_k, encode_q5_k, encode_q6_k,
};
pub use integers::{integer_block, integer_formats, mxfp4_block};
pub use weighted::{WEIGHTED_FORMATS, quantize_weighted};

/// The importance of values whose columns are all alike.
const ALIKE: [f32; 256] = [1.0; 256];

/// A row that cannot be encoded.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum QuantizeError {
    /// This format can be read but not written.
    #[error("values cannot be encoded as {format}: only decoding of this format is implemented")]
    Unsupported {
        /// The format asked for.
        format: BlockFormat,
    },
    /// The number of values is no whole number of blocks.
    #[error("{n_values} values cannot be stored as {format}, whose blocks hold {block_len}")]
    PartialBlock {
        /// The format asked for.
        format: BlockFormat,
        /// Values given.
        n_values: usize,
        /// Values in one block.
        block_len: usize,
    },
    /// The output is longer or shorter than the blocks.
    #[error("{n_values} values take {wanted} bytes as {format}, not {got}")]
    WrongLength {
        /// The format asked for.
        format: BlockFormat,
        /// Values given.
        n_values: usize,
        /// Bytes that they take.
        wanted: usize,
        /// Bytes of the output.
        got: usize,
    },
    /// A value is not finite, or beyond the numbers of half precision, which scales have.
    #[error(
        "value {index} of {n_values} is {value:e}, which {format} cannot hold: its largest is \
         65504; if the weights are not damaged, take bf16 or f32"
    )]
    OutOfRange {
        /// The format asked for.
        format: BlockFormat,
        /// Values given.
        n_values: usize,
        /// The place of the first such value.
        index: usize,
        /// The value.
        value: f32,
    },
    /// Not every value has an importance.
    #[error("{n_values} values need as many importances, not {got}")]
    WrongImportance {
        /// Values given.
        n_values: usize,
        /// Importances given.
        got: usize,
    },
}

/// Encodes `values` as whole blocks of `format`: `F32`, `F16`, `BF16`, `Q4_0`, `Q4_1`, `Q5_0`,
/// `Q5_1`, `Q8_0`, a K format, an IQ format, `MXFP4`, `TQ1_0`, `TQ2_0`, `Q1_0` or
/// `Q2_0`.
///
/// # Errors
/// [`QuantizeError`] for another format, where the values are no whole number of blocks, or where
/// one of them is beyond what the format holds.
pub fn quantize(format: BlockFormat, values: &[f32]) -> Result<Vec<u8>, QuantizeError> {
    check_range(format, values)?;
    let mut bytes = vec![0; format.row_bytes(values.len()).unwrap_or(0)];
    quantize_into(format, values, &mut bytes)?;
    Ok(bytes)
}

/// The same into `bytes`, which must have [`BlockFormat::row_bytes`] of the values. Values beyond
/// what the format holds are clipped: for rows of K and V, where one must not stop a text.
///
/// # Errors
/// As [`quantize`] otherwise, and [`QuantizeError::WrongLength`]; nothing is written then.
pub fn quantize_into(
    format: BlockFormat,
    values: &[f32],
    bytes: &mut [u8],
) -> Result<(), QuantizeError> {
    let (n_values, block_len) = (values.len(), format.block_len());
    let Some(wanted) = format.row_bytes(n_values) else {
        return Err(QuantizeError::PartialBlock {
            format,
            n_values,
            block_len,
        });
    };
    if bytes.len() != wanted {
        let got = bytes.len();
        return Err(QuantizeError::WrongLength {
            format,
            n_values,
            wanted,
            got,
        });
    }
    match format {
        BlockFormat::F32 => each_block(values, bytes, |[v]: &[f32; 1]| v.to_le_bytes()),
        BlockFormat::F16 => {
            each_block(values, bytes, |[v]: &[f32; 1]| {
                f16::from_f32(*v).to_le_bytes()
            });
        }
        BlockFormat::BF16 => {
            each_block(values, bytes, |[v]: &[f32; 1]| {
                bf16::from_f32(*v).to_le_bytes()
            });
        }
        BlockFormat::Q4_0 => each_block(values, bytes, encode_q4_0),
        BlockFormat::Q4_1 => each_block(values, bytes, encode_q4_1),
        BlockFormat::Q5_0 => each_block(values, bytes, encode_q5_0),
        BlockFormat::Q5_1 => each_block(values, bytes, encode_q5_1),
        BlockFormat::Q8_0 => each_block(values, bytes, encode_q8_0),
        BlockFormat::IQ4_NL => each_block(values, bytes, encode_iq4_nl),
        BlockFormat::Q2_K => each_block(values, bytes, |v| encode_q2_k(v, &ALIKE)),
        BlockFormat::Q3_K => each_block(values, bytes, |v| encode_q3_k(v, &ALIKE)),
        BlockFormat::Q4_K => each_block(values, bytes, |v| encode_q4_k(v, &ALIKE)),
        BlockFormat::Q5_K => each_block(values, bytes, |v| encode_q5_k(v, &ALIKE)),
        BlockFormat::Q6_K => each_block(values, bytes, |v| encode_q6_k(v, &ALIKE)),
        BlockFormat::IQ1_S => each_block(values, bytes, |v| encode_iq1_s(v, &ALIKE)),
        BlockFormat::IQ1_M => each_block(values, bytes, |v| encode_iq1_m(v, &ALIKE)),
        BlockFormat::IQ4_XS => each_block(values, bytes, |v| encode_iq4_xs(v, &ALIKE)),
        BlockFormat::IQ2_XXS => each_block(values, bytes, |v| encode_iq2_xxs(v, &ALIKE)),
        BlockFormat::IQ2_XS => each_block(values, bytes, |v| encode_iq2_xs(v, &ALIKE)),
        BlockFormat::IQ2_S => each_block(values, bytes, |v| encode_iq2_s(v, &ALIKE)),
        BlockFormat::IQ3_XXS => each_block(values, bytes, |v| encode_iq3_xxs(v, &ALIKE)),
        BlockFormat::IQ3_S => each_block(values, bytes, |v| encode_iq3_s(v, &ALIKE)),
        BlockFormat::MXFP4 => each_block(values, bytes, encode_mxfp4),
        BlockFormat::TQ1_0 => each_block(values, bytes, encode_tq1_0),
        BlockFormat::TQ2_0 => each_block(values, bytes, encode_tq2_0),
        BlockFormat::Q1_0 => each_block(values, bytes, encode_q1_0),
        BlockFormat::Q2_0 => each_block(values, bytes, encode_q2_0),
        _ => {
            return Err(QuantizeError::Unsupported { format });
        }
    }
    Ok(())
}

/// Checks that no value is clipped by a format, or becomes infinite: all of a tensor's, so that the
/// place of one is its place there.
///
/// # Errors
/// [`QuantizeError::OutOfRange`] with the first.
pub fn check_range(format: BlockFormat, values: &[f32]) -> Result<(), QuantizeError> {
    let half = f16::MAX.to_f32();
    let holds = |value: &f32| match format {
        // What is not finite stays what it is.
        BlockFormat::F32 | BlockFormat::BF16 => true,
        BlockFormat::F16 => value.abs() <= half || !value.is_finite(),
        BlockFormat::MXFP4 => value.is_finite(),
        _ => value.abs() <= half,
    };
    match values.iter().position(|value| !holds(value)) {
        Some(index) => Err(QuantizeError::OutOfRange {
            format,
            n_values: values.len(),
            index,
            value: values[index],
        }),
        None => Ok(()),
    }
}

fn each_block<const LEN: usize, const BYTES: usize>(
    values: &[f32],
    bytes: &mut [u8],
    encode: impl Fn(&[f32; LEN]) -> [u8; BYTES],
) {
    let (values, bytes) = (values.as_chunks().0, bytes.as_chunks_mut().0);
    for (values, bytes) in values.iter().zip(bytes) {
        *bytes = encode(values);
    }
}

/// `d = extreme / −8`, where `extreme` is the value of largest magnitude, so that it takes index 0.
fn encode_q4_0(values: &[f32; 32]) -> [u8; 18] {
    let d = representable(extreme(values) / -8.0);
    let inverse = inverse(d);
    let indices = values.map(|v| index(v * inverse + 8.0, 15));
    joined(&[&half(d), &nibbles(&indices)])
}

/// `d = (max − min) / 15`, `m = min`.
fn encode_q4_1(values: &[f32; 32]) -> [u8; 20] {
    let (min, max) = bounds(values);
    let d = representable((max - min) / 15.0);
    let inverse = inverse(d);
    let indices = values.map(|v| index((v - min) * inverse, 15));
    joined(&[&half(d), &half(min), &nibbles(&indices)])
}

/// `d = extreme / −16`, as in `Q4_0`.
fn encode_q5_0(values: &[f32; 32]) -> [u8; 22] {
    let d = representable(extreme(values) / -16.0);
    let inverse = inverse(d);
    let indices = values.map(|v| index(v * inverse + 16.0, 31));
    joined(&[&half(d), &fifth_bits(&indices), &nibbles(&indices)])
}

/// `d = (max − min) / 31`, `m = min`.
fn encode_q5_1(values: &[f32; 32]) -> [u8; 24] {
    let (min, max) = bounds(values);
    let d = representable((max - min) / 31.0);
    let inverse = inverse(d);
    let indices = values.map(|v| index((v - min) * inverse, 31));
    let (fifth, nibbles) = (fifth_bits(&indices), nibbles(&indices));
    joined(&[&half(d), &half(min), &fifth, &nibbles])
}

/// `d = max |x| / 127`.
fn encode_q8_0(values: &[f32; 32]) -> [u8; 34] {
    let d = representable(extreme(values).abs() / 127.0);
    let inverse = inverse(d);
    let quants = values.map(|v| (v * inverse).round() as i8 as u8);
    joined(&[&half(d), &quants])
}

/// The nearest entries `t` of the table to `x / d₀`, where `d₀ = extreme / −127` (so that the value
/// of largest magnitude takes the table's), then the scale that fits these entries best:
/// `d = Σ t·x / Σ t²`.
fn encode_iq4_nl(values: &[f32; 32]) -> [u8; 18] {
    let inverse = inverse(representable(extreme(values) / f32::from(IQ4_VALUES[0])));
    let indices = values.map(|v| nearest_iq4(v * inverse));
    let (mut products, mut squares) = (0.0, 0.0);
    for (&x, &index) in values.iter().zip(&indices) {
        let t = f32::from(IQ4_VALUES[usize::from(index)]);
        products += t * x;
        squares += t * t;
    }
    // No entry of the table is 0, so neither is the sum of squares.
    let d = representable(products / squares);
    joined(&[&half(d), &nibbles(&indices)])
}

/// The index of the nearest entry of the table: how many midpoints between neighbours lie below
/// `x`.
fn nearest_iq4(x: f32) -> u8 {
    let middles = IQ4_VALUES
        .windows(2)
        .map(|pair| (f32::from(pair[0]) + f32::from(pair[1])) / 2.0);
    middles.map(|middle| u8::from(x > middle)).sum()
}

/// The value of largest magnitude, with its sign; the first of several.
fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(
        0.0,
        |best: f32, &v| if v.abs() > best.abs() { v } else { best },
    )
}

fn bounds(values: &[f32]) -> (f32, f32) {
    values
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| {
            (lo.min(v), hi.max(v))
        })
}

/// `d`, or the largest half-precision value: beyond it values are clipped instead of becoming
/// infinite.
fn representable(d: f32) -> f32 {
    let largest = f16::MAX.to_f32();
    d.clamp(-largest, largest)
}

/// A scale as it reads back.
fn stored(d: f32) -> f32 {
    f16::from_f32(representable(d)).to_f32()
}

fn mean_square(values: &[f32]) -> f32 {
    let sum: f32 = values.iter().map(|x| x * x).sum();
    sum / values.len().max(1) as f32
}

/// `1 / d`, and 0 for a block of equal values, whose scale is 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The nearest index in `0..=last` (halves upwards).
fn index(scaled: f32, last: u8) -> u8 {
    ((scaled + 0.5) as u8).min(last)
}

fn half(value: f32) -> [u8; 2] {
    f16::from_f32(representable(value)).to_le_bytes()
}

fn nibbles(indices: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| (indices[i] & 15) | ((indices[i + 16] & 15) << 4))
}

fn fifth_bits(indices: &[u8; 32]) -> [u8; 4] {
    let bits = indices
        .iter()
        .rev()
        .fold(0u32, |bits, q| (bits << 1) | u32::from(q >> 4));
    bits.to_le_bytes()
}

/// The parts of a block one after the other.
fn joined<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    let mut block = [0; N];
    let from = parts.iter().copied().flatten();
    block
        .iter_mut()
        .zip(from)
        .for_each(|(to, from)| *to = *from);
    block
}

#[cfg(test)]
mod tests {
    use super::super::dequantize;
    use super::*;

    /// Numbers that look random, nearly normal.
    pub(super) fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next() + next() + next()).collect()
    }

    /// Largest error of a value, as a part of the block's range of values (`max − min`, or twice
    /// the largest magnitude): half a step, or a whole one at the far end of the `_0` formats,
    /// plus the rounding of the scales to `f16`.
    fn tolerance(format: BlockFormat) -> f32 {
        match format {
            BlockFormat::F32 => 0.0,
            BlockFormat::F16 => 1.0 / 2048.0,
            BlockFormat::BF16 => 1.0 / 256.0,
            BlockFormat::Q4_0 => 1.01 / 16.0,
            BlockFormat::Q4_1 => 0.51 / 15.0,
            BlockFormat::Q5_0 => 1.02 / 32.0,
            BlockFormat::Q5_1 => 0.53 / 31.0,
            // Half of the widest gap of the table is 12, and the scale is fitted.
            BlockFormat::IQ4_NL => 16.0 / 254.0,
            BlockFormat::IQ4_XS => 16.0 / 254.0 + 0.5 / 64.0,
            // Half a step of the group, and the rounding of its scale.
            BlockFormat::Q2_K => 0.5 / 3.0 + 0.5 / 15.0,
            BlockFormat::Q3_K => 1.0 / 8.0 + 0.5 / 32.0,
            BlockFormat::Q4_K => 0.5 / 15.0 + 0.5 / 63.0,
            BlockFormat::Q5_K => 0.5 / 31.0 + 0.5 / 63.0,
            BlockFormat::Q6_K => 1.0 / 64.0 + 0.5 / 128.0,
            BlockFormat::IQ1_S | BlockFormat::IQ1_M => 0.4,
            // Few points of a grid of four levels (three), or of eight.
            BlockFormat::IQ2_XXS | BlockFormat::IQ2_XS | BlockFormat::IQ2_S => 0.27,
            BlockFormat::IQ3_XXS | BlockFormat::IQ3_S => 0.15,
            // The largest may lie between the last two floats of its power of two, or beyond.
            BlockFormat::MXFP4 => 0.13,
            // Half the way from 0 to the largest, and all the way from the mean to it.
            BlockFormat::TQ1_0 | BlockFormat::TQ2_0 | BlockFormat::Q2_0 => 0.251,
            BlockFormat::Q1_0 => 0.5,
            _ => 0.6 / 254.0,
        }
    }

    const WRITABLE: [BlockFormat; 27] = [
        BlockFormat::F32,
        BlockFormat::F16,
        BlockFormat::BF16,
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q8_0,
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
        BlockFormat::MXFP4,
        BlockFormat::TQ1_0,
        BlockFormat::TQ2_0,
        BlockFormat::Q1_0,
        BlockFormat::Q2_0,
    ];

    #[test]
    fn what_is_written_reads_back_within_one_step() {
        let values: Vec<f32> = (0..768)
            .map(|i: i32| (i as f32 * 0.7).sin() * (1 + i / 32) as f32)
            .collect();
        for format in WRITABLE {
            let bytes = quantize(format, &values).unwrap();
            assert_eq!(
                Some(bytes.len()),
                format.row_bytes(values.len()),
                "{format}"
            );
            let mut read = vec![f32::NAN; values.len()];
            dequantize(format, &bytes, &mut read);
            let len = format.block_len().max(32);
            for (block, read) in values.chunks(len).zip(read.chunks(len)) {
                let largest = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let worst = block
                    .iter()
                    .zip(read)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                let allowed = 2.0 * largest * tolerance(format);
                assert!(worst <= allowed, "{format}: error {worst} > {allowed}");
            }
        }
    }

    #[test]
    fn equal_values_and_zeros_survive() {
        for format in WRITABLE {
            for constant in [0.0f32, -2.0, 0.5] {
                let bytes = quantize(format, &[constant; 256]).unwrap();
                let mut read = [f32::NAN; 256];
                dequantize(format, &bytes, &mut read);
                // A scale of 0.5 / 127 is not exact in half precision.
                assert!(
                    read.iter()
                        .all(|v| (v - constant).abs() <= constant.abs() / 2048.0),
                    "{format} {constant}: {read:?}"
                );
            }
        }
    }

    /// Values beyond the largest scale in half precision are clipped, and never become infinite.
    #[test]
    fn extremes_stay_finite() {
        let mut mixed = [0.0f32; 256];
        mixed[3] = f32::MAX;
        mixed[9] = -1.0;
        let blocks = [
            mixed,
            [f32::MAX; 256],
            [f32::MIN; 256],
            [1e-42; 256],
            [-f32::MIN_POSITIVE; 256],
            std::array::from_fn(|i| if i % 2 == 0 { f32::MAX } else { f32::MIN }),
        ];
        let quantised = WRITABLE.into_iter().filter(|f| f.block_len() > 1);
        for (format, values) in quantised.flat_map(|f| blocks.map(|b| (f, b))) {
            let mut bytes = vec![0; format.row_bytes(256).unwrap()];
            quantize_into(format, &values, &mut bytes).unwrap();
            let mut read = [f32::NAN; 256];
            dequantize(format, &bytes, &mut read);
            for (v, r) in values.iter().zip(read) {
                assert!(r.is_finite(), "{format}: {v} became {r}");
                assert!(
                    v.abs() < 1e-30 || r == 0.0 || v.signum() == r.signum() || v.abs() < 1e30,
                    "{format}: {v} became {r}"
                );
            }
        }
    }

    /// Weights are not clipped in silence: the first that a format cannot hold is named.
    #[test]
    fn values_out_of_range_are_refused() {
        for format in WRITABLE {
            for value in [65504.0, -1e5, 3e19, f32::MAX, f32::INFINITY, f32::NAN] {
                let mut values = [0.5; 256];
                (values[77], values[99]) = (value, value);
                let found = quantize(format, &values).map(drop);
                let weighted = quantize_weighted(format, &values, &ALIKE).map(drop);
                let is_held = match format {
                    BlockFormat::F32 | BlockFormat::BF16 => true,
                    BlockFormat::F16 => value == 65504.0 || !value.is_finite(),
                    BlockFormat::MXFP4 => value.is_finite(),
                    _ => value == 65504.0,
                };
                for found in [found, weighted] {
                    match found {
                        Ok(()) => assert!(is_held, "{format}: {value}"),
                        Err(QuantizeError::OutOfRange { index, .. }) => {
                            assert!(index == 77 && !is_held, "{format}: {value}, {index}");
                        }
                        Err(other) => panic!("{format}: {value}: {other}"),
                    }
                }
            }
        }
    }

    /// Every entry of the table is found again where the block spans it.
    #[test]
    fn iq4_entries_survive() {
        let values: [f32; 32] = std::array::from_fn(|i| f32::from(IQ4_VALUES[i % 16]) / 64.0);
        let bytes = quantize(BlockFormat::IQ4_NL, &values).unwrap();
        let mut read = [f32::NAN; 32];
        dequantize(BlockFormat::IQ4_NL, &bytes, &mut read);
        assert_eq!(values, read);
    }

    #[test]
    fn room_of_another_size_is_refused() {
        let mut bytes = [7; 33];
        let refused = quantize_into(BlockFormat::Q8_0, &[1.0; 32], &mut bytes);
        let (n_values, wanted, got) = (32, 34, 33);
        let format = BlockFormat::Q8_0;
        assert_eq!(
            refused,
            Err(QuantizeError::WrongLength {
                format,
                n_values,
                wanted,
                got
            })
        );
        assert_eq!(bytes, [7; 33]);
    }

    #[test]
    fn partial_blocks_and_other_formats_are_refused() {
        assert_eq!(
            quantize(BlockFormat::Q8_0, &[0.0; 33]),
            Err(QuantizeError::PartialBlock {
                format: BlockFormat::Q8_0,
                n_values: 33,
                block_len: 32
            })
        );
        for format in BlockFormat::ALL
            .into_iter()
            .filter(|f| !WRITABLE.contains(f))
        {
            let values = vec![0.0; format.block_len()];
            assert_eq!(
                quantize(format, &values),
                Err(QuantizeError::Unsupported { format })
            );
        }
    }
}
