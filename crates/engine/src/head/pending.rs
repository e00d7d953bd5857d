//! [`PendingRows`]: tokens whose keys and values a head that drafts has not stored yet.
//!
//! Nothing reads the head's rows until it drafts or they are saved or moved, so tokens of several
//! steps are stored in one run, which takes hardly longer than one of a single token. Invariant: no
//! cell of a part is there twice. Knows no graph.

use kv_core::CellIdx;
use kv_core::batch::UBatch;
use kv_core::memory::PartInputs;

/// Tokens that are stored together at most.
pub(crate) const MAX_PENDING: usize = 32;

/// Tokens whose keys and values are not stored yet, as graphs take them.
#[derive(Debug, Default)]
pub(crate) struct PendingRows {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) coordinates: Vec<[u32; 3]>,
    /// The rows that the head reads with them, one after the other.
    pub(crate) rows: Vec<f32>,
    /// Their cells in each part.
    pub(crate) parts: Vec<PartInputs>,
}

impl PendingRows {
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True if the tokens of a ubatch can be added: they are few, and their cells are others.
    pub(crate) fn takes(&self, parts: &[PartInputs], n_tokens: usize, n_max: usize) -> bool {
        let has = |cell: &CellIdx, pending: &PartInputs| pending.cells.contains(cell);
        let mut both = parts.iter().zip(&self.parts);
        self.len() + n_tokens <= n_max
            && !both.any(|(new, old)| new.cells.iter().any(|cell| has(cell, old)))
    }

    /// Adds the tokens of a ubatch with these cells and rows.
    pub(crate) fn push(&mut self, ubatch: &UBatch, parts: &[PartInputs], rows: &[f32]) {
        self.tokens.extend_from_slice(&ubatch.tokens);
        self.positions.extend_from_slice(&ubatch.positions);
        self.coordinates.extend(ubatch.coordinates());
        self.rows.extend_from_slice(rows);
        self.parts.resize_with(parts.len(), PartInputs::default);
        for (pending, new) in self.parts.iter_mut().zip(parts) {
            pending.cells.extend_from_slice(&new.cells);
        }
    }

    /// Only the first `n` stay: the others were taken back.
    pub(crate) fn truncate(&mut self, n: usize) {
        let width = self.rows.len() / self.len().max(1);
        self.tokens.truncate(n);
        self.positions.truncate(n);
        self.coordinates.truncate(n);
        self.rows.truncate(n * width);
        for part in &mut self.parts {
            part.cells.truncate(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(cells: &[u32]) -> Vec<PartInputs> {
        vec![PartInputs {
            cells: cells.iter().copied().map(CellIdx).collect(),
            ..PartInputs::default()
        }]
    }

    #[test]
    fn a_cell_is_stored_once_in_a_run() {
        let mut pending = PendingRows {
            tokens: vec![7, 8, 9],
            positions: vec![0, 1, 2],
            coordinates: vec![[0; 3]; 3],
            rows: vec![0.5; 6],
            parts: cells(&[4, 5, 6]),
        };
        assert!(pending.takes(&cells(&[7]), 1, 4));
        assert!(!pending.takes(&cells(&[7, 8]), 2, 4));
        assert!(!pending.takes(&cells(&[5]), 1, 4));
        pending.truncate(1);
        assert_eq!((pending.len(), pending.rows.len()), (1, 2));
        assert!(pending.takes(&cells(&[5]), 1, 4));
        pending.truncate(0);
        assert!(pending.takes(&cells(&[4]), 1, 4));
    }
}
