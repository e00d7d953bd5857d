//! Unpacks one block of sixteen packed rows into a GEMM [`Panel`].
//!
//! Writes the same bits as [`panel::pack`](crate::kernels::panel::pack) does from stored rows. Knows
//! block formats through [`Chunks`].

use std::arch::x86_64::*;

use super::chunks::{Chunks, PIECES};
use super::heads::Heads;
use super::sixteen::{self, Block16};
use crate::activations::SUPER_BLOCK;
use crate::kernels::panel::{Panel, ROWS, STEP};

/// Steps of a chunk of 16 columns.
pub(super) const STEPS: usize = 16 / STEP;

/// A block of sixteen rows, stored block `at` of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn pack_block<F: Chunks<BYTES>, const BYTES: usize>(
    block: impl Block16<BYTES>,
    at: usize,
    half: usize,
    panel: &mut Panel,
) {
    // SAFETY: this function needs the same features.
    let heads = unsafe { F::heads(block) };
    pack_scales::<F, BYTES>(&heads, at, half, panel);
    pack_quants::<F, BYTES>((block, &heads), at, half, panel);
}

/// The quants of stored block `at` of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn pack_quants<F: Chunks<BYTES>, const BYTES: usize>(
    (blocks, heads): (impl Block16<BYTES>, &Heads),
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
            let chunks = unsafe { F::chunks(pieces, (read, word), heads) };
            for (k, words) in chunks.into_iter().enumerate().take(F::CHUNKS) {
                store(words, &mut steps[F::chunk(read, k)][word], half);
            }
        }
    }
}

/// The scales of stored block `at` of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn pack_scales<F: Chunks<BYTES>, const BYTES: usize>(
    heads: &Heads,
    at: usize,
    half: usize,
    panel: &mut Panel,
) {
    let (scales, minima) = match F::GROUPS {
        1 => (&mut panel.scales[at], &mut panel.minima[at]),
        _ => (&mut panel.super_scales[at], &mut panel.super_minima[at]),
    };
    store(_mm512_castps_si512(heads.scales), scales, half);
    if F::MINIMA {
        store(_mm512_castps_si512(heads.minimum_scales), minima, half);
    }
    if F::GROUPS == 1 {
        return;
    }
    let n = F::PARTS * SUPER_BLOCK;
    let factors = &mut panel.factors[at * n..(at + 1) * n];
    for (part, to) in factors.iter_mut().enumerate() {
        store(heads.factor(part), to, half);
    }
    if F::MINIMA {
        let minima = &mut panel.int_minima[at * n / 2..(at + 1) * n / 2];
        for (pair, to) in minima.iter_mut().enumerate() {
            store(heads.minima(pair), to, half);
        }
    }
}

/// Writes a word for each of half the panel's rows.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store<T: Word>(words: __m512i, to: &mut [T; ROWS], half: usize) {
    const { assert!(size_of::<T>() == 4 && ROWS == 2 * sixteen::ROWS) };
    let to = &mut to.as_chunks_mut::<{ sixteen::ROWS }>().0[half];
    // SAFETY: 64 writable bytes; the store needs no alignment, and any bits are a `T`.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
}

/// What four bytes are, whatever they are.
pub(super) trait Word {}
impl Word for [u8; STEP] {}
impl Word for [i16; 2] {}
impl Word for i32 {}
impl Word for f32 {}

#[cfg(test)]
mod tests {
    use kv_core::block::BlockFormat;

    use super::super::repacked;
    use super::*;
    use crate::isa::Isa;
    use crate::kernels::panel::formats::for_format;
    use crate::kernels::panel::pack::{Packed, Words, pack as unpack_stored};
    use crate::kernels::{Arrangement, WeightRows};

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
    fn agrees<F: Packed<BYTES>, const BYTES: usize>(format: BlockFormat) {
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
            arrangement: Arrangement::Stored,
            bytes: &bytes,
            row_bytes,
            first: 0,
            n_columns: COLUMNS,
        };
        let packed_row_bytes = repacked::row_bytes(format, COLUMNS);
        let mut packed_bytes = vec![0; N_ROWS * packed_row_bytes];
        // SAFETY: the caller has checked for AVX-512.
        assert!(unsafe { repacked::repack(&stored, &mut packed_bytes) });
        let packed = WeightRows {
            arrangement: Arrangement::Repacked,
            bytes: &packed_bytes,
            row_bytes: packed_row_bytes,
            ..stored
        };
        // SAFETY: as above.
        let unpack_packed = unsafe { repacked::to_panels(format) };
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
            if format.block_len() > 1 {
                for_format!(format, agrees(format));
            }
        }
    }
}
