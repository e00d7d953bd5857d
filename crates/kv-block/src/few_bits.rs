//! One or two bits a value, or a ternary digit.
//!
//! Layouts, in bytes from the start of the block; `d` is `f16`, little endian.
//!
//! | format  | layout                          | values | value           |
//! | ------- | ------------------------------- | ------ | --------------- |
//! | `Q1_0`  | `d` 2, `qs` 16                  | 128    | `d` or `−d`     |
//! | `Q2_0`  | `d` 2, `qs` 16                  | 64     | `d · (q − 1)`   |
//! | `TQ1_0` | `qs` 48, `qh` 4, `d` 2          | 256    | `d · (q − 1)`   |
//! | `TQ2_0` | `qs` 64, `d` 2                  | 256    | `d · (q − 1)`   |
//!
//! Where the bits of value `v` lie:
//! - `Q1_0`: bit `v % 8` of `qs[v / 8]`; `d` where it is set.
//! - `Q2_0`: bits `2·(v % 4)` and the next of `qs[v / 4]`.
//! - `TQ2_0`: bits `2·((v / 32) % 4)` and the next of `qs[32·(v / 128) + v % 32]`.
//! - `TQ1_0`: a byte is a fraction of 256, whose ternary digit `n` is `q`: digit `v / 32` of
//!   `qs[v % 32]` for the first 160 values; of the next 80, `w` being their number, digit `w / 16`
//!   of `qs[32 + w % 16]`; of the last 16, digit `w / 4` of `qh[w % 4]`.
//!
//! Source: the `ggml` block types of these names, which the GGUF specification refers to.

use super::grid::Quants32;
use super::plain::half_at;

/// Eight bytes of 1.
const ONES: u64 = 0x0101_0101_0101_0101;

/// Group `g` of 32 values of a `Q1_0` block: 1 or −1.
#[inline]
pub fn q1_0_quants(block: &[u8; 18], g: usize) -> Quants32 {
    let bits = block[2 + 4 * g..].first_chunk();
    Quants32 {
        bytes: [ONES; 4],
        signs: !bits.map_or(0, |bits| u32::from_le_bytes(*bits)),
    }
}

/// Group `g` of 32 values of a `Q2_0` block, plus 1.
#[inline]
pub fn q2_0_quants(block: &[u8; 18], g: usize) -> Quants32 {
    let spread = |k: usize| {
        let at = 2 + 8 * g + 2 * k;
        let packed = u64::from(u16::from_le_bytes([block[at], block[at + 1]]));
        // Each step separates the halves of what lies together.
        let bytes = (packed | packed << 24) & 0x0000_00ff_0000_00ff;
        let nibbles = (bytes | bytes << 12) & 0x000f_000f_000f_000f;
        (nibbles | nibbles << 6) & (3 * ONES)
    };
    Quants32::positive(std::array::from_fn(spread))
}

/// Group `g` of 32 values of a `TQ1_0` block, plus 1.
#[inline]
pub fn tq1_0_quants(block: &[u8; 54], g: usize) -> [u8; 32] {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let digit = |byte: u8, n: usize| ((u16::from(byte.wrapping_mul(POWERS[n])) * 3) >> 8) as u8;
    match g {
        0..5 => std::array::from_fn(|i| digit(block[i], g)),
        5 | 6 => std::array::from_fn(|i| digit(block[32 + i % 16], 2 * (g - 5) + i / 16)),
        _ => std::array::from_fn(|i| match i {
            0..16 => digit(block[32 + i], 4),
            _ => digit(block[48 + i % 4], (i - 16) / 4),
        }),
    }
}

/// `Q1_0`: 18 bytes.
pub(super) fn decode_q1_0(block: &[u8; 18], values: &mut [f32; 128]) {
    let d = half_at([block[0], block[1]]);
    for (g, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
        scale(values, q1_0_quants(block, g).values(0), d);
    }
}

/// `Q2_0`: 18 bytes.
pub(super) fn decode_q2_0(block: &[u8; 18], values: &mut [f32; 64]) {
    let d = half_at([block[0], block[1]]);
    for (g, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
        scale(values, q2_0_quants(block, g).values(1), d);
    }
}

/// `TQ1_0`: 54 bytes.
pub(super) fn decode_tq1_0(block: &[u8; 54], values: &mut [f32; 256]) {
    let d = half_at([block[52], block[53]]);
    for (g, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
        scale(values, tq1_0_quants(block, g).map(|q| q as i8 - 1), d);
    }
}

/// `TQ2_0`: 66 bytes.
pub(super) fn decode_tq2_0(block: &[u8; 66], values: &mut [f32; 256]) {
    let d = half_at([block[64], block[65]]);
    for (v, value) in values.iter_mut().enumerate() {
        let q = block[32 * (v / 128) + v % 32] >> (2 * (v / 32 % 4)) & 3;
        *value = (f32::from(q) - 1.0) * d;
    }
}

fn scale(values: &mut [f32; 32], quants: [i8; 32], d: f32) {
    for (value, quant) in values.iter_mut().zip(quants) {
        *value = f32::from(quant) * d;
    }
}
