//! [`Tails`]: the final rows of the last tokens of each sequence, which a head that drafts reads
//! with the tokens after them.
//!
//! Invariant: a row is of the token that the sequence has at its position, or is not there; after
//! an edit it is not there rather than wrong. Knows neither graphs nor memories.

use std::collections::BTreeMap;

use cellar_scheduler::MAX_DRAFT;
use kv_core::batch::UBatch;
use kv_core::memory::{Edit, Seqs};
use kv_core::{Pos, PosRange, SeqId};

/// Rows that are kept of a sequence at least: of a token, and of the drafted ones after it.
const MAX_ROWS: usize = MAX_DRAFT + 1;

/// The final rows of the last tokens of each sequence.
#[derive(Debug, Default)]
pub(crate) struct Tails {
    width: usize,
    tails: BTreeMap<SeqId, Tail>,
}

/// The rows of one sequence.
#[derive(Clone, Debug, Default)]
struct Tail {
    /// The position behind the last row.
    end: u32,
    /// One after the other.
    rows: Vec<f32>,
}

impl Tail {
    fn row(&self, pos: u32, width: usize) -> Option<&[f32]> {
        let from_end = self.end.checked_sub(pos)? as usize;
        let start = self.rows.len().checked_sub(from_end.checked_mul(width)?)?;
        self.rows.get(start..start + width)
    }

    fn push(&mut self, pos: u32, row: &[f32]) {
        if self.end != pos {
            self.rows.clear();
        }
        self.rows.extend_from_slice(row);
        self.end = pos + 1;
        // Not one at a time: that would move all others each time.
        if self.rows.len() > 2 * MAX_ROWS * row.len() {
            let n_more = self.rows.len() - MAX_ROWS * row.len();
            self.rows.drain(..n_more);
        }
    }
}

impl Tails {
    /// No rows, of so many values each.
    pub(crate) fn new(width: usize) -> Self {
        Self {
            width,
            tails: BTreeMap::new(),
        }
    }

    /// The row of the token at a position.
    pub(crate) fn row(&self, seq: SeqId, pos: Pos) -> Option<&[f32]> {
        self.tails.get(&seq)?.row(pos.0, self.width)
    }

    /// The position behind the last token with a row.
    pub(crate) fn end(&self, seq: SeqId) -> Option<Pos> {
        Some(Pos(self.tails.get(&seq)?.end))
    }

    /// For each row of a ubatch whose final rows are `rows`, the final row of the token before it:
    /// zeros where that is not known, as at the beginning of a text.
    pub(crate) fn rows_before(&self, ubatch: &UBatch, rows: &[f32], before: &mut Vec<f32>) {
        before.clear();
        let mut last: BTreeMap<SeqId, (u32, &[f32])> = BTreeMap::new();
        let all = ubatch.positions.iter().zip(&ubatch.first_seqs);
        for ((&pos, &seq), row) in all.zip(rows.chunks_exact(self.width.max(1))) {
            let own = last.get(&seq).filter(|(at, _)| at + 1 == pos);
            let known = match (own, pos.checked_sub(1)) {
                (Some((_, row)), _) => Some(*row),
                (None, Some(pos)) => self.row(seq, Pos(pos)),
                (None, None) => None,
            };
            match known {
                Some(row) => before.extend_from_slice(row),
                None => before.resize(before.len() + self.width, 0.0),
            }
            last.insert(seq, (pos, row));
        }
    }

    /// Takes the final rows of a ubatch's tokens.
    pub(crate) fn push(&mut self, ubatch: &UBatch, rows: &[f32]) {
        let all = ubatch.positions.iter().zip(&ubatch.seqs);
        for ((&pos, seqs), row) in all.zip(rows.chunks_exact(self.width.max(1))) {
            for seq in seqs.iter() {
                self.tails.entry(seq).or_default().push(pos, row);
            }
        }
    }

    /// Sequences changed as this edit has it.
    pub(crate) fn edit(&mut self, edit: Edit) {
        match edit {
            Edit::Remove { seqs, range } => self.remove(seqs, range),
            Edit::Copy { from, to, range } => {
                let tail = self.tails.get(&from).filter(|tail| {
                    let first = (tail.rows.len() / self.width.max(1)) as u32;
                    range.contains(Pos(tail.end.saturating_sub(1)))
                        && range.contains(Pos(tail.end.saturating_sub(first)))
                });
                match tail.cloned() {
                    Some(tail) => self.tails.insert(to, tail),
                    None => self.tails.remove(&to),
                };
            }
            Edit::Reposition { seq, .. } => self.forget(seq),
            Edit::KeepOnly(seq) => self.tails.retain(|&other, _| other == seq),
            Edit::Compact => {}
            _ => self.tails.clear(),
        }
    }

    /// Tokens of a sequence are others now.
    pub(crate) fn forget(&mut self, seq: SeqId) {
        self.tails.remove(&seq);
    }

    /// Nothing is known of any.
    pub(crate) fn clear(&mut self) {
        self.tails.clear();
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) {
        let is_meant = |seq: SeqId| match seqs {
            Seqs::One(one) => one == seq,
            Seqs::All => true,
        };
        let width = self.width;
        self.tails.retain(|&seq, tail| {
            if !is_meant(seq) {
                return true;
            }
            let is_kept = |pos: &u32| !range.contains(Pos(*pos));
            let n_rows = tail.rows.len() / width.max(1);
            let first = tail.end.saturating_sub(n_rows as u32);
            let n_kept = (first..tail.end).take_while(is_kept).count();
            // What is behind a gap is at another place among the tokens.
            tail.rows.truncate(n_kept * width);
            tail.end = first + n_kept as u32;
            n_kept > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQ: SeqId = SeqId(3);

    fn tails(n_rows: u32) -> Tails {
        let mut tails = Tails::new(2);
        let tail = tails.tails.entry(SEQ).or_default();
        (0..n_rows).for_each(|pos| tail.push(pos, &[pos as f32, 0.5]));
        tails
    }

    fn remove(tails: &mut Tails, range: PosRange) {
        let seqs = Seqs::One(SEQ);
        tails.edit(Edit::Remove { seqs, range });
    }

    #[test]
    fn the_last_rows_are_kept() {
        let tails = tails(100);
        assert_eq!(tails.end(SEQ), Some(Pos(100)));
        assert_eq!(tails.row(SEQ, Pos(99)), Some([99.0, 0.5].as_slice()));
        for pos in 100 - MAX_ROWS as u32..100 {
            assert_eq!(tails.row(SEQ, Pos(pos)), Some([pos as f32, 0.5].as_slice()));
        }
        for pos in [99 - 2 * MAX_ROWS as u32, 100] {
            assert_eq!(tails.row(SEQ, Pos(pos)), None);
        }
        assert_eq!(tails.row(SeqId(0), Pos(99)), None);
    }

    #[test]
    fn edits_take_rows_along_or_drop_them() {
        let mut edited = tails(8);
        remove(&mut edited, PosRange::from(Pos(6)..));
        assert_eq!(edited.end(SEQ), Some(Pos(6)));
        assert_eq!(edited.row(SEQ, Pos(5)), Some([5.0, 0.5].as_slice()));
        assert_eq!(edited.row(SEQ, Pos(6)), None);
        let (from, to) = (SEQ, SeqId(1));
        let range = PosRange::ALL;
        edited.edit(Edit::Copy { from, to, range });
        assert!(edited.row(to, Pos(5)).is_some());
        // A part of it may continue other tokens.
        let range = PosRange::from(..Pos(3));
        edited.edit(Edit::Copy { from, to, range });
        assert_eq!(edited.row(to, Pos(5)), None);
        edited.edit(Edit::Compact);
        assert!(edited.row(SEQ, Pos(5)).is_some());
        remove(&mut edited, PosRange::ALL);
        assert_eq!(edited.end(SEQ), None);
        let mut cleared = tails(8);
        cleared.edit(Edit::Clear);
        assert_eq!(cleared.end(SEQ), None);
    }
}
