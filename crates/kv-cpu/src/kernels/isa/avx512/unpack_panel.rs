//! Unpacks one block of sixteen packed rows into a GEMM [`Panel`].
//!
//! Writes the same bits as [`gemm::unpack_panel`](crate::kernels::gemm::unpack_panel) does from
//! stored rows. Generic over the block format ([`UnpackGroup`]).

use std::arch::x86_64::*;

use super::block_scales::GroupScales;
use super::row_group::{self, GroupBlock};
use super::unpack::{PIECES, UnpackGroup};
use crate::kernels::gemm::{Panel, ROWS, STEP};
use crate::operands::SUPER_BLOCK;

/// Steps of a chunk of 16 columns.
pub(super) const STEPS: usize = 16 / STEP;

/// A block of sixteen rows, stored block `at` of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn unpack_block<F: UnpackGroup<BYTES>, const BYTES: usize>(
    block: impl GroupBlock<BYTES>,
    at: usize,
    half: usize,
    panel: &mut Panel,
) {
    // SAFETY: this function needs the same features.
    let scales = unsafe { F::scales(block) };
    unpack_scales::<F, BYTES>(&scales, at, half, panel);
    unpack_quants::<F, BYTES>((block, &scales), at, half, panel);
}

/// The quants of stored block `at` of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn unpack_quants<F: UnpackGroup<BYTES>, const BYTES: usize>(
    (blocks, scales): (impl GroupBlock<BYTES>, &GroupScales),
    at: usize,
    half: usize,
    panel: &mut Panel,
) {
    let steps = panel.quants.as_chunks_mut::<STEPS>().0;
    let steps = &mut steps[at * F::GROUPS * 2..(at + 1) * F::GROUPS * 2];
    for read in 0..F::READS {
        let mut pieces = [[_mm512_setzero_si512(); STEPS]; PIECES];
        for (words, piece) in pieces.iter_mut().zip(F::PIECES_OF[read]).take(F::TAKES) {
            // SAFETY: this function needs the same features.
            *words = unsafe { blocks.words(piece) };
        }
        for word in 0..STEPS {
            let pieces = [pieces[0][word], pieces[1][word], pieces[2][word]];
            // SAFETY: this function needs the same features.
            let chunks = unsafe { F::chunks(pieces, (read, word), scales) };
            for (k, words) in chunks.into_iter().enumerate().take(F::CHUNKS) {
                store(words, &mut steps[F::chunk(read, k)][word], half);
            }
        }
    }
}

/// The scales of stored block `at` of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn unpack_scales<F: UnpackGroup<BYTES>, const BYTES: usize>(
    of: &GroupScales,
    at: usize,
    half: usize,
    panel: &mut Panel,
) {
    let (scales, minima) = match F::GROUPS {
        1 => (&mut panel.scales[at], &mut panel.minima[at]),
        _ => (&mut panel.super_scales[at], &mut panel.super_minima[at]),
    };
    store(_mm512_castps_si512(of.scales), scales, half);
    if F::MINIMA {
        store(_mm512_castps_si512(of.minimum_scales), minima, half);
    }
    if F::GROUPS == 1 {
        return;
    }
    let n = F::PARTS * SUPER_BLOCK;
    let factors = &mut panel.factors[at * n..(at + 1) * n];
    for (part, to) in factors.iter_mut().enumerate() {
        store(of.factor(part), to, half);
    }
    if F::MINIMA {
        let minima = &mut panel.int_minima[at * n / 2..(at + 1) * n / 2];
        for (pair, to) in minima.iter_mut().enumerate() {
            store(of.minima(pair), to, half);
        }
    }
}

/// Writes a word for each of half the panel's rows.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store<T: Word>(words: __m512i, to: &mut [T; ROWS], half: usize) {
    const { assert!(size_of::<T>() == 4 && ROWS == 2 * row_group::ROWS) };
    let to = &mut to.as_chunks_mut::<{ row_group::ROWS }>().0[half];
    // SAFETY: 64 writable bytes; the store needs no alignment, and any bits are a `T`.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
}

/// Four bytes of any meaning.
pub(super) trait Word {}
impl Word for [u8; STEP] {}
impl Word for [i16; 2] {}
impl Word for i32 {}
impl Word for f32 {}

#[cfg(test)]
mod tests {
    use kv_block::BlockFormat;

    use super::super::pack;
    use super::*;
    use crate::isa::Isa;
    use crate::kernels::gemm::dispatch::for_packed_format;
    use crate::kernels::gemm::unpack_panel::{Words, unpack_panel as unpack_stored};
    use crate::kernels::quant_format::QuantFormat;
    use crate::kernels::{WeightLayout, WeightRows};

    /// Every bit of a panel.
    fn bits(panel: &Panel) -> Vec<u32> {
        let scales = [&panel.scales, &panel.minima].into_iter().flatten();
        let super_scales = [&panel.super_scales, &panel.super_minima].into_iter();
        let scales = scales.chain(super_scales.flatten()).flatten();
        let quants = panel
            .quants
            .iter()
            .flatten()
            .map(|q| u32::from_le_bytes(*q));
        let minima = panel.int_minima.iter().flatten();
        let minima = minima.map(|[a, b]| (*a as u16 as u32) << 16 | *b as u16 as u32);
        let factors = panel.factors.iter().flatten().map(|f| *f as u32);
        let bits = scales.map(|s| s.to_bits()).chain(quants).chain(minima);
        bits.chain(factors).collect()
    }

    /// Panels from packed rows against panels from the same rows as stored.
    fn agrees<F: QuantFormat<BYTES>, const BYTES: usize>(format: BlockFormat) {
        const COLUMNS: usize = 768;
        const N_ROWS: usize = 64;
        let row_bytes = COLUMNS / (32 * F::GROUPS) * BYTES;
        let mut seed = 1_u64;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 56) as u8
        })
        .take(N_ROWS * row_bytes)
        .collect();
        let stored = WeightRows {
            format,
            layout: WeightLayout::Stored,
            bytes: &bytes,
            row_bytes,
            first: 0,
            n_columns: COLUMNS,
        };
        let packed_row_bytes = pack::row_bytes(format, COLUMNS);
        let mut packed_bytes = vec![0; N_ROWS * packed_row_bytes];
        // SAFETY: the caller has checked for AVX-512.
        assert!(unsafe { pack::pack(&stored, &mut packed_bytes) });
        let packed = WeightRows {
            layout: WeightLayout::Packed,
            bytes: &packed_bytes,
            row_bytes: packed_row_bytes,
            ..stored
        };
        // SAFETY: as above.
        let unpack_packed = unsafe { pack::unpack_panel_of(format) };
        for rows in [0..32, 32..64, 32..48, 48..64] {
            for blocks in [0..16, 16..24, 8..16, 8..8 + F::GROUPS] {
                let [mut wanted, mut got] = [Panel::new(), Panel::new()];
                let of = (rows.clone(), blocks.clone());
                // SAFETY: as above.
                unsafe { unpack_stored::<Words, F, BYTES>(&stored, of.0, of.1, &mut wanted) };
                unpack_packed(&packed, rows.clone(), blocks.clone(), &mut got);
                assert_eq!(
                    bits(&wanted),
                    bits(&got),
                    "{format}, rows {rows:?}, blocks {blocks:?}"
                );
            }
        }
    }

    #[test]
    fn packed_and_stored_rows_give_the_same_panels() {
        // A machine without AVX-512 has nothing to compare.
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        for format in BlockFormat::ALL {
            // The others are not packed.
            for_packed_format!(format, agrees(format), else ());
        }
    }
}
