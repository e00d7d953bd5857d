//! Weight rows into a [`Panel`]: unpacked with AVX2, eight rows at a time, and interleaved.
//!
//! Knows block formats through [`groups`] (their quants) and [`heads`] (their scales).

use std::arch::x86_64::*;
use std::ops::Range;

use half::f16;

use super::heads::{self, Head};
use super::{BLOCKS, Layout, Panel, ROWS};
use crate::activations::{BLOCK, SUPER_BLOCK};
use crate::kernels::WeightRows;
use crate::kernels::avx2::groups::{self, Format};

/// Rows that are interleaved at a time.
const EIGHT: usize = 8;

/// A format that can be unpacked to a panel.
pub(in crate::kernels) trait Packed<const BYTES: usize>: Format<BYTES> {
    /// What it has beside its quants.
    const LAYOUT: Layout;
    /// What makes its quants unsigned.
    const OFFSET: i32;
    /// How many bits they have then.
    const BITS: u32;
    /// As [`Layout::parts`].
    const PARTS: usize = Self::LAYOUT.parts();
    /// As [`Layout::has_minima`].
    const MINIMA: bool = Self::LAYOUT.has_minima();
    /// Whether unsigned quants may be 64 or more.
    const WIDE: bool = Self::BITS > 6;
    /// What is left of the offset where wide weights are multiplied as signed bytes.
    const SIGNED_OFFSET: i32 = if Self::WIDE { 0 } else { Self::OFFSET };
    /// As [`TileArgs::narrow_steps`](super::TileArgs::narrow_steps): a pair of products is below
    /// `2^(BITS + 8)`.
    const NARROW_STEPS: usize = {
        let (fit, all) = (1 << 7u32.saturating_sub(Self::BITS), Self::LAYOUT.steps());
        if fit < all { fit } else { all }
    };

    /// Scales of a super-block.
    fn super_head(_block: &[u8; BYTES]) -> Option<Head> {
        None
    }
}

macro_rules! packed {
    ($($name:ident, $bytes:literal: $layout:ident, $bits:literal bits, $offset:literal $(, $head:path)?;)+) => {
        $(impl Packed<$bytes> for groups::$name {
            const LAYOUT: Layout = Layout::$layout;
            const OFFSET: i32 = $offset;
            const BITS: u32 = $bits;

            $(#[inline(always)]
            fn super_head(block: &[u8; $bytes]) -> Option<Head> {
                Some($head(block))
            })?
        })+
    };
}

packed! {
    Q4_0, 18: Blocks, 4 bits, 8;
    Q4_1, 20: BlocksWithMinima, 4 bits, 0;
    Q5_0, 22: Blocks, 5 bits, 16;
    Q5_1, 24: BlocksWithMinima, 5 bits, 0;
    Q8_0, 34: Blocks, 8 bits, 128;
    Iq4Nl, 18: Blocks, 8 bits, 128;
    Iq4Xs, 136: Supers, 8 bits, 128, heads::iq4_xs;
    Q2K, 84: SuperHalvesWithMinima, 2 bits, 0, heads::q2_k;
    Q3K, 110: SuperHalves, 3 bits, 4, heads::q3_k;
    Q4K, 144: SupersWithMinima, 4 bits, 0, heads::q4_k;
    Q5K, 176: SupersWithMinima, 5 bits, 0, heads::q4_k;
    Q6K, 210: SuperHalves, 6 bits, 32, heads::q6_k;
}

/// The pack function of a format.
///
/// # Safety
/// AVX2, FMA and F16C are available.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels) fn pack<F: Packed<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    rows: Range<usize>,
    blocks: Range<usize>,
    panel: &mut Panel,
) {
    debug_assert!(!rows.is_empty() && rows.len() <= ROWS && blocks.len() <= BLOCKS);
    // Blocks of the format and groups of 32 columns may differ.
    let stored = blocks.start / F::GROUPS..blocks.end / F::GROUPS;
    for first in (0..rows.len()).step_by(EIGHT) {
        // The last row stands in for those that are missing.
        let row = |r: usize| {
            let row = rows.start + (first + r).min(rows.len() - 1);
            let bytes = weights.bytes.get(row * weights.row_bytes..);
            let bytes = bytes.and_then(|bytes| bytes.get(..weights.row_bytes));
            bytes.unwrap_or_default().as_chunks::<BYTES>().0
        };
        let rows: [&[[u8; BYTES]]; EIGHT] = std::array::from_fn(row);
        for (at, b) in stored.clone().enumerate() {
            let Some(eight) = eight_blocks(&rows, b) else {
                return;
            };
            pack_scales::<F, BYTES>(&eight, at, first, panel);
            for g in 0..F::GROUPS {
                let unsigned = _mm256_set1_epi8(F::OFFSET as i8);
                // Not `map`: that would be a call for each of them.
                let mut quants = [unsigned; EIGHT];
                for (quants, block) in quants.iter_mut().zip(eight) {
                    // SAFETY: this function needs the same features.
                    *quants = _mm256_add_epi8(unsafe { F::quants(block, g) }, unsigned);
                }
                store_steps(transposed(quants), at * F::GROUPS + g, first, panel);
            }
        }
    }
}

/// Block `b` of eight rows.
#[inline(always)]
fn eight_blocks<'a, const BYTES: usize>(
    rows: &[&'a [[u8; BYTES]]; EIGHT],
    b: usize,
) -> Option<[&'a [u8; BYTES]; EIGHT]> {
    let mut eight = [rows[0].get(b)?; EIGHT];
    for (block, row) in eight.iter_mut().zip(rows) {
        *block = row.get(b)?;
    }
    Some(eight)
}

#[inline]
#[target_feature(enable = "f16c")]
fn widened(x: f16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits()))))
}

/// The scales of stored block `at` of the panel, of eight rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pack_scales<F: Packed<BYTES>, const BYTES: usize>(
    blocks: &[&[u8; BYTES]; EIGHT],
    at: usize,
    first: usize,
    panel: &mut Panel,
) {
    for (row, block) in (first..).zip(blocks) {
        let half = |at: usize| widened(f16::from_le_bytes([block[at], block[at + 1]]));
        let Some(head) = F::super_head(block) else {
            panel.scales[at][row] = half(0);
            if F::MINIMA {
                panel.minima[at][row] = half(2);
            }
            continue;
        };
        panel.super_scales[at][row] = widened(head.scale);
        panel.super_minima[at][row] = widened(head.minimum);
        let n = F::PARTS * SUPER_BLOCK;
        let factors = &mut panel.factors[at * n..(at + 1) * n];
        for (to, factor) in factors.iter_mut().zip(head.each_factor()) {
            to[row] = i32::from(factor);
        }
        if F::MINIMA {
            let minima = &mut panel.int_minima[at * n / 2..(at + 1) * n / 2];
            for (to, pair) in minima
                .iter_mut()
                .zip(head.each_minimum().as_chunks::<2>().0)
            {
                to[row] = pair.map(i16::from);
            }
        }
    }
}

/// From eight rows of eight words to eight words of eight rows.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(r: [__m256i; EIGHT]) -> [__m256i; EIGHT] {
    let words = |a, b| [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)];
    let [a0, a1] = words(r[0], r[1]);
    let [b0, b1] = words(r[2], r[3]);
    let [c0, c1] = words(r[4], r[5]);
    let [d0, d1] = words(r[6], r[7]);
    let pairs = |a, b| [_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)];
    let [e0, e1] = pairs(a0, b0);
    let [e2, e3] = pairs(a1, b1);
    let [f0, f1] = pairs(c0, d0);
    let [f2, f3] = pairs(c1, d1);
    [
        _mm256_permute2x128_si256::<0x20>(e0, f0),
        _mm256_permute2x128_si256::<0x20>(e1, f1),
        _mm256_permute2x128_si256::<0x20>(e2, f2),
        _mm256_permute2x128_si256::<0x20>(e3, f3),
        _mm256_permute2x128_si256::<0x31>(e0, f0),
        _mm256_permute2x128_si256::<0x31>(e1, f1),
        _mm256_permute2x128_si256::<0x31>(e2, f2),
        _mm256_permute2x128_si256::<0x31>(e3, f3),
    ]
}

/// The eight steps of block `b` of eight rows.
#[inline]
#[target_feature(enable = "avx2")]
fn store_steps(steps: [__m256i; EIGHT], b: usize, first: usize, panel: &mut Panel) {
    let all = &mut panel.quants[b * EIGHT..(b + 1) * EIGHT];
    const { assert!(BLOCK / super::STEP == EIGHT) };
    for (to, step) in all.iter_mut().zip(steps) {
        let to: &mut [[u8; super::STEP]] = &mut to[first..first + EIGHT];
        // SAFETY: eight rows of four bytes; the store needs no alignment.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), step) };
    }
}
