//! [`TileRows`]: values of the rows of tiles, as graphs take and give them.
//!
//! Invariant: each tile is a sequence of its own, in the order of tiles. Plain copies.

use std::borrow::Cow;

use kv_core::batch::{Batch, BatchRules, PositionRule, SplitPolicy, UBatch, validate_with};
use kv_core::{GridPos, Pos, SeqId};
use model_core::media::MediaKind;
use model_core::picture::{PictureError, Tile};

use crate::tower::STEM_FRAMES;

/// The values of the rows of a tile that a graph takes.
pub(crate) struct TileRows<'t> {
    pub(crate) values: Cow<'t, [f32]>,
    /// The tile, where the rows are those of its patches: they have its places.
    pub(crate) tile: Option<&'t Tile>,
}

impl<'t> TileRows<'t> {
    /// The patches of a tile.
    pub(crate) fn of(tile: &'t Tile) -> Self {
        Self {
            values: Cow::Borrowed(&tile.patches),
            tile: Some(tile),
        }
    }

    /// Their number, where they are so wide.
    pub(crate) fn n_rows(&self, width: usize) -> usize {
        self.values.len() / width.max(1)
    }
}

/// The values of each three rows that follow each other, from every `step`th row on.
pub(crate) fn overlapping(rows: &[f32], width: usize, step: usize) -> Vec<f32> {
    let windows = rows.windows((STEM_FRAMES * width).max(1));
    windows
        .step_by((step * width).max(1))
        .flatten()
        .copied()
        .collect()
}

/// The rows of several lists, each with its width, concatenated.
pub(crate) fn side_by_side(mut parts: Vec<(Cow<'_, [f32]>, usize)>) -> Vec<f32> {
    if parts.len() < 2 {
        let only = parts.pop().map(|(rows, _)| rows.into_owned());
        return only.unwrap_or_default();
    }
    let mut out = Vec::with_capacity(parts.iter().map(|(rows, _)| rows.len()).sum());
    let mut lists: Vec<_> = parts
        .iter()
        .map(|(rows, width)| rows.chunks_exact((*width).max(1)))
        .collect();
    while let Some(row) = lists
        .iter_mut()
        .map(Iterator::next)
        .collect::<Option<Vec<_>>>()
    {
        row.into_iter().for_each(|part| out.extend_from_slice(part));
    }
    out
}

/// The values of each tile among those of all, of which each has so many rows.
pub(crate) fn divided(values: Vec<f32>, n_rows: &[usize]) -> Vec<Vec<f32>> {
    if n_rows.len() == 1 {
        return vec![values];
    }
    let width = values.len() / n_rows.iter().sum::<usize>().max(1);
    let mut rest = &values[..];
    let own = n_rows.iter().map(|n| {
        let (own, behind) = rest.split_at((n * width).min(rest.len()));
        rest = behind;
        own.to_vec()
    });
    own.collect()
}

/// The values of tiles as rows of one ubatch.
pub(crate) fn ubatch_of(tiles: &[TileRows<'_>], width: usize) -> Result<UBatch, PictureError> {
    let unreadable = |reason: String| PictureError::Unreadable {
        media: MediaKind::Picture,
        reason,
    };
    let mut batch = Batch::new();
    for (seq, rows) in (0u32..).map(SeqId).zip(tiles) {
        let values = rows.values.chunks_exact(width.max(1));
        if values.len() == 0 {
            return Err(unreadable("it has no patches".to_owned()));
        }
        for (at, row) in (0u32..).zip(values) {
            let number = at as usize;
            let pos = rows.tile.and_then(|tile| tile.positions.get(number));
            let place = rows.tile.and_then(|tile| tile.places.get(number));
            batch
                .push_embedding(row)
                .in_sequence(seq)
                .at_grid(
                    Pos(pos.copied().unwrap_or(at)),
                    place.copied().unwrap_or(GridPos::of_text(Pos(at))),
                )
                .with_output();
        }
    }
    let n_batch = u32::try_from(batch.len()).unwrap_or(u32::MAX);
    let rules = BatchRules {
        n_batch,
        n_seqs: u32::try_from(tiles.len()).unwrap_or(u32::MAX),
        n_vocab: 1,
        n_embd: u32::try_from(width).unwrap_or(u32::MAX),
    };
    let checked = validate_with(&batch, &rules, PositionRule::Grid, |_| None);
    let split = checked.and_then(|valid| SplitPolicy::WholeSequences.split(&valid, n_batch));
    let mut ubatches = split.map_err(|error| unreadable(error.to_string()))?;
    ubatches
        .pop()
        .ok_or_else(|| unreadable("it has no patches".to_owned()))
}
