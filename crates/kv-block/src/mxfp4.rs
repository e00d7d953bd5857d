//! 4-bit floats with a shared power of two, or a shared float of 8 bits.
//!
//! | format  | layout                       | value                    |
//! | ------- | ---------------------------- | ------------------------ |
//! | `MXFP4` | `e` 1, `qs` 16; 32 values    | `2^(e - 128) * table[q]` |
//! | `NVFP4` | `d` 4, `qs` 32; 64 values    | `d[g] / 2 * table[q]`    |
//!
//! Byte `j` of `qs` holds value `j` in its low and value `j + 16` in its high nibble; a nibble is a
//! sign, two bits of exponent and one of mantissa. In `NVFP4` each `d[g]` has 16 values and 8 bytes
//! of `qs`: byte `j` of these holds value `j` and value `j + 8`. Source: OCP Microscaling Formats
//! 1.0; the order of nibbles is that of the `ggml` block types of these names.

/// Twice the values of the 16 nibbles of `MXFP4`.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `MXFP4`: 17 bytes.
pub(super) fn decode_mxfp4(block: &[u8; 17], values: &mut [f32; 32]) {
    let [exponent, qs @ ..] = block;
    let scale = mxfp4_scale(*exponent);
    let (low, high) = values.split_at_mut(16);
    for ((q, low), high) in qs.iter().zip(low).zip(high) {
        *low = scale * f32::from(MXFP4_VALUES[usize::from(q & 15)]);
        *high = scale * f32::from(MXFP4_VALUES[usize::from(q >> 4)]);
    }
}

/// `NVFP4`: 36 bytes.
pub(super) fn decode_nvfp4(block: &[u8; 36], values: &mut [f32; 64]) {
    let [d0, d1, d2, d3, qs @ ..] = block;
    let groups = qs.as_chunks::<8>().0.iter();
    let groups = groups.zip(values.as_chunks_mut::<16>().0);
    for (d, (qs, values)) in [d0, d1, d2, d3].into_iter().zip(groups) {
        let scale = nvfp4_scale(*d);
        let (low, high) = values.split_at_mut(8);
        for ((q, low), high) in qs.iter().zip(low).zip(high) {
            *low = scale * f32::from(MXFP4_VALUES[usize::from(q & 15)]);
            *high = scale * f32::from(MXFP4_VALUES[usize::from(q >> 4)]);
        }
    }
}

/// The factor of [`MXFP4_VALUES`] in `NVFP4`: half of a float with 4 bits of exponent and 3 of
/// mantissa, whose sign means nothing. What would be NaN is 0.
fn nvfp4_scale(d: u8) -> f32 {
    let (exponent, mantissa) = (d >> 3 & 15, f32::from(d & 7));
    match (d, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa / 1024.0,
        // Half of 2^(exponent − 7), times 1.0 to 1.875.
        _ => f32::from_bits((u32::from(exponent) + 119) << 23) * (1.0 + mantissa / 8.0),
    }
}

/// The factor of [`MXFP4_VALUES`]: `2^(e - 128)`, exact, also where it is no normal number.
pub fn mxfp4_scale(e: u8) -> f32 {
    match e {
        0 | 1 => f32::from_bits(0x0020_0000 << e),
        _ => f32::from_bits((u32::from(e) - 1) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against what the types of 8 bits that machine learning uses are: E4M3 without a sign.
    #[test]
    fn scales_of_nvfp4_are_floats_of_eight_bits() {
        for d in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(d / 8 % 16), f64::from(d % 8));
            let wanted = match (d, exponent) {
                (0x7f, _) => 0.0,
                (_, 0) => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            assert_eq!(f64::from(nvfp4_scale(d)), wanted / 2.0, "{d}");
        }
    }

    #[test]
    fn scales_are_powers_of_two() {
        for e in 0..=255u8 {
            let wanted = 2f64.powi(i32::from(e) - 128);
            assert_eq!(f64::from(mxfp4_scale(e)), wanted, "{e}");
        }
    }
}
