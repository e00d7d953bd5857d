//! Scores of `Q8_0` keys as they are stored, by integer dot products (VNNI): the keys are neither
//! dequantized nor transposed to `f32`.
//!
//! Queries are in 24 bits ([`QueryBlockI24`]). Invariant: that of [`crate::attend::query_i24`].

use core::arch::x86_64::*;

use super::F32_LANES;
use super::transpose::load_quarters;
use crate::attend::kv_tiles::{KvPrefetcher, StoredTile};
use crate::attend::query_i24::{BLOCK_LEN, QueryBlockI24};
use crate::attend::tile_kernels::KV_TILE;

/// Bytes of a `Q8_0` block: a half-precision scale, then 32 quants.
pub(super) const BLOCK_BYTES: usize = 34;
pub(super) const SCALE_BYTES: usize = 2;
/// The integer of a block's largest magnitude, `65,536 · 127`: its upper byte still fits.
const MAX_INTEGER: f32 = 8_323_072.0;
/// Blocks with a smaller magnitude become zeros: their scale would be subnormal.
const MIN_MAGNITUDE: f32 = 1e-30;

/// Quantizes queries `[queries, k_dim]`, whole blocks each.
#[target_feature(enable = "avx512f")]
pub(crate) fn quantize_queries(q: &[f32], blocks: &mut [QueryBlockI24]) {
    for (values, block) in q.as_chunks::<BLOCK_LEN>().0.iter().zip(blocks) {
        *block = quantize_block(values);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn quantize_block(values: &[f32; BLOCK_LEN]) -> QueryBlockI24 {
    // SAFETY: a block is two registers of `f32`.
    let x = unsafe {
        let at = values.as_ptr();
        [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(F32_LANES))]
    };
    // Compared as integers, so that NaN is the largest.
    let magnitude = |x: __m512| _mm512_castps_si512(_mm512_abs_ps(x));
    let most = _mm512_max_epu32(magnitude(x[0]), magnitude(x[1]));
    let most = f32::from_bits(_mm512_reduce_max_epu32(most));
    let mut block = QueryBlockI24::default();
    if !most.is_finite() {
        block.scale = f32::NAN;
        return block;
    }
    if most < MIN_MAGNITUDE {
        return block;
    }
    let inverse_scale = _mm512_set1_ps(MAX_INTEGER / most);
    let to_integer = |x: __m512| _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse_scale));
    let v = [to_integer(x[0]), to_integer(x[1])];
    let mut sums = [_mm512_setzero_si512(); 2];
    for (half, v) in v.into_iter().enumerate() {
        // What is left for the bytes above, after the lowest byte is taken as a signed number.
        let above =
            |v: __m512i| _mm512_srai_epi32::<8>(_mm512_add_epi32(v, _mm512_set1_epi32(128)));
        let middle = above(v);
        let high = above(middle);
        let at = half * BLOCK_LEN / 8;
        // SAFETY: half of a block is 16 bytes, four `i32` of each array.
        unsafe {
            let to = |bytes: &mut [i32; BLOCK_LEN / 4]| bytes.as_mut_ptr().add(at).cast();
            _mm_storeu_si128(to(&mut block.low), _mm512_cvtepi32_epi8(v));
            _mm_storeu_si128(to(&mut block.middle), _mm512_cvtepi32_epi8(middle));
            _mm_storeu_si128(to(&mut block.high), _mm512_cvtepi32_epi8(high));
        }
        let below_high = _mm512_sub_epi32(v, _mm512_slli_epi32::<16>(high));
        sums = [
            _mm512_add_epi32(sums[0], high),
            _mm512_add_epi32(sums[1], below_high),
        ];
    }
    block.unbias = [
        -128 * _mm512_reduce_add_epi32(sums[0]),
        -128 * _mm512_reduce_add_epi32(sums[1]),
    ];
    block.scale = most / MAX_INTEGER;
    block
}

/// Two registers of one number for each lane of the tile.
type PerLane<T> = [T; 2];

/// One block of the keys of all lanes.
struct KeyBlock {
    scales: PerLane<__m512>,
    /// Quants biased by 128 to be unsigned; register `i` has values `4 i .. 4 i + 4` of each lane.
    quants: PerLane<[__m512i; BLOCK_LEN / 4]>,
}

/// `scores[q][lane] = Σ_d q[q][d] · k[lane][d]`, of queries from [`quantize_queries`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) fn scores(
    queries: &[QueryBlockI24],
    keys: StoredTile<'_>,
    out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    let rows = keys.row_pointers();
    let n_blocks = queries.len() / out.len().max(1);
    assert!(keys.head.n_bytes >= n_blocks * BLOCK_BYTES);
    out.as_flattened_mut().fill(0.0);
    for block in 0..n_blocks {
        // SAFETY: each row has `n_blocks` blocks, as asserted.
        let keys = unsafe {
            let at = block * BLOCK_BYTES;
            let quants = at + SCALE_BYTES;
            KeyBlock {
                scales: load_scales(&rows, at),
                quants: [
                    load_quants(&rows, 0, quants),
                    load_quants(&rows, F32_LANES, quants),
                ],
            }
        };
        let queries = queries.iter().skip(block).step_by(n_blocks);
        for (query, out) in queries.zip(out.iter_mut()) {
            prefetch.prefetch_next();
            add_block(query, &keys, out);
        }
    }
}

/// Adds one block's part of a query's scores.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_block(query: &QueryBlockI24, keys: &KeyBlock, out: &mut [f32; KV_TILE]) {
    let [mut high, mut low] = query.unbias.map(|sum| [_mm512_set1_epi32(sum); 2]);
    let mut middle = [_mm512_setzero_si512(); 2];
    for (i, k) in keys.quants[0].iter().zip(&keys.quants[1]).enumerate() {
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
        let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(65_536.0), _mm512_cvtepi32_ps(below));
        let scale = _mm512_mul_ps(scale, keys.scales[half]);
        // SAFETY: a query's scores are two registers of `f32`.
        unsafe {
            let at = out.as_mut_ptr().add(half * F32_LANES);
            let sum = _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(at));
            _mm512_storeu_ps(at, sum);
        }
    }
}

/// The scales of the blocks at byte `at` of each row.
///
/// # Safety
/// Each row has 16 bytes there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn load_scales(rows: &[*const u8; KV_TILE], at: usize) -> PerLane<__m512> {
    let mut pairs = [_mm512_setzero_si512(); 4];
    for (i, pair) in pairs.iter_mut().enumerate() {
        // SAFETY: as the caller promises.
        *pair = unsafe {
            _mm512_unpacklo_epi16(
                load_quarters::<8>(rows, 2 * i, at),
                load_quarters::<8>(rows, 2 * i + 1, at),
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

/// The 32 quants at byte `at` of 16 rows from `first` on, biased by 128 to be unsigned: register
/// `i` has values `4 i .. 4 i + 4` of each row.
///
/// # Safety
/// Each row has 32 bytes there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load_quants(
    rows: &[*const u8; KV_TILE],
    first: usize,
    at: usize,
) -> [__m512i; BLOCK_LEN / 4] {
    let mut k = [_mm512_setzero_si512(); BLOCK_LEN / 4];
    for (half, k) in k.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let at = at + half * 16;
        // SAFETY: as the caller promises.
        let r = unsafe {
            [
                load_quarters::<4>(rows, first, at),
                load_quarters::<4>(rows, first + 1, at),
                load_quarters::<4>(rows, first + 2, at),
                load_quarters::<4>(rows, first + 3, at),
            ]
        };
        let twos = [
            _mm512_unpacklo_epi32(r[0], r[1]),
            _mm512_unpacklo_epi32(r[2], r[3]),
            _mm512_unpackhi_epi32(r[0], r[1]),
            _mm512_unpackhi_epi32(r[2], r[3]),
        ];
        let bias = _mm512_set1_epi8(i8::MIN);
        k[0] = _mm512_xor_si512(bias, _mm512_unpacklo_epi64(twos[0], twos[1]));
        k[1] = _mm512_xor_si512(bias, _mm512_unpackhi_epi64(twos[0], twos[1]));
        k[2] = _mm512_xor_si512(bias, _mm512_unpacklo_epi64(twos[2], twos[3]));
        k[3] = _mm512_xor_si512(bias, _mm512_unpackhi_epi64(twos[2], twos[3]));
    }
    k
}
