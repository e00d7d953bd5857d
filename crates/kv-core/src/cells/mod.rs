//! What is where: position and sequences of each cell of one stream.
//!
//! Invariant (see `memory::invariants`): three views of one fact agree: a cell's own record, the
//! map of free cells, and the runs of each of its sequences. No operation looks at all cells.
//! Knows nothing of windows, streams beside its own, or rows.
//!
//! Cells are named by their number over all streams ([`CellIdx`]), so runs of one stream can be
//! handed out as they are.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::grid::GridPos;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::visibility::CellRun;
use crate::window::PosRange;

mod free_map;
mod seq_runs;

pub use free_map::FreeMap;
pub use seq_runs::SeqRuns;

/// What a cell holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Position of its token.
    pub pos: Pos,
    /// The sequences that the token belongs to, at least one.
    pub seqs: SeqSet,
    /// Where it lies in an image; `None` for text.
    pub grid: Option<GridPos>,
}

impl Cell {
    /// A token of text.
    pub const fn new(pos: Pos, seqs: SeqSet) -> Self {
        let grid = None;
        Self { pos, seqs, grid }
    }
}

/// The cells of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCells {
    first_cell: CellIdx,
    first_seq: SeqId,
    free: FreeMap,
    /// By cell; meaningless where the cell is free.
    pos: Vec<Pos>,
    /// By cell; empty where the cell is free.
    seqs: Vec<SeqSet>,
    /// Of the cells in use that hold tokens of images.
    grids: BTreeMap<CellIdx, GridPos>,
    /// By sequence, from `first_seq` on.
    runs: Vec<SeqRuns>,
}

/// What an edit took away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Tokens taken from sequences; a token of two sequences counts twice.
    pub n_tokens: u32,
    /// Cells that became free.
    pub n_cells: u32,
    /// The smallest of them.
    pub lowest: Option<CellIdx>,
}

impl KvCells {
    /// Free cells with these numbers, for these sequences.
    pub fn new(cells: Range<u32>, seqs: Range<u32>) -> Self {
        let n_cells = cells.len();
        Self {
            first_cell: CellIdx(cells.start),
            first_seq: SeqId(seqs.start),
            free: FreeMap::all_free(n_cells as u32),
            pos: vec![Pos(0); n_cells],
            seqs: vec![SeqSet::EMPTY; n_cells],
            grids: BTreeMap::new(),
            runs: vec![SeqRuns::default(); seqs.len()],
        }
    }

    /// Number of cells.
    pub fn n_cells(&self) -> u32 {
        self.free.n_cells()
    }

    /// Number of cells in use.
    pub fn n_used(&self) -> u32 {
        self.free.n_cells() - self.free.n_free()
    }

    /// The first cell.
    pub fn first_cell(&self) -> CellIdx {
        self.first_cell
    }

    /// The sequences that may have cells here.
    pub fn seqs(&self) -> impl Iterator<Item = SeqId> + use<> {
        let first = self.first_seq.0;
        (first..first + self.runs.len() as u32).map(SeqId)
    }

    /// Which cells are free, counted from the first cell.
    pub fn free(&self) -> &FreeMap {
        &self.free
    }

    /// What a cell holds, or `None` where it is free or not of this stream.
    #[inline]
    pub fn get(&self, cell: CellIdx) -> Option<Cell> {
        let i = self.local(cell)?;
        let seqs = self.seqs[i];
        (!seqs.is_empty()).then(|| Cell {
            pos: self.pos[i],
            seqs,
            grid: self.grids.get(&cell).copied(),
        })
    }

    /// The cells of a sequence; `None` where it cannot have any here.
    pub fn runs(&self, seq: SeqId) -> Option<&SeqRuns> {
        self.runs.get(self.seq_index(seq)?)
    }

    /// The smallest and the largest position of a sequence, or `None` without any.
    #[inline]
    pub fn positions(&self, seq: SeqId) -> Option<PosRange> {
        self.runs(seq)?.positions()
    }

    /// Puts a token into a cell, in place of what was there.
    pub fn put(&mut self, at: CellIdx, cell: Cell) {
        self.take(at);
        for seq in &cell.seqs {
            self.add_seq_at(at, cell.pos, seq);
        }
        if let Some(grid) = cell.grid {
            self.set_grid(at, grid);
        }
    }

    /// Says where the token of a cell lies in an image; no effect on a free cell.
    pub fn set_grid(&mut self, at: CellIdx, grid: GridPos) {
        if self.get(at).is_some() {
            self.grids.insert(at, grid);
        }
    }

    /// The tokens of images, by cell.
    pub fn grids(&self) -> &BTreeMap<CellIdx, GridPos> {
        &self.grids
    }

    /// Empties a cell and returns what it held.
    pub fn take(&mut self, at: CellIdx) -> Option<Cell> {
        let cell = self.get(at)?;
        for seq in &cell.seqs {
            if let Some(runs) = self.runs_mut(seq) {
                runs.remove(cell.pos, at);
            }
        }
        self.empty(at);
        Some(cell)
    }

    /// Adds a sequence to the token of a cell; no effect on a free cell.
    pub fn add_seq(&mut self, at: CellIdx, seq: SeqId) {
        if let Some(cell) = self.get(at) {
            self.add_seq_at(at, cell.pos, seq);
        }
    }

    /// Gives cells to a sequence at the positions of `run`: free cells come into use, others, which
    /// hold these positions already, are shared from now on.
    pub fn add_run(&mut self, run: CellRun, seq: SeqId) {
        for (cell, pos) in run.iter() {
            self.add_seq_at(cell, pos, seq);
        }
    }

    /// Takes the tokens of a sequence with positions in `range` from it; cells that are left without
    /// a sequence become free. Returns the runs that the sequence lost, too.
    pub fn remove(&mut self, seq: SeqId, range: PosRange) -> (Freed, Vec<CellRun>) {
        let Some(runs) = self.runs_mut(seq) else {
            return (Freed::default(), Vec::new());
        };
        let removed = runs.remove_range(range);
        let mut freed = Freed::default();
        for (cell, _) in removed.iter().flat_map(|run| run.iter()) {
            let Some(i) = self.local(cell) else { continue };
            self.seqs[i].remove(seq);
            freed.n_tokens += 1;
            if self.seqs[i].is_empty() {
                self.empty(cell);
                freed.n_cells += 1;
                freed.lowest = Some(freed.lowest.map_or(cell, |lowest| lowest.min(cell)));
            }
        }
        (freed, removed)
    }

    fn add_seq_at(&mut self, at: CellIdx, pos: Pos, seq: SeqId) {
        let Some(i) = self.local(at) else { return };
        let Some(runs) = self.runs_mut(seq) else {
            return;
        };
        runs.insert(pos, at);
        self.pos[i] = pos;
        self.seqs[i].insert(seq);
        self.free.take(i as u32);
    }

    fn empty(&mut self, at: CellIdx) {
        if let Some(i) = self.local(at) {
            self.seqs[i] = SeqSet::EMPTY;
            self.pos[i] = Pos(0);
            self.grids.remove(&at);
            self.free.release(i as u32);
        }
    }

    fn runs_mut(&mut self, seq: SeqId) -> Option<&mut SeqRuns> {
        let i = self.seq_index(seq)?;
        self.runs.get_mut(i)
    }

    fn seq_index(&self, seq: SeqId) -> Option<usize> {
        Some(seq.0.checked_sub(self.first_seq.0)? as usize)
    }

    #[inline]
    fn local(&self, cell: CellIdx) -> Option<usize> {
        let i = cell.0.checked_sub(self.first_cell.0)?;
        (i < self.n_cells()).then_some(i as usize)
    }
}

impl Freed {
    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            n_tokens: self.n_tokens + other.n_tokens,
            n_cells: self.n_cells + other.n_cells,
            lowest: [self.lowest, other.lowest].into_iter().flatten().min(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ids: &[u32]) -> SeqSet {
        ids.iter().copied().map(SeqId).collect()
    }

    /// Positions and sequences of all cells.
    fn draw(cells: &KvCells) -> String {
        let cell = |i| match cells.get(CellIdx(i)) {
            Some(Cell { pos, seqs, .. }) => format!("{pos}:{seqs}"),
            None => ".".to_owned(),
        };
        (0..cells.n_cells()).map(cell).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn c9_c11_worked_example_of_cells() {
        let mut cells = KvCells::new(0..6, 0..2);
        cells.put(CellIdx(0), Cell::new(Pos(0), set(&[0])));
        cells.put(CellIdx(1), Cell::new(Pos(1), set(&[0])));
        cells.add_seq(CellIdx(0), SeqId(1));
        assert_eq!(draw(&cells), "0:{0,1} 1:{0} . . . .");
        let (freed, _) = cells.remove(SeqId(0), PosRange::from(Pos(0)..Pos(1)));
        assert_eq!((freed.n_tokens, freed.n_cells), (1, 0));
        assert_eq!(draw(&cells), "0:{1} 1:{0} . . . .");
        assert_eq!(
            cells.positions(SeqId(0)),
            Some(PosRange::new(Pos(1), Pos(1)))
        );
        let taken = cells.take(CellIdx(0));
        assert_eq!(taken, Some(Cell::new(Pos(0), set(&[1]))));
        assert_eq!(cells.positions(SeqId(1)), None);
        assert_eq!(cells.n_used(), 1);
    }

    #[test]
    fn cells_and_sequences_of_other_streams_are_left_alone() {
        let mut cells = KvCells::new(8..12, 3..4);
        cells.put(CellIdx(2), Cell::new(Pos(0), set(&[3])));
        cells.put(CellIdx(9), Cell::new(Pos(0), set(&[1])));
        assert_eq!(cells, KvCells::new(8..12, 3..4));
        assert_eq!(cells.seqs().collect::<Vec<_>>(), [SeqId(3)]);
        assert_eq!(cells.get(CellIdx(12)), None);
    }
}
