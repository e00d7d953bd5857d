//! Unpacks stored weight rows into a [`Panel`]: eight rows at a time, in registers, and
//! interleaved.
//!
//! Knows block formats through [`QuantFormat`].

use std::ops::Range;

use half::f16;
use kv_block::mxfp4_scale;

use super::{BLOCKS, Panel, ROWS, STEP};
use crate::kernels::WeightRows;
use crate::kernels::gemm::prefetch::PanelPrefetch;
use crate::kernels::prefetch::prefetch_l1;
use crate::kernels::quant_format::QuantFormat;
use crate::kernels::unpack::{self, Quants};
use crate::operands::{BLOCK, SUPER_BLOCK};

/// Rows that are interleaved at a time.
const EIGHT: usize = 8;
/// The same columns of so many rows.
type Step = [[u8; STEP]; EIGHT];

/// The way the quants of eight rows are interleaved in a panel.
pub(in crate::kernels) trait Interleave {
    /// From 32 columns of each row to eight steps.
    ///
    /// # Safety
    /// AVX2 is available, or NEON.
    unsafe fn steps(rows: [Quants; EIGHT]) -> [Quants; EIGHT];
}

/// Each step is a word of every row: four columns for a lane of dot products.
pub(in crate::kernels) struct Words;

impl Interleave for Words {
    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    unsafe fn steps(rows: [Quants; EIGHT]) -> [Quants; EIGHT] {
        unpack::transpose(rows)
    }
}

/// Unpacks blocks of at most [`ROWS`] stored rows into a panel.
///
/// # Safety
/// AVX2, FMA and F16C are available, or NEON.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(in crate::kernels) fn unpack_panel<I: Interleave, F: QuantFormat<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    rows: Range<usize>,
    blocks: Range<usize>,
    panel: &mut Panel,
) {
    debug_assert!(!rows.is_empty() && rows.len() <= ROWS && blocks.len() <= BLOCKS);
    // Blocks of the format and groups of 32 columns may differ.
    let stored = blocks.start / F::GROUPS..blocks.end / F::GROUPS;
    let next = PanelPrefetch::after(stored.start * BYTES..stored.end * BYTES, weights.row_bytes);
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
            for line in next.lines(b * BYTES, BYTES) {
                for block in eight {
                    prefetch_l1(block.as_ptr().wrapping_add(line));
                }
            }
            unpack_scales::<F, BYTES>(&eight, at, first, panel);
            for g in 0..F::GROUPS {
                // SAFETY: this function needs the same features.
                let of_row = |block| unsafe { F::quants(block, g) };
                // Not `map`: that would be a call for each of them.
                let mut quants = [of_row(eight[0]); EIGHT];
                for (quants, block) in quants.iter_mut().zip(eight) {
                    *quants = unpack::offset_by(of_row(block), F::OFFSET as i8);
                }
                // SAFETY: as above.
                let steps = unsafe { I::steps(quants) };
                let places = steps_of(panel, at * F::GROUPS + g, first);
                for (to, step) in places.zip(steps) {
                    unpack::store(step, to);
                }
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

/// The scales of stored block `at` of the panel, of eight rows.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn unpack_scales<F: QuantFormat<BYTES>, const BYTES: usize>(
    blocks: &[&[u8; BYTES]; EIGHT],
    at: usize,
    first: usize,
    panel: &mut Panel,
) {
    for (row, block) in (first..).zip(blocks) {
        let Some(head) = F::super_scales_of(block) else {
            let scale = if F::POWERS {
                mxfp4_scale(block[0])
            } else {
                unpack::number(f16::from_bits(F::scale_bits(block)))
            };
            for scales in &mut panel.scales[at * F::GROUPS..(at + 1) * F::GROUPS] {
                scales[row] = scale;
            }
            if F::MINIMA {
                let minimum = f16::from_bits(F::minimum_bits(block));
                panel.minima[at][row] = unpack::number(minimum);
            }
            continue;
        };
        panel.super_scales[at][row] = unpack::number(head.scale) * F::UNIT;
        panel.super_minima[at][row] = unpack::number(head.minimum);
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

/// The eight steps of block `b` of eight rows.
#[inline(always)]
fn steps_of(panel: &mut Panel, b: usize, first: usize) -> impl Iterator<Item = &mut Step> {
    const { assert!(BLOCK / STEP == EIGHT) };
    let steps = panel.quants[b * EIGHT..(b + 1) * EIGHT].iter_mut();
    steps.filter_map(move |rows| rows[first..].first_chunk_mut())
}
