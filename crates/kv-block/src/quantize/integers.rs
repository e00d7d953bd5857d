//! Blocks of whole numbers that somebody else chose, with their scale: nothing is rounded.

use half::f16;

use super::super::BlockFormat;
use super::few_bits::{q2_0_block, tq2_0_block};
use super::{QuantizeError, fifth_bits, joined, nibbles};

/// The formats of these blocks, the smallest first, with the numbers that they hold.
const FORMATS: [(BlockFormat, [i32; 2]); 5] = [
    (BlockFormat::TQ2_0, [-1, 2]),
    (BlockFormat::Q2_0, [-1, 2]),
    (BlockFormat::Q4_0, [-8, 7]),
    (BlockFormat::Q5_0, [-16, 15]),
    (BlockFormat::Q8_0, [-128, 127]),
];

/// The formats whose blocks hold all whole numbers from `least` to `most`, the smallest first.
pub fn integer_formats(least: i32, most: i32) -> impl Iterator<Item = BlockFormat> {
    let fits = move |&(_, [first, last]): &(BlockFormat, [i32; 2])| first <= least && most <= last;
    let formats = FORMATS.into_iter().filter(fits);
    formats.map(|(format, _)| format)
}

/// A block of one of the [`integer_formats`] whose value `i` is `scale · numbers[i]`, exactly.
/// Numbers that the format does not hold become the nearest that it does.
///
/// # Errors
/// [`QuantizeError::Unsupported`] for another format, [`QuantizeError::PartialBlock`] where there
/// are more or fewer numbers than a block has, [`QuantizeError::WrongLength`] where `block` is
/// longer or shorter than one.
pub fn integer_block(
    format: BlockFormat,
    scale: f16,
    numbers: &[i16],
    block: &mut [u8],
) -> Result<(), QuantizeError> {
    let known = FORMATS.into_iter().find(|(known, _)| *known == format);
    let Some((_, [least, most])) = known else {
        return Err(QuantizeError::Unsupported { format });
    };
    let (n_values, block_len) = (numbers.len(), format.block_len());
    if n_values != block_len {
        return Err(QuantizeError::PartialBlock {
            format,
            n_values,
            block_len,
        });
    }
    if block.len() != format.block_bytes() {
        return Err(QuantizeError::WrongLength {
            format,
            n_values,
            wanted: format.block_bytes(),
            got: block.len(),
        });
    }
    let d = scale.to_le_bytes();
    let above = |number: i16| (i32::from(number).clamp(least, most) - least) as u8;
    match format {
        BlockFormat::TQ2_0 => block.copy_from_slice(&tq2_0_block(d, &each(numbers, above))),
        BlockFormat::Q2_0 => block.copy_from_slice(&q2_0_block(d, &each(numbers, above))),
        BlockFormat::Q4_0 => {
            let bytes: [u8; 18] = joined(&[&d, &nibbles(&each(numbers, above))]);
            block.copy_from_slice(&bytes);
        }
        BlockFormat::Q5_0 => {
            let indices = each(numbers, above);
            let bytes: [u8; 22] = joined(&[&d, &fifth_bits(&indices), &nibbles(&indices)]);
            block.copy_from_slice(&bytes);
        }
        _ => {
            let quants: [u8; 32] = each(numbers, |number| number.clamp(-128, 127) as i8 as u8);
            let bytes: [u8; 34] = joined(&[&d, &quants]);
            block.copy_from_slice(&bytes);
        }
    }
    Ok(())
}

/// The indices of so many numbers.
fn each<const LEN: usize>(numbers: &[i16], index: impl Fn(i16) -> u8) -> [u8; LEN] {
    std::array::from_fn(|i| numbers.get(i).copied().map_or(0, &index))
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
                let numbers =
                    (0..format.block_len() as i32).map(|i| (least + i * 37 % span) as i16);
                let numbers: Vec<i16> = numbers.collect();
                let mut block = vec![0; format.block_bytes()];
                integer_block(format, scale, &numbers, &mut block).unwrap();
                let mut values = vec![0.0; numbers.len()];
                dequantize(format, &block, &mut values);
                let wanted = numbers.iter().map(|&n| scale.to_f32() * f32::from(n));
                assert_eq!(values, wanted.collect::<Vec<_>>(), "{format}, {scale}");
            }
        }
    }

    #[test]
    fn formats_that_hold_all_numbers_are_listed_the_smallest_first() {
        let first = |least, most| integer_formats(least, most).next();
        for (least, most, wanted) in [
            (-1, 1, Some(BlockFormat::TQ2_0)),
            (-1, 2, Some(BlockFormat::TQ2_0)),
            (-2, 1, Some(BlockFormat::Q4_0)),
            (-8, 7, Some(BlockFormat::Q4_0)),
            (-9, 7, Some(BlockFormat::Q5_0)),
            (-15, 15, Some(BlockFormat::Q5_0)),
            (-16, 16, Some(BlockFormat::Q8_0)),
            (-128, 127, Some(BlockFormat::Q8_0)),
            (-128, 128, None),
        ] {
            assert_eq!(first(least, most), wanted, "{least} to {most}");
        }
        let bits: Vec<usize> = integer_formats(-1, 2)
            .map(|format| 256 / format.block_len() * format.block_bytes())
            .collect();
        assert!(bits.len() == FORMATS.len() && bits.is_sorted(), "{bits:?}");
    }

    #[test]
    fn other_formats_and_lengths_are_refused() {
        let (scale, numbers) = (f16::ONE, [0; 32]);
        let mut block = [0; 22];
        let q8 = integer_block(BlockFormat::Q8_0, scale, &numbers, &mut block).unwrap_err();
        assert!(q8.to_string().contains("34 bytes as Q8_0, not 22"), "{q8}");
        let q4 = integer_block(BlockFormat::Q4_1, scale, &numbers, &mut block).unwrap_err();
        assert!(q4.to_string().contains("Q4_1"), "{q4}");
        let q2 = integer_block(BlockFormat::Q2_0, scale, &numbers, &mut block).unwrap_err();
        assert!(q2.to_string().contains("32 values"), "{q2}");
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
