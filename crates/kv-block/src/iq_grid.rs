//! Indices into grids: 256 values a block, in groups of 32; each index stands for eight values, or
//! for four in the IQ3 formats.
//!
//! Layouts, in bytes from the start of the block; numbers are little endian, `d` is `f16`. `q[k]`
//! is index `k` of a group, `g` the group, `t` its values as [`Quants32`] has them.
//!
//! | format    | layout                                            | value                              |
//! | --------- | ------------------------------------------------- | ---------------------------------- |
//! | `IQ2_XXS` | `d` 2, 8 times (`q` 4, `word` 4)                   | `d / 8 · (2·sc[g] + 1) · t`         |
//! | `IQ2_XS`  | `d` 2, `q` 64, `scales` 8                          | `d / 8 · (2·sc[2g + h] + 1) · t`    |
//! | `IQ2_S`   | `d` 2, `q` 32, `signs` 32, `high` 8, `scales` 8    | `d / 8 · (2·sc[2g + h] + 1) · t`    |
//! | `IQ3_XXS` | `d` 2, `q` 64, 8 times `word` 4                    | `d / 4 · (2·sc[g] + 1) · t`         |
//! | `IQ3_S`   | `d` 2, `q` 64, `high` 8, `signs` 32, `scales` 4    | `d · (2·sc[g] + 1) · t`             |
//! | `IQ1_S`   | `d` 2, `q` 32, 8 times `word` 2                    | `d / 8 · (2·sc[g] + 1) · (t − 16)`  |
//! | `IQ1_M`   | `q` 32, `high` 16, `scales` 8                      | `d / 8 · (2·sc[2g+h] + 1) · (t−16)` |
//!
//! - `word` of 4 bytes: four times seven bits of signs ([`grid::EVEN_SIGNS`]), then 4 bits of
//!   scale.
//! - `IQ2_XS`: `q` has 16 bits each, nine of the index and seven of signs.
//! - `high[g]`: in `IQ2_S` bits `2k` and the next are the index's two upper bits, in `IQ3_S` bit
//!   `k` is its ninth.
//! - `scales` of the IQ2 formats: a nibble for each half `h` of a group; of `IQ3_S`: one a group.
//! - `word` of 2 bytes: four times three upper bits of the index, 3 bits of scale, then the sign of
//!   the eighth that is added to the grid's values.
//! - `IQ1_M`: `high` has a nibble an index, with three upper bits and that sign. Each of the four
//!   numbers of 16 bits of `scales` has four scales of 3 bits, and 4 bits of `d`.
//!
//! Source: the `ggml` block types of these names, which the GGUF specification refers to.

use super::grid::{self, EVEN_SIGNS, Quants32};
use super::plain::half_at;

/// Eight bytes of 1.
const ONES: u64 = 0x0101_0101_0101_0101;

/// Group `g` of an `IQ2_XXS` block, unscaled.
#[inline]
pub fn iq2_xxs_quants(block: &[u8; 66], g: usize) -> Quants32 {
    let indices = &block[2 + 8 * g..6 + 8 * g];
    Quants32 {
        bytes: std::array::from_fn(|k| grid::IQ2_XXS[usize::from(indices[k])]),
        signs: even_signs(word(block, 6 + 8 * g)),
    }
}

/// Group `g` of an `IQ2_XS` block, unscaled.
#[inline]
pub fn iq2_xs_quants(block: &[u8; 74], g: usize) -> Quants32 {
    let both: [u16; 4] = std::array::from_fn(|k| half_word(block, 2 + 8 * g + 2 * k));
    Quants32 {
        bytes: both.map(|index| grid::IQ2_XS[usize::from(index & 511)]),
        signs: u32::from_le_bytes(both.map(|index| EVEN_SIGNS[usize::from(index >> 9)])),
    }
}

/// Group `g` of an `IQ2_S` block, unscaled.
#[inline]
pub fn iq2_s_quants(block: &[u8; 82], g: usize) -> Quants32 {
    let high = usize::from(block[66 + g]);
    let index = |k: usize| usize::from(block[2 + 4 * g + k]) | (high >> (2 * k) & 3) << 8;
    Quants32 {
        bytes: std::array::from_fn(|k| grid::IQ2_S[index(k)]),
        signs: word(block, 34 + 4 * g),
    }
}

/// Eight indices into a grid whose entries are four values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FourIndices {
    /// Their low bytes, the first in the lowest bits.
    pub low: u64,
    /// Bit `k` is the ninth bit of index `k`.
    pub high: u8,
    /// Bit `i` is set where value `i` is negated.
    pub signs: u32,
}

impl FourIndices {
    /// The entries that they stand for.
    #[inline]
    pub fn quants<const N: usize>(self, grid: &[u32; N]) -> Quants32 {
        let index = |k: usize| (self.low >> (8 * k)) & 255 | (u64::from(self.high) >> k & 1) << 8;
        let entry = |k: usize| grid[index(k) as usize % N];
        Quants32 {
            bytes: std::array::from_fn(|pair| two(entry(2 * pair), entry(2 * pair + 1))),
            signs: self.signs,
        }
    }
}

/// The indices of group `g` of an `IQ3_XXS` block.
#[inline]
pub fn iq3_xxs_indices(block: &[u8; 98], g: usize) -> FourIndices {
    FourIndices {
        low: two_words(block, 2 + 8 * g),
        high: 0,
        signs: even_signs(word(block, 66 + 4 * g)),
    }
}

/// The indices of group `g` of an `IQ3_S` block.
#[inline]
pub fn iq3_s_indices(block: &[u8; 110], g: usize) -> FourIndices {
    FourIndices {
        low: two_words(block, 2 + 8 * g),
        high: block[66 + g],
        signs: word(block, 74 + 4 * g),
    }
}

/// Group `g` of an `IQ1_S` block, unscaled, plus 16.
#[inline]
pub fn iq1_s_quants(block: &[u8; 50], g: usize) -> Quants32 {
    let more = usize::from(half_word(block, 34 + 2 * g));
    let eighth = |k: usize| {
        let index = usize::from(block[2 + 4 * g + k]) | (more >> (3 * k) & 7) << 8;
        grid::IQ1[index].wrapping_add(eighths(more >> 15))
    };
    Quants32::positive(std::array::from_fn(eighth))
}

/// Group `g` of an `IQ1_M` block, unscaled, plus 16.
#[inline]
pub fn iq1_m_quants(block: &[u8; 56], g: usize) -> Quants32 {
    let eighth = |k: usize| {
        let nibble = usize::from(block[32 + 2 * g + k / 2] >> (4 * (k % 2)));
        let index = usize::from(block[4 * g + k]) | (nibble & 7) << 8;
        grid::IQ1[index].wrapping_add(eighths(nibble & 8))
    };
    Quants32::positive(std::array::from_fn(eighth))
}

/// The odd numbers that scale the eight groups of an `IQ2_XXS` block.
#[inline]
pub fn iq2_xxs_scales(block: &[u8; 66]) -> [i8; 8] {
    odd(upper_nibbles(std::array::from_fn(|g| block[9 + 8 * g])))
}

/// The odd numbers that scale the sixteen half groups of an `IQ2_XS` or `IQ2_S` block, whose last
/// eight bytes they are.
#[inline]
pub fn iq2_scales(scales: [u8; 8]) -> [i8; 16] {
    odd_sixteen(nibbles(word(&scales, 0)), nibbles(word(&scales, 4)))
}

/// The odd numbers that scale the eight groups of an `IQ3_XXS` block.
#[inline]
pub fn iq3_xxs_scales(block: &[u8; 98]) -> [i8; 8] {
    odd(upper_nibbles(std::array::from_fn(|g| block[69 + 4 * g])))
}

/// The odd numbers that scale the eight groups of an `IQ3_S` block.
#[inline]
pub fn iq3_s_scales(block: &[u8; 110]) -> [i8; 8] {
    odd(nibbles(word(block, 106)))
}

/// The odd numbers that scale the eight groups of an `IQ1_S` block.
#[inline]
pub fn iq1_s_scales(block: &[u8; 50]) -> [i8; 8] {
    odd(upper_nibbles(std::array::from_fn(|g| block[35 + 2 * g])) & (7 * ONES))
}

/// The bits of `d`, and the odd numbers that scale the sixteen half groups of an `IQ1_M` block.
#[inline]
pub fn iq1_m_scales(block: &[u8; 56]) -> (u16, [i8; 16]) {
    let words: [u32; 4] = std::array::from_fn(|i| half_word(block, 48 + 2 * i).into());
    let [a, b, c, e] = words;
    let d = a >> 12 | (b >> 12) << 4 | (c >> 12) << 8 | (e >> 12) << 12;
    // Four times three bits, as bytes.
    let four = |x: u32| x & 7 | (x & 0o70) << 5 | (x & 0o700) << 10 | (x & 0o7000) << 15;
    let scales = odd_sixteen(two(four(a), four(b)), two(four(c), four(e)));
    (d as u16, scales)
}

/// `IQ2_XXS`: 66 bytes.
pub(super) fn decode_iq2_xxs(block: &[u8; 66], values: &mut [f32; 256]) {
    let (unit, scales) = (half_at([block[0], block[1]]) / 8.0, iq2_xxs_scales(block));
    decode(
        values,
        |g| iq2_xxs_quants(block, g).values(0),
        unit,
        &scales,
    );
}

/// `IQ2_XS`: 74 bytes.
pub(super) fn decode_iq2_xs(block: &[u8; 74], values: &mut [f32; 256]) {
    let unit = half_at([block[0], block[1]]) / 8.0;
    let scales = iq2_scales(last_eight(block));
    decode(values, |g| iq2_xs_quants(block, g).values(0), unit, &scales);
}

/// `IQ2_S`: 82 bytes.
pub(super) fn decode_iq2_s(block: &[u8; 82], values: &mut [f32; 256]) {
    let unit = half_at([block[0], block[1]]) / 8.0;
    let scales = iq2_scales(last_eight(block));
    decode(values, |g| iq2_s_quants(block, g).values(0), unit, &scales);
}

/// `IQ3_XXS`: 98 bytes.
pub(super) fn decode_iq3_xxs(block: &[u8; 98], values: &mut [f32; 256]) {
    let (unit, scales) = (half_at([block[0], block[1]]) / 4.0, iq3_xxs_scales(block));
    decode(
        values,
        |g| {
            iq3_xxs_indices(block, g)
                .quants(&grid::IQ3_XXS_ENTRIES)
                .values(0)
        },
        unit,
        &scales,
    );
}

/// `IQ3_S`: 110 bytes.
pub(super) fn decode_iq3_s(block: &[u8; 110], values: &mut [f32; 256]) {
    let (unit, scales) = (half_at([block[0], block[1]]), iq3_s_scales(block));
    decode(
        values,
        |g| {
            iq3_s_indices(block, g)
                .quants(&grid::IQ3_S_ENTRIES)
                .values(0)
        },
        unit,
        &scales,
    );
}

/// `IQ1_S`: 50 bytes.
pub(super) fn decode_iq1_s(block: &[u8; 50], values: &mut [f32; 256]) {
    let (unit, scales) = (half_at([block[0], block[1]]) / 8.0, iq1_s_scales(block));
    decode(values, |g| iq1_s_quants(block, g).values(16), unit, &scales);
}

/// `IQ1_M`: 56 bytes.
pub(super) fn decode_iq1_m(block: &[u8; 56], values: &mut [f32; 256]) {
    let (d, scales) = iq1_m_scales(block);
    let unit = half_at(d.to_le_bytes()) / 8.0;
    decode(values, |g| iq1_m_quants(block, g).values(16), unit, &scales);
}

/// All groups, each scaled by one number, or each half by one of twice as many. Products with
/// `unit` are exact.
fn decode(values: &mut [f32; 256], quants: impl Fn(usize) -> [i8; 32], unit: f32, scales: &[i8]) {
    let len = values.len() / scales.len();
    for (g, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (i, (value, quant)) in values.iter_mut().zip(quants(g)).enumerate() {
            let scale = unit * f32::from(scales[(32 * g + i) / len]);
            *value = scale * f32::from(quant);
        }
    }
}

// Eight bytes at once: byte by byte, compilers make long detours of these.

/// Twice each byte, which is below 64, and 1.
#[inline]
fn odd(numbers: u64) -> [i8; 8] {
    (numbers << 1 | ONES).to_le_bytes().map(|byte| byte as i8)
}

/// The same of the first eight and of the others.
#[inline]
fn odd_sixteen(first: u64, others: u64) -> [i8; 16] {
    let numbers = u128::from(others) << 64 | u128::from(first);
    let ones = u128::from_le_bytes([1; 16]);
    (numbers << 1 | ones).to_le_bytes().map(|byte| byte as i8)
}

/// The upper nibbles of bytes.
#[inline]
fn upper_nibbles(of: [u8; 8]) -> u64 {
    (u64::from_le_bytes(of) >> 4) & (15 * ONES)
}

/// Nibbles, a byte each.
#[inline]
fn nibbles(packed: u32) -> u64 {
    let fours = u64::from(packed);
    let fours = (fours | fours << 16) & 0x0000_ffff_0000_ffff;
    let twos = (fours | fours << 8) & 0x00ff_00ff_00ff_00ff;
    (twos | twos << 4) & (15 * ONES)
}

/// What is added to each byte of a grid's entry; none overflows, as they are 8, 16 or 24.
#[inline]
fn eighths(sign: usize) -> u64 {
    if sign == 0 { ONES } else { ONES.wrapping_neg() }
}

/// The signs of four times seven bits.
#[inline]
fn even_signs(word: u32) -> u32 {
    let signs = |k: usize| EVEN_SIGNS[(word >> (7 * k) & 127) as usize];
    u32::from_le_bytes(std::array::from_fn(signs))
}

#[inline]
fn two(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
fn word(block: &[u8], at: usize) -> u32 {
    block[at..]
        .first_chunk()
        .map_or(0, |word| u32::from_le_bytes(*word))
}

#[inline]
fn two_words(block: &[u8], at: usize) -> u64 {
    block[at..]
        .first_chunk()
        .map_or(0, |words| u64::from_le_bytes(*words))
}

#[inline]
fn half_word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn last_eight(block: &[u8]) -> [u8; 8] {
    block.last_chunk().copied().unwrap_or_default()
}
