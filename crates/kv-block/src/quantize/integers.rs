//! Blocks of whole numbers that somebody else chose, with their scale: nothing is rounded.

use half::f16;

use super::super::BlockFormat;
use super::{QuantizeError, fifth_bits, joined, nibbles};

/// The formats of these blocks, the smallest first, with the numbers that they hold.
const FORMATS: [(BlockFormat, [i32; 2]); 3] = [
    (BlockFormat::Q4_0, [-8, 7]),
    (BlockFormat::Q5_0, [-16, 15]),
    (BlockFormat::Q8_0, [-128, 127]),
];

/// The smallest format whose blocks hold all whole numbers from `least` to `most`, if one does.
pub fn integer_format(least: i32, most: i32) -> Option<BlockFormat> {
    let fits = |&(_, [first, last]): &(BlockFormat, [i32; 2])| first <= least && most <= last;
    let found = FORMATS.into_iter().find(fits);
    found.map(|(format, _)| format)
}

/// A block of `Q4_0`, `Q5_0` or `Q8_0` whose value `i` is `scale · numbers[i]`, exactly. Numbers
/// that the format does not hold become the nearest that it does.
///
/// # Errors
/// [`QuantizeError::Unsupported`] for another format, [`QuantizeError::WrongLength`] where `block`
/// is longer or shorter than one.
pub fn integer_block(
    format: BlockFormat,
    scale: f16,
    numbers: &[i16; 32],
    block: &mut [u8],
) -> Result<(), QuantizeError> {
    let d = scale.to_le_bytes();
    let above =
        |least: i16, most: i16| numbers.map(|number| (number.clamp(least, most) - least) as u8);
    match (format, block.len()) {
        (BlockFormat::Q4_0, 18) => {
            let bytes: [u8; 18] = joined(&[&d, &nibbles(&above(-8, 7))]);
            block.copy_from_slice(&bytes);
        }
        (BlockFormat::Q5_0, 22) => {
            let indices = above(-16, 15);
            let bytes: [u8; 22] = joined(&[&d, &fifth_bits(&indices), &nibbles(&indices)]);
            block.copy_from_slice(&bytes);
        }
        (BlockFormat::Q8_0, 34) => {
            let quants = numbers.map(|number| number.clamp(-128, 127) as i8 as u8);
            let bytes: [u8; 34] = joined(&[&d, &quants]);
            block.copy_from_slice(&bytes);
        }
        (BlockFormat::Q4_0 | BlockFormat::Q5_0 | BlockFormat::Q8_0, got) => {
            return Err(QuantizeError::WrongLength {
                format,
                n_values: 32,
                wanted: format.block_bytes(),
                got,
            });
        }
        _ => return Err(QuantizeError::Unsupported { format }),
    }
    Ok(())
}

/// A block of `MXFP4` with this power of two (`2^(exponent − 127)`) and these floats, as the bits
/// of sign, exponent and mantissa.
pub fn mxfp4_block(exponent: u8, floats: &[u8; 32]) -> [u8; 17] {
    joined(&[&[exponent], &nibbles(floats)])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::super::super::dequantize;
    use super::*;

    #[test]
    fn values_are_the_numbers_times_their_scale() {
        // The largest, a common one, and the smallest that half precision has.
        for scale in [65504.0, -0.013_427_734, 5.960_464_5e-8] {
            let scale = f16::from_f32(scale);
            for (format, [least, most]) in FORMATS {
                let span = most - least + 1;
                let numbers = std::array::from_fn(|i| (least + (i as i32 * 37) % span) as i16);
                let mut block = vec![0; format.block_bytes()];
                integer_block(format, scale, &numbers, &mut block).unwrap();
                let mut values = [0.0; 32];
                dequantize(format, &block, &mut values);
                let wanted = numbers.map(|number| scale.to_f32() * f32::from(number));
                assert_eq!(values, wanted, "{format}, {scale}");
            }
        }
    }

    #[test]
    fn the_smallest_format_that_holds_all_numbers_is_taken() {
        for (least, most, wanted) in [
            (-8, 7, Some(BlockFormat::Q4_0)),
            (-9, 7, Some(BlockFormat::Q5_0)),
            (-15, 15, Some(BlockFormat::Q5_0)),
            (-16, 16, Some(BlockFormat::Q8_0)),
            (-128, 127, Some(BlockFormat::Q8_0)),
            (-128, 128, None),
        ] {
            assert_eq!(integer_format(least, most), wanted, "{least} to {most}");
        }
    }

    #[test]
    fn other_formats_and_lengths_are_refused() {
        let (scale, numbers) = (f16::ONE, [0; 32]);
        let mut block = [0; 22];
        let q8 = integer_block(BlockFormat::Q8_0, scale, &numbers, &mut block).unwrap_err();
        assert!(q8.to_string().contains("34 bytes as Q8_0, not 22"), "{q8}");
        let q4 = integer_block(BlockFormat::Q4_1, scale, &numbers, &mut block).unwrap_err();
        assert!(q4.to_string().contains("Q4_1"), "{q4}");
    }

    #[test]
    fn blocks_of_4_bit_floats_hold_their_bits() {
        let floats = std::array::from_fn(|i| i as u8 % 16);
        let mut values = [0.0; 32];
        dequantize(BlockFormat::MXFP4, &mxfp4_block(126, &floats), &mut values);
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (i, value) in values.into_iter().enumerate() {
            let sign = if i % 16 < 8 { 0.5 } else { -0.5 };
            assert_eq!(value, sign * magnitudes[i % 8], "{i}");
        }
    }
}
