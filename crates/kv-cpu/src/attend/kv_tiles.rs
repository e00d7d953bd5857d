//! KV tiles: [`KvTiles`] groups the visible cells into tiles, [`KvPrefetcher`] prefetches the next
//! tile's K and V while the present one is computed.
//!
//! Invariant: a tile begins at a multiple of [`KV_TILE`] *positions*, a cell's lane in it is its
//! position's offset, and two cells at one position go to different tiles. So a tile's contents do
//! not depend on where cells are stored. Knows nothing of queries.

use kv_core::{CellRun, PosRange};

use super::tile_kernels::KV_TILE;
use crate::kernels::prefetch::CacheLevel;
use crate::kv_rows::HeadRows;

/// Cells at up to [`KV_TILE`] consecutive positions; lane `i` is position `base + i`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KvTile {
    /// The position of lane 0.
    pub(crate) base: u32,
    /// One bit for each lane that has a cell.
    pub(crate) mask: u32,
    /// The cell of each lane; a lane without one repeats the cell of the lane before it.
    cells: [u32; KV_TILE],
}

impl KvTile {
    /// The lanes that have a cell, with the cell: `(lane, cell)`.
    #[inline(always)]
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut left = self.mask;
        std::iter::from_fn(move || {
            let lane = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            self.cells.get(lane).map(|&cell| (lane, cell as usize))
        })
    }

    /// The cell of every lane; a lane without one has that of the last lane before it that has
    /// one, or else of the first that has one.
    #[cfg(any(target_arch = "x86_64", test))]
    #[inline(always)]
    pub(crate) fn cells(&self) -> [usize; KV_TILE] {
        self.cells.map(|cell| cell as usize)
    }

    /// Gives lanes without a cell that of the last lane before them. A query that sees lanes on
    /// both sides of the gap sees that cell, so kernels that read whole lane ranges (with weight
    /// 0 in the gap) read no cell that the query must not see.
    fn fill_gaps(&mut self) {
        let mut last = self.cells[self.mask.trailing_zeros() as usize % KV_TILE];
        for (lane, cell) in self.cells.iter_mut().enumerate() {
            match self.mask >> lane & 1 {
                1 => last = *cell,
                _ => *cell = last,
            }
        }
    }

    /// The lane after the last cell.
    fn end(&self) -> u32 {
        u32::BITS - self.mask.leading_zeros()
    }

    /// Adds the cells of `run` from lane `first` on, behind those that are there.
    fn push(&mut self, first: u32, run: CellRun) {
        for (lane, cell) in (first..first + run.len).zip(run.cell.0..) {
            self.cells[lane as usize] = cell;
        }
        self.mask |= lane_mask(first, first + run.len);
    }
}

/// One KV head of the cells of a tile, as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredTile<'a> {
    pub(crate) tile: &'a KvTile,
    pub(crate) head: &'a HeadRows<'a>,
}

impl StoredTile<'_> {
    /// The address of the head's row for every lane.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(crate) fn row_pointers(self) -> [*const u8; KV_TILE] {
        let mut rows = [std::ptr::null(); KV_TILE];
        for (row, cell) in rows.iter_mut().zip(self.tile.cells()) {
            *row = self.head.row(cell).as_ptr();
        }
        rows
    }
}

/// A mask of the lanes `first..end`, none where `first` is not below `end`; `end` is at most 32.
pub(crate) fn lane_mask(first: u32, end: u32) -> u32 {
    let below = |n: u32| {
        if n >= u32::BITS {
            u32::MAX
        } else {
            (1 << n) - 1
        }
    };
    below(end) & !below(first)
}

/// Iterates over the tiles of visibility runs, which are sorted by position.
pub(crate) struct KvTiles<'a> {
    runs: std::slice::Iter<'a, CellRun>,
    /// The positions that are visited.
    range: PosRange,
    /// The rest of the last run that was begun.
    rest: Option<CellRun>,
}

impl<'a> KvTiles<'a> {
    /// The tiles of the cells of `runs` at positions in `range`.
    pub(crate) fn new(runs: &'a [CellRun], range: PosRange) -> Self {
        let n_before = runs.partition_point(|run| run.last_pos() < range.first);
        Self {
            runs: runs[n_before..].iter(),
            range,
            rest: None,
        }
    }

    fn next_run(&mut self) -> Option<CellRun> {
        self.rest
            .take()
            .or_else(|| self.runs.next().and_then(|run| run.clip(self.range)))
    }

    /// Writes the next tile to `tile`; returns whether there was one.
    pub(crate) fn next_into(&mut self, tile: &mut KvTile) -> bool {
        tile.mask = 0;
        while let Some(run) = self.next_run() {
            let base = run.pos.0 & !(KV_TILE as u32 - 1);
            let first = run.pos.0 - base;
            if tile.mask != 0 && (base != tile.base || first < tile.end()) {
                self.rest = Some(run);
                break;
            }
            tile.base = base;
            let len = run.len.min(KV_TILE as u32 - first);
            tile.push(first, CellRun { len, ..run });
            if len < run.len {
                // The run has later positions, so this sum cannot overflow.
                self.rest = Some(CellRun {
                    cell: run.cell.offset(len),
                    pos: kv_core::Pos(run.pos.0 + len),
                    len: run.len - len,
                });
            }
        }
        if tile.mask != u32::MAX {
            tile.fill_gaps();
        }
        tile.mask != 0
    }
}

/// Prefetches K and V of a tile, one cell's head at a time.
///
/// A cache miss takes hundreds of times as long as a multiply-add. Kernels call
/// [`KvPrefetcher::prefetch_next`] between multiply-adds, so that misses overlap with computing;
/// all prefetches at once would fill the core's miss buffers and stall it.
pub(crate) struct KvPrefetcher<'a> {
    cells: &'a [u32; KV_TILE],
    /// K and V.
    heads: &'a [HeadRows<'a>; 2],
    /// The number of rows that were prefetched: first all of K, then of V.
    n_done: usize,
    level: CacheLevel,
}

impl<'a> KvPrefetcher<'a> {
    /// For the K and V heads of `tile`.
    pub(crate) fn new(tile: &'a KvTile, heads: &'a [HeadRows<'a>; 2]) -> Self {
        Self {
            cells: &tile.cells,
            heads,
            n_done: if tile.mask == 0 { 2 * KV_TILE } else { 0 },
            level: CacheLevel::for_streams(),
        }
    }

    /// Prefetches one more row, if there is one.
    #[inline(always)]
    pub(crate) fn prefetch_next(&mut self) {
        if self.n_done >= 2 * KV_TILE {
            return;
        }
        let head = &self.heads[self.n_done / KV_TILE];
        let start = head.address(self.cells[self.n_done % KV_TILE] as usize);
        self.n_done += 1;
        self.level.prefetch(start, head.n_bytes);
    }

    /// Prefetches all rows that are left.
    pub(crate) fn prefetch_rest(&mut self) {
        while self.n_done < 2 * KV_TILE {
            self.prefetch_next();
        }
    }
}

#[cfg(test)]
impl KvTile {
    /// A tile with these `(lane, cell)` pairs.
    pub(crate) fn of(lanes: &[(usize, u32)]) -> Self {
        let mut tile = Self::default();
        for &(lane, cell) in lanes {
            tile.cells[lane] = cell;
            tile.mask |= 1 << lane;
        }
        tile.fill_gaps();
        tile
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{CellIdx, Pos};

    use super::*;

    fn run(cell: u32, pos: u32, len: u32) -> CellRun {
        let (cell, pos) = (CellIdx(cell), Pos(pos));
        CellRun { cell, pos, len }
    }

    /// `(position, cell)` of each lane that has a cell, tile by tile.
    fn tiles(runs: &[CellRun], range: PosRange) -> Vec<Vec<(u32, usize)>> {
        let (mut tiles, mut tile) = (KvTiles::new(runs, range), KvTile::default());
        let mut found = vec![];
        while tiles.next_into(&mut tile) {
            let lanes = tile.lanes();
            found.push(
                lanes
                    .map(|(lane, cell)| (tile.base + lane as u32, cell))
                    .collect(),
            );
            assert!(tile.cells().iter().all(|c| tile.lanes().any(|l| l.1 == *c)));
        }
        assert!(!tiles.next_into(&mut tile), "the end stays the end");
        found
    }

    #[test]
    fn a_lane_without_a_cell_repeats_the_one_before() {
        let cells = KvTile::of(&[(3, 7), (5, 40), (9, 2)]).cells();
        assert_eq!(cells[..11], [7, 7, 7, 7, 7, 40, 40, 40, 40, 2, 2]);
        assert_eq!(cells[31], 2);
    }

    #[test]
    fn tiles_begin_at_multiples_of_positions_wherever_cells_are() {
        let all = PosRange::from(Pos(3)..Pos(70));
        let got = tiles(&[run(100, 0, 40), run(7, 40, 1), run(0, 60, 80)], all);
        let cells = |from: u32, to: u32, first: usize| (from..to).zip(first..);
        let wanted: [Vec<_>; 3] = [
            cells(3, 32, 103).collect(),
            cells(32, 40, 132)
                .chain([(40, 7)])
                .chain(cells(60, 64, 0))
                .collect(),
            cells(64, 70, 4).collect(),
        ];
        assert_eq!(got, wanted);
    }

    #[test]
    fn two_cells_at_one_position_go_to_different_tiles() {
        let got = tiles(&[run(5, 9, 2), run(8, 10, 1), run(9, 10, 2)], PosRange::ALL);
        assert_eq!(
            got,
            [
                vec![(9, 5), (10, 6)],
                vec![(10, 8)],
                vec![(10, 9), (11, 10)]
            ]
        );
    }

    #[test]
    fn the_largest_position_is_visited_like_any_other() {
        let got = tiles(&[run(0, u32::MAX - 1, 2)], PosRange::ALL);
        assert_eq!(got, [vec![(u32::MAX - 1, 0), (u32::MAX, 1)]]);
        assert!(tiles(&[], PosRange::ALL).is_empty());
    }

    #[test]
    fn a_lane_mask_has_the_bits_of_its_range() {
        assert_eq!(
            (lane_mask(0, 32), lane_mask(32, 32), lane_mask(3, 5)),
            (u32::MAX, 0, 24)
        );
        assert_eq!((lane_mask(5, 3), lane_mask(32, 1)), (0, 0));
    }
}
