//! [`BlockScales`]: the scales of one stored super-block, half-precision numbers and small
//! integers.
//!
//! Where the bits are is described at the formats' scalar decoders in `kv_block`. Knows
//! nothing of quants.

use half::f16;
use kv_block::iq4_xs_scales;

/// Scales and minima of one super-block: value = `scale · factor · quant − minimum · int_minimum`.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct BlockScales {
    pub(in crate::kernels) scale: f16,
    pub(in crate::kernels) minimum: f16,
    /// Signed bytes, for the eight blocks (then the upper half is unused) or the sixteen half
    /// blocks.
    pub(in crate::kernels) factors: u128,
    /// As many, never negative.
    pub(in crate::kernels) minima: u128,
}

impl BlockScales {
    /// The factors, one by one.
    pub(in crate::kernels) fn each_factor(&self) -> [i8; 16] {
        self.factors.to_le_bytes().map(|b| b as i8)
    }

    /// The minima, one by one.
    pub(in crate::kernels) fn each_minimum(&self) -> [i8; 16] {
        self.minima.to_le_bytes().map(|b| b as i8)
    }
}

#[inline(always)]
fn half(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    // Not byte by byte: the compiler makes two loads and a shift of that.
    block[at..]
        .first_chunk()
        .map_or(0, |word| u32::from_le_bytes(*word))
}

/// The four bytes of a word, masked alike.
const fn bytes(mask: u8) -> u32 {
    u32::from_le_bytes([mask; 4])
}

/// Eight bytes in two words, then zeros.
#[inline(always)]
fn eight(low: u32, high: u32) -> u128 {
    u128::from(u64::from(high) << 32 | u64::from(low))
}

/// 16 bytes.
#[inline(always)]
fn sixteen(block: &[u8], at: usize) -> u128 {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&block[at..at + 16]);
    u128::from_le_bytes(bytes)
}

#[inline(always)]
pub(in crate::kernels) fn q4_k<const BYTES: usize>(block: &[u8; BYTES]) -> BlockScales {
    let (a, b, c) = (word(block, 4), word(block, 8), word(block, 12));
    BlockScales {
        scale: half(block, 0),
        minimum: half(block, 2),
        factors: eight(a & bytes(63), (c & bytes(15)) | ((a >> 2) & bytes(0x30))),
        minima: eight(
            b & bytes(63),
            ((c >> 4) & bytes(15)) | ((b >> 2) & bytes(0x30)),
        ),
    }
}

#[inline(always)]
pub(in crate::kernels) fn q2_k(block: &[u8; 84]) -> BlockScales {
    let (packed, low) = (sixteen(block, 0), u128::from_le_bytes([15; 16]));
    BlockScales {
        scale: half(block, 80),
        minimum: half(block, 82),
        factors: packed & low,
        minima: (packed >> 4) & low,
    }
}

#[inline(always)]
pub(in crate::kernels) fn q3_k(block: &[u8; 110]) -> BlockScales {
    let (a, b, c) = (word(block, 96), word(block, 100), word(block, 104));
    let high = |k: u32| ((c >> (2 * k)) & bytes(3)) << 4;
    let (first, second) = (
        eight((a & bytes(15)) | high(0), (b & bytes(15)) | high(1)),
        eight(
            ((a >> 4) & bytes(15)) | high(2),
            ((b >> 4) & bytes(15)) | high(3),
        ),
    );
    BlockScales {
        scale: half(block, 108),
        minimum: f16::ZERO,
        factors: less_32(second << 64 | first),
        minima: 0,
    }
}

#[inline(always)]
pub(in crate::kernels) fn q6_k(block: &[u8; 210]) -> BlockScales {
    BlockScales {
        scale: half(block, 208),
        minimum: f16::ZERO,
        factors: sixteen(block, 192),
        minima: 0,
    }
}

#[inline(always)]
pub(in crate::kernels) fn iq4_xs(block: &[u8; 136]) -> BlockScales {
    let mut packed = [0; 6];
    packed.copy_from_slice(&block[2..8]);
    of_eight(half(block, 0), iq4_xs_scales(&packed))
}

#[inline(always)]
pub(in crate::kernels) fn iq2_xxs(block: &[u8; 66]) -> BlockScales {
    let four = |at: usize| upper_nibbles([9, 17, 25, 33].map(|byte| block[at + byte]));
    of_odd(half(block, 0), eight(four(0), four(32)))
}

/// `IQ2_XS` and `IQ2_S`.
#[inline(always)]
pub(in crate::kernels) fn iq2_halves<const BYTES: usize>(block: &[u8; BYTES]) -> BlockScales {
    let (low, high) = (word(block, BYTES - 8), word(block, BYTES - 4));
    let factors = u128::from(nibbles(high)) << 64 | u128::from(nibbles(low));
    of_odd(half(block, 0), factors)
}

#[inline(always)]
pub(in crate::kernels) fn iq3_xxs(block: &[u8; 98]) -> BlockScales {
    let four = |at: usize| upper_nibbles([69, 73, 77, 81].map(|byte| block[at + byte]));
    of_odd(half(block, 0), eight(four(0), four(16)))
}

#[inline(always)]
pub(in crate::kernels) fn iq3_s(block: &[u8; 110]) -> BlockScales {
    of_odd(half(block, 0), nibbles(word(block, 106)).into())
}

#[inline(always)]
pub(in crate::kernels) fn iq1_s(block: &[u8; 50]) -> BlockScales {
    // Bits 12 to 14 of each number of 16 bits.
    let four = |at: usize| upper_nibbles([35, 37, 39, 41].map(|byte| block[at + byte]));
    let factors = eight(four(0) & bytes(7), four(8) & bytes(7));
    of_odd(half(block, 0), factors)
}

#[inline(always)]
pub(in crate::kernels) fn iq1_m(block: &[u8; 56]) -> BlockScales {
    let (low, high) = (word(block, 48), word(block, 52));
    let numbers = [low & 0xffff, low >> 16, high & 0xffff, high >> 16];
    let scale =
        numbers[0] >> 12 | numbers[1] >> 12 << 4 | numbers[2] >> 12 << 8 | numbers[3] >> 12 << 12;
    // Four times three bits.
    let four = |x: u32| x & 7 | (x & 0o70) << 5 | (x & 0o700) << 10 | (x & 0o7000) << 15;
    let (first, second) = (
        eight(four(numbers[0]), four(numbers[1])),
        eight(four(numbers[2]), four(numbers[3])),
    );
    of_odd(f16::from_bits(scale as u16), second << 64 | first)
}

#[inline(always)]
pub(in crate::kernels) fn tq1_0(block: &[u8; 54]) -> BlockScales {
    of_eight(half(block, 52), [1; 8])
}

#[inline(always)]
pub(in crate::kernels) fn tq2_0(block: &[u8; 66]) -> BlockScales {
    of_eight(half(block, 64), [1; 8])
}

/// The upper nibbles of four bytes, a byte each.
#[inline(always)]
fn upper_nibbles(of: [u8; 4]) -> u32 {
    (u32::from_le_bytes(of) >> 4) & bytes(15)
}

/// Nibbles, a byte each.
#[inline(always)]
fn nibbles(packed: u32) -> u64 {
    let fours = u64::from(packed);
    let fours = (fours | fours << 16) & 0x0000_ffff_0000_ffff;
    let twos = (fours | fours << 8) & 0x00ff_00ff_00ff_00ff;
    (twos | twos << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// Without minima, with the odd numbers that bytes below 64 stand for as factors.
#[inline(always)]
fn of_odd(scale: f16, numbers: u128) -> BlockScales {
    BlockScales {
        scale,
        minimum: f16::ZERO,
        factors: numbers << 1 | u128::from_le_bytes([1; 16]),
        minima: 0,
    }
}

/// Without minima, with a factor for each block.
#[inline(always)]
fn of_eight(scale: f16, factors: [i8; 8]) -> BlockScales {
    let factors = u64::from_le_bytes(factors.map(|factor| factor as u8));
    BlockScales {
        scale,
        minimum: f16::ZERO,
        factors: factors.into(),
        minima: 0,
    }
}

/// Each byte, below 64, less 32.
#[inline(always)]
fn less_32(numbers: u128) -> u128 {
    // With bit 7 set no byte borrows from the next one; its complement is what is left too much.
    let top = u128::from_le_bytes([0x80; 16]);
    ((numbers | top) - u128::from_le_bytes([32; 16])) ^ top
}
