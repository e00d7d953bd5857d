//! [`QuantFormat`]: the block formats that are multiplied as int8, one entry each: where its scales
//! and its quants are.
//!
//! Where the bits of a value are is described at the formats' scalar decoders in `kv_block`.
//! Quants are unpacked 32 at a time by the functions of an instruction set ([`unpack`]); scales of
//! super-blocks by [`block_scales`].

use kv_block::{
    IQ3_S_ENTRIES, IQ3_XXS_ENTRIES, IQ4_VALUES, MXFP4_VALUES, iq1_m_quants, iq1_s_quants,
    iq2_s_quants, iq2_xs_quants, iq2_xxs_quants, iq3_s_indices, iq3_xxs_indices, q1_0_quants,
    q2_0_quants, tq1_0_digits,
};

use super::gemm::block_scales::{self, BlockScales};
use super::gemm::{Layout, SIGNED};
use super::unpack::{
    Quants, bit, digits, fives, fours, high_bits, less, load16, load32, lookup, negated, nibble,
    nibbles, signed, signed_fives, two_bits,
};
use crate::operands::SUPER_BLOCK;

/// A format of `BYTES` bytes a block that is multiplied as int8.
pub(in crate::kernels) trait QuantFormat<const BYTES: usize> {
    /// Groups of 32 values in a block; without super-blocks they share a scale.
    const GROUPS: usize = if Self::LAYOUT.has_supers() {
        SUPER_BLOCK
    } else {
        1
    };
    /// Its scales.
    const LAYOUT: Layout;
    /// The offset that makes its quants unsigned, unless they are [`SIGNED`]: a power of two, or 0.
    const OFFSET: i32;
    /// The number of bits they have then.
    const BITS: u32;
    /// The largest magnitude of quants.
    const LARGEST: usize = match Self::OFFSET {
        0 => (1 << Self::BITS) - 1,
        offset => offset as usize,
    };
    /// A power of two that all scales are multiplied with.
    const UNIT: f32 = 1.0;
    /// As [`Layout::parts`].
    const PARTS: usize = Self::LAYOUT.parts();
    /// As [`Layout::has_minima`].
    const MINIMA: bool = Self::LAYOUT.has_minima();
    /// True if scales of blocks are powers of two, of one byte, not numbers in half precision.
    const POWERS: bool = matches!(Self::LAYOUT, Layout::BlocksByPowers);
    /// True if unsigned quants may be 64 or more.
    const WIDE: bool = Self::BITS > 6;
    /// The remaining offset where wide weights are multiplied as signed bytes.
    const SIGNED_OFFSET: i32 = if Self::WIDE { 0 } else { Self::OFFSET };
    /// As [`TileArgs::narrow_steps`](super::gemm::TileArgs::narrow_steps): a pair of products is
    /// below `2^(BITS + 8)`.
    const NARROW_STEPS: usize = {
        let (fit, all) = (1 << 7u32.saturating_sub(Self::BITS), Self::LAYOUT.steps());
        if fit < all { fit } else { all }
    };

    /// As [`TileArgs::max_magnitude`](super::gemm::TileArgs::max_magnitude).
    const MAX_MAGNITUDE: u16 = {
        let halves = 2 / Self::PARTS;
        (i16::MAX as usize / Self::LARGEST / halves) as u16
    };

    /// The quants of group `g`, signed.
    ///
    /// # Safety
    /// AVX2 is available, or NEON.
    unsafe fn quants(block: &[u8; BYTES], g: usize) -> Quants;

    /// The stored scale of a block.
    #[inline(always)]
    fn scale_bits(block: &[u8; BYTES]) -> u16 {
        if Self::POWERS {
            u16::from(block[0])
        } else {
            u16::from_le_bytes([block[0], block[1]])
        }
    }

    /// The stored minimum of a block, a number in half precision.
    #[inline(always)]
    fn minimum_bits(block: &[u8; BYTES]) -> u16 {
        u16::from_le_bytes([block[2], block[3]])
    }

    /// Scales of a super-block.
    fn super_scales_of(_block: &[u8; BYTES]) -> Option<BlockScales> {
        None
    }
}

/// A format from its layout, the bits and the offset of unsigned quants, the function of its scales
/// where it has super-blocks, constants that are not the trait's, and how the quants of group `g`
/// of block `b` are unpacked.
macro_rules! format {
    ($name:ident, $bytes:literal: $layout:ident, $bits:literal bits, $offset:literal $(, $head:path)? $(, { $($constant:tt)* })?;
        ($b:ident, $g:pat) => $quants:expr) => {
        #[derive(Clone, Copy)]
        pub(in crate::kernels) struct $name;

        impl QuantFormat<$bytes> for $name {
            const LAYOUT: Layout = Layout::$layout;
            const OFFSET: i32 = if SIGNED { 0 } else { $offset };
            const BITS: u32 = $bits;
            $($($constant)*)?

            #[inline]
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
            #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
            unsafe fn quants($b: &[u8; $bytes], $g: usize) -> Quants {
                signed($quants)
            }

            $(#[inline(always)]
            fn super_scales_of(block: &[u8; $bytes]) -> Option<BlockScales> {
                Some($head(block))
            })?
        }
    };
}

format!(Q4_0, 18: Blocks, 4 bits, 8;
    (b, _) => less(nibbles(load16(b, 2)), 8));
format!(Q4_1, 20: BlocksWithMinima, 4 bits, 0;
    (b, _) => nibbles(load16(b, 4)));
format!(Q5_0, 22: Blocks, 5 bits, 16;
    (b, _) => signed_fives(nibbles(load16(b, 6)), word(b, 2)));
format!(Q5_1, 24: BlocksWithMinima, 5 bits, 0;
    (b, _) => fives(nibbles(load16(b, 8)), word(b, 4)));
format!(Q8_0, 34: Blocks, 8 bits, 128;
    (b, _) => load32(b, 2));
format!(Iq4Nl, 18: Blocks, 8 bits, 128;
    (b, _) => lookup(&IQ4_VALUES, load16(b, 2)));
format!(Mxfp4, 17: BlocksByPowers, 5 bits, 16;
    (b, _) => lookup(&MXFP4_VALUES, load16(b, 1)));
format!(Iq4Xs, 136: Supers, 8 bits, 128, block_scales::iq4_xs;
    (b, g) => lookup(&IQ4_VALUES, load16(b, 8 + 16 * g)));
format!(Q2K, 84: SuperHalvesWithMinima, 2 bits, 0, block_scales::q2_k;
    (b, g) => two_bits(load32(b, 16 + 32 * (g / 4)), g % 4));
format!(Q3K, 110: SuperHalves, 3 bits, 4, block_scales::q3_k;
(b, g) => {
    let low = two_bits(load32(b, 32 + 32 * (g / 4)), g % 4);
    less(high_bits::<2>(low, bit(load32(b, 0), g)), 4)
});
format!(Q4K, 144: SupersWithMinima, 4 bits, 0, block_scales::q4_k;
    (b, g) => nibble(load32(b, 16 + 32 * (g / 2)), g % 2));
format!(Q5K, 176: SupersWithMinima, 5 bits, 0, block_scales::q4_k;
(b, g) => {
    let low = nibble(load32(b, 48 + 32 * (g / 2)), g % 2);
    high_bits::<4>(low, bit(load32(b, 16), g))
});
format!(Q6K, 210: SuperHalves, 6 bits, 32, block_scales::q6_k;
(b, g) => {
    let low = nibble(load32(b, 64 * (g / 4) + 32 * (g % 2)), (g / 2) % 2);
    let high = two_bits(load32(b, 128 + 32 * (g / 4)), g % 4);
    less(high_bits::<4>(low, high), 32)
});

// The IQ2 and IQ3 formats' quants need seven bits, which wide weights have.
format!(Iq2Xxs, 66: Supers, 8 bits, 128, block_scales::iq2_xxs,
    { const LARGEST: usize = 43; const UNIT: f32 = 0.125; };
    (b, g) => negated(iq2_xxs_quants(b, g)));
format!(Iq2Xs, 74: SuperHalves, 8 bits, 128, block_scales::iq2_halves,
    { const LARGEST: usize = 43; const UNIT: f32 = 0.125; };
    (b, g) => negated(iq2_xs_quants(b, g)));
format!(Iq2S, 82: SuperHalves, 8 bits, 128, block_scales::iq2_halves,
    { const LARGEST: usize = 43; const UNIT: f32 = 0.125; };
    (b, g) => negated(iq2_s_quants(b, g)));
format!(Iq3Xxs, 98: Supers, 8 bits, 128, block_scales::iq3_xxs,
    { const LARGEST: usize = 62; const UNIT: f32 = 0.25; };
    (b, g) => fours(&IQ3_XXS_ENTRIES, iq3_xxs_indices(b, g)));
format!(Iq3S, 110: Supers, 5 bits, 16, block_scales::iq3_s;
    (b, g) => fours(&IQ3_S_ENTRIES, iq3_s_indices(b, g)));
format!(Iq1S, 50: Supers, 5 bits, 16, block_scales::iq1_s, { const UNIT: f32 = 0.125; };
    (b, g) => less(negated(iq1_s_quants(b, g)), 16));
format!(Iq1M, 56: SuperHalves, 5 bits, 16, block_scales::iq1_m, { const UNIT: f32 = 0.125; };
    (b, g) => less(negated(iq1_m_quants(b, g)), 16));
format!(Tq1_0, 54: Supers, 2 bits, 1, block_scales::tq1_0;
(b, g) => {
    let (bytes, powers) = tq1_0_digits(b, g);
    less(digits(load32(&bytes, 0), load32(&powers, 0)), 1)
});
// A 3 that no encoder writes stands for 2.
format!(Tq2_0, 66: Supers, 2 bits, 1, block_scales::tq2_0, { const LARGEST: usize = 2; };
    (b, g) => less(two_bits(load32(b, 32 * (g / 4)), g % 4), 1));
format!(Q1_0, 18: Blocks, 2 bits, 1, { const GROUPS: usize = 4; };
    (b, g) => negated(q1_0_quants(b, g)));
format!(Q2_0, 18: Blocks, 2 bits, 1, { const GROUPS: usize = 2; const LARGEST: usize = 2; };
    (b, g) => less(negated(q2_0_quants(b, g)), 1));

#[inline]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
