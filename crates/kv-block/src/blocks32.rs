//! Blocks of 32 values with one scale `d` (and, in the `_1` formats, one minimum `m`).
//!
//! Layouts, in bytes from the start of the block; `d` and `m` are `f16`, little endian, and `x[i]`
//! is value `i` of the block. In the 4- and 5-bit formats byte `j` of `qs` holds value `j` in its
//! low and value `j + 16` in its high nibble; bit `i` of `qh` is the fifth bit of value `i`.
//!
//! | format | layout                          | value                   |
//! | ------ | ------------------------------- | ----------------------- |
//! | `Q4_0` | `d` 2, `qs` 16                  | `x[i] = d · (q[i] − 8)`  |
//! | `Q4_1` | `d` 2, `m` 2, `qs` 16           | `x[i] = d · q[i] + m`    |
//! | `Q5_0` | `d` 2, `qh` 4, `qs` 16          | `x[i] = d · (q[i] − 16)` |
//! | `Q5_1` | `d` 2, `m` 2, `qh` 4, `qs` 16   | `x[i] = d · q[i] + m`    |
//! | `Q8_0` | `d` 2, `qs` 32 (`i8`)           | `x[i] = d · q[i]`        |
//!
//! Source: the `ggml` block types of these names, which the GGUF specification refers to.

use super::plain::half_at;

/// `Q4_0`: 18 bytes.
pub(super) fn decode_q4_0(block: &[u8; 18], values: &mut [f32; 32]) {
    let [d0, d1, qs @ ..] = block;
    let d = half_at([*d0, *d1]);
    let (low, high) = values.split_at_mut(16);
    for ((q, low), high) in qs.iter().zip(low).zip(high) {
        *low = d * (f32::from(q & 15) - 8.0);
        *high = d * (f32::from(q >> 4) - 8.0);
    }
}

/// `Q4_1`: 20 bytes.
pub(super) fn decode_q4_1(block: &[u8; 20], values: &mut [f32; 32]) {
    let [d0, d1, m0, m1, qs @ ..] = block;
    let (d, m) = (half_at([*d0, *d1]), half_at([*m0, *m1]));
    let (low, high) = values.split_at_mut(16);
    for ((q, low), high) in qs.iter().zip(low).zip(high) {
        *low = d * f32::from(q & 15) + m;
        *high = d * f32::from(q >> 4) + m;
    }
}

/// `Q5_0`: 22 bytes.
pub(super) fn decode_q5_0(block: &[u8; 22], values: &mut [f32; 32]) {
    let [d0, d1, h0, h1, h2, h3, qs @ ..] = block;
    let d = half_at([*d0, *d1]);
    for_each_5_bit([*h0, *h1, *h2, *h3], qs, values, |q| {
        d * (f32::from(q) - 16.0)
    });
}

/// `Q5_1`: 24 bytes.
pub(super) fn decode_q5_1(block: &[u8; 24], values: &mut [f32; 32]) {
    let [d0, d1, m0, m1, h0, h1, h2, h3, qs @ ..] = block;
    let (d, m) = (half_at([*d0, *d1]), half_at([*m0, *m1]));
    for_each_5_bit([*h0, *h1, *h2, *h3], qs, values, |q| d * f32::from(q) + m);
}

/// `Q8_0`: 34 bytes.
pub(super) fn decode_q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let [d0, d1, qs @ ..] = block;
    let d = half_at([*d0, *d1]);
    for (q, value) in qs.iter().zip(values) {
        *value = d * f32::from(*q as i8);
    }
}

fn for_each_5_bit(qh: [u8; 4], qs: &[u8; 16], values: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let qh = u32::from_le_bytes(qh);
    let fifth = |i: usize| (((qh >> i) & 1) as u8) << 4;
    for (j, q) in qs.iter().enumerate() {
        values[j] = value((q & 15) | fifth(j));
        values[j + 16] = value((q >> 4) | fifth(j + 16));
    }
}
