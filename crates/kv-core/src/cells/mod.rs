//! What is where: position and sequences of each cell of one stream.
//!
//! Invariant (see `memory::invariants`): three views of one fact agree: a cell's own record, the
//! map of free cells, and the runs of each of its sequences. No operation looks at all cells but
//! [`KvCells::owned_runs`]. Knows nothing of windows, other streams, or KV rows.
//!
//! A cell costs some nine bytes, plus 12 for each run: its position, the id of its sequence set,
//! and its bits in the map. Cells are named by their number over all streams ([`CellIdx`]), so the
//! runs of one stream can be handed out as they are.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::grid::GridPos;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::visibility::CellRun;
use crate::window::PosRange;

mod free_map;
mod seq_runs;
mod set_table;
#[cfg(test)]
mod tests;

pub use free_map::FreeMap;
pub(crate) use seq_runs::CopyOrigin;
pub use seq_runs::SeqRuns;
use set_table::{SetId, SetTable};

/// The contents of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Position of its token.
    pub pos: Pos,
    /// The sequences that the token belongs to, at least one.
    pub seqs: SeqSet,
    /// Its row and column in an image; `None` for text.
    pub grid: Option<GridPos>,
}

impl Cell {
    /// A token of text.
    pub const fn new(pos: Pos, seqs: SeqSet) -> Self {
        let grid = None;
        Self { pos, seqs, grid }
    }
}

/// Neighbouring cells that belong to the same sequences and hold consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedRun {
    /// The first cell.
    pub first: CellIdx,
    /// Number of cells, at least one.
    pub n_cells: u32,
    /// Position of the token in the first; of a state, of the last token that went into it.
    pub pos: Pos,
    /// The sequences that they belong to, at least one.
    pub seqs: SeqSet,
}

/// The cells of one stream.
#[derive(Clone, Debug)]
pub struct KvCells {
    first_cell: CellIdx,
    first_seq: SeqId,
    free: FreeMap,
    /// By cell, up to the last that was ever used; meaningless where the cell is free.
    pos: Vec<Pos>,
    /// As many; the empty set where the cell is free.
    set_ids: Vec<SetId>,
    sets: SetTable,
    /// Of the used cells that hold tokens of images.
    grids: BTreeMap<CellIdx, GridPos>,
    /// By sequence, from `first_seq` on.
    runs: Vec<SeqRuns>,
    /// The number of sequences that grow at the same time.
    n_active: u32,
}

/// The runs of all sequences tell everything, and sets may have other ids in an equal value.
impl PartialEq for KvCells {
    fn eq(&self, other: &Self) -> bool {
        let own = (self.first_cell, self.first_seq, &self.free);
        own == (other.first_cell, other.first_seq, &other.free)
            && self.grids == other.grids
            && self.runs == other.runs
    }
}

impl Eq for KvCells {}

/// The tokens and cells that an edit removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreedCells {
    /// Tokens removed from sequences; a token of two sequences counts twice.
    pub n_tokens: u32,
    /// Cells that became free.
    pub n_cells: u32,
    /// The smallest of them.
    pub lowest: Option<CellIdx>,
}

/// A token that moves from one cell to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellMove {
    /// The cell that holds it.
    pub from: CellIdx,
    /// The cell that will hold it, free so far.
    pub to: CellIdx,
}

/// The longest block of cells that is reserved for one sequence.
const MAX_BLOCK: u32 = u64::BITS;
/// Blocks that every sequence can have before there is none left.
const MIN_BLOCKS_PER_SEQ: u32 = 4;

impl KvCells {
    /// Free cells with these numbers, for these sequences.
    pub fn new(cells: Range<u32>, seqs: Range<u32>) -> Self {
        let n_cells = cells.len();
        Self {
            first_cell: CellIdx(cells.start),
            first_seq: SeqId(seqs.start),
            free: FreeMap::all_free(n_cells as u32),
            pos: Vec::new(),
            set_ids: Vec::new(),
            sets: SetTable::default(),
            grids: BTreeMap::new(),
            runs: vec![SeqRuns::default(); seqs.len()],
            n_active: seqs.len() as u32,
        }
    }

    /// The same where only so many of the sequences grow at the same time: their
    /// [blocks](KvCells::block_len) are as long as if there were no others.
    pub fn with_active(self, n_active: u32) -> Self {
        Self { n_active, ..self }
    }

    /// Number of cells.
    pub fn n_cells(&self) -> u32 {
        self.free.n_cells()
    }

    /// Number of used cells.
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

    /// Number of cells that are given to a sequence at a time, a power of two up to 64: so many
    /// that sequences which grow together have long runs, and so few that all of them get blocks.
    /// 1 where no other sequence can come between.
    pub fn block_len(&self) -> u32 {
        let n_seqs = self.runs.len() as u32;
        if n_seqs < 2 {
            return 1;
        }
        let n_each = self.n_cells() / self.n_active.clamp(2, n_seqs) / MIN_BLOCKS_PER_SEQ;
        n_each
            .checked_ilog2()
            .map_or(1, |log| MAX_BLOCK.min(1 << log))
    }

    /// The cells that are free, counted from the first cell.
    pub fn free(&self) -> &FreeMap {
        &self.free
    }

    /// The contents of a cell, or `None` where it is free or not of this stream.
    pub fn get(&self, cell: CellIdx) -> Option<Cell> {
        let i = self.used(cell)?;
        Some(Cell {
            pos: self.pos[i],
            seqs: self.sets.get(self.set_ids[i]),
            grid: self.grids.get(&cell).copied(),
        })
    }

    /// True if a cell is used and all its sequences have a property; they are given with the
    /// position of its token.
    #[inline]
    pub fn all_seqs(&self, cell: CellIdx, is_so: impl Fn(SeqId, Pos) -> bool) -> bool {
        self.used(cell).is_some_and(|i| {
            let pos = self.pos[i];
            self.sets.all(self.set_ids[i], |seq| is_so(seq, pos))
        })
    }

    /// True if a cell belongs to two or more sequences.
    #[inline]
    pub fn is_shared(&self, cell: CellIdx) -> bool {
        self.used(cell)
            .is_some_and(|i| self.sets.is_shared(self.set_ids[i]))
    }

    /// The smallest id of the sequences of a cell, or `None` where it is free.
    pub fn first_seq_of(&self, cell: CellIdx) -> Option<SeqId> {
        self.sets.first(self.set_ids[self.used(cell)?])
    }

    /// The used cells, ascending: neighbours with the same sequences and consecutive positions in
    /// one.
    pub fn owned_runs(&self) -> Vec<OwnedRun> {
        let mut runs: Vec<OwnedRun> = Vec::new();
        let mut last: Option<(SetId, Pos)> = None;
        for (i, (&id, &pos)) in (0..).zip(self.set_ids.iter().zip(&self.pos)) {
            if id == SetId::EMPTY {
                last = None;
                continue;
            }
            let goes_on =
                last.is_some_and(|(set, at)| set == id && Some(pos.0) == at.0.checked_add(1));
            match runs.last_mut() {
                Some(run) if goes_on => run.n_cells += 1,
                _ => runs.push(OwnedRun {
                    first: self.first_cell.offset(i),
                    n_cells: 1,
                    pos,
                    seqs: self.sets.get(id),
                }),
            }
            last = Some((id, pos));
        }
        runs
    }

    /// The number of cells that belong to exactly the same sequences, for each such set of
    /// sequences. Looks at runs, not at cells.
    pub fn count_by_owners(&self, mut each: impl FnMut(&SeqSet, u32)) {
        let mut n_own: Vec<u32> = self.runs.iter().map(SeqRuns::n_cells).collect();
        for (seqs, n_cells) in self.sets.shared() {
            for seq in seqs {
                if let Some(n) = self.seq_index(seq).and_then(|i| n_own.get_mut(i)) {
                    *n = n.saturating_sub(n_cells);
                }
            }
            each(seqs, n_cells);
        }
        let own = self.seqs().zip(n_own).filter(|&(_, n)| n > 0);
        own.for_each(|(seq, n)| each(&SeqSet::one(seq), n));
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

    /// Stores a token in a cell, in place of what was there.
    pub fn insert(&mut self, at: CellIdx, cell: &Cell) {
        self.take(at);
        let Some(i) = self.local(at) else { return };
        let is_here = |seq: &SeqId| self.seq_index(*seq).is_some();
        let seqs: SeqSet = if cell.seqs.iter().all(|seq| is_here(&seq)) {
            cell.seqs.clone()
        } else {
            cell.seqs.iter().filter(is_here).collect()
        };
        if seqs.is_empty() {
            return;
        }
        for seq in &seqs {
            if let Some(runs) = self.runs_mut(seq) {
                runs.insert(cell.pos, at);
            }
        }
        self.reach(i);
        self.pos[i] = cell.pos;
        self.set_ids[i] = self.sets.acquire(&seqs);
        self.free.take(i as u32);
        if let Some(grid) = cell.grid {
            self.grids.insert(at, grid);
        }
    }

    /// Records the row and the column of a token in an image; no effect on a free cell.
    pub fn set_grid(&mut self, at: CellIdx, grid: GridPos) {
        if self.used(at).is_some() {
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
        if let Some(i) = self.local(at) {
            self.sets.release(self.set_ids[i]);
        }
        self.clear_cell(at);
        Some(cell)
    }

    /// Gives cells to a sequence at the positions of `run`: free cells become used; others, which
    /// hold these positions already, are shared from now on.
    pub fn add_run(&mut self, run: CellRun, seq: SeqId) {
        if self.runs(seq).is_none() {
            return;
        }
        let mut changes = SetChanges::default();
        for (cell, pos) in run.iter() {
            let Some(i) = self.local(cell) else { continue };
            if let Some(runs) = self.runs_mut(seq) {
                runs.insert(pos, cell);
            }
            self.reach(i);
            self.pos[i] = pos;
            self.free.take(i as u32);
            self.set_ids[i] = changes.apply(&mut self.sets, self.set_ids[i], |set| {
                set.insert(seq);
            });
        }
    }

    /// Removes the tokens of a sequence with positions in `range` from it; cells that are left
    /// without a sequence become free. Returns the runs that the sequence lost, too.
    pub fn remove(&mut self, seq: SeqId, range: PosRange) -> (FreedCells, Vec<CellRun>) {
        let Some(runs) = self.runs_mut(seq) else {
            return (FreedCells::default(), Vec::new());
        };
        let removed = runs.remove_range(range);
        let mut freed = FreedCells::default();
        let mut changes = SetChanges::default();
        for (cell, _) in removed.iter().flat_map(|run| run.iter()) {
            let Some(i) = self.local(cell) else { continue };
            self.set_ids[i] = changes.apply(&mut self.sets, self.set_ids[i], |set| {
                set.remove(seq);
            });
            freed.n_tokens += 1;
            if self.set_ids[i] == SetId::EMPTY {
                self.clear_cell(cell);
                freed.n_cells += 1;
                freed.lowest = Some(freed.lowest.map_or(cell, |lowest| lowest.min(cell)));
            }
        }
        (freed, removed)
    }

    /// Moves tokens to free cells, all at once. No cell occurs twice.
    pub fn move_cells(&mut self, moves: &[CellMove]) {
        let mut seqs = SeqSet::EMPTY;
        let mut known = SetId::EMPTY;
        // By cell: where it goes, if it does.
        let mut target: Vec<CellIdx> = Vec::new();
        target.extend((0..self.pos.len() as u32).map(|i| self.first_cell.offset(i)));
        for &CellMove { from, to } in moves {
            let (Some(i), Some(j)) = (self.used(from), self.local(to)) else {
                continue;
            };
            let id = std::mem::take(&mut self.set_ids[i]);
            if id != known {
                seqs = seqs.union(&self.sets.get(id));
                known = id;
            }
            self.reach(j);
            (self.set_ids[j], self.pos[j]) = (id, self.pos[i]);
            target[i] = to;
            if let Some(grid) = self.grids.remove(&from) {
                self.grids.insert(to, grid);
            }
            self.free.take(j as u32);
            self.clear_cell(from);
        }
        let first_cell = self.first_cell;
        for seq in &seqs {
            let Some(runs) = self.runs_mut(seq) else {
                continue;
            };
            let cells = runs.as_slice().iter().flat_map(|run| run.iter());
            let target_of = |cell: CellIdx| {
                let i = cell.0.checked_sub(first_cell.0);
                i.and_then(|i| target.get(i as usize))
                    .copied()
                    .unwrap_or(cell)
            };
            let mut cells: Vec<(Pos, CellIdx)> =
                cells.map(|(cell, pos)| (pos, target_of(cell))).collect();
            cells.sort_unstable();
            *runs = SeqRuns::from_ascending(cells.into_iter());
        }
    }

    /// Bytes on the heap for all that is kept of these cells.
    pub fn heap_bytes(&self) -> usize {
        let runs: usize = self.runs.iter().map(SeqRuns::heap_bytes).sum();
        runs + self.runs.capacity() * size_of::<SeqRuns>()
            + self.pos.capacity() * size_of::<Pos>()
            + self.set_ids.capacity() * size_of::<SetId>()
            + self.free.heap_bytes()
            + self.sets.heap_bytes()
            // Nodes of the tree are at least half full.
            + self.grids.len() * 2 * size_of::<(CellIdx, GridPos)>()
    }

    /// Forgets what a cell held, but for its sequences.
    fn clear_cell(&mut self, at: CellIdx) {
        if let Some(i) = self.local(at) {
            if let Some(id) = self.set_ids.get_mut(i) {
                *id = SetId::EMPTY;
            }
            self.grids.remove(&at);
            self.free.release(i as u32);
        }
    }

    /// Makes room for what is kept of cell `i`.
    #[inline]
    fn reach(&mut self, i: usize) {
        if i < self.pos.len() {
            return;
        }
        // At most doubled, and no more than there are cells.
        let n_cells = self.n_cells() as usize;
        let n = (i + 1).max(self.pos.len() * 2).min(n_cells);
        self.pos.reserve_exact(n - self.pos.len());
        self.pos.resize(n, Pos(0));
        self.set_ids.reserve_exact(n - self.set_ids.len());
        self.set_ids.resize(n, SetId::EMPTY);
    }

    fn runs_mut(&mut self, seq: SeqId) -> Option<&mut SeqRuns> {
        let i = self.seq_index(seq)?;
        self.runs.get_mut(i)
    }

    fn seq_index(&self, seq: SeqId) -> Option<usize> {
        let i = seq.0.checked_sub(self.first_seq.0)? as usize;
        (i < self.runs.len()).then_some(i)
    }

    #[inline]
    fn local(&self, cell: CellIdx) -> Option<usize> {
        let i = cell.0.checked_sub(self.first_cell.0)?;
        (i < self.n_cells()).then_some(i as usize)
    }

    /// The number of a used cell in this stream.
    #[inline]
    fn used(&self, cell: CellIdx) -> Option<usize> {
        let i = self.local(cell)?;
        let id = self.set_ids.get(i)?;
        (*id != SetId::EMPTY).then_some(i)
    }
}

/// Changes the sets of one cell after the other. Neighbours usually have the same set, so the
/// last change is remembered.
#[derive(Default)]
struct SetChanges {
    last: Option<(SetId, SetId)>,
}

impl SetChanges {
    /// The id of a cell's set after the change.
    fn apply(&mut self, sets: &mut SetTable, before: SetId, change: impl Fn(&mut SeqSet)) -> SetId {
        let after = match self.last {
            Some((known, after)) if known == before => {
                sets.retain(after);
                after
            }
            _ => {
                let mut set = sets.get(before);
                change(&mut set);
                sets.acquire(&set)
            }
        };
        // A set that goes with its last cell here has no other cell that could be looked up.
        sets.release(before);
        self.last = Some((before, after));
        after
    }
}

impl FreedCells {
    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            n_tokens: self.n_tokens + other.n_tokens,
            n_cells: self.n_cells + other.n_cells,
            lowest: [self.lowest, other.lowest].into_iter().flatten().min(),
        }
    }
}
