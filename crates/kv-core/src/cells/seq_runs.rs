//! The cells of one sequence, by position, as runs.
//!
//! Invariant: the concatenation of the runs is strictly ascending by (position, cell), and runs are
//! as long as they can be. So equal contents are equal lists, however they came about. Several
//! cells may hold the same position. Knows nothing of other sequences.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ids::{CellIdx, Pos};
use crate::visibility::CellRun;
use crate::window::PosRange;

/// The cells that hold the positions of one sequence.
#[derive(Debug)]
pub struct SeqRuns {
    runs: Vec<CellRun>,
    epoch: Epoch,
}

/// Names one list of runs for as long as it only grows at its end; no two lists share one.
///
/// A copy made in the same epoch is up to date but for its last run and those after it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Epoch(u64);

/// Without the number, so that equal runs print alike.
impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_")
    }
}

/// The origin of a copy of a sequence's runs, so that [`SeqRuns::update_copy`] needs to write only
/// what was added since.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CopyOrigin(Option<(Epoch, usize)>);

impl Epoch {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Default for SeqRuns {
    fn default() -> Self {
        Self {
            runs: Vec::new(),
            epoch: Epoch::new(),
        }
    }
}

/// The clone may grow in another way, so it begins an epoch of its own.
impl Clone for SeqRuns {
    fn clone(&self) -> Self {
        Self {
            runs: self.runs.clone(),
            epoch: Epoch::new(),
        }
    }
}

impl PartialEq for SeqRuns {
    fn eq(&self, other: &Self) -> bool {
        self.runs == other.runs
    }
}

impl Eq for SeqRuns {}

impl SeqRuns {
    /// The runs of these cells, which ascend by position and cell.
    pub(super) fn from_ascending(cells: impl Iterator<Item = (Pos, CellIdx)>) -> Self {
        let mut runs = Self::default();
        for (pos, cell) in cells {
            runs.append(pos, cell);
        }
        runs
    }

    /// Makes `copy` the list of all runs. `origin` tells what it was a copy of.
    pub(crate) fn update_copy(&self, copy: &mut Vec<CellRun>, origin: &mut CopyOrigin) {
        let n_kept = match origin.0 {
            Some((epoch, n)) if epoch == self.epoch && n == copy.len() => n.saturating_sub(1),
            _ => 0,
        };
        copy.truncate(n_kept);
        copy.extend_from_slice(&self.runs[n_kept..]);
        debug_assert_eq!(*copy, self.runs, "the copy was edited by somebody else");
        *origin = CopyOrigin(Some((self.epoch, self.runs.len())));
    }

    /// The smallest and the largest position, or `None` without cells.
    #[inline]
    pub fn positions(&self) -> Option<PosRange> {
        let (first, last) = (self.runs.first()?, self.runs.last()?);
        Some(PosRange::new(first.pos, last.last_pos()))
    }

    /// Number of cells.
    pub fn n_cells(&self) -> u32 {
        self.as_slice().iter().map(|run| run.len).sum()
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
        let last = self.runs.last();
        if last.is_none_or(|last| (last.last_pos(), last.last_cell()) < (pos, cell)) {
            return self.append(pos, cell);
        }
        self.epoch = Epoch::new();
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
        self.reserve(1);
        self.runs.insert(at, CellRun { cell, pos, len: 1 });
        self.join(at + 1);
    }

    /// Adds a cell after all others.
    fn append(&mut self, pos: Pos, cell: CellIdx) {
        match self.runs.last_mut() {
            Some(last) if follows(*last, pos, cell) => last.len += 1,
            _ => {
                self.reserve(1);
                self.runs.push(CellRun { cell, pos, len: 1 });
            }
        }
    }

    /// Removes one cell; no effect where it is not there.
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
        self.epoch = Epoch::new();
        let (left, right) = (cut(run, 0, offset), cut(run, offset + 1, run.len));
        match (left, right) {
            (Some(left), Some(right)) => {
                self.runs[at] = left;
                self.reserve(1);
                self.runs.insert(end, right);
            }
            (Some(rest), None) | (None, Some(rest)) => self.runs[at] = rest,
            (None, None) => {
                self.runs.remove(at);
                self.join(at);
            }
        }
    }

    /// Removes the cells whose positions lie in `range` and returns them.
    pub fn remove_range(&mut self, range: PosRange) -> Vec<CellRun> {
        let removed: Vec<CellRun> = self.within(range).collect();
        let (start, end) = self.indices(range);
        if (start, end) == (0, self.runs.len()) && removed == self.runs {
            // Returns the memory, too.
            *self = Self::default();
        } else if start < end {
            self.epoch = Epoch::new();
            let (first, last) = (self.runs[start], self.runs[end - 1]);
            let left = first.clip(before(range.first));
            let right = last.clip(PosRange::new(range.last.next(), PosRange::ALL.last));
            // Without a position behind the largest there is nothing to the right.
            let right = right.filter(|_| range.last < PosRange::ALL.last);
            self.reserve(1);
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
        self.reserve(2);
        let new = CellRun { cell, pos, len: 1 };
        let pieces = [
            cut(run, 0, left_len),
            Some(new),
            cut(run, left_len, run.len),
        ];
        self.runs.splice(at..=at, pieces.into_iter().flatten());
    }

    /// Makes room for `n` more runs, growing by a quarter: there may be as many runs as cells, and
    /// twice as much memory would be too much.
    fn reserve(&mut self, n: usize) {
        if self.runs.len() + n > self.runs.capacity() {
            self.runs.reserve_exact(self.runs.len() / 4 + 4);
        }
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        self.runs.capacity() * size_of::<CellRun>()
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
            let (mut copy, mut origin) = (Vec::new(), CopyOrigin::default());
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
                runs.update_copy(&mut copy, &mut origin);
                prop_assert_eq!(&copy, runs.as_slice());
                let again = pairs.iter().map(|&(p, c)| (Pos(p), CellIdx(c)));
                prop_assert_eq!(&SeqRuns::from_ascending(again), &runs);
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
    fn a_copy_of_one_list_is_not_taken_for_that_of_another() {
        let mut a = SeqRuns::default();
        (0..4).for_each(|i| a.insert(Pos(i), CellIdx(2 * i)));
        let (mut copy, mut origin) = (Vec::new(), CopyOrigin::default());
        a.update_copy(&mut copy, &mut origin);
        // Both grow by as many runs, in other cells.
        let mut b = a.clone();
        for i in 4..8 {
            a.insert(Pos(i), CellIdx(2 * i));
            b.insert(Pos(i), CellIdx(3 * i));
        }
        a.update_copy(&mut copy, &mut origin);
        assert_eq!(copy, a.as_slice());
        b.update_copy(&mut copy, &mut origin);
        assert_eq!(copy, b.as_slice());
        b.remove(Pos(2), CellIdx(4));
        b.insert(Pos(2), CellIdx(5));
        b.update_copy(&mut copy, &mut origin);
        assert_eq!(copy, b.as_slice());
    }

    /// The memory of a list that grew by one operation to `n` runs: a quarter more at most.
    fn assert_room_is_tight(runs: &SeqRuns, n: usize) {
        assert!(runs.runs.len() >= n, "{}", runs.runs.len());
        let room = runs.heap_bytes() / size_of::<CellRun>();
        let most = runs.runs.len() + runs.runs.len() / 4 + 4;
        assert!(room <= most, "{room} for {}", runs.runs.len());
    }

    #[test]
    fn room_for_runs_grows_by_a_quarter() {
        const N: u32 = 1030;
        let mut appended = SeqRuns::default();
        (0..N).for_each(|i| appended.insert(Pos(2 * i), CellIdx(i)));
        assert_room_is_tight(&appended, N as usize);
        let mut inserted = SeqRuns::default();
        (0..N)
            .rev()
            .for_each(|i| inserted.insert(Pos(2 * i), CellIdx(i)));
        assert_room_is_tight(&inserted, N as usize);
        let one_run = || {
            let cells = (0..3 * N).map(|i| (Pos(i), CellIdx(i)));
            SeqRuns::from_ascending(cells)
        };
        let mut doubled = one_run();
        (0..N).for_each(|i| doubled.insert(Pos(3 * i + 1), CellIdx(2)));
        assert_room_is_tight(&doubled, N as usize);
        let mut cut = one_run();
        (0..N).for_each(|i| cut.remove(Pos(3 * i + 1), CellIdx(3 * i + 1)));
        assert_room_is_tight(&cut, N as usize);
        let mut cut = one_run();
        for i in 0..N {
            cut.remove_range(PosRange::new(Pos(3 * i + 1), Pos(3 * i + 1)));
        }
        assert_room_is_tight(&cut, N as usize);
        // A list that loses all it has returns its memory.
        cut.remove_range(PosRange::ALL);
        assert_eq!(cut.heap_bytes(), 0);
    }

    #[test]
    fn the_largest_position_can_be_removed() {
        let mut runs = SeqRuns::default();
        runs.insert(Pos(u32::MAX - 1), CellIdx(0));
        assert_eq!(runs.remove_range(PosRange::ALL).len(), 1);
        assert_eq!(runs, SeqRuns::default());
        // Nothing is behind it that could be left.
        runs.insert(Pos(5), CellIdx(0));
        runs.insert(Pos(u32::MAX), CellIdx(1));
        assert_ne!(runs, SeqRuns::default());
        assert_eq!(runs.remove_range(PosRange::from(Pos(6)..)).len(), 1);
        assert_eq!(runs.positions(), Some(PosRange::new(Pos(5), Pos(5))));
    }
}
