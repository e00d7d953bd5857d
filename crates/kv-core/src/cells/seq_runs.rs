//! The cells of one sequence, by position, as runs.
//!
//! Invariant: the concatenation of the runs is strictly ascending by (position, cell), and runs are
//! as long as they can be. So equal contents are equal lists, whatever led there. Several cells may
//! hold the same position.

use crate::ids::{CellIdx, Pos};
use crate::visibility::CellRun;
use crate::window::PosRange;

/// Which cells hold the positions of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeqRuns {
    runs: Vec<CellRun>,
}

impl SeqRuns {
    /// The smallest and the largest position, or `None` without cells.
    #[inline]
    pub fn positions(&self) -> Option<PosRange> {
        let (first, last) = (self.runs.first()?, self.runs.last()?);
        Some(PosRange::new(first.pos, last.last_pos()))
    }

    /// All runs, by position, ties by cell.
    pub fn as_slice(&self) -> &[CellRun] {
        &self.runs
    }

    /// The cells whose positions lie in `range`, as runs in order.
    pub fn within(&self, range: PosRange) -> impl Iterator<Item = CellRun> + '_ {
        let (start, end) = self.indices(range);
        self.runs[start..end]
            .iter()
            .filter_map(move |run| run.clip(range))
    }

    /// The largest position below `pos`.
    pub fn last_before(&self, pos: Pos) -> Option<Pos> {
        let end = self.runs.partition_point(|r| r.pos < pos);
        let run = self.runs[..end].last()?;
        // The run starts below `pos`, so `pos - 1` exists and is not below its start.
        Some(run.last_pos().min(Pos(pos.0.saturating_sub(1))))
    }

    /// The smallest position above `pos`.
    pub fn first_after(&self, pos: Pos) -> Option<Pos> {
        let start = self.runs.partition_point(|r| r.last_pos() <= pos);
        Some(self.runs.get(start)?.pos.max(pos.next()))
    }

    /// Adds a cell; no effect where it is there already.
    pub fn insert(&mut self, pos: Pos, cell: CellIdx) {
        let at = self
            .runs
            .partition_point(|r| (r.pos, r.cell) <= (pos, cell));
        if let Some(before) = at.checked_sub(1).and_then(|i| self.runs.get_mut(i)) {
            let last = (before.last_pos(), before.last_cell());
            if (pos, cell) <= last {
                return self.insert_inside(at - 1, pos, cell);
            }
            if follows(*before, pos, cell) {
                before.len += 1;
                return self.join(at);
            }
        }
        self.runs.insert(at, CellRun { cell, pos, len: 1 });
        self.join(at + 1);
    }

    /// Takes one cell out; no effect where it is not there.
    pub fn remove(&mut self, pos: Pos, cell: CellIdx) {
        let end = self
            .runs
            .partition_point(|r| (r.pos, r.cell) <= (pos, cell));
        let Some(at) = end.checked_sub(1) else { return };
        let run = self.runs[at];
        let offset = pos.0 - run.pos.0;
        if offset >= run.len || run.cell.offset(offset) != cell {
            return;
        }
        let (left, right) = (cut(run, 0, offset), cut(run, offset + 1, run.len));
        match (left, right) {
            (Some(left), Some(right)) => {
                self.runs[at] = left;
                self.runs.insert(end, right);
            }
            (Some(rest), None) | (None, Some(rest)) => self.runs[at] = rest,
            (None, None) => {
                self.runs.remove(at);
                self.join(at);
            }
        }
    }

    /// Takes the cells whose positions lie in `range` out and returns them.
    pub fn remove_range(&mut self, range: PosRange) -> Vec<CellRun> {
        let removed: Vec<CellRun> = self.within(range).collect();
        let (start, end) = self.indices(range);
        if start < end {
            let (first, last) = (self.runs[start], self.runs[end - 1]);
            let left = first.clip(before(range.first));
            let right = last.clip(PosRange::new(range.last.next(), PosRange::ALL.last));
            // Without a position behind the largest there is nothing to the right.
            let right = right.filter(|_| range.last < PosRange::ALL.last);
            self.runs.splice(start..end, left.into_iter().chain(right));
        }
        removed
    }

    /// The runs that have a position in `range`.
    fn indices(&self, range: PosRange) -> (usize, usize) {
        if range.is_empty() {
            return (0, 0);
        }
        let start = self.runs.partition_point(|r| r.last_pos() < range.first);
        let end = self.runs.partition_point(|r| r.pos <= range.last);
        (start, end.max(start))
    }

    /// Inserts between cells of run `at`: another cell of the run holds the same position.
    fn insert_inside(&mut self, at: usize, pos: Pos, cell: CellIdx) {
        let run = self.runs[at];
        let offset = pos.0 - run.pos.0;
        let same_pos = run.cell.offset(offset);
        if same_pos == cell {
            return;
        }
        let left_len = if same_pos < cell { offset + 1 } else { offset };
        let new = CellRun { cell, pos, len: 1 };
        let pieces = [
            cut(run, 0, left_len),
            Some(new),
            cut(run, left_len, run.len),
        ];
        self.runs.splice(at..=at, pieces.into_iter().flatten());
    }

    /// Joins run `at` to the one before it where it continues that.
    fn join(&mut self, at: usize) {
        let Some(before) = at.checked_sub(1) else {
            return;
        };
        if let (Some(&left), Some(&right)) = (self.runs.get(before), self.runs.get(at))
            && follows(left, right.pos, right.cell)
        {
            self.runs[before].len += right.len;
            self.runs.remove(at);
        }
    }
}

/// The positions below `pos`.
fn before(pos: Pos) -> PosRange {
    PosRange::from(..pos)
}

fn follows(run: CellRun, pos: Pos, cell: CellIdx) -> bool {
    pos.0 == run.pos.0 + run.len && cell == run.cell.offset(run.len)
}

/// The cells `from..to` of a run, if any.
fn cut(run: CellRun, from: u32, to: u32) -> Option<CellRun> {
    let pos = Pos(run.pos.0 + from);
    (from < to).then(|| CellRun {
        cell: run.cell.offset(from),
        pos,
        len: to - from,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Edit {
        Insert(u32, u32),
        Remove(u32, u32),
        RemoveRange(u32, u32),
    }

    fn edit() -> impl Strategy<Value = Edit> {
        prop_oneof![
            4 => (0u32..12, 0u32..6).prop_map(|(p, c)| Edit::Insert(p, p + c)),
            2 => (0u32..12, 0u32..6).prop_map(|(p, c)| Edit::Remove(p, p + c)),
            1 => (0u32..14, 0u32..14).prop_map(|(a, b)| Edit::RemoveRange(a, b)),
        ]
    }

    /// The only list of longest runs for these pairs.
    fn longest_runs(pairs: &BTreeSet<(u32, u32)>) -> Vec<CellRun> {
        let mut runs: Vec<CellRun> = Vec::new();
        for &(pos, cell) in pairs {
            match runs.last_mut() {
                Some(r) if follows(*r, Pos(pos), CellIdx(cell)) => r.len += 1,
                _ => runs.push(CellRun {
                    cell: CellIdx(cell),
                    pos: Pos(pos),
                    len: 1,
                }),
            }
        }
        runs
    }

    proptest! {
        #[test]
        fn runs_are_a_sorted_set_of_pairs(edits in prop::collection::vec(edit(), 0..60)) {
            let mut runs = SeqRuns::default();
            let mut pairs = BTreeSet::new();
            for edit in edits {
                match edit {
                    Edit::Insert(p, c) => {
                        runs.insert(Pos(p), CellIdx(c));
                        pairs.insert((p, c));
                    }
                    Edit::Remove(p, c) => {
                        runs.remove(Pos(p), CellIdx(c));
                        pairs.remove(&(p, c));
                    }
                    Edit::RemoveRange(a, b) => {
                        let gone = runs.remove_range(PosRange::new(Pos(a), Pos(b)));
                        let gone: Vec<_> =
                            gone.iter().flat_map(|r| r.iter()).map(|(c, p)| (p.0, c.0)).collect();
                        let inside = |p: &(u32, u32)| a <= p.0 && p.0 <= b;
                        prop_assert_eq!(gone, pairs.iter().copied().filter(inside).collect::<Vec<_>>());
                        pairs.retain(|p| !inside(p));
                    }
                }
                prop_assert_eq!(runs.as_slice(), longest_runs(&pairs));
                let last = |n: u32| pairs.iter().rev().find(|p| p.0 < n).map(|p| Pos(p.0));
                for n in 0..14 {
                    prop_assert_eq!(runs.last_before(Pos(n)), last(n));
                    let next = pairs.iter().find(|p| p.0 > n).map(|p| Pos(p.0));
                    prop_assert_eq!(runs.first_after(Pos(n)), next);
                }
            }
        }
    }

    #[test]
    fn the_largest_position_can_be_removed() {
        let mut runs = SeqRuns::default();
        runs.insert(Pos(u32::MAX - 1), CellIdx(0));
        assert_eq!(runs.remove_range(PosRange::ALL).len(), 1);
        assert_eq!(runs, SeqRuns::default());
    }
}
