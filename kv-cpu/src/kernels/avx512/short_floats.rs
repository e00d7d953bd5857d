//! Rows of BF16, F16 or F32 of whose values thirteen bits say all: the others need not be read.
//!
//! Models are trained in BF16, whose values have eight significant bits, and whichever of these formats their file has, those of a
//! row are seldom more than thirty binades apart. So a row is stored as a scale, a power of two, and of each value its sign, five
//! bits of exponent and seven of mantissa. Where that does not give every bit of every value the row cannot be repacked
//! ([`repack`] says so).
//!
//! Of each 64 columns the lower eight bits come first, then the upper four of the exponent, then signs, in an order
//! ([`column_of`]) that takes them to the lanes of registers. The row's scale stands at its end. Products are added up
//! as [`floats`](crate::kernels::floats) does.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use kv_core::block::BlockFormat;

use super::floats::{self, Sixteen};
use crate::kernels::ahead::{Ahead, ask_next_tile};
use crate::kernels::fetch::Level;
use crate::kernels::floats::Columns;
use crate::kernels::{Arrangement, WeightRows};
use crate::output::OutputColumns;

/// Columns of a block.
pub(super) const COLUMNS: usize = 64;
/// Columns of a register.
const LANES: usize = 16;
/// Registers of a block.
const QUARTERS: usize = COLUMNS / LANES;
/// Where the nibbles and signs of a block begin, and its end.
const NIBBLES: usize = COLUMNS;
const SIGNS: usize = NIBBLES + COLUMNS / 2;
const BLOCK: usize = SIGNS + COLUMNS / 8;
/// Bytes of a row's scale.
const SCALE: usize = size_of::<f32>();
const LINE: usize = 64;
/// Tokens that are multiplied side by side, and up to how many rows are read as they lie: for more they are stored as
/// they were before, once for all of them.
const TOKENS: usize = 8;
const FEW: usize = 32;

/// Where the exponent of an `f32` begins, that of 1.0, and the largest that has five bits: that of the largest value of a row,
/// before it is scaled.
const EXPONENT: u32 = 23;
const ONE: u32 = 127;
const TOP: u32 = 31;

/// Bytes of a row, 0 where there is no such row.
pub(super) fn row_bytes(format: BlockFormat, n_columns: usize) -> usize {
    match format {
        BlockFormat::BF16 | BlockFormat::F16 | BlockFormat::F32
            if n_columns.is_multiple_of(COLUMNS) =>
        {
            n_columns / COLUMNS * BLOCK + SCALE
        }
        _ => 0,
    }
}

/// Which of a block's columns has byte `at`: of neighbouring bytes one goes to a register of sixteen columns, the next to the one
/// after it, and of sixteen bytes eight to these two.
const fn column_of(at: usize) -> usize {
    let (sixteen, half, pair, odd) = (at / 16, at / 8 % 2, at / 2 % 4, at % 2);
    LANES * (2 * half + odd) + 4 * sixteen + pair
}

/// Repacks the given rows, as they are stored; says whether all values could be kept, else what was written means nothing.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn repack(stored: &WeightRows<'_>, to: &mut [u8]) -> bool {
    let row_bytes = row_bytes(stored.format, stored.n_columns).max(1);
    let rows = stored.bytes.chunks_exact(stored.row_bytes.max(1));
    rows.zip(to.chunks_exact_mut(row_bytes))
        .all(|(row, to)| repack_row(stored.format, row, to))
}

/// Sixteen stored values.
///
/// # Safety
/// The features are available, and there are so many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load(format: BlockFormat, from: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe {
        match format {
            BlockFormat::BF16 => Sixteen::load_bf16(from),
            BlockFormat::F16 => Sixteen::load_f16(from),
            _ => Sixteen::load(from.cast()),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn repack_row(format: BlockFormat, row: &[u8], to: &mut [u8]) -> bool {
    let n_bytes = LANES * format.block_bytes();
    let Some((factor, scale)) = scales(format, row) else {
        return false;
    };
    let (into, last) = to.as_chunks_mut::<BLOCK>();
    for (block, to) in row.chunks_exact(QUARTERS * n_bytes).zip(into) {
        let mut halves = [0u16; COLUMNS];
        let quarters = halves.chunks_exact_mut(LANES);
        for (from, to) in block.chunks_exact(n_bytes).zip(quarters) {
            // SAFETY: sixteen values are there to be read, and room for as many halves.
            let is_kept = unsafe {
                let values = load(format, from.as_ptr());
                let short = _mm512_mul_ps(values, _mm512_set1_ps(factor));
                let short = _mm512_srli_epi32::<16>(_mm512_castps_si512(short));
                _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(short));
                let short = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(short));
                let kept = _mm512_castps_si512(_mm512_mul_ps(short, _mm512_set1_ps(scale)));
                _mm512_cmpeq_epi32_mask(kept, _mm512_castps_si512(values)) == !0
            };
            if !is_kept {
                return false;
            }
        }
        put(&halves, to);
    }
    last.copy_from_slice(&scale.to_le_bytes());
    true
}

/// What gives the largest value of a row the exponent [`TOP`], and back; none where powers of two in `f32` do not, or it is not
/// finite.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn scales(format: BlockFormat, row: &[u8]) -> Option<(f32, f32)> {
    let mut most = _mm512_setzero_si512();
    for sixteen in row.chunks_exact(LANES * format.block_bytes()) {
        // SAFETY: sixteen values are there to be read.
        let values = unsafe { load(format, sixteen.as_ptr()) };
        most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(values)));
    }
    let exponent = _mm512_reduce_max_epu32(most) >> EXPONENT;
    let power = |exponent: u32| {
        let is_normal = (1..=2 * ONE).contains(&exponent);
        is_normal.then(|| f32::from_bits(exponent << EXPONENT))
    };
    let factor = power((ONE + TOP).checked_sub(exponent)?)?;
    Some((factor, power(ONE + exponent - TOP)?))
}

/// A block of halves of which bits 12 to 14 are zero.
#[inline]
fn put(halves: &[u16; COLUMNS], to: &mut [u8; BLOCK]) {
    let half = |at: usize| halves[column_of(at)];
    let (lower, rest) = to.split_at_mut(NIBBLES);
    let (nibbles, signs) = rest.split_at_mut(SIGNS - NIBBLES);
    for (at, to) in lower.iter_mut().enumerate() {
        *to = half(at) as u8;
    }
    for (at, to) in nibbles.iter_mut().enumerate() {
        let nibble = |at: usize| (half(at) >> 8 & 0xf) as u8;
        *to = nibble(at) | nibble(at + COLUMNS / 2) << 4;
    }
    let all = (0..COLUMNS).fold(0, |all, at| all | u64::from(half(at) >> 15) << at);
    signs.copy_from_slice(&all.to_le_bytes());
}

/// The columns of a block, in order, times the row's scale.
///
/// # Safety
/// The features are available, and the block can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn values(block: *const u8, scale: __m512) -> [__m512; QUARTERS] {
    // SAFETY: as the caller promises; loads need no alignment.
    let (lower, nibbles, signs) = unsafe {
        (
            _mm512_loadu_si512(block.cast()),
            _mm256_loadu_si256(block.add(NIBBLES).cast()),
            block.add(SIGNS).cast::<u64>().read_unaligned(),
        )
    };
    // Low nibbles in the lower half, high ones in the upper half.
    let to_bottom = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(4));
    let upper = _mm512_srlv_epi16(_mm512_broadcast_i64x4(nibbles), to_bottom);
    let upper = _mm512_and_si512(upper, _mm512_set1_epi8(0xf));
    let upper = _mm512_mask_add_epi8(upper, signs, upper, _mm512_set1_epi8(i8::MIN));
    let (a, b) = (
        _mm512_unpacklo_epi8(lower, upper),
        _mm512_unpackhi_epi8(lower, upper),
    );
    let odd = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let wide = [
        _mm512_slli_epi32::<16>(a),
        _mm512_and_si512(a, odd),
        _mm512_slli_epi32::<16>(b),
        _mm512_and_si512(b, odd),
    ];
    // Exact, as the product is a stored value.
    [
        _mm512_mul_ps(_mm512_castsi512_ps(wide[0]), scale),
        _mm512_mul_ps(_mm512_castsi512_ps(wide[1]), scale),
        _mm512_mul_ps(_mm512_castsi512_ps(wide[2]), scale),
        _mm512_mul_ps(_mm512_castsi512_ps(wide[3]), scale),
    ]
}

/// The scale of a row of so many blocks.
///
/// # Safety
/// The row can be read.
#[inline]
unsafe fn scale_of(row: *const u8, n_blocks: usize) -> f32 {
    // SAFETY: as the caller promises.
    unsafe { row.add(n_blocks * BLOCK).cast::<f32>().read_unaligned() }
}

/// The blocks of a row, and its scale.
#[inline]
#[target_feature(enable = "avx512f")]
fn parts(row: &[u8]) -> Option<(&[[u8; BLOCK]], __m512)> {
    let (blocks, scale) = row.split_last_chunk::<SCALE>()?;
    let scale = _mm512_set1_ps(f32::from_le_bytes(*scale));
    Some((blocks.as_chunks().0, scale))
}

/// Columns `64 · b` to `64 · b + 63` of row `row`, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn stored_block(weights: &WeightRows<'_>, (row, b): (usize, usize), to: &mut [u8]) {
    let mut rows = weights.bytes.chunks_exact(weights.row_bytes.max(1));
    let row = rows.nth(row).and_then(|row| parts(row));
    let block = row.and_then(|(blocks, scale)| Some((blocks.get(b)?, scale)));
    debug_assert!(block.is_some() && to.len() == COLUMNS * weights.format.block_bytes());
    if let Some(block) = block {
        store_block(weights.format, block, to);
    }
}

/// All columns of a row, as they were stored.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_row(format: BlockFormat, row: &[u8], to: &mut [u8]) {
    let Some((blocks, scale)) = parts(row) else {
        return;
    };
    let to = to.chunks_exact_mut(COLUMNS * format.block_bytes());
    for (block, to) in blocks.iter().zip(to) {
        store_block(format, (block, scale), to);
    }
}

/// A block, as it was stored.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn store_block(format: BlockFormat, (block, scale): (&[u8; BLOCK], __m512), to: &mut [u8]) {
    // SAFETY: a whole block; this function needs the same features.
    let values = unsafe { values(block.as_ptr(), scale) };
    let to = to.chunks_exact_mut(LANES * format.block_bytes());
    for (values, to) in values.into_iter().zip(to) {
        let to = to.as_mut_ptr();
        // SAFETY: room for sixteen values; stores need no alignment.
        unsafe {
            match format {
                BlockFormat::F32 => _mm512_storeu_ps(to.cast(), values),
                BlockFormat::F16 => {
                    let short = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                    _mm256_storeu_si256(to.cast(), short);
                }
                _ => {
                    let upper = _mm512_srli_epi32::<16>(_mm512_castps_si512(values));
                    _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(upper));
                }
            }
        }
    }
}

/// All rows against some tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn multiply(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    let inside = weights.row_bytes == row_bytes(weights.format, n) && tokens.end * n <= acts.len();
    debug_assert!(inside);
    if !inside {
        return;
    }
    if tokens.len() > FEW {
        return as_stored(weights, acts, tokens, out);
    }
    let mut token = tokens.start;
    while token < tokens.end {
        let left = tokens.end - token;
        // Of nine tokens five and four, not eight and one.
        let together = left.div_ceil(left.div_ceil(TOKENS));
        // SAFETY: these tokens exist, as was checked above.
        unsafe {
            match together {
                1 => few::<1, 4>(weights, acts, token, out),
                2 => few::<2, 2>(weights, acts, token, out),
                3 => few::<3, 2>(weights, acts, token, out),
                4 => few::<4, 2>(weights, acts, token, out),
                5 => few::<5, 2>(weights, acts, token, out),
                6 => few::<6, 2>(weights, acts, token, out),
                7 => few::<7, 2>(weights, acts, token, out),
                _ => few::<TOKENS, 2>(weights, acts, token, out),
            }
        }
        token += together;
    }
}

/// All rows against `T` tokens, `R` rows at a time.
///
/// # Safety
/// The tokens exist; the features are available.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn few<const T: usize, const R: usize>(
    weights: &WeightRows<'_>,
    acts: &[f32],
    token: usize,
    out: &mut OutputColumns<'_>,
) {
    let tiles = weights.bytes.chunks_exact(R * weights.row_bytes);
    debug_assert!(tiles.remainder().is_empty());
    for (tile, rows) in tiles.enumerate() {
        let first = weights.first + tile * R;
        let Some((to, stride)) = out.block(token..token + T, first..first + R) else {
            return;
        };
        // SAFETY: so many rows, and as many tokens as are promised; `to` has room for the sums of both.
        unsafe {
            let acts = acts.as_ptr().add(token * weights.n_columns);
            let sums = products::<T, R>(rows.as_ptr(), weights.row_bytes, acts, weights.n_columns);
            for (r, sums) in sums.into_iter().enumerate() {
                for (t, sum) in Sixteen::sums(sums).into_iter().enumerate() {
                    *to.add(t * stride + r) = sum;
                }
            }
        }
    }
}

/// `R` rows against `T` tokens: a register of sums for each, `[rows][tokens]`.
///
/// # Safety
/// They can be read; the features are available.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn products<const T: usize, const R: usize>(
    rows: *const u8,
    row_bytes: usize,
    acts: *const f32,
    n_columns: usize,
) -> [[__m512; T]; R] {
    let n_blocks = n_columns / COLUMNS;
    let level = Level::of_streams();
    let mut scales = [0.0; R];
    for (r, scale) in scales.iter_mut().enumerate() {
        // SAFETY: as the caller promises.
        *scale = unsafe { scale_of(rows.add(r * row_bytes), n_blocks) };
    }
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    for b in 0..n_blocks {
        let at = b * BLOCK;
        // So many blocks of all rows are a whole number of lines.
        if b % (8 / R) == 0 {
            const { assert!((8 * BLOCK).is_multiple_of(LINE) && R.is_multiple_of(2)) };
            match level {
                Level::First => {
                    let ahead = Ahead::of::<R>(at, 8 / R * BLOCK, row_bytes);
                    for r in 0..R {
                        ahead.fetch(rows.wrapping_add(r * row_bytes + at), r);
                    }
                }
                Level::Second => {
                    for line in 0..8 * BLOCK / LINE {
                        ask_next_tile::<R>(rows, (at, line), row_bytes);
                    }
                }
            }
        }
        for (pair, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (r, [of_first, of_second]) = (2 * pair, sums);
            // SAFETY: the rows have this block, and the tokens these columns.
            unsafe {
                let row = rows.add(r * row_bytes + at);
                let first = values(row, _mm512_set1_ps(scales[r]));
                let second = values(row.add(row_bytes), _mm512_set1_ps(scales[r + 1]));
                for (t, sums) in of_first.iter_mut().zip(of_second).enumerate() {
                    let acts = acts.add(t * n_columns + b * COLUMNS);
                    for (q, (first, second)) in first.into_iter().zip(second).enumerate() {
                        let x = _mm512_loadu_ps(acts.add(q * LANES));
                        *sums.0 = _mm512_fmadd_ps(first, x, *sums.0);
                        *sums.1 = _mm512_fmadd_ps(second, x, *sums.1);
                    }
                }
            }
        }
    }
    sums
}

thread_local! {
    /// Rows as they were stored, for many tokens.
    static STORED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// All rows against many tokens, by way of what they were before.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn as_stored(
    weights: &WeightRows<'_>,
    acts: &[f32],
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n_rows = weights.bytes.len() / weights.row_bytes.max(1);
    let row_bytes = weights.n_columns * weights.format.block_bytes();
    STORED.with_borrow_mut(|bytes| {
        bytes.resize(n_rows * row_bytes, 0);
        let rows = weights.bytes.chunks_exact(weights.row_bytes);
        for (row, to) in rows.zip(bytes.chunks_exact_mut(row_bytes)) {
            store_row(weights.format, row, to);
        }
        let stored = WeightRows {
            arrangement: Arrangement::Stored,
            bytes,
            row_bytes,
            ..*weights
        };
        floats::multiply(&stored, acts, tokens, out);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    const N: usize = 3 * COLUMNS;

    /// Whether a row can be repacked; if so, it has to give the bits that were stored.
    fn is_repacked(format: BlockFormat, halves: &[u16; N]) -> bool {
        let bytes = halves.map(u16::to_le_bytes);
        are_repacked(format, bytes.as_flattened())
    }

    fn are_repacked(format: BlockFormat, bytes: &[u8]) -> bool {
        let stored = WeightRows {
            format,
            arrangement: Arrangement::Stored,
            bytes,
            row_bytes: bytes.len(),
            first: 0,
            n_columns: N,
        };
        let row_bytes = row_bytes(format, N);
        let mut to = vec![0xa5; row_bytes];
        // SAFETY: tests look for the features.
        if unsafe { !repack(&stored, &mut to) } {
            return false;
        }
        let repacked = WeightRows {
            arrangement: Arrangement::Repacked,
            bytes: &to,
            row_bytes,
            ..stored
        };
        let n_bytes = COLUMNS * format.block_bytes();
        for (b, wanted) in bytes.chunks_exact(n_bytes).enumerate() {
            let mut got = vec![0; n_bytes];
            // SAFETY: as above.
            unsafe { stored_block(&repacked, (0, b), &mut got) };
            assert_eq!(wanted, got, "{format}: block {b}");
        }
        true
    }

    fn bf16(f: impl Fn(usize) -> f32) -> [u16; N] {
        std::array::from_fn(|i| (f(i).to_bits() >> 16) as u16)
    }

    #[test]
    fn rows_of_eight_significant_bits_are_kept() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let (bf, f) = (BlockFormat::BF16, BlockFormat::F16);
        // Signs, all mantissas, and exponents from the largest to the last that fits.
        let binades = |n: i32| {
            bf16(move |i| {
                let sign = if i % 3 == 0 { -1.0 } else { 1.0 };
                sign * (1.0 + (i * 37 % 128) as f32 / 128.0) * 2f32.powi(5 - i as i32 % n)
            })
        };
        assert!(is_repacked(bf, &binades(30)));
        assert!(!is_repacked(bf, &binades(34)), "too far apart");
        let near = |scale: i32| bf16(move |i| (i as f32 - 99.0) / 128.0 * 2f32.powi(scale));
        for scale in [-118, -14, 0, 29] {
            assert!(is_repacked(bf, &near(scale)), "values near 2^{scale}");
        }
        assert!(!is_repacked(bf, &near(40)), "no model has such values");
        assert!(
            is_repacked(bf, &[0; N]) && is_repacked(f, &[0x8000; N]),
            "zeros of both signs"
        );
        // Far below the largest only a few bits are left.
        let with_small = |small: f32| bf16(move |i| if i == 100 { small } else { 3.0 });
        assert!(is_repacked(bf, &with_small(2f32.powi(-35))));
        assert!(!is_repacked(bf, &with_small(1.5 * 2f32.powi(-36))));
        assert!(
            !is_repacked(bf, &with_small(f32::from_bits(1 << 16))),
            "a subnormal number"
        );
        for odd in [f32::INFINITY, f32::NAN, -f32::INFINITY] {
            assert!(!is_repacked(bf, &with_small(odd)), "{odd}");
        }
        assert!(
            is_repacked(bf, &bf16(|_| f32::from_bits(0x0080_0000))),
            "the smallest normal number"
        );
    }

    #[test]
    fn f16_is_kept_where_it_was_rounded_from_fewer_bits() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let format = BlockFormat::F16;
        let f16 = |f: &dyn Fn(usize) -> f32| -> [u16; N] {
            std::array::from_fn(|i| half::f16::from_f32(f(i)).to_bits())
        };
        // As trained: BF16 values whose smallest ones are subnormal in F16, where they were rounded.
        let trained = |i: usize| {
            let value = (i as f32 * 0.37).sin() * 0.1 * 2f32.powi(-(i as i32 % 24));
            f32::from_bits(value.to_bits() & 0xffff_0000)
        };
        assert!(is_repacked(format, &f16(&trained)));
        assert!(
            !is_repacked(format, &f16(&|i| (i as f32 * 0.37).sin())),
            "eleven bits"
        );
        assert!(is_repacked(format, &[1; N]), "all subnormal");
        let large = |i: usize| if i == 7 { 65_280.0 } else { -1.0 };
        assert!(is_repacked(format, &f16(&large)));
        let mut with_odd = f16(&large);
        with_odd[9] = 1;
        assert!(!is_repacked(format, &with_odd), "2^-24 beside 2^15");
        with_odd[9] = 0x7c00;
        assert!(!is_repacked(format, &with_odd), "infinity");
    }

    #[test]
    fn f32_is_kept_where_its_lower_half_is_zero() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let row: [f32; N] = std::array::from_fn(|i| (i as f32 - 99.0) / 128.0);
        let mut bytes = row.map(f32::to_le_bytes);
        assert!(are_repacked(BlockFormat::F32, bytes.as_flattened()));
        bytes[70][0] |= 1;
        assert!(!are_repacked(BlockFormat::F32, bytes.as_flattened()));
    }

    /// Whatever the bits, what is said to be kept is.
    #[test]
    fn random_rows_are_kept_or_refused() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let mut seed = 1_u64;
        let mut n_kept = 0;
        for round in 0..2000 {
            let masks = [0xffff, 0x83f8, 0x9ff8, 0xbfff, 0x8fff];
            let halves = std::array::from_fn(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((seed >> 48) as u16 & masks[round % masks.len()]) | (0x3000 * (round as u16 % 2))
            });
            for format in [BlockFormat::F16, BlockFormat::BF16] {
                n_kept += usize::from(is_repacked(format, &halves));
            }
        }
        assert!((500..3500).contains(&n_kept), "{n_kept} of 4000");
    }
}
