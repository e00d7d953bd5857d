//! Encoding with one or two bits a value, with ternary digits, and with 4-bit floats: by the
//! magnitudes of a block, as llama.cpp does. For values that are near such numbers already, as
//! those of models that were trained with them.

use super::super::{MXFP4_VALUES, mxfp4_scale};
use super::{extreme, half, inverse, joined};

/// `d` is the mean of the magnitudes; each value keeps its sign.
pub(super) fn encode_q1_0(values: &[f32; 128]) -> [u8; 18] {
    let sum: f32 = values.iter().map(|v| v.abs()).sum();
    let mut bits = [0u8; 16];
    for (i, value) in values.iter().enumerate() {
        bits[i / 8] |= u8::from(*value >= 0.0) << (i % 8);
    }
    joined(&[&half(sum / 128.0), &bits])
}

/// `d` is the largest magnitude; values are −d, 0 or d.
pub(super) fn encode_q2_0(values: &[f32; 64]) -> [u8; 18] {
    let (d, digits) = ternary(values);
    q2_0_block(half(d), &digits)
}

/// A block with this scale of these numbers of two bits, which are 1 above what they stand for.
pub(super) fn q2_0_block(d: [u8; 2], digits: &[u8; 64]) -> [u8; 18] {
    let bytes: [u8; 16] = std::array::from_fn(|i| packed([0, 1, 2, 3].map(|j| digits[4 * i + j])));
    joined(&[&d, &bytes])
}

/// As `Q2_0`.
pub(super) fn encode_tq2_0(values: &[f32; 256]) -> [u8; 66] {
    let (d, digits) = ternary(values);
    tq2_0_block(half(d), &digits)
}

/// As [`q2_0_block`].
pub(super) fn tq2_0_block(d: [u8; 2], digits: &[u8; 256]) -> [u8; 66] {
    let byte = |i: usize| packed([0, 1, 2, 3].map(|j| digits[128 * (i / 32) + 32 * j + i % 32]));
    let bytes: [u8; 64] = std::array::from_fn(byte);
    joined(&[&bytes, &d])
}

/// As `Q2_0`; the digits of a byte are those of a fraction of 256, rounded up.
pub(super) fn encode_tq1_0(values: &[f32; 256]) -> [u8; 54] {
    let (d, digits) = ternary(values);
    let fraction = |all: [usize; 5]| {
        let number = all.into_iter().fold(0u16, |n, at| {
            // The last digit of the last bytes is none.
            3 * n + u16::from(digits.get(at).copied().unwrap_or(0))
        });
        (number * 256).div_ceil(243) as u8
    };
    let places = [0, 1, 2, 3, 4];
    let bytes: [u8; 52] = std::array::from_fn(|i| match i {
        0..32 => fraction(places.map(|n| 32 * n + i)),
        32..48 => fraction(places.map(|n| 160 + 16 * n + i - 32)),
        _ => fraction(places.map(|n| 240 + 4 * n + i - 48)),
    });
    joined(&[&bytes, &half(d)])
}

/// The power of two that makes the largest magnitude one between 4 and 8, of which the nearest
/// floats are taken.
pub(super) fn encode_mxfp4(values: &[f32; 32]) -> [u8; 17] {
    let largest = extreme(values).abs();
    let exponent = (largest.to_bits() >> 23).saturating_sub(2) as u8;
    let d = mxfp4_scale(exponent);
    let indices = values.map(|value| nearest_float(value, d));
    joined(&[&[exponent], &super::nibbles(&indices)])
}

/// The index of the nearest 4-bit float, the first of two.
fn nearest_float(value: f32, d: f32) -> u8 {
    let off = |i: u8| (f32::from(MXFP4_VALUES[usize::from(i)]) * d - value).abs();
    (1..16).fold(0, |best, i| if off(i) < off(best) { i } else { best })
}

/// The largest magnitude, and each value divided by it, rounded, plus 1.
fn ternary<const LEN: usize>(values: &[f32; LEN]) -> (f32, [u8; LEN]) {
    let d = extreme(values).abs();
    let inverse = inverse(d);
    let digit = |value: f32| ((value * inverse).round().clamp(-1.0, 1.0) + 1.0) as u8;
    (d, values.map(digit))
}

/// Four numbers of two bits, the first in the lowest.
fn packed(numbers: [u8; 4]) -> u8 {
    numbers.into_iter().rev().fold(0, |byte, n| byte << 2 | n)
}
