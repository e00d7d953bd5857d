//! [`QueryBlockI24`]: queries quantized to 24 bits, for integer dot products with `Q8_0` keys.
//!
//! A block of 32 query values is `scale · (65,536 · high + 256 · middle + low)` with three signed
//! bytes per value: rounded to 1/8,323,072 of the block's largest magnitude, which is as precise
//! as `f32`. So the products of a block are exact integer sums, scaled once at the end.
//!
//! Invariant: a score depends on its query and its cell only, not on others in the batch. Knows no
//! instruction set.

use super::kv_tiles::{KvPrefetcher, StoredTile};
use super::tile_kernels::KV_TILE;

/// Values of a block.
pub(crate) const BLOCK_LEN: usize = 32;

/// 32 values of a query in 24 bits each.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only AVX-512 has integer scores")
)]
pub(crate) struct QueryBlockI24 {
    /// Upper bytes of the values, four in each `i32`, as `vpdpbusd` takes them.
    pub(crate) high: [i32; BLOCK_LEN / 4],
    /// Middle bytes.
    pub(crate) middle: [i32; BLOCK_LEN / 4],
    /// Lower bytes.
    pub(crate) low: [i32; BLOCK_LEN / 4],
    /// `-128 · Σ high` and `-128 · Σ (256 · middle + low)`: keys are biased by 128 to be unsigned,
    /// and sums start with what that adds.
    pub(crate) unbias: [i32; 2],
    pub(crate) scale: f32,
}

/// Quantizes queries `[queries, k_dim]` to blocks.
type QuantizeQueries = fn(&[f32], &mut [QueryBlockI24]);
/// `scores[q][lane] = Σ_d q[q][d] · k[lane][d]` of stored keys. Prefetches the next tile meanwhile.
type ScoresI24 = fn(&[QueryBlockI24], StoredTile<'_>, &mut [[f32; KV_TILE]], &mut KvPrefetcher<'_>);

/// Scores of keys as they are stored, without dequantizing them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntegerScores {
    pub(crate) quantize: QuantizeQueries,
    pub(crate) scores: ScoresI24,
}
