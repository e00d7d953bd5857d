//! Packs weight rows: groups of sixteen, interleaved, one row in each lane, in as many bytes as
//! stored.
//!
//! A group begins with the bytes of its blocks that are not in 32-bit words, `[blocks][rows]`; the
//! words follow, `[blocks][words][rows]`. So one load brings the same word of all sixteen rows, and
//! GEMV reads a group once from beginning to end: words are in the order in which products take
//! them ([`UnpackGroup::PLACES`]). Fifth bits are permuted
//! ([`by_columns_of_four`](super::row_group::by_columns_of_four)). Generic over the block format
//! ([`UnpackGroup`]).

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::ChunksExact;

use kv_block::BlockFormat;

use super::packed_float;
use super::row_group::{GroupBlock, ROWS, StoredGroup};
use super::unpack::UnpackGroup;
use super::unpack_panel::unpack_block;
use crate::kernels::WeightRows;
use crate::kernels::gemm::dispatch::for_packed_format;
use crate::kernels::gemm::{self, Panel, UnpackPanelFn};
use crate::kernels::prefetch::prefetch_l1;

/// Bytes of a word of sixteen rows.
const WORD16: usize = 4 * ROWS;

/// Bytes of the parts of so many blocks that are not in words, in whole lines.
const fn narrow_bytes<const BYTES: usize>(n_blocks: usize) -> usize {
    (n_blocks * ROWS * (BYTES % 4)).next_multiple_of(WORD16)
}

/// Bytes of sixteen packed rows, whole lines.
const fn group_bytes<const BYTES: usize>(n_blocks: usize) -> usize {
    narrow_bytes::<BYTES>(n_blocks) + n_blocks * (BYTES / 4) * WORD16
}

/// Blocks of a row.
fn blocks_of(format: BlockFormat, n_columns: usize) -> usize {
    n_columns / format.block_len().max(1)
}

/// Sixteen packed rows of blocks of `BYTES` bytes.
#[derive(Clone, Copy)]
pub(super) struct PackedGroup<'a, F, const BYTES: usize> {
    start: *const u8,
    n_blocks: usize,
    weights: PhantomData<(&'a [u8], F)>,
}

impl<'a, F: UnpackGroup<BYTES>, const BYTES: usize> PackedGroup<'a, F, BYTES> {
    /// All groups of these weights that are whole.
    pub(super) fn all(weights: &WeightRows<'a>) -> impl Iterator<Item = Self> {
        let n_blocks = blocks_of(weights.format, weights.n_columns);
        Self::bytes_of_all(weights, n_blocks).map(move |bytes| Self::new(bytes, n_blocks))
    }

    /// The group that begins with row `row`.
    fn of(weights: &WeightRows<'a>, row: usize) -> Option<Self> {
        let n_blocks = blocks_of(weights.format, weights.n_columns);
        let bytes = Self::bytes_of_all(weights, n_blocks).nth(row / ROWS)?;
        Some(Self::new(bytes, n_blocks))
    }

    fn bytes_of_all(weights: &WeightRows<'a>, n_blocks: usize) -> ChunksExact<'a, u8> {
        let n_bytes = group_bytes::<BYTES>(n_blocks);
        weights.bytes.chunks_exact(n_bytes.max(1))
    }

    /// From the bytes of a whole group.
    fn new(bytes: &'a [u8], n_blocks: usize) -> Self {
        Self {
            start: bytes.as_ptr(),
            n_blocks,
            weights: PhantomData,
        }
    }

    /// Block `b` of all rows.
    ///
    /// # Safety
    /// There is such a block.
    #[inline(always)]
    pub(super) unsafe fn block(self, b: usize) -> PackedBlock<'a, F, BYTES> {
        debug_assert!(b < self.n_blocks);
        let words = narrow_bytes::<BYTES>(self.n_blocks) + b * (BYTES / 4) * WORD16;
        // SAFETY: inside the group, as the caller promises.
        unsafe {
            PackedBlock {
                narrow: self.start.add(b * ROWS * (BYTES % 4)),
                words: self.start.add(words),
                weights: PhantomData,
            }
        }
    }
}

/// A block of sixteen packed rows.
#[derive(Clone, Copy)]
pub(super) struct PackedBlock<'a, F, const BYTES: usize> {
    narrow: *const u8,
    words: *const u8,
    weights: PhantomData<(&'a [u8], F)>,
}

impl<F: UnpackGroup<BYTES>, const BYTES: usize> PackedBlock<'_, F, BYTES> {
    /// Prefetches what is so many bytes after each line of the block's words.
    #[inline(always)]
    fn fetch(self, further: usize) {
        for place in 0..BYTES / 4 {
            prefetch_l1(self.line(place).wrapping_add(further));
        }
    }

    /// The line of the word at a place, of all rows.
    #[inline(always)]
    pub(super) fn line(self, place: usize) -> *const u8 {
        self.words.wrapping_add(place * WORD16)
    }

    /// The place of the bytes that are not in words.
    #[inline(always)]
    pub(super) fn narrow_line(self) -> *const u8 {
        self.narrow
    }
}

impl<F: UnpackGroup<BYTES>, const BYTES: usize> GroupBlock<BYTES> for PackedBlock<'_, F, BYTES> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn words(self, at: usize) -> [__m512i; 4] {
        // SAFETY: this function needs the same features.
        unsafe {
            [
                self.word(at),
                self.word(at + 4),
                self.word(at + 8),
                self.word(at + 12),
            ]
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word(self, at: usize) -> __m512i {
        // Bytes before the first word, if there are any, are fewer than a word has.
        let word = at / 4;
        debug_assert!(word < BYTES / 4);
        // SAFETY: 64 readable bytes, as the block was promised to be there; the load needs no
        // alignment.
        unsafe { _mm512_loadu_si512(self.line(F::PLACES[word]).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn bits(self, at: usize) -> __m512i {
        // SAFETY: this function needs the same features.
        unsafe { self.word(at) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2")]
    unsafe fn before(self) -> __m512i {
        // SAFETY: sixteen numbers of so many bytes, as the block was promised to be there.
        unsafe {
            match BYTES % 4 {
                1 => _mm512_cvtepu8_epi32(_mm_loadu_si128(self.narrow.cast())),
                _ => _mm512_cvtepu16_epi32(_mm256_loadu_si256(self.narrow.cast())),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2")]
    unsafe fn behind(self) -> __m512i {
        // SAFETY: both lie in the same place here.
        unsafe { self.before() }
    }
}

/// The number of bytes a row of so many columns takes on average; 0 where there are no kernels for
/// such rows.
pub(super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    if format.block_len() == 1 {
        return packed_float::bf13::row_bytes(format, n_columns);
    }
    for_packed_format!(format, row_bytes_of(blocks_of(format, n_columns)), else 0)
}

fn row_bytes_of<F: UnpackGroup<BYTES>, const BYTES: usize>(n_blocks: usize) -> usize {
    group_bytes::<BYTES>(n_blocks) / ROWS
}

/// As [`RepackFns::block_len`](crate::kernels::RepackFns).
pub(super) fn block_len(format: BlockFormat) -> usize {
    match format.block_len() {
        1 => packed_float::bf13::COLUMNS,
        len => len,
    }
}

/// Packs all groups of sixteen of the given stored rows. Returns whether they can be packed.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn pack(stored: &WeightRows<'_>, to: &mut [u8]) -> bool {
    if stored.format.block_len() == 1 {
        return packed_float::f32::pack(stored, to);
    }
    for_packed_format!(stored.format, pack_of(stored, to));
    true
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn pack_of<F: UnpackGroup<BYTES>, const BYTES: usize>(stored: &WeightRows<'_>, to: &mut [u8]) {
    let n_blocks = stored.row_bytes / BYTES;
    let n_rows = stored.bytes.len() / stored.row_bytes.max(1);
    let groups = to.chunks_exact_mut(group_bytes::<BYTES>(n_blocks).max(1));
    for (row, group) in (0..n_rows / ROWS * ROWS).step_by(ROWS).zip(groups) {
        let (narrow, words) = group.split_at_mut(narrow_bytes::<BYTES>(n_blocks));
        let words = words.as_chunks_mut::<WORD16>().0;
        for b in 0..n_blocks {
            // SAFETY: the rows and the block exist, as they were counted.
            let block = unsafe { StoredGroup::<BYTES>::of(stored, row, b) };
            let n = BYTES / 4;
            pack_words::<F, BYTES>(block, &mut words[b * n..(b + 1) * n]);
            let n = ROWS * (BYTES % 4);
            // SAFETY: this function needs the same features.
            let numbers = unsafe {
                match F::GROUPS {
                    1 => block.before(),
                    _ => block.behind(),
                }
            };
            pack_narrow::<BYTES>(numbers, &mut narrow[b * n..(b + 1) * n]);
        }
    }
}

/// The words of a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn pack_words<F: UnpackGroup<BYTES>, const BYTES: usize>(
    block: StoredGroup<'_, BYTES>,
    to: &mut [[u8; WORD16]],
) {
    let first = if F::GROUPS == 1 { BYTES % 4 } else { 0 };
    let n_words = to.len();
    for word in (0..n_words / 4 * 4).step_by(4) {
        // SAFETY: this function needs the same features.
        let words = unsafe { block.words(first + 4 * word) };
        for (place, words) in F::PLACES[word..].iter().zip(words) {
            store(words, &mut to[*place]);
        }
    }
    for word in n_words / 4 * 4..n_words {
        // SAFETY: as above.
        store(
            unsafe { block.word(first + 4 * word) },
            &mut to[F::PLACES[word]],
        );
    }
    if let Some(at) = F::FIFTH_BITS {
        // SAFETY: as above.
        store(unsafe { block.bits(at) }, &mut to[F::PLACES[at / 4]]);
    }
}

/// The bytes of a block that are not in words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack_narrow<const BYTES: usize>(numbers: __m512i, to: &mut [u8]) {
    let mut words = [0u32; ROWS];
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), numbers) };
    for (to, word) in to.chunks_exact_mut((BYTES % 4).max(1)).zip(words) {
        to.copy_from_slice(&word.to_le_bytes()[..BYTES % 4]);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(words: __m512i, to: &mut [u8; WORD16]) {
    // SAFETY: 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
}

/// Block `b` of row `row` of the first group, as it was stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn stored_block(weights: &WeightRows<'_>, row: usize, b: usize, to: &mut [u8]) {
    if weights.format.block_len() == 1 {
        return packed_float::f32::stored_block(weights, row, b, to);
    }
    for_packed_format!(weights.format, stored_block_of(weights, row, b, to));
}

fn stored_block_of<F: UnpackGroup<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    row: usize,
    b: usize,
    to: &mut [u8],
) {
    let n_blocks = blocks_of(weights.format, weights.n_columns);
    let (narrow, words) = weights.bytes.split_at(narrow_bytes::<BYTES>(n_blocks));
    let words = &words.as_chunks::<WORD16>().0[b * (BYTES / 4)..(b + 1) * (BYTES / 4)];
    let n_narrow = BYTES % 4;
    let (at, of_words) = match F::GROUPS {
        1 => (0, n_narrow),
        _ => (BYTES - n_narrow, 0),
    };
    let from = (b * ROWS + row) * n_narrow;
    to[at..at + n_narrow].copy_from_slice(&narrow[from..from + n_narrow]);
    let to = to[of_words..].as_chunks_mut::<4>().0;
    for (to, place) in to.iter_mut().zip(F::PLACES) {
        *to = words[place].as_chunks().0[row];
    }
    if let Some(at) = F::FIFTH_BITS {
        let to = &mut to[at / 4];
        *to = by_columns(u32::from_le_bytes(*to)).to_le_bytes();
    }
}

/// The inverse of [`by_columns_of_four`](super::row_group::by_columns_of_four).
fn by_columns(bits: u32) -> u32 {
    (0..32).fold(0, |all, i| all | (bits >> (8 * (i % 4) + i / 4) & 1) << i)
}

/// The function that unpacks packed rows of a format to panels.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn unpack_panel_of(format: BlockFormat) -> UnpackPanelFn {
    for_packed_format!(format, to_panels_of(), else |_, _, _, _| ())
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn to_panels_of<F: UnpackGroup<BYTES>, const BYTES: usize>() -> UnpackPanelFn {
    |weights, rows, blocks, panel| unpack_to::<F, BYTES>(weights, rows, blocks, panel)
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn unpack_to<F: UnpackGroup<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    rows: Range<usize>,
    blocks: Range<usize>,
    panel: &mut Panel,
) {
    // Blocks of the format and groups of 32 columns may differ.
    let stored = blocks.start / F::GROUPS..blocks.end / F::GROUPS;
    let further = next_part::<BYTES>(weights, &stored);
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let is_whole = rows.len().is_multiple_of(ROWS) && rows.end <= n_rows;
    debug_assert!(is_whole && rows.len() <= gemm::ROWS && blocks.len() <= gemm::BLOCKS);
    for (half, row) in rows.step_by(ROWS).enumerate().take(gemm::ROWS / ROWS) {
        let Some(group) = PackedGroup::<F, BYTES>::of(weights, row) else {
            return;
        };
        for (at, b) in stored
            .clone()
            .take_while(|b| *b < group.n_blocks)
            .enumerate()
        {
            // SAFETY: the group has this block.
            let block = unsafe { group.block(b) };
            block.fetch(further);
            unpack_block::<F, BYTES>(block, at, half, panel);
        }
    }
}

/// From a panel's blocks to those of the panel that comes after it, in bytes.
fn next_part<const BYTES: usize>(weights: &WeightRows<'_>, blocks: &Range<usize>) -> usize {
    let n_blocks = blocks_of(weights.format, weights.n_columns);
    let bytes = BYTES / 4 * WORD16;
    if blocks.end < n_blocks {
        blocks.len() * bytes
    } else {
        2 * group_bytes::<BYTES>(n_blocks) - blocks.start * bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::unpack_panel::STEPS;
    use super::*;

    /// The places of a block's words, as a product takes them: first those without quants, then
    /// those of each step.
    fn places_met<F: UnpackGroup<BYTES>, const BYTES: usize>() {
        let words_of = |read: usize| {
            let pieces = F::PIECES_OF[read].into_iter().take(F::TAKES);
            (0..STEPS).flat_map(move |word| pieces.clone().map(move |piece| piece / 4 + word))
        };
        let quants: Vec<usize> = (0..F::READS).flat_map(words_of).collect();
        let others = (0..BYTES / 4).filter(|word| !quants.contains(word));
        let mut met = vec![];
        for word in others.chain(quants.iter().copied()) {
            if !met.contains(&F::PLACES[word]) {
                met.push(F::PLACES[word]);
            }
        }
        assert_eq!(met, Vec::from_iter(0..BYTES / 4), "blocks of {BYTES} bytes");
    }

    #[test]
    fn products_meet_all_words_in_order() {
        use BlockFormat as B;
        let blocks = [
            B::Q4_0,
            B::Q4_1,
            B::Q5_0,
            B::Q5_1,
            B::Q8_0,
            B::IQ4_NL,
            B::MXFP4,
        ];
        let super_blocks = [B::Q2_K, B::Q3_K, B::Q4_K, B::Q5_K, B::Q6_K, B::IQ4_XS];
        for format in blocks.into_iter().chain(super_blocks) {
            for_packed_format!(format, places_met());
        }
    }
}
