//! Dequantization of each block format in scalar code: the specification that faster kernels are
//! tested against.
//!
//! Each format has one function from the bytes of a block to its values, next to the description of
//! its layout: [`super::plain`] (`F32`, `F16`, `BF16`), [`super::blocks32`] (32 values with one
//! scale), [`super::k_quants`] (256 values with scales of their own for 16 or 32 of them),
//! [`super::iq4`] (4-bit indices into a table), [`super::iq_grid`] (indices into grids of four or
//! eight values), [`super::few_bits`] (one or two bits, or a third of a number) and
//! [`super::mxfp4`] (4-bit floats). This file only iterates over blocks.

use super::{BlockFormat, blocks32, few_bits, iq_grid, iq4, k_quants, mxfp4, plain};

/// Decodes `values.len()` values from `bytes`, block after block.
///
/// `bytes` holds whole blocks of `format`; where `values` ends inside a block, the rest of that
/// block is skipped. Too few bytes are a mistake of the caller (a debug assertion); without
/// assertions the values that are there are written and the others keep what they held.
pub fn dequantize(format: BlockFormat, bytes: &[u8], values: &mut [f32]) {
    debug_assert!(
        bytes.len() / format.block_bytes() >= values.len().div_ceil(format.block_len()),
        "{} bytes of {format} are too few for {} values",
        bytes.len(),
        values.len(),
    );
    match format {
        BlockFormat::F32 => each_block(bytes, values, plain::decode_f32),
        BlockFormat::F16 => each_block(bytes, values, plain::decode_f16),
        BlockFormat::BF16 => each_block(bytes, values, plain::decode_bf16),
        _ if cfg!(cellar_plans_only) => unreachable!("built for plans alone, without decoders"),
        BlockFormat::Q4_0 => each_block(bytes, values, blocks32::decode_q4_0),
        BlockFormat::Q4_1 => each_block(bytes, values, blocks32::decode_q4_1),
        BlockFormat::Q5_0 => each_block(bytes, values, blocks32::decode_q5_0),
        BlockFormat::Q5_1 => each_block(bytes, values, blocks32::decode_q5_1),
        BlockFormat::Q8_0 => each_block(bytes, values, blocks32::decode_q8_0),
        BlockFormat::Q2_K => each_block(bytes, values, k_quants::decode_q2_k),
        BlockFormat::Q3_K => each_block(bytes, values, k_quants::decode_q3_k),
        BlockFormat::Q4_K => each_block(bytes, values, k_quants::decode_q4_k),
        BlockFormat::Q5_K => each_block(bytes, values, k_quants::decode_q5_k),
        BlockFormat::Q6_K => each_block(bytes, values, k_quants::decode_q6_k),
        BlockFormat::IQ4_NL => each_block(bytes, values, iq4::decode_iq4_nl),
        BlockFormat::IQ4_XS => each_block(bytes, values, iq4::decode_iq4_xs),
        BlockFormat::MXFP4 => each_block(bytes, values, mxfp4::decode_mxfp4),
        BlockFormat::IQ1_S => each_block(bytes, values, iq_grid::decode_iq1_s),
        BlockFormat::IQ1_M => each_block(bytes, values, iq_grid::decode_iq1_m),
        BlockFormat::IQ2_XXS => each_block(bytes, values, iq_grid::decode_iq2_xxs),
        BlockFormat::IQ2_XS => each_block(bytes, values, iq_grid::decode_iq2_xs),
        BlockFormat::IQ2_S => each_block(bytes, values, iq_grid::decode_iq2_s),
        BlockFormat::IQ3_XXS => each_block(bytes, values, iq_grid::decode_iq3_xxs),
        BlockFormat::IQ3_S => each_block(bytes, values, iq_grid::decode_iq3_s),
        BlockFormat::TQ1_0 => each_block(bytes, values, few_bits::decode_tq1_0),
        BlockFormat::TQ2_0 => each_block(bytes, values, few_bits::decode_tq2_0),
        BlockFormat::Q1_0 => each_block(bytes, values, few_bits::decode_q1_0),
        BlockFormat::Q2_0 => each_block(bytes, values, few_bits::decode_q2_0),
        BlockFormat::NVFP4 => each_block(bytes, values, mxfp4::decode_nvfp4),
    }
}

/// Applies `decode` to every block of `BYTES` bytes and `LEN` values, also to a last one of which
/// only some values are needed.
fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let (whole, partial) = values.as_chunks_mut::<LEN>();
    for (block, out) in blocks.iter().zip(whole.iter_mut()) {
        decode(block, out);
    }
    if !partial.is_empty()
        && let Some(block) = blocks.get(whole.len())
    {
        let mut out = [0.0; LEN];
        decode(block, &mut out);
        partial.copy_from_slice(&out[..partial.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_match_the_format_table() {
        // `each_block` takes its sizes from the decoders; they must equal the table's.
        for format in BlockFormat::ALL {
            let bytes = vec![0u8; 2 * format.block_bytes()];
            let mut values = vec![f32::NAN; 2 * format.block_len()];
            dequantize(format, &bytes, &mut values);
            assert!(
                values.iter().all(|v| v.is_finite()),
                "{format} left values unwritten"
            );
        }
    }

    #[test]
    fn a_partial_block_equals_the_start_of_a_whole_one() {
        for format in BlockFormat::ALL.into_iter().filter(|f| f.block_len() > 1) {
            // Bytes below 0x70 cannot make an infinite or NaN half-precision scale.
            let bytes: Vec<u8> = (0..2 * format.block_bytes())
                .map(|i| (i * 37 % 0x70) as u8)
                .collect();
            let mut whole = vec![0.0; 2 * format.block_len()];
            dequantize(format, &bytes, &mut whole);
            let n = format.block_len() + 5;
            let mut part = vec![0.0; n];
            dequantize(format, &bytes, &mut part);
            assert_eq!(part, whole[..n], "{format}");
        }
    }

    #[test]
    #[cfg(not(debug_assertions))]
    fn too_few_bytes_fill_what_is_there() {
        for format in BlockFormat::ALL {
            let bytes = vec![0u8; 2 * format.block_bytes() - 1];
            let mut values = vec![7.0; 2 * format.block_len()];
            dequantize(format, &bytes, &mut values);
            let (first, second) = values.split_at(format.block_len());
            assert!(first.iter().all(|&v| v != 7.0) && second.iter().all(|&v| v == 7.0));
        }
    }
}
