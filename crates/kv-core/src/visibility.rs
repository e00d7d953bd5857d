//! What the rows of one ubatch see of one part of the memory, as runs of cells.
//!
//! Invariant (see [`Visibility::check`]): every row is in exactly one group; the runs of a group
//! follow each other by position, ties by cell. So a kernel that walks them adds up in the same
//! order however the cells are laid out, whatever other sequences have cells there, and in whatever
//! pieces the tokens came.
//! Knows nothing of windows or sequences: those have been worked into runs and limits.

use std::fmt;

use crate::cells::CopyOrigin;
use crate::ids::{CellIdx, Pos};
use crate::window::PosRange;

/// The cells of one part of the memory that each row (token) of a ubatch sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Visibility {
    /// Number of rows, which is the number of tokens of the ubatch.
    pub n_rows: u32,
    /// The rows, in groups that look at the same cells.
    pub groups: Vec<VisibleGroup>,
}

/// Query rows that look at the same runs of cells, each within its own limits.
///
/// A row sees exactly the cells of `runs` whose position lies in its limits. A row that sees
/// nothing is in a group, too: its attention is zero.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct VisibleGroup {
    /// Row numbers in the ubatch, ascending.
    pub rows: Vec<u32>,
    /// Cells that cover what the rows see, by position, ties by cell. A memory that writes its
    /// inputs over those of the step before keeps the runs that are still right: edit a clone.
    pub runs: Vec<CellRun>,
    /// For each of `rows`, the positions that it sees.
    pub limits: Vec<PosRange>,
    /// The sequence whose runs `runs` is a copy of, where it is a whole one.
    pub(crate) origin: CopyOrigin,
}

/// The origin of runs makes no difference.
impl PartialEq for VisibleGroup {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows && self.runs == other.runs && self.limits == other.limits
    }
}

impl Eq for VisibleGroup {}

/// `len` cells from `cell` on that hold the positions `pos`, `pos + 1`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellRun {
    /// The first cell.
    pub cell: CellIdx,
    /// The position that it holds.
    pub pos: Pos,
    /// Number of cells, at least 1.
    pub len: u32,
}

/// A visibility that breaks its rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VisibilityError {
    /// A row is in no group, in several, or twice in one.
    #[error("row {row} of {n_rows} is in {n_groups} groups instead of one")]
    RowNotInOneGroup {
        /// The row.
        row: u32,
        /// Rows there are.
        n_rows: u32,
        /// Number of times that it was found.
        n_groups: u32,
    },
    /// The rows of a group are not ascending.
    #[error("group {group}: row {row} follows row {previous}")]
    RowsNotAscending {
        /// Number of the group.
        group: usize,
        /// The row before.
        previous: u32,
        /// The row that is not larger.
        row: u32,
    },
    /// A group has another number of limits than rows.
    #[error("group {group} has {n_rows} rows but {n_limits} limits")]
    LimitsMissing {
        /// Number of the group.
        group: usize,
        /// Rows in it.
        n_rows: usize,
        /// Limits in it.
        n_limits: usize,
    },
    /// A run is empty, leaves the cells there are, or exceeds the largest position.
    #[error("group {group}: run {run} does not lie in {n_cells} cells")]
    RunOutside {
        /// Number of the group.
        group: usize,
        /// The run.
        run: CellRun,
        /// Cells there are.
        n_cells: u32,
    },
    /// Two runs are not in order of position and cell.
    #[error("group {group}: run {run} does not follow run {previous}")]
    RunsOutOfOrder {
        /// Number of the group.
        group: usize,
        /// The run before.
        previous: CellRun,
        /// The run that starts too early.
        run: CellRun,
    },
}

impl Visibility {
    /// The visibility of `n_rows` rows; [`Visibility::check`] tells whether it is a sound one.
    pub fn new(n_rows: u32, groups: Vec<VisibleGroup>) -> Self {
        Self { n_rows, groups }
    }

    /// The cells that `row` sees with their positions, by position.
    pub fn row(&self, row: u32) -> impl Iterator<Item = (CellIdx, Pos)> + '_ {
        self.groups.iter().flat_map(move |group| {
            let index = group.rows.binary_search(&row).ok();
            index.into_iter().flat_map(move |i| group.cells_of(i))
        })
    }

    /// The same as a table of rows × cells, for `n_cells` cells.
    ///
    /// # Errors
    /// [`VisibilityError`] as from [`Visibility::check`].
    pub fn dense_mask(&self, n_cells: u32) -> Result<KqMask, VisibilityError> {
        self.check(n_cells)?;
        let mut mask = KqMask::none(self.n_rows, n_cells);
        for group in &self.groups {
            for (i, &row) in group.rows.iter().enumerate() {
                for (cell, _) in group.cells_of(i) {
                    mask.set(row, cell);
                }
            }
        }
        Ok(mask)
    }

    /// What rows see where each sees the cells alone whose ranks `chosen [rows, per_row]` names, as
    /// `Op::Index` of `kv-graph` chooses them: into `out`, whose memory is used again.
    pub fn keep_chosen(&self, chosen: &[f32], per_row: usize, out: &mut Self) {
        out.n_rows = self.n_rows;
        let mut n_groups = 0;
        for group in &self.groups {
            for (at, &row) in group.rows.iter().enumerate() {
                let ranks = chosen.chunks_exact(per_row.max(1)).nth(row as usize);
                if out.groups.len() == n_groups {
                    out.groups.push(VisibleGroup::default());
                }
                if let Some(kept) = out.groups.get_mut(n_groups) {
                    kept.keep(group, at, ranks.unwrap_or_default());
                }
                n_groups += 1;
            }
        }
        out.groups.truncate(n_groups);
    }

    /// Checks that the rules of this type hold for `n_cells` cells.
    ///
    /// # Errors
    /// [`VisibilityError`], the first rule that is broken.
    pub fn check(&self, n_cells: u32) -> Result<(), VisibilityError> {
        self.check_with(n_cells, &mut Vec::new())
    }

    /// The same with memory for the number of groups that each row is in: a second check of as many
    /// rows allocates nothing.
    ///
    /// # Errors
    /// As from [`Self::check`].
    pub fn check_with(&self, n_cells: u32, n_groups: &mut Vec<u32>) -> Result<(), VisibilityError> {
        let in_other_than_one = |row, n_groups| VisibilityError::RowNotInOneGroup {
            row,
            n_rows: self.n_rows,
            n_groups,
        };
        n_groups.clear();
        n_groups.resize(self.n_rows as usize, 0);
        for (number, group) in self.groups.iter().enumerate() {
            group.check(number, n_cells)?;
            for &row in &group.rows {
                let n = n_groups.get_mut(row as usize);
                *n.ok_or_else(|| in_other_than_one(row, 1))? += 1;
            }
        }
        match (0..).zip(n_groups).find(|(_, n)| **n != 1) {
            Some((row, n)) => Err(in_other_than_one(row, *n)),
            None => Ok(()),
        }
    }
}

impl VisibleGroup {
    /// A group of rows; [`Visibility::check`] tells whether it is a sound one.
    pub fn new(rows: Vec<u32>, runs: Vec<CellRun>, limits: Vec<PosRange>) -> Self {
        let origin = CopyOrigin::default();
        Self {
            rows,
            runs,
            limits,
            origin,
        }
    }

    /// The cells that the `index`-th row of this group sees with their positions, by position.
    pub fn cells_of(&self, index: usize) -> impl Iterator<Item = (CellIdx, Pos)> + '_ {
        let limits = self.limits.get(index).copied().unwrap_or(PosRange::EMPTY);
        self.runs
            .iter()
            .filter_map(move |run| run.clip(limits))
            .flat_map(CellRun::iter)
    }

    /// Becomes the `index`-th row of `group` alone, which sees the cells of these ranks, ascending,
    /// of what it saw; ranks below 0 are none.
    fn keep(&mut self, group: &Self, index: usize, ranks: &[f32]) {
        self.origin = CopyOrigin::default();
        self.rows.clear();
        self.rows.extend(group.rows.get(index));
        self.limits.clear();
        self.limits.push(PosRange::ALL);
        self.runs.clear();
        let limits = group.limits.get(index).copied().unwrap_or(PosRange::EMPTY);
        let mut ranks = ranks.iter().filter(|rank| **rank >= 0.0);
        let mut wanted = ranks.next().map(|&rank| rank as u32);
        let mut first = 0;
        for run in group.runs.iter().filter_map(|run| run.clip(limits)) {
            while let Some(skipped) = wanted
                .and_then(|rank| rank.checked_sub(first))
                .filter(|&skipped| skipped < run.len)
            {
                let (cell, pos) = (run.cell.offset(skipped), Pos(run.pos.0 + skipped));
                match self.runs.last_mut() {
                    Some(last)
                        if [last.cell.0, last.pos.0].map(|n| n + last.len) == [cell.0, pos.0] =>
                    {
                        last.len += 1;
                    }
                    _ => self.runs.push(CellRun { cell, pos, len: 1 }),
                }
                wanted = ranks.next().map(|&rank| rank as u32);
            }
            first += run.len;
        }
    }

    fn check(&self, group: usize, n_cells: u32) -> Result<(), VisibilityError> {
        let (n_rows, n_limits) = (self.rows.len(), self.limits.len());
        if n_rows != n_limits {
            return Err(VisibilityError::LimitsMissing {
                group,
                n_rows,
                n_limits,
            });
        }
        for pair in self.rows.windows(2) {
            if let [previous, row] = *pair
                && row <= previous
            {
                return Err(VisibilityError::RowsNotAscending {
                    group,
                    previous,
                    row,
                });
            }
        }
        let mut before: Option<CellRun> = None;
        for &run in &self.runs {
            let end = run.cell.0.checked_add(run.len);
            let end_pos = run.pos.checked_add(run.len);
            if run.len == 0 || end.is_none_or(|e| e > n_cells) || end_pos.is_none() {
                return Err(VisibilityError::RunOutside {
                    group,
                    run,
                    n_cells,
                });
            }
            if let Some(previous) = before.replace(run)
                && (run.pos, run.cell) <= (previous.last_pos(), previous.last_cell())
            {
                return Err(VisibilityError::RunsOutOfOrder {
                    group,
                    previous,
                    run,
                });
            }
        }
        Ok(())
    }
}

impl CellRun {
    /// The largest position in the run.
    #[inline]
    pub fn last_pos(self) -> Pos {
        Pos(self.pos.0.saturating_add(self.len.saturating_sub(1)))
    }

    /// The last cell of the run.
    #[inline]
    pub fn last_cell(self) -> CellIdx {
        self.cell.offset(self.len.saturating_sub(1))
    }

    /// The part of the run whose positions lie in `range`, if any does.
    #[inline]
    pub fn clip(self, range: PosRange) -> Option<Self> {
        let kept = PosRange::new(self.pos, self.last_pos()).intersection(range);
        if kept.is_empty() {
            return None;
        }
        let skipped = kept.first.0 - self.pos.0;
        let len = kept.last.0 - kept.first.0 + 1;
        Some(Self {
            cell: self.cell.offset(skipped),
            pos: kept.first,
            len,
        })
    }

    /// The cells of the run with their positions.
    pub fn iter(self) -> impl Iterator<Item = (CellIdx, Pos)> {
        (0..self.len).map(move |i| (self.cell.offset(i), Pos(self.pos.0 + i)))
    }
}

impl fmt::Display for CellRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}@{}", self.cell, self.len, self.pos)
    }
}

/// Visibility as a table: which row sees which cell.
///
/// Prints one line a row, `#` for a cell that it sees and `.` for one that it does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KqMask {
    n_rows: u32,
    n_cells: u32,
    bits: Vec<bool>,
}

impl KqMask {
    /// A mask in which no row sees any cell.
    pub fn none(n_rows: u32, n_cells: u32) -> Self {
        Self {
            n_rows,
            n_cells,
            bits: vec![false; n_rows as usize * n_cells as usize],
        }
    }

    /// Number of rows.
    pub fn n_rows(&self) -> u32 {
        self.n_rows
    }

    /// Number of cells.
    pub fn n_cells(&self) -> u32 {
        self.n_cells
    }

    /// One row, a value for each cell; empty where there is no such row.
    pub fn row(&self, row: u32) -> &[bool] {
        let start = row as usize * self.n_cells as usize;
        self.bits
            .get(start..start + self.n_cells as usize)
            .unwrap_or_default()
    }

    /// True if `row` sees `cell`.
    pub fn sees(&self, row: u32, cell: CellIdx) -> bool {
        self.row(row).get(cell.as_usize()).copied().unwrap_or(false)
    }

    fn set(&mut self, row: u32, cell: CellIdx) {
        let at = row as usize * self.n_cells as usize + cell.as_usize();
        if let Some(bit) = self.bits.get_mut(at) {
            *bit = true;
        }
    }
}

impl fmt::Display for KqMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in 0..self.n_rows {
            let line = self
                .row(row)
                .iter()
                .map(|&sees| if sees { '#' } else { '.' });
            writeln!(f, "{}", line.collect::<String>())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(cell: u32, pos: u32, len: u32) -> CellRun {
        CellRun {
            cell: CellIdx(cell),
            pos: Pos(pos),
            len,
        }
    }

    fn limits(ranges: &[(u32, u32)]) -> Vec<PosRange> {
        ranges
            .iter()
            .map(|&(a, b)| PosRange::new(Pos(a), Pos(b)))
            .collect()
    }

    fn example() -> Visibility {
        let of_seq_0 = VisibleGroup::new(
            vec![0, 2],
            vec![run(4, 0, 3), run(0, 3, 2)],
            limits(&[(0, 3), (2, 4)]),
        );
        let blind = VisibleGroup::new(vec![1], vec![], limits(&[(0, 9)]));
        Visibility::new(3, vec![of_seq_0, blind])
    }

    #[test]
    fn runs_without_cells_and_beyond_all_positions_are_refused() {
        for run in [run(0, 3, 0), run(0, u32::MAX, 2), run(4, 0, 3)] {
            let group = VisibleGroup::new(vec![0], vec![run], limits(&[(0, 9)]));
            let error = Visibility::new(1, vec![group]).check(6).unwrap_err();
            let (group, n_cells) = (0, 6);
            let outside = VisibilityError::RunOutside {
                group,
                run,
                n_cells,
            };
            assert_eq!(error, outside);
        }
    }

    #[test]
    fn groups_differ_by_rows_runs_and_limits() {
        let group = VisibleGroup::new(vec![0], vec![run(4, 0, 3)], limits(&[(0, 2)]));
        let mut same = group.clone();
        assert_eq!(same, group);
        same.rows[0] = 1;
        assert_ne!(same, group);
        let longer = VisibleGroup::new(vec![0], vec![run(4, 0, 4)], limits(&[(0, 2)]));
        assert_ne!(longer, group);
        let wider = VisibleGroup::new(vec![0], vec![run(4, 0, 3)], limits(&[(0, 3)]));
        assert_ne!(wider, group);
    }

    #[test]
    fn a_check_can_be_repeated_with_its_memory() {
        let (example, mut n_groups) = (example(), Vec::new());
        for _ in 0..2 {
            assert_eq!(example.check_with(7, &mut n_groups), Ok(()));
        }
        assert!(matches!(
            example.dense_mask(6),
            Err(VisibilityError::RunOutside { .. })
        ));
        assert_eq!(example.dense_mask(7).unwrap().n_cells(), 7);
    }

    #[test]
    fn rows_and_runs_that_come_twice_are_refused() {
        let of = |rows: Vec<u32>, runs: Vec<CellRun>| {
            let limits = vec![PosRange::ALL; rows.len()];
            let group = VisibleGroup::new(rows, runs, limits);
            Visibility::new(2, vec![group]).check(10).unwrap_err()
        };
        let twice = of(vec![1, 1], Vec::new());
        assert!(
            matches!(twice, VisibilityError::RowsNotAscending { .. }),
            "{twice}"
        );
        let twice = of(vec![0, 1], vec![run(3, 2, 1), run(3, 2, 1)]);
        assert!(
            matches!(twice, VisibilityError::RunsOutOfOrder { .. }),
            "{twice}"
        );
        let outside = of(vec![0, 1], vec![run(u32::MAX, 0, 2)]);
        assert!(
            matches!(outside, VisibilityError::RunOutside { .. }),
            "{outside}"
        );
    }

    #[test]
    fn a_choice_for_fewer_rows_uses_memory_again() {
        let mut out = Visibility::default();
        example().keep_chosen(&[0.0; 3], 1, &mut out);
        assert_eq!(out.groups.len(), 3);
        let group = VisibleGroup::new(vec![0], vec![run(4, 0, 3)], limits(&[(0, 2)]));
        Visibility::new(1, vec![group]).keep_chosen(&[1.0], 1, &mut out);
        assert_eq!(out.groups.len(), 1);
        assert_eq!(out.row(0).collect::<Vec<_>>(), [(CellIdx(5), Pos(1))]);
    }

    #[test]
    fn rows_see_their_limits_of_the_runs_by_position() {
        let cells = |row| {
            example()
                .row(row)
                .map(|(c, p)| (c.0, p.0))
                .collect::<Vec<_>>()
        };
        assert_eq!(cells(0), [(4, 0), (5, 1), (6, 2), (0, 3)]);
        assert_eq!(cells(1), []);
        assert_eq!(cells(2), [(6, 2), (0, 3), (1, 4)]);
    }

    #[test]
    fn rows_keep_what_was_chosen_of_what_they_saw() {
        let chosen = [1.0, 2.0, 3.0, -1.0, -1.0, -1.0, 0.0, 2.0, -1.0];
        let mut kept = Visibility::default();
        for _ in 0..2 {
            example().keep_chosen(&chosen, 3, &mut kept);
            assert_eq!(kept.check(8), Ok(()));
            let cells = |row| kept.row(row).map(|(c, p)| (c.0, p.0)).collect::<Vec<_>>();
            assert_eq!(cells(0), [(5, 1), (6, 2), (0, 3)]);
            assert_eq!(cells(1), []);
            assert_eq!(cells(2), [(6, 2), (1, 4)]);
            assert_eq!(kept.groups[0].runs, [run(5, 1, 2), run(0, 3, 1)]);
        }
        example().keep_chosen(&[-1.0; 3], 1, &mut kept);
        assert!((0..3).all(|row| kept.row(row).next().is_none()));
    }

    #[test]
    fn the_dense_mask_is_drawn_as_text() {
        let mask = example().dense_mask(8).unwrap();
        insta::assert_snapshot!(mask, @r"
        #...###.
        ........
        ##....#.
        ");
        assert!(mask.sees(0, CellIdx(0)) && !mask.sees(0, CellIdx(1)) && !mask.sees(9, CellIdx(0)));
    }

    #[test]
    fn runs_are_clipped_to_positions() {
        assert_eq!(
            run(4, 10, 5).clip(limits(&[(12, 99)])[0]),
            Some(run(6, 12, 3))
        );
        assert_eq!(
            run(4, 10, 5).clip(limits(&[(0, 10)])[0]),
            Some(run(4, 10, 1))
        );
        assert_eq!(run(4, 10, 5).clip(limits(&[(15, 20)])[0]), None);
        assert_eq!(run(4, 10, 5).clip(PosRange::EMPTY), None);
    }

    #[test]
    fn broken_rules_are_named() {
        let broken = |edit: fn(&mut Visibility)| {
            let mut v = example();
            edit(&mut v);
            v.check(8).unwrap_err().to_string()
        };
        assert_eq!(example().check(8), Ok(()));
        let text = broken(|v| v.groups[1].rows[0] = 2);
        assert_eq!(text, "row 1 of 3 is in 0 groups instead of one");
        let text = broken(|v| v.groups[0].rows.swap(0, 1));
        assert_eq!(text, "group 0: row 0 follows row 2");
        let text = broken(|v| v.groups[0].limits.truncate(1));
        assert_eq!(text, "group 0 has 2 rows but 1 limits");
        let text = broken(|v| v.groups[0].runs[1].len = 9);
        assert_eq!(text, "group 0: run 0+9@3 does not lie in 8 cells");
        let text = broken(|v| v.groups[0].runs[1].pos = Pos(1));
        assert_eq!(text, "group 0: run 0+2@1 does not follow run 4+3@0");
        let text = broken(|v| v.groups[1].rows[0] = 7);
        assert_eq!(text, "row 7 of 3 is in 1 groups instead of one");
    }
}
