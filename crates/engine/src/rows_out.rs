//! [`Logits`] and [`Embeddings`]: the rows that come out of a batch.
//!
//! Borrowed from the engine until its next batch. Know no model.

use kv_graph::TopK;

use crate::completion::OutputRow;

/// The logits of the entries whose output was wanted, in the order of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'e> {
    pub(crate) values: &'e [f32],
    pub(crate) n_vocab: usize,
}

impl<'e> Logits<'e> {
    /// Number of rows: entries whose output was wanted.
    pub fn n_rows(self) -> usize {
        self.values.len() / self.n_vocab.max(1)
    }

    /// The logits of the `index`-th wanted entry, `[vocab]`; `None` beyond the last.
    pub fn row(self, index: usize) -> Option<&'e [f32]> {
        self.values.chunks_exact(self.n_vocab.max(1)).nth(index)
    }

    /// The logits of the last wanted entry, `[vocab]`; `None` where none was wanted.
    pub fn last(self) -> Option<&'e [f32]> {
        self.values.chunks_exact(self.n_vocab.max(1)).next_back()
    }

    /// All rows one after the other, `[wanted, vocab]`.
    pub fn values(self) -> &'e [f32] {
        self.values
    }
}

/// The output rows of a step: rows of logits, or the most likely tokens of each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRows<'e> {
    pub(crate) values: &'e [f32],
    pub(crate) n_vocab: usize,
    /// Tokens of each row; `None` for whole rows.
    pub(crate) k: Option<usize>,
}

impl<'e> StepRows<'e> {
    /// The row of the `index`-th wanted entry; `None` beyond the last.
    pub(crate) fn row(self, index: usize) -> Option<OutputRow<'e>> {
        let width = self.k.map_or(self.n_vocab, TopK::row_len).max(1);
        let row = self.values.chunks_exact(width).nth(index)?;
        match self.k {
            Some(_) => TopK::read(row).map(OutputRow::Candidates),
            None => Some(OutputRow::Logits(row)),
        }
    }
}

/// The final rows of the entries whose output was wanted, in the order of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Embeddings<'e> {
    pub(crate) values: &'e [f32],
    pub(crate) dim: usize,
}

impl<'e> Embeddings<'e> {
    /// The rows, `[dim]` each, in order.
    pub fn rows(self) -> impl ExactSizeIterator<Item = &'e [f32]> {
        self.values.chunks_exact(self.dim.max(1))
    }

    /// Values of one row.
    pub fn dim(self) -> usize {
        self.dim
    }

    /// All rows one after the other, `[wanted, dim]`.
    pub fn values(self) -> &'e [f32] {
        self.values
    }
}
