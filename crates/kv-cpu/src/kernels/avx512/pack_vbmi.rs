//! Weight rows in blocks of 32 into a [`Panel`] where the processor moves bytes freely (VBMI, GFNI): one or
//! two blocks of a row are read at a time, and words of sixteen rows turned.
//!
//! Writes what [`pack`](super::pack) writes. Knows block formats through [`Stored`].

use std::arch::x86_64::*;
use std::ops::Range;

use kv_core::block::BlockFormat;

use super::heads::powers;
use super::pack::{STEPS, by_sixteens, fits, store};
use super::sixteen::{ROWS, turned};
use super::stored::{Stored, load, readable};
use super::table::entries;
use crate::kernels::WeightRows;
use crate::kernels::fetch::fetch_line;
use crate::kernels::groups as g;
use crate::kernels::panel::next::NextPanel;
use crate::kernels::panel::pack::{Packed, Words, pack as by_eights};
use crate::kernels::panel::{PackFn, Panel};

/// Words of sixteen rows, a row in each lane: four of three kinds.
type Turned16 = [[__m512i; 4]; 3];

/// How blocks of `BYTES` bytes are brought into words.
trait Turned<const BYTES: usize>: Packed<BYTES> {
    /// Blocks that are read at a time.
    const AT_ONCE: usize;
    /// Which of their bytes make up the words.
    const WORD_BYTES: [u8; 64];

    /// Writes so many of the blocks with these words, the first of which is `b` in the panel.
    ///
    /// # Safety
    /// AVX-512 with VBMI is available, and GFNI.
    unsafe fn put(words: Turned16, b_and_n: (usize, usize), half: usize, panel: &mut Panel);
}

impl<F: Stored<BYTES>, const BYTES: usize> Turned<BYTES> for F {
    const AT_ONCE: usize = 2;
    const WORD_BYTES: [u8; 64] = <F as Stored<BYTES>>::WORD_BYTES;

    #[inline]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,gfni")]
    unsafe fn put(words: Turned16, (b, n): (usize, usize), half: usize, panel: &mut Panel) {
        pack_block::<F, BYTES>(first(words), b, half, panel);
        if n == 2 {
            pack_block::<F, BYTES>(second(words), b + 1, half, panel);
        }
    }
}

impl Turned<34> for g::Q8_0 {
    const AT_ONCE: usize = 1;
    /// The scale in the first word, the quants after four.
    const WORD_BYTES: [u8; 64] = {
        let (mut all, mut i) = ([0; 64], 0);
        while i < 34 {
            all[if i < 2 { i } else { 14 + i }] = i as u8;
            i += 1;
        }
        all
    };

    #[inline]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,gfni")]
    unsafe fn put(
        [heads, low, high]: Turned16,
        (b, _): (usize, usize),
        half: usize,
        panel: &mut Panel,
    ) {
        let scales = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(heads[0]));
        store(_mm512_castps_si512(scales), &mut panel.scales[b], half);
        let steps = &mut panel.quants.as_chunks_mut::<{ 2 * STEPS }>().0[b];
        let sign = _mm512_set1_epi8(-128);
        for (i, (low, high)) in low.into_iter().zip(high).enumerate() {
            store(_mm512_xor_si512(low, sign), &mut steps[i], half);
            store(_mm512_xor_si512(high, sign), &mut steps[STEPS + i], half);
        }
    }
}

/// How a format is unpacked; large blocks as without VBMI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni")]
pub(super) fn by_words(format: BlockFormat) -> PackFn {
    match format {
        BlockFormat::Q4_0 => of::<g::Q4_0, 18>(),
        BlockFormat::Q4_1 => of::<g::Q4_1, 20>(),
        BlockFormat::Q5_0 => of::<g::Q5_0, 22>(),
        BlockFormat::Q5_1 => of::<g::Q5_1, 24>(),
        BlockFormat::IQ4_NL => of::<g::Iq4Nl, 18>(),
        BlockFormat::MXFP4 => of::<g::Mxfp4, 17>(),
        BlockFormat::Q8_0 => of::<g::Q8_0, 34>(),
        _ => by_sixteens(format),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni")]
fn of<F: Turned<BYTES>, const BYTES: usize>() -> PackFn {
    |weights, rows, blocks, panel| pack::<F, BYTES>(weights, rows, blocks, panel)
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni")]
fn pack<F: Turned<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    rows: Range<usize>,
    blocks: Range<usize>,
    panel: &mut Panel,
) {
    let part = blocks.start * BYTES..blocks.end * BYTES;
    if !fits(weights, (&rows, &blocks), part.end) {
        return by_eights::<Words, F, BYTES>(weights, rows, blocks, panel);
    }
    let row_bytes = weights.row_bytes;
    let next = NextPanel::after(part, row_bytes);
    for (half, row) in rows.step_by(ROWS).enumerate() {
        for b in blocks.clone().step_by(F::AT_ONCE) {
            let n = (blocks.end - b).min(F::AT_ONCE);
            let from = weights
                .bytes
                .as_ptr()
                .wrapping_add(row * row_bytes + b * BYTES);
            for line in next.lines(b * BYTES, n * BYTES) {
                for row in 0..ROWS {
                    fetch_line(from.wrapping_add(row * row_bytes + line));
                }
            }
            // SAFETY: rows and blocks exist, as was checked above.
            let words = unsafe { words::<F, BYTES>(from, row_bytes, readable(n * BYTES)) };
            // SAFETY: this function needs the same features.
            unsafe { F::put(words, (b - blocks.start, n), half, panel) };
        }
    }
}

/// The words of [`Turned::WORD_BYTES`] of sixteen rows of `row_bytes`, of which the first is at `from`.
///
/// # Safety
/// The given bytes can be read from the beginning of each row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn words<F: Turned<BYTES>, const BYTES: usize>(
    from: *const u8,
    row_bytes: usize,
    readable: u64,
) -> Turned16 {
    let places = load(&F::WORD_BYTES);
    let mut fours = [[_mm512_setzero_si512(); 4]; 4];
    for (i, four) in fours.iter_mut().enumerate() {
        let mut rows = [_mm512_setzero_si512(); 4];
        for (r, row) in rows.iter_mut().enumerate() {
            let at = (4 * i + r) * row_bytes;
            // SAFETY: as the caller promises; the load needs no alignment.
            let stored = unsafe { _mm512_maskz_loadu_epi8(readable, from.add(at).cast()) };
            *row = _mm512_permutexvar_epi8(places, stored);
        }
        *four = turned(rows);
    }
    let mut words = [[_mm512_setzero_si512(); 4]; 3];
    for i in 0..4 {
        let four = [fours[0][i], fours[1][i], fours[2][i], fours[3][i]];
        [words[0][i], words[1][i], words[2][i]] = quarters(four);
    }
    words
}

/// One block of sixteen rows.
#[derive(Clone, Copy)]
struct Block {
    scales: __m256i,
    minima: __m256i,
    fifth_bits: __m512i,
    nibbles: [__m512i; 4],
}

/// The first block of [`words`].
#[inline]
#[target_feature(enable = "avx512f")]
fn first([heads, nibbles, _]: Turned16) -> Block {
    Block {
        scales: _mm512_cvtepi32_epi16(heads[0]),
        minima: _mm512_cvtepi32_epi16(heads[1]),
        fifth_bits: heads[2],
        nibbles,
    }
}

/// The second block of [`words`].
#[inline]
#[target_feature(enable = "avx512f")]
fn second([heads, _, nibbles]: Turned16) -> Block {
    Block {
        scales: _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(heads[0])),
        minima: _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(heads[1])),
        fifth_bits: heads[3],
        nibbles,
    }
}

/// The first quarters of four registers, their second and their third ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn quarters(r: [__m512i; 4]) -> [__m512i; 3] {
    let low = [
        _mm512_shuffle_i32x4::<0b01_00_01_00>(r[0], r[1]),
        _mm512_shuffle_i32x4::<0b01_00_01_00>(r[2], r[3]),
    ];
    let high = [
        _mm512_shuffle_i32x4::<0b10_10_10_10>(r[0], r[1]),
        _mm512_shuffle_i32x4::<0b10_10_10_10>(r[2], r[3]),
    ];
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(low[0], low[1]),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(low[0], low[1]),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(high[0], high[1]),
    ]
}

/// Writes block `b` of the panel, for sixteen rows.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,gfni")]
fn pack_block<F: Stored<BYTES>, const BYTES: usize>(
    block: Block,
    b: usize,
    half: usize,
    panel: &mut Panel,
) {
    let scales = match F::POWERS {
        true => powers(_mm512_cvtepu16_epi32(block.scales)),
        false => _mm512_cvtph_ps(block.scales),
    };
    store(_mm512_castps_si512(scales), &mut panel.scales[b], half);
    if F::MINIMA {
        let minima = _mm512_cvtph_ps(block.minima);
        store(_mm512_castps_si512(minima), &mut panel.minima[b], half);
    }
    let steps = &mut panel.quants.as_chunks_mut::<{ 2 * STEPS }>().0[b];
    for (i, nibbles) in block.nibbles.into_iter().enumerate() {
        for (step, quants) in [(i, low(nibbles)), (STEPS + i, high(nibbles))] {
            let quants = match F::FIFTH_BITS {
                Some(_) => fifth_bits(quants, block.fifth_bits, step),
                None => quants,
            };
            let quants = match F::TABLE {
                Some(table) => entries(table, F::OFFSET, quants),
                None => quants,
            };
            store(quants, &mut steps[step], half);
        }
    }
}

/// The low nibble of every byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn low(bytes: __m512i) -> __m512i {
    _mm512_and_si512(bytes, _mm512_set1_epi8(15))
}

/// The high nibble of every byte, by an affine map: byte `7 − i` is the row of its matrix for bit `i`.
#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn high(bytes: __m512i) -> __m512i {
    let matrix = _mm512_set1_epi64(0x1020_4080_0000_0000);
    _mm512_gf2p8affine_epi64_epi8::<0>(bytes, matrix)
}

/// Quants of step `step` of a block with their fifth bits, of which a row's lane has one for each column.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi")]
fn fifth_bits(quants: __m512i, bits: __m512i, step: usize) -> __m512i {
    // The eight bits of which the fifth is that of a column, for eight bytes (two rows); numbers of bits
    // are taken modulo 64.
    let each = 0x2322_2120_0302_0100 + (60 + 4 * step as i64) * 0x0101_0101_0101_0101;
    let bits = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(each), bits);
    // Where a bit of 16 is set, that of `bits` too.
    _mm512_ternarylogic_epi64::<0xf8>(quants, bits, _mm512_set1_epi8(16))
}
