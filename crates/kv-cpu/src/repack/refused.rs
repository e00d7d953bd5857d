//! [`Refused`]: pieces of a weight that turned out to be such that they cannot be repacked.
//!
//! Invariant: what was refused stays so, and is so before its bytes count as written: who may read them knows.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::form::Form;

/// Which pieces of a weight turned out to be such that they cannot be repacked.
pub(super) struct Refused {
    /// Rows of a piece; the last one may have fewer.
    step: usize,
    /// Of each piece.
    pieces: Box<[AtomicBool]>,
    any: AtomicBool,
}

impl Refused {
    pub(super) fn none_of(form: &Form) -> Self {
        let step = form.rows_of_piece();
        let pieces = (0..form.n_rows.div_ceil(step)).map(|_| AtomicBool::new(false));
        Self {
            step,
            pieces: pieces.collect(),
            any: AtomicBool::new(false),
        }
    }

    /// The piece that begins with row `first`.
    pub(super) fn add(&self, first: usize) {
        if let Some(piece) = self.pieces.get(first / self.step) {
            piece.store(true, Ordering::Relaxed);
            self.any.store(true, Ordering::Relaxed);
        }
    }

    /// Whether some of these rows are of such a piece.
    pub(super) fn has_some(&self, rows: &Range<usize>) -> bool {
        let pieces = rows.start / self.step..rows.end.div_ceil(self.step);
        let is_refused = |piece: &AtomicBool| piece.load(Ordering::Relaxed);
        self.any.load(Ordering::Relaxed)
            && self
                .pieces
                .get(pieces)
                .is_some_and(|p| p.iter().any(is_refused))
    }

    /// How many of these rows are.
    pub(super) fn n_rows(&self, rows: &Range<usize>) -> usize {
        let pieces = rows.clone().step_by(self.step);
        let of_piece = |first: usize| first..rows.end.min(first + self.step);
        let refused = pieces.map(of_piece).filter(|piece| self.has_some(piece));
        refused.map(|piece| piece.len()).sum()
    }
}
