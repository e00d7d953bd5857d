//! [`QueryBlock`] and [`ByteScores`]: queries as bytes, for scores of `Q8_0` keys as they are stored.
//!
//! For each block of 32 values a query is `scale · (65,536 · high + 256 · middle + low)` with three signed
//! bytes, rounded to 1/8,323,072 of its largest magnitude: as near as single precision is to it. The products
//! of a block are summed as whole numbers, exactly, then scaled.
//!
//! Invariant: a score depends on its query and its cell alone, whichever lie beside them. Knows no
//! instruction set.

use super::decode::Heads;
use super::tile::TILE;
use super::walk::{Ahead, Tile};

/// Values of a block.
pub(super) const BLOCK: usize = 32;

/// 32 values of a query.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only AVX-512 has such scores")
)]
pub(crate) struct QueryBlock {
    /// Four bytes in each.
    pub(super) high: [i32; BLOCK / 4],
    pub(super) middle: [i32; BLOCK / 4],
    pub(super) low: [i32; BLOCK / 4],
    /// What sums begin with, as bytes of keys are raised by 128 to have no sign: of the high bytes, and of
    /// the others together.
    pub(super) offsets: [i32; 2],
    pub(super) scale: f32,
}

/// `(q, blocks)`: rounds queries, `[queries, k_dim]`.
type Quantise = fn(&[f32], &mut [QueryBlock]);
/// `scores[i][c] = Σ_d q[i][d] · k[c][d]`: `(q, (keys, tile), scores)`; meanwhile the next tile is asked for.
type Scores = fn(&[QueryBlock], (&Heads<'_>, &Tile), &mut [[f32; TILE]], &mut Ahead<'_>);

/// How to round queries, and their scores.
pub(super) type ByteScores = (Quantise, Scores);
