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
fn tq1_0_quants(block: &[u8; 54], g: usize) -> [u8; 32] {
    let (bytes, powers) = tq1_0_digits(block, g);
    std::array::from_fn(|i| ((u16::from(bytes[i].wrapping_mul(powers[i])) * 3) >> 8) as u8)
}

/// The bytes that the values of group `g` of a `TQ1_0` block are digits of, and the powers of three
/// that move each digit to the front: value = `(byte · power mod 256) · 3 / 256`, plus 1.
#[inline]
pub fn tq1_0_digits(block: &[u8; 54], g: usize) -> ([u8; 32], [u8; 32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let halves = |low: [u8; 16], high: [u8; 16]| {
        let mut both = [0; 32];
        both[..16].copy_from_slice(&low);
        both[16..].copy_from_slice(&high);
        both
    };
    let (mut many, mut some, mut few) = ([0; 32], [0; 16], [0; 4]);
    many.copy_from_slice(&block[..32]);
    some.copy_from_slice(&block[32..48]);
    few.copy_from_slice(&block[48..52]);
    match g {
        0..5 => (many, [POWERS[g]; 32]),
        5 | 6 => {
            let first = 2 * (g - 5);
            let powers = halves([POWERS[first]; 16], [POWERS[first + 1]; 16]);
            (halves(some, some), powers)
        }
        _ => {
            let repeated = u128::from(u32::from_le_bytes(few)) * ONE_IN_FOUR;
            let powers = std::array::from_fn(|i| POWERS[i / 4]);
            (
                halves(some, repeated.to_le_bytes()),
                halves([POWERS[4]; 16], powers),
            )
        }
    }
}

/// Times a number of 32 bits: that number four times.
const ONE_IN_FOUR: u128 = 1 << 96 | 1 << 64 | 1 << 32 | 1;

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
