//! The K formats: 256 values a block, in groups of 16 or 32 with a small scale each, which are
//! themselves scaled by the block's `d` (and minima by its `dmin`).
//!
//! Layouts, in bytes from the start of the block; `d` and `dmin` are `f16`, little endian. Values
//! are listed by group `g` (in order of the values); `i` counts inside the group.
//!
//! | format | layout                                          | group | value                                  |
//! | ------ | ----------------------------------------------- | ----- | -------------------------------------- |
//! | `Q2_K` | `scales` 16, `qs` 64, `d` 2, `dmin` 2            | 16    | `(d · sc[g]) · q − dmin · min[g]`       |
//! | `Q3_K` | `hmask` 32, `qs` 64, `scales` 12, `d` 2          | 16    | `(d · (sc[g] − 32)) · (q − 4)`          |
//! | `Q4_K` | `d` 2, `dmin` 2, `scales` 12, `qs` 128           | 32    | `(d · sc[g]) · q − dmin · min[g]`       |
//! | `Q5_K` | `d` 2, `dmin` 2, `scales` 12, `qh` 32, `qs` 128  | 32    | `(d · sc[g]) · q − dmin · min[g]`       |
//! | `Q6_K` | `ql` 128, `qh` 64, `scales` 16 (`i8`), `d` 2     | 16    | `(d · sc[g]) · (q − 32)`                |
//!
//! Where the bits of value `v` (0..256) lie:
//! - `Q2_K`, `Q3_K`: the two low bits of `q` are bits `2·((v / 32) % 4)` of byte
//!   `32·(v / 128) + v % 32` of `qs`; in `Q3_K` the third bit is bit `v / 32` of `hmask[v % 32]`.
//! - `Q4_K`, `Q5_K`: the four low bits are nibble `(v / 32) % 2` (0 = low) of byte
//!   `32·(v / 64) + v % 32` of `qs`; in `Q5_K` the fifth bit is bit `v / 32` of `qh[v % 32]`.
//! - `Q6_K`: with `h = v / 128` and `w = v % 128`, the four low bits are nibble `w / 64` of
//!   `ql[64·h + w % 64]`, the two high bits are bits `2·(w / 32)` of `qh[32·h + w % 32]`.
//!
//! Scales: `Q2_K` has `sc[g]` in the low and `min[g]` in the high nibble of `scales[g]`; for the
//! others see [`q3_k_scales`] and [`q4_k_scales`].
//!
//! Source: the `ggml` block types of these names, which the GGUF specification refers to.

use super::plain::half_at;

/// The 16 scales of a `Q3_K` block, from its 12 bytes `scales`, with 32 already subtracted.
///
/// Scale `g` is six bits wide: its low four are nibble `g / 8` of byte `g % 8`, its high two are
/// bits `2·(g / 4)` of byte `8 + g % 4`.
pub fn q3_k_scales(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|g| {
        let low = (packed[g % 8] >> (4 * (g / 8))) & 15;
        let high = (packed[8 + g % 4] >> (2 * (g / 4))) & 3;
        (low | (high << 4)) as i8 - 32
    })
}

/// The eight scales and eight minima of a `Q4_K` or `Q5_K` block, from its 12 bytes `scales`.
///
/// Both are six bits wide. For `g < 4` they are the low six bits of bytes `g` and `g + 4`. For
/// `g ≥ 4` their low four bits are the low (scale) and high (minimum) nibble of byte `g + 4`, and
/// their high two bits are the top two bits of bytes `g − 4` (scale) and `g` (minimum).
pub fn q4_k_scales(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let scale = |g: usize| match g {
        0..4 => packed[g] & 63,
        _ => (packed[g + 4] & 15) | ((packed[g - 4] >> 6) << 4),
    };
    let min = |g: usize| match g {
        0..4 => packed[g + 4] & 63,
        _ => (packed[g + 4] >> 4) | ((packed[g] >> 6) << 4),
    };
    (std::array::from_fn(scale), std::array::from_fn(min))
}

/// `Q2_K`: 84 bytes.
pub(super) fn decode_q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (scales, rest) = block.split_at(16);
    let (qs, halves) = rest.split_at(64);
    let (d, dmin) = (
        half_at([halves[0], halves[1]]),
        half_at([halves[2], halves[3]]),
    );
    for (v, value) in values.iter_mut().enumerate() {
        let packed = scales[v / 16];
        let (scale, min) = (d * f32::from(packed & 15), dmin * f32::from(packed >> 4));
        *value = scale * f32::from(two_bits(qs, v)) - min;
    }
}

/// `Q3_K`: 110 bytes.
pub(super) fn decode_q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let (hmask, rest) = block.split_at(32);
    let (qs, rest) = rest.split_at(64);
    let Some((packed, d)) = rest.split_first_chunk() else {
        return;
    };
    let d = half_at([d[0], d[1]]);
    let scales = q3_k_scales(packed).map(|scale| d * f32::from(scale));
    for (v, value) in values.iter_mut().enumerate() {
        let third = ((hmask[v % 32] >> (v / 32)) & 1) << 2;
        *value = scales[v / 16] * (f32::from(two_bits(qs, v) | third) - 4.0);
    }
}

/// `Q4_K`: 144 bytes.
pub(super) fn decode_q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let Some((head, qs)) = block.split_first_chunk() else {
        return;
    };
    let (scales, mins) = scales_and_mins(head);
    for (v, value) in values.iter_mut().enumerate() {
        let g = v / 32;
        *value = scales[g] * f32::from(nibble(qs, v)) - mins[g];
    }
}

/// `Q5_K`: 176 bytes.
pub(super) fn decode_q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let Some((head, rest)) = block.split_first_chunk() else {
        return;
    };
    let (qh, qs) = rest.split_at(32);
    let (scales, mins) = scales_and_mins(head);
    for (v, value) in values.iter_mut().enumerate() {
        let g = v / 32;
        let fifth = ((qh[v % 32] >> g) & 1) << 4;
        *value = scales[g] * f32::from(nibble(qs, v) | fifth) - mins[g];
    }
}

/// `Q6_K`: 210 bytes.
pub(super) fn decode_q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let (ql, rest) = block.split_at(128);
    let (qh, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(16);
    let d = half_at([d[0], d[1]]);
    for (v, value) in values.iter_mut().enumerate() {
        let (h, w) = (v / 128, v % 128);
        let low = (ql[64 * h + w % 64] >> (4 * (w / 64))) & 15;
        let high = (qh[32 * h + w % 32] >> (2 * (w / 32))) & 3;
        let scale = d * f32::from(scales[v / 16] as i8);
        *value = scale * (f32::from(low | (high << 4)) - 32.0);
    }
}

/// `d · sc[g]` and `dmin · min[g]` from the first 16 bytes of a `Q4_K` or `Q5_K` block.
fn scales_and_mins(head: &[u8; 16]) -> ([f32; 8], [f32; 8]) {
    let [d0, d1, m0, m1, packed @ ..] = head;
    let (d, dmin) = (half_at([*d0, *d1]), half_at([*m0, *m1]));
    let (scales, mins) = q4_k_scales(packed);
    (
        scales.map(|s| d * f32::from(s)),
        mins.map(|m| dmin * f32::from(m)),
    )
}

/// The two low bits of value `v` of a `Q2_K` or `Q3_K` block.
fn two_bits(qs: &[u8], v: usize) -> u8 {
    (qs[32 * (v / 128) + v % 32] >> (2 * ((v / 32) % 4))) & 3
}

/// The four low bits of value `v` of a `Q4_K` or `Q5_K` block.
fn nibble(qs: &[u8], v: usize) -> u8 {
    (qs[32 * (v / 64) + v % 32] >> (4 * ((v / 32) % 2))) & 15
}
