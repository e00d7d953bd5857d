//! 4-bit floats with a shared power of two.
//!
//! | format  | layout                       | value                    |
//! | ------- | ---------------------------- | ------------------------ |
//! | `MXFP4` | `e` 1, `qs` 16; 32 values    | `2^(e - 128) * table[q]` |
//!
//! Byte `j` of `qs` holds value `j` in its low and value `j + 16` in its high nibble; a nibble is a
//! sign, two bits of exponent and one of mantissa. Source: OCP Microscaling Formats 1.0; the order
//! of nibbles is that of the `ggml` block type of this name.

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

    #[test]
    fn scales_are_powers_of_two() {
        for e in 0..=255u8 {
            let wanted = 2f64.powi(i32::from(e) - 128);
            assert_eq!(f64::from(mxfp4_scale(e)), wanted, "{e}");
        }
    }
}
