//! 4-bit indices into a fixed table of 16 unevenly spaced values.
//!
//! Layouts, in bytes from the start of the block; `d` is `f16`, little endian. In each run of 16
//! bytes of `qs`, byte `j` holds value `j` in its low and value `j + 16` in its high nibble.
//!
//! | format   | layout                                          | value                                    |
//! | -------- | ----------------------------------------------- | ---------------------------------------- |
//! | `IQ4_NL` | `d` 2, `qs` 16; 32 values                        | `d · table[q]`                            |
//! | `IQ4_XS` | `d` 2, `scales_h` 2, `scales_l` 4, `qs` 128; 256 | `(d · (sc[g] − 32)) · table[q]`, `g` = 32 |
//!
//! Source: the `ggml` block types of these names, which the GGUF specification refers to.

use super::plain::half_at;

/// The 16 values that `IQ4_NL` and `IQ4_XS` index.
pub const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// The eight scales of an `IQ4_XS` block, from its bytes 2..8, with 32 already subtracted.
///
/// Scale `g` is six bits wide: its low four are nibble `g % 2` of `scales_l[g / 2]` (bytes 2..6 of
/// `packed`), its high two are bits `2·g` of the 16-bit number `scales_h` (bytes 0..2).
pub fn iq4_xs_scales(packed: &[u8; 6]) -> [i8; 8] {
    let [h0, h1, low @ ..] = packed;
    let high = u16::from_le_bytes([*h0, *h1]);
    std::array::from_fn(|g| {
        let low = (low[g / 2] >> (4 * (g % 2))) & 15;
        let high = ((high >> (2 * g)) & 3) as u8;
        (low | (high << 4)) as i8 - 32
    })
}

/// `IQ4_NL`: 18 bytes.
pub(super) fn decode_iq4_nl(block: &[u8; 18], values: &mut [f32; 32]) {
    let [d0, d1, qs @ ..] = block;
    decode_group(half_at([*d0, *d1]), qs, values);
}

/// `IQ4_XS`: 136 bytes.
pub(super) fn decode_iq4_xs(block: &[u8; 136], values: &mut [f32; 256]) {
    let [d0, d1, s0, s1, s2, s3, s4, s5, qs @ ..] = block;
    let d = half_at([*d0, *d1]);
    let scales = iq4_xs_scales(&[*s0, *s1, *s2, *s3, *s4, *s5]);
    let groups = qs
        .as_chunks::<16>()
        .0
        .iter()
        .zip(values.as_chunks_mut::<32>().0);
    for (scale, (qs, values)) in scales.into_iter().zip(groups) {
        decode_group(d * f32::from(scale), qs, values);
    }
}

fn decode_group(scale: f32, qs: &[u8; 16], values: &mut [f32; 32]) {
    let (low, high) = values.split_at_mut(16);
    for ((q, low), high) in qs.iter().zip(low).zip(high) {
        *low = scale * f32::from(IQ4_VALUES[usize::from(q & 15)]);
        *high = scale * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
    }
}
