//! `Q8_0` keys and values as they are stored, in AVX-512: scores by products of bytes (VNNI), and values
//! that are widened once for up to eight queries.
//!
//! Invariant: that of [`super::bytes`]; and values are added with the bits of those that were decoded
//! first.

use core::arch::x86_64::*;
use std::ops::Range;

use super::avx512::{quarters, rows_of};
use super::bytes::{BLOCK, QueryBlock};
use super::decode::Heads;
use super::tile::TILE;
use super::walk::{Ahead, Tile};

/// Bytes of a block: its scale, then its quants.
const BYTES: usize = 34;
const SCALE_BYTES: usize = 2;
/// Numbers of a register.
const LANES: usize = 16;
/// Queries whose outputs are summed at once.
const QUERIES: usize = 8;
/// What stands for the largest magnitude of a block of a query: `65,536 · 127`, so that all bytes fit.
const MOST: f32 = 8_323_072.0;
/// Magnitudes below this are nothing: the scale of a block would not be a normal number.
const LEAST: f32 = 1e-30;

/// Rounds queries, `[queries, k_dim]`, whole blocks each.
#[target_feature(enable = "avx512f")]
pub(super) fn quantise(q: &[f32], blocks: &mut [QueryBlock]) {
    for (values, block) in q.as_chunks::<BLOCK>().0.iter().zip(blocks) {
        *block = quantised(values);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn quantised(values: &[f32; BLOCK]) -> QueryBlock {
    // SAFETY: there are two registers of values.
    let x = unsafe {
        let at = values.as_ptr();
        [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(LANES))]
    };
    // As whole numbers, so that what is no number is the largest.
    let magnitude = |x: __m512| _mm512_castps_si512(_mm512_abs_ps(x));
    let most = _mm512_max_epu32(magnitude(x[0]), magnitude(x[1]));
    let most = f32::from_bits(_mm512_reduce_max_epu32(most));
    let mut block = QueryBlock::default();
    if !most.is_finite() {
        block.scale = f32::NAN;
        return block;
    }
    if most < LEAST {
        return block;
    }
    let by = _mm512_set1_ps(MOST / most);
    let whole = |x: __m512| _mm512_cvtps_epi32(_mm512_mul_ps(x, by));
    let v = [whole(x[0]), whole(x[1])];
    let mut sums = [_mm512_setzero_si512(); 2];
    for (half, v) in v.into_iter().enumerate() {
        // A byte as a signed number leaves what the bytes above it hold.
        let above =
            |v: __m512i| _mm512_srai_epi32::<8>(_mm512_add_epi32(v, _mm512_set1_epi32(128)));
        let middle = above(v);
        let high = above(middle);
        let at = half * BLOCK / 8;
        // SAFETY: half of the groups of four are 16 bytes.
        unsafe {
            let to = |groups: &mut [i32; BLOCK / 4]| groups.as_mut_ptr().add(at).cast();
            _mm_storeu_si128(to(&mut block.low), _mm512_cvtepi32_epi8(v));
            _mm_storeu_si128(to(&mut block.middle), _mm512_cvtepi32_epi8(middle));
            _mm_storeu_si128(to(&mut block.high), _mm512_cvtepi32_epi8(high));
        }
        let others = _mm512_sub_epi32(v, _mm512_slli_epi32::<16>(high));
        sums = [
            _mm512_add_epi32(sums[0], high),
            _mm512_add_epi32(sums[1], others),
        ];
    }
    block.offsets = [
        -128 * _mm512_reduce_add_epi32(sums[0]),
        -128 * _mm512_reduce_add_epi32(sums[1]),
    ];
    block.scale = most / MOST;
    block
}

/// `scores[i][c] = Σ_d q[i][d] · k[c][d]`: queries from [`quantise`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) fn scores(
    queries: &[QueryBlock],
    (heads, tile): (&Heads<'_>, &Tile),
    out: &mut [[f32; TILE]],
    ahead: &mut Ahead<'_>,
) {
    let rows = rows_of(heads, tile);
    let n_blocks = queries.len() / out.len().max(1);
    assert!(heads.n_bytes >= n_blocks * BYTES);
    out.as_flattened_mut().fill(0.0);
    for block in 0..n_blocks {
        // SAFETY: each row has so many blocks, as was asserted.
        let (d, k) = unsafe {
            let at = block * BYTES;
            let quants = at + SCALE_BYTES;
            (
                scales(&rows, at),
                [keys(&rows, 0, quants), keys(&rows, LANES, quants)],
            )
        };
        let queries = queries.iter().skip(block).step_by(n_blocks);
        for (query, out) in queries.zip(out.iter_mut()) {
            ahead.step();
            add_block(query, (&d, &k), out);
        }
    }
}

/// Adds a block's part of the scores of one query.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_block(
    query: &QueryBlock,
    (d, k): (&[__m512; 2], &[[__m512i; BLOCK / 4]; 2]),
    out: &mut [f32; TILE],
) {
    let [mut high, mut low] = query.offsets.map(|offset| [_mm512_set1_epi32(offset); 2]);
    let mut middle = [_mm512_setzero_si512(); 2];
    for (i, k) in k[0].iter().zip(&k[1]).enumerate() {
        let k = [*k.0, *k.1];
        let q_high = _mm512_set1_epi32(query.high[i]);
        let q_middle = _mm512_set1_epi32(query.middle[i]);
        let q_low = _mm512_set1_epi32(query.low[i]);
        for half in 0..2 {
            high[half] = _mm512_dpbusd_epi32(high[half], k[half], q_high);
            middle[half] = _mm512_dpbusd_epi32(middle[half], k[half], q_middle);
            low[half] = _mm512_dpbusd_epi32(low[half], k[half], q_low);
        }
    }
    let scale = _mm512_set1_ps(query.scale);
    for half in 0..2 {
        // At most 32 · 255 · 32,896 in magnitude.
        let below = _mm512_add_epi32(_mm512_slli_epi32::<8>(middle[half]), low[half]);
        let high = _mm512_cvtepi32_ps(high[half]);
        let whole = _mm512_fmadd_ps(high, _mm512_set1_ps(65_536.0), _mm512_cvtepi32_ps(below));
        let by = _mm512_mul_ps(scale, d[half]);
        // SAFETY: there are two registers of scores.
        unsafe {
            let at = out.as_mut_ptr().add(half * LANES);
            let sum = _mm512_fmadd_ps(whole, by, _mm512_loadu_ps(at));
            _mm512_storeu_ps(at, sum);
        }
    }
}

/// The scales that lie at `at` in each row.
///
/// # Safety
/// Each row has 16 bytes there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn scales(rows: &[*const u8; TILE], at: usize) -> [__m512; 2] {
    let mut pairs = [_mm512_setzero_si512(); 4];
    for (i, pair) in pairs.iter_mut().enumerate() {
        // SAFETY: as the caller promises.
        *pair = unsafe {
            _mm512_unpacklo_epi16(
                quarters::<8>(rows, 2 * i, at),
                quarters::<8>(rows, 2 * i + 1, at),
            )
        };
    }
    let fours = [
        _mm512_unpacklo_epi32(pairs[0], pairs[1]),
        _mm512_unpacklo_epi32(pairs[2], pairs[3]),
    ];
    let all = _mm512_unpacklo_epi64(fours[0], fours[1]);
    [
        _mm512_cvtph_ps(_mm512_castsi512_si256(all)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(all)),
    ]
}

/// The quants of 16 rows from `first` on that begin at `at`, raised by 128: four values of each row in a
/// register.
///
/// # Safety
/// Each row has 32 bytes there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn keys(rows: &[*const u8; TILE], first: usize, at: usize) -> [__m512i; BLOCK / 4] {
    let mut k = [_mm512_setzero_si512(); BLOCK / 4];
    for (piece, k) in k.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let at = at + piece * 16;
        // SAFETY: as the caller promises.
        let r = unsafe {
            [
                quarters::<4>(rows, first, at),
                quarters::<4>(rows, first + 1, at),
                quarters::<4>(rows, first + 2, at),
                quarters::<4>(rows, first + 3, at),
            ]
        };
        let twos = [
            _mm512_unpacklo_epi32(r[0], r[1]),
            _mm512_unpacklo_epi32(r[2], r[3]),
            _mm512_unpackhi_epi32(r[0], r[1]),
            _mm512_unpackhi_epi32(r[2], r[3]),
        ];
        let raise = _mm512_set1_epi8(i8::MIN);
        k[0] = _mm512_xor_si512(raise, _mm512_unpacklo_epi64(twos[0], twos[1]));
        k[1] = _mm512_xor_si512(raise, _mm512_unpackhi_epi64(twos[0], twos[1]));
        k[2] = _mm512_xor_si512(raise, _mm512_unpacklo_epi64(twos[2], twos[3]));
        k[3] = _mm512_xor_si512(raise, _mm512_unpackhi_epi64(twos[2], twos[3]));
    }
    k
}

/// As [`super::tile::TileKernels::accumulate`], from values as they are stored.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn accumulate(
    mut out: &mut [f32],
    mut weights: &[[f32; TILE]],
    (cells, (heads, tile)): (Range<usize>, (&Heads<'_>, &Tile)),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / weights.len().max(1);
    assert!(cells.end <= TILE && v_dim.is_multiple_of(BLOCK));
    assert!(heads.n_bytes >= v_dim / BLOCK * BYTES);
    let rows = rows_of(heads, tile);
    while !weights.is_empty() {
        let n = weights.len().min(QUERIES);
        let (now, later) = weights.split_at(n);
        let (out_now, out_later) = out.split_at_mut(n * v_dim);
        for block in 0..v_dim / BLOCK {
            let (cells, at) = (cells.clone(), (&rows, block));
            // SAFETY: each row has so many blocks, as was asserted, and there are `n` rows of weights
            // and of outputs, which have this block.
            unsafe {
                match n {
                    8 => values::<8>(out_now, now, (cells, at), ahead),
                    7 => values::<7>(out_now, now, (cells, at), ahead),
                    6 => values::<6>(out_now, now, (cells, at), ahead),
                    5 => values::<5>(out_now, now, (cells, at), ahead),
                    4 => values::<4>(out_now, now, (cells, at), ahead),
                    3 => values::<3>(out_now, now, (cells, at), ahead),
                    2 => values::<2>(out_now, now, (cells, at), ahead),
                    _ => values::<1>(out_now, now, (cells, at), ahead),
                }
            }
        }
        (out, weights) = (out_later, later);
    }
}

/// One block of values for `N` queries.
///
/// # Safety
/// Rows have the block, there are `N` rows of weights and of outputs, which have it as well, and no cell is
/// beyond the tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn values<const N: usize>(
    out: &mut [f32],
    weights: &[[f32; TILE]],
    (cells, (rows, block)): (Range<usize>, (&[*const u8; TILE], usize)),
    ahead: &mut Ahead<'_>,
) {
    let v_dim = out.len() / N;
    let out = out.as_mut_ptr().wrapping_add(block * BLOCK);
    let mut d = [0.0f32; TILE];
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    // SAFETY: as the caller promises; there are two registers of scales.
    unsafe {
        let [low, high] = scales(rows, block * BYTES);
        _mm512_storeu_ps(d.as_mut_ptr(), low);
        _mm512_storeu_ps(d.as_mut_ptr().add(LANES), high);
        for (i, sums) in sums.iter_mut().enumerate() {
            let from = out.add(i * v_dim);
            *sums = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(LANES))];
        }
    }
    for cell in cells {
        ahead.step();
        // SAFETY: as the caller promises.
        let now = unsafe {
            let from = rows.get_unchecked(cell).add(block * BYTES + SCALE_BYTES);
            let d = _mm512_set1_ps(*d.get_unchecked(cell));
            [
                _mm512_mul_ps(d, widened(from)),
                _mm512_mul_ps(d, widened(from.add(LANES))),
            ]
        };
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as the caller promises.
            let weight = _mm512_set1_ps(unsafe { *weights.get_unchecked(i).get_unchecked(cell) });
            sums[0] = _mm512_fmadd_ps(weight, now[0], sums[0]);
            sums[1] = _mm512_fmadd_ps(weight, now[1], sums[1]);
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe {
            let to = out.add(i * v_dim);
            _mm512_storeu_ps(to, sums[0]);
            _mm512_storeu_ps(to.add(LANES), sums[1]);
        }
    }
}

/// Sixteen signed bytes as numbers.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widened(from: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe {
        _mm_loadu_si128(from.cast())
    }))
}
