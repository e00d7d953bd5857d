//! [`BlockScales`]: the scales of one stored super-block, half-precision numbers and small
//! integers.
//!
//! Where the bits are is described at the formats' scalar decoders in `kv_block`. Knows
//! nothing of quants.

use half::f16;
use kv_block::{
    iq1_m_scales, iq1_s_scales, iq2_scales, iq2_xxs_scales, iq3_s_scales, iq3_xxs_scales,
    iq4_xs_scales,
};

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
    of_eight(half(block, 0), iq2_xxs_scales(block))
}

/// `IQ2_XS` and `IQ2_S`.
#[inline(always)]
pub(in crate::kernels) fn iq2_halves<const BYTES: usize>(block: &[u8; BYTES]) -> BlockScales {
    let scales = block.last_chunk().copied().unwrap_or_default();
    of_sixteen(half(block, 0), iq2_scales(scales))
}

#[inline(always)]
pub(in crate::kernels) fn iq3_xxs(block: &[u8; 98]) -> BlockScales {
    of_eight(half(block, 0), iq3_xxs_scales(block))
}

#[inline(always)]
pub(in crate::kernels) fn iq3_s(block: &[u8; 110]) -> BlockScales {
    of_eight(half(block, 0), iq3_s_scales(block))
}

#[inline(always)]
pub(in crate::kernels) fn iq1_s(block: &[u8; 50]) -> BlockScales {
    of_eight(half(block, 0), iq1_s_scales(block))
}

#[inline(always)]
pub(in crate::kernels) fn iq1_m(block: &[u8; 56]) -> BlockScales {
    let (scale, factors) = iq1_m_scales(block);
    of_sixteen(f16::from_bits(scale), factors)
}

#[inline(always)]
pub(in crate::kernels) fn tq1_0(block: &[u8; 54]) -> BlockScales {
    of_eight(half(block, 52), [1; 8])
}

#[inline(always)]
pub(in crate::kernels) fn tq2_0(block: &[u8; 66]) -> BlockScales {
    of_eight(half(block, 64), [1; 8])
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

/// The same with one for each half block.
#[inline(always)]
fn of_sixteen(scale: f16, factors: [i8; 16]) -> BlockScales {
    BlockScales {
        scale,
        minimum: f16::ZERO,
        factors: u128::from_le_bytes(factors.map(|factor| factor as u8)),
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
