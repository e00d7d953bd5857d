//! Encoding values into the simple block formats: for conversions, K/V rows and test data.
//!
//! One scale is chosen per block from its extreme values, as described at each function; there is
//! no search for a better one. The K and IQ4 formats cannot be written.

use half::{bf16, f16};

use super::BlockFormat;

/// A row that cannot be encoded.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
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
}

/// Encodes `values` as whole blocks of `format`: `F32`, `F16`, `BF16`, `Q4_0`, `Q4_1`, `Q5_0`,
/// `Q5_1` or `Q8_0`.
///
/// # Errors
/// [`QuantizeError`] for another format, or where the values are no whole number of blocks.
pub fn quantize(format: BlockFormat, values: &[f32]) -> Result<Vec<u8>, QuantizeError> {
    let (n_values, block_len) = (values.len(), format.block_len());
    if !n_values.is_multiple_of(block_len) {
        return Err(QuantizeError::PartialBlock {
            format,
            n_values,
            block_len,
        });
    }
    let mut bytes = Vec::with_capacity(n_values / block_len * format.block_bytes());
    let (blocks, _) = values.as_chunks::<32>();
    match format {
        BlockFormat::F32 => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        BlockFormat::F16 => {
            bytes.extend(values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()));
        }
        BlockFormat::BF16 => {
            bytes.extend(values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()));
        }
        BlockFormat::Q4_0 => blocks.iter().for_each(|b| encode_q4_0(b, &mut bytes)),
        BlockFormat::Q4_1 => blocks.iter().for_each(|b| encode_q4_1(b, &mut bytes)),
        BlockFormat::Q5_0 => blocks.iter().for_each(|b| encode_q5_0(b, &mut bytes)),
        BlockFormat::Q5_1 => blocks.iter().for_each(|b| encode_q5_1(b, &mut bytes)),
        BlockFormat::Q8_0 => blocks.iter().for_each(|b| encode_q8_0(b, &mut bytes)),
        BlockFormat::Q2_K
        | BlockFormat::Q3_K
        | BlockFormat::Q4_K
        | BlockFormat::Q5_K
        | BlockFormat::Q6_K
        | BlockFormat::IQ4_NL
        | BlockFormat::IQ4_XS => return Err(QuantizeError::Unsupported { format }),
    }
    Ok(bytes)
}

/// `d = extreme / −8`, where `extreme` is the value of largest magnitude, so that it takes index 0.
fn encode_q4_0(values: &[f32; 32], bytes: &mut Vec<u8>) {
    let d = extreme(values) / -8.0;
    let indices = values.map(|v| index(v * inverse(d) + 8.0, 15));
    push_half(d, bytes);
    push_nibbles(&indices, bytes);
}

/// `d = (max − min) / 15`, `m = min`.
fn encode_q4_1(values: &[f32; 32], bytes: &mut Vec<u8>) {
    let (min, max) = bounds(values);
    let d = (max - min) / 15.0;
    let indices = values.map(|v| index((v - min) * inverse(d), 15));
    push_half(d, bytes);
    push_half(min, bytes);
    push_nibbles(&indices, bytes);
}

/// `d = extreme / −16`, as in `Q4_0`.
fn encode_q5_0(values: &[f32; 32], bytes: &mut Vec<u8>) {
    let d = extreme(values) / -16.0;
    let indices = values.map(|v| index(v * inverse(d) + 16.0, 31));
    push_half(d, bytes);
    push_fifth_bits(&indices, bytes);
    push_nibbles(&indices, bytes);
}

/// `d = (max − min) / 31`, `m = min`.
fn encode_q5_1(values: &[f32; 32], bytes: &mut Vec<u8>) {
    let (min, max) = bounds(values);
    let d = (max - min) / 31.0;
    let indices = values.map(|v| index((v - min) * inverse(d), 31));
    push_half(d, bytes);
    push_half(min, bytes);
    push_fifth_bits(&indices, bytes);
    push_nibbles(&indices, bytes);
}

/// `d = max |x| / 127`.
fn encode_q8_0(values: &[f32; 32], bytes: &mut Vec<u8>) {
    let d = extreme(values).abs() / 127.0;
    push_half(d, bytes);
    bytes.extend(values.iter().map(|v| (v * inverse(d)).round() as i8 as u8));
}

/// The value of largest magnitude, with its sign; the first of several.
fn extreme(values: &[f32; 32]) -> f32 {
    values.iter().fold(
        0.0,
        |best: f32, &v| if v.abs() > best.abs() { v } else { best },
    )
}

fn bounds(values: &[f32; 32]) -> (f32, f32) {
    values
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| {
            (lo.min(v), hi.max(v))
        })
}

/// `1 / d`, and 0 for a block of equal values, whose scale is 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The nearest index in `0..=last` (halves upwards).
fn index(scaled: f32, last: u8) -> u8 {
    ((scaled + 0.5) as u8).min(last)
}

fn push_half(value: f32, bytes: &mut Vec<u8>) {
    bytes.extend(f16::from_f32(value).to_le_bytes());
}

fn push_nibbles(indices: &[u8; 32], bytes: &mut Vec<u8>) {
    let (low, high) = indices.split_at(16);
    bytes.extend(
        low.iter()
            .zip(high)
            .map(|(low, high)| (low & 15) | ((high & 15) << 4)),
    );
}

fn push_fifth_bits(indices: &[u8; 32], bytes: &mut Vec<u8>) {
    let bits = indices
        .iter()
        .rev()
        .fold(0u32, |bits, q| (bits << 1) | u32::from(q >> 4));
    bytes.extend(bits.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::dequantize;
    use super::*;

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
            _ => 0.6 / 254.0,
        }
    }

    const WRITABLE: [BlockFormat; 8] = [
        BlockFormat::F32,
        BlockFormat::F16,
        BlockFormat::BF16,
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q8_0,
    ];

    #[test]
    fn what_is_written_reads_back_within_one_step() {
        let values: Vec<f32> = (0..320)
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
            for (block, read) in values.chunks(32).zip(read.chunks(32)) {
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
                let bytes = quantize(format, &[constant; 32]).unwrap();
                let mut read = [f32::NAN; 32];
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
