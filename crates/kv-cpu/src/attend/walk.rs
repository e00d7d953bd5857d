//! [`Tiles`]: the cells that some rows see, tile by tile, and [`Ahead`]: asking for the bytes of a tile
//! while the one before it is worked on.
//!
//! Invariant: tiles begin at multiples of [`TILE`] *positions*, a cell's place in its tile is its
//! position's, and two cells at one position go to different tiles. So what is in a tile does not
//! depend on how cells are stored. Knows nothing of queries.

use kv_core::{CellRun, PosRange};

use super::decode::Heads;
use super::tile::TILE;
use crate::kernels::fetch::Level;

/// Cells at neighbouring positions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tile {
    /// The position of the first place.
    pub(super) base: u32,
    /// A bit for each place that has a cell.
    pub(super) mask: u32,
    /// The cell of each place, or of one before it where there is none.
    cells: [u32; TILE],
}

impl Tile {
    /// The places that have cells, with these.
    #[inline(always)]
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut left = self.mask;
        std::iter::from_fn(move || {
            let place = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            self.cells.get(place).map(|&cell| (place, cell as usize))
        })
    }

    /// The cell of each place; where there is none, that of the last place before it, or of the first.
    #[cfg(any(target_arch = "x86_64", test))]
    #[inline(always)]
    pub(super) fn cells(&self) -> [usize; TILE] {
        self.cells.map(|cell| cell as usize)
    }

    /// Gives places without a cell that of the last place before them: who sees places on both sides
    /// sees that one, so nobody meets what he does not see.
    fn fill(&mut self) {
        let mut last = self.cells[self.mask.trailing_zeros() as usize % TILE];
        for (place, cell) in self.cells.iter_mut().enumerate() {
            match self.mask >> place & 1 {
                1 => last = *cell,
                _ => *cell = last,
            }
        }
    }

    /// The place after the last cell.
    fn end(&self) -> u32 {
        u32::BITS - self.mask.leading_zeros()
    }

    /// Puts cells to places that follow those that are taken.
    fn push(&mut self, first: u32, run: CellRun) {
        for (place, cell) in (first..first + run.len).zip(run.cell.0..) {
            self.cells[place as usize] = cell;
        }
        self.mask |= ones(first, first + run.len);
    }
}

/// A mask with the bits from `first` on to `end` set, which is at most 32.
pub(super) fn ones(first: u32, end: u32) -> u32 {
    let below = |n: u32| {
        if n >= u32::BITS {
            u32::MAX
        } else {
            (1 << n) - 1
        }
    };
    below(end) & !below(first)
}

/// Walks over runs, which are sorted by position.
pub(super) struct Tiles<'a> {
    runs: std::slice::Iter<'a, CellRun>,
    /// What is looked at.
    all: PosRange,
    /// What is left of the run that was begun.
    rest: Option<CellRun>,
}

impl<'a> Tiles<'a> {
    /// The cells of `runs` at the positions of `all`.
    pub(super) fn new(runs: &'a [CellRun], all: PosRange) -> Self {
        // Those that end before anybody looks are skipped.
        let skipped = runs.partition_point(|run| run.last_pos() < all.first);
        Self {
            runs: runs[skipped..].iter(),
            all,
            rest: None,
        }
    }

    fn next_run(&mut self) -> Option<CellRun> {
        self.rest
            .take()
            .or_else(|| self.runs.next().and_then(|run| run.clip(self.all)))
    }

    /// The next tile into `tile`; says whether there was one.
    pub(super) fn next_into(&mut self, tile: &mut Tile) -> bool {
        tile.mask = 0;
        while let Some(run) = self.next_run() {
            let base = run.pos.0 & !(TILE as u32 - 1);
            let first = run.pos.0 - base;
            if tile.mask != 0 && (base != tile.base || first < tile.end()) {
                self.rest = Some(run);
                break;
            }
            tile.base = base;
            let len = run.len.min(TILE as u32 - first);
            tile.push(first, CellRun { len, ..run });
            if len < run.len {
                // Positions go on here, so these do not exceed the largest.
                self.rest = Some(CellRun {
                    cell: run.cell.offset(len),
                    pos: kv_core::Pos(run.pos.0 + len),
                    len: run.len - len,
                });
            }
        }
        if tile.mask != u32::MAX {
            tile.fill();
        }
        tile.mask != 0
    }
}

/// Asks for K and V of a tile, cell by cell.
///
/// Memory takes hundreds of times as long as a product; asked for between products it works while the
/// core does, asked for all at once it would keep the core waiting.
pub(crate) struct Ahead<'a> {
    cells: &'a [u32; TILE],
    heads: &'a [Heads<'a>; 2],
    /// What was asked for: so many heads of K, then of V.
    done: usize,
    level: Level,
}

impl<'a> Ahead<'a> {
    /// For the K and V of a tile.
    pub(super) fn new(tile: &'a Tile, heads: &'a [Heads<'a>; 2]) -> Self {
        Self {
            cells: &tile.cells,
            heads,
            done: if tile.mask == 0 { 2 * TILE } else { 0 },
            level: Level::of_streams(),
        }
    }

    /// Asks for one more head, if there is one.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        if self.done >= 2 * TILE {
            return;
        }
        let heads = &self.heads[self.done / TILE];
        let start = heads.at(self.cells[self.done % TILE] as usize);
        self.done += 1;
        self.level.fetch(start, heads.n_bytes);
    }

    /// Asks for all that is left.
    pub(super) fn rest(&mut self) {
        while self.done < 2 * TILE {
            self.step();
        }
    }
}

#[cfg(test)]
impl Tile {
    /// Some places with cells.
    pub(super) fn of(places: &[(usize, u32)]) -> Self {
        let mut tile = Self::default();
        for &(place, cell) in places {
            tile.cells[place] = cell;
            tile.mask |= 1 << place;
        }
        tile.fill();
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

    /// `(position, cell)` of each place, tile by tile.
    fn tiles(runs: &[CellRun], all: PosRange) -> Vec<Vec<(u32, usize)>> {
        let (mut tiles, mut tile) = (Tiles::new(runs, all), Tile::default());
        let mut found = vec![];
        while tiles.next_into(&mut tile) {
            let places = tile.places();
            found.push(
                places
                    .map(|(place, cell)| (tile.base + place as u32, cell))
                    .collect(),
            );
            assert!(
                tile.cells()
                    .iter()
                    .all(|c| tile.places().any(|p| p.1 == *c))
            );
        }
        assert!(!tiles.next_into(&mut tile), "an end is an end");
        found
    }

    #[test]
    fn a_place_without_a_cell_has_that_of_the_one_before() {
        let cells = Tile::of(&[(3, 7), (5, 40), (9, 2)]).cells();
        assert_eq!(cells[..11], [7, 7, 7, 7, 7, 40, 40, 40, 40, 2, 2]);
        assert_eq!(cells[31], 2);
    }

    #[test]
    fn tiles_begin_at_multiples_of_positions_wherever_cells_lie() {
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
    fn the_largest_position_is_walked_like_any() {
        let got = tiles(&[run(0, u32::MAX - 1, 2)], PosRange::ALL);
        assert_eq!(got, [vec![(u32::MAX - 1, 0), (u32::MAX, 1)]]);
        assert!(tiles(&[], PosRange::ALL).is_empty());
    }

    #[test]
    fn masks_have_the_bits_of_their_range() {
        assert_eq!((ones(0, 32), ones(32, 32), ones(3, 5)), (u32::MAX, 0, 24));
    }
}
