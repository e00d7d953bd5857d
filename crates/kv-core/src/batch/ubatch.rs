//! A piece of a batch that one run of the graph takes.
//!
//! Invariant: everything that is given by row has one value for each row. Knows nothing of cells.

use super::{Output, TokensOf, ValidBatch};
use crate::grid::GridPos;
use crate::ids::{Pos, SeqId};
use crate::seq_set::SeqSet;

/// Rows that are evaluated together.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct UBatch {
    /// The owner of the tokens.
    pub tokens_of: TokensOf,
    /// For each row, the number of its entry in the batch.
    pub entries: Vec<u32>,
    /// For each row its token, as graphs take it; empty where embeddings are given.
    pub tokens: Vec<u32>,
    /// For each row its embedding, `[rows, n_embd]`; empty where tokens are given.
    pub embeddings: Vec<f32>,
    /// For each row its position, as graphs take it.
    pub positions: Vec<u32>,
    /// For each row its type, as graphs take it.
    pub token_types: Vec<u32>,
    /// For each row its place in an image; `None` for text.
    pub grids: Vec<Option<GridPos>>,
    /// For each row the last position that it sees, where that is not its own.
    pub sees_to: Vec<Option<Pos>>,
    /// For each row its sequences, at least one.
    pub seqs: Vec<SeqSet>,
    /// For each row the smallest id of its sequences: the one whose tokens it sees.
    pub first_seqs: Vec<SeqId>,
    /// Rows whose output is wanted, ascending.
    pub output_rows: Vec<u32>,
}

impl UBatch {
    /// Number of rows.
    pub fn n_tokens(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The rows as memories need them, in order.
    pub fn rows(&self) -> impl Iterator<Item = UBatchRow> + '_ {
        (0..self.n_tokens()).filter_map(|number| self.row(number))
    }

    /// One row as memories need it; `None` where there is no such row.
    pub fn row(&self, number: u32) -> Option<UBatchRow> {
        let at = number as usize;
        Some(UBatchRow {
            pos: Pos(*self.positions.get(at)?),
            grid: *self.grids.get(at)?,
            seqs: self.seqs.get(at)?.clone(),
            first_seq: *self.first_seqs.get(at)?,
        })
    }

    /// For each row position, row and column, as rotations of images take them.
    pub fn coordinates(&self) -> impl Iterator<Item = [u32; 3]> + '_ {
        let grids = self.positions.iter().zip(&self.grids);
        grids.map(|(&pos, &grid)| GridPos::coordinates(Pos(pos), grid))
    }

    /// The rows of `batch` with these numbers, in this order.
    pub(super) fn gather(batch: &ValidBatch, numbers: &[u32]) -> Self {
        let n = numbers.len();
        let mut ubatch = Self {
            tokens_of: batch.tokens_of,
            entries: numbers.to_vec(),
            tokens: Vec::with_capacity(if batch.tokens.is_empty() { 0 } else { n }),
            embeddings: Vec::new(),
            positions: Vec::with_capacity(n),
            token_types: Vec::with_capacity(n),
            grids: Vec::with_capacity(n),
            sees_to: Vec::with_capacity(n),
            seqs: Vec::with_capacity(n),
            first_seqs: Vec::with_capacity(n),
            output_rows: Vec::new(),
        };
        for (row, &number) in (0u32..).zip(numbers) {
            let number = number as usize;
            let Some(entry) = batch.entries.get(number) else {
                continue;
            };
            ubatch.positions.push(entry.pos.0);
            ubatch.token_types.push(entry.token_type);
            ubatch.grids.push(entry.grid);
            ubatch.sees_to.push(entry.sees_to);
            ubatch.seqs.push(entry.seqs.clone());
            ubatch.first_seqs.push(entry.first_seq);
            if entry.output == Output::Wanted {
                ubatch.output_rows.push(row);
            }
            ubatch.tokens.extend(batch.tokens.get(number));
            let start = number * batch.n_embd;
            let values = batch.embeddings.get(start..start + batch.n_embd);
            ubatch
                .embeddings
                .extend_from_slice(values.unwrap_or_default());
        }
        ubatch
    }
}

/// One row of a ubatch, as memories see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UBatchRow {
    /// Its position.
    pub pos: Pos,
    /// Its place in an image; `None` for text.
    pub grid: Option<GridPos>,
    /// Its sequences, at least one.
    pub seqs: SeqSet,
    /// The smallest id of them.
    pub first_seq: SeqId,
}
