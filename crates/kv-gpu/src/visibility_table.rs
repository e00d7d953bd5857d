//! What attention kernels read of a [`Visibility`]: pieces of work, as words in the inputs of a
//! run.
//!
//! A group with few rows is cut into pieces of one row each, one with many into tiles of up to
//! [`TILE_ROWS`] rows; both are cut at fixed multiples of a position, so that a piece's sums do not
//! depend on where cells are or what else is in the ubatch. Each piece has a slot for the partial
//! result of each of its rows, and each row knows its slots, which are merged in order.
//!
//! The header, [`HEADER_WORDS`] words, has the numbers and places of the tables:
//! `n_few, few_at, n_many, many_at, runs_at, rows_at, merge_at, seen_at`. Places are word numbers
//! within the inputs. The tables, in words:
//! * runs: `cell, pos, len, cells of the group before it`, those of each group by position; the
//!   table begins at a multiple of 4 words;
//! * rows: `row, first_pos, last_pos`, by group, what each row sees;
//! * few: `rows entry, first run, end run, first_pos, last_pos, slot`;
//! * many: `first rows entry, rows, first run, end run, first_pos, last_pos, slot` where the slot
//!   of its `i`-th row is `slot + i`;
//! * merge, by row of the ubatch: `first slot, slots, stride`;
//! * seen, by row of the ubatch: `first run, end run, cells of the group before those that it sees,
//!   cells that it sees`.

use kv_core::{CellRun, PosRange, Visibility, VisibleGroup};

/// Words of the header.
pub(crate) const HEADER_WORDS: usize = 8;
/// Words of an entry of the pieces of few rows, and of many.
pub(crate) const PIECE_WORDS: usize = 8;
/// Words of a run; tables begin at multiples of it.
const RUN_WORDS: usize = 4;
/// Words of what a row sees.
const SEEN_WORDS: usize = 4;
/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 64;
/// Rows from which a group is cut into tiles.
const MANY: usize = 8;

/// The way pieces are cut in programs of some number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceLimits {
    /// The most pieces of a row by itself.
    few: u32,
    /// The most pieces of a tile.
    many: u32,
}

/// Positions of the shortest pieces.
const SHORTEST: [u32; 2] = [64, 512];

impl PieceLimits {
    /// Those for `n_rows` rows: partial results of all rows take a bounded amount of memory.
    pub(crate) fn of(n_rows: usize) -> Self {
        let n_rows = u32::try_from(n_rows.max(1)).unwrap_or(u32::MAX);
        Self {
            few: (1024 / n_rows).clamp(2, 32),
            many: (2048 / n_rows).clamp(1, 8),
        }
    }

    /// The most pieces of a row by itself.
    pub(crate) fn few(self) -> usize {
        self.few as usize
    }

    /// Slots for the partial results of `n_rows` rows.
    pub(crate) fn slots(self, n_rows: usize) -> usize {
        n_rows * self.few.max(self.many) as usize
    }
}

/// Numbers of pieces, which grids depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PieceCounts {
    pub(crate) few: u32,
    pub(crate) many: u32,
}

/// Appends the tables of `visibility` to `words` and fills the header at `header`.
pub(crate) fn write(
    visibility: &Visibility,
    limits: PieceLimits,
    words: &mut Vec<u32>,
    header: usize,
) -> PieceCounts {
    let mut tables = Tables {
        merge: vec![0; visibility.n_rows as usize * 3],
        seen: vec![0; visibility.n_rows as usize * SEEN_WORDS],
        ..Tables::default()
    };
    for group in &visibility.groups {
        tables.add(group, limits);
    }
    let counts = PieceCounts {
        few: (tables.few.len() / PIECE_WORDS) as u32,
        many: (tables.many.len() / PIECE_WORDS) as u32,
    };
    let mut append = |table: &[u32]| {
        words.resize(words.len().next_multiple_of(RUN_WORDS), 0);
        let at = words.len() as u32;
        words.extend_from_slice(table);
        at
    };
    let few_at = append(&tables.few);
    let many_at = append(&tables.many);
    let runs_at = append(&tables.runs);
    let rows_at = append(&tables.rows);
    let merge_at = append(&tables.merge);
    let seen_at = append(&tables.seen);
    let values = [
        counts.few,
        few_at,
        counts.many,
        many_at,
        runs_at,
        rows_at,
        merge_at,
        seen_at,
    ];
    if let Some(to) = words.get_mut(header..header + HEADER_WORDS) {
        to.copy_from_slice(&values);
    }
    counts
}

#[derive(Default)]
struct Tables {
    few: Vec<u32>,
    many: Vec<u32>,
    runs: Vec<u32>,
    rows: Vec<u32>,
    merge: Vec<u32>,
    seen: Vec<u32>,
    n_slots: u32,
}

/// Some rows of a group that are attended together.
struct Tile<'a> {
    /// The ubatch's numbers of the rows.
    rows: &'a [u32],
    /// The first one's entry in the table of rows.
    entry: u32,
    /// The positions that all of them together see.
    sees: PosRange,
}

impl Tables {
    fn add(&mut self, group: &VisibleGroup, limits: PieceLimits) {
        let first_run = (self.runs.len() / RUN_WORDS) as u32;
        let mut before = 0;
        for run in &group.runs {
            self.runs.extend([run.cell.0, run.pos.0, run.len, before]);
            before += run.len;
        }
        let tile_rows = if group.rows.len() < MANY {
            1
        } else {
            TILE_ROWS
        };
        let tiles = group.rows.chunks(tile_rows);
        for (rows, limits_of) in tiles.zip(group.limits.chunks(tile_rows)) {
            let entry = (self.rows.len() / 3) as u32;
            for (row, sees) in rows.iter().zip(limits_of) {
                // Beyond the last position for a row that sees nothing.
                let (first, last) = if sees.is_empty() {
                    (1, 0)
                } else {
                    (sees.first.0, sees.last.0)
                };
                self.rows.extend([*row, first, last]);
                self.see(*row, *sees, &group.runs, first_run);
            }
            let sees = limits_of
                .iter()
                .fold(PosRange::EMPTY, |all, &l| all.hull(l));
            let tile = Tile { rows, entry, sees };
            self.cut(&tile, &group.runs, (first_run, limits));
        }
    }

    /// Notes which cells of a group's runs a row sees.
    fn see(&mut self, row: u32, sees: PosRange, runs: &[CellRun], first_run: u32) {
        if sees.is_empty() {
            return;
        }
        let from = runs.partition_point(|run| run.last_pos() < sees.first);
        let to = runs.partition_point(|run| run.pos <= sees.last);
        let (Some(first), Some(last)) = (runs.get(from), runs.get(..to).and_then(<[_]>::last))
        else {
            return;
        };
        let [from, to] = [from, to].map(|run| first_run + run as u32);
        if from >= to {
            return;
        }
        let before = |run: u32| self.runs[run as usize * RUN_WORDS + 3];
        let skipped = sees.first.0.saturating_sub(first.pos.0);
        let held = (sees.last.0 - last.pos.0).saturating_add(1).min(last.len);
        let begin = before(from) + skipped;
        let n_seen = before(to - 1) + held - begin;
        if let Some(to_row) = self.seen.chunks_exact_mut(SEEN_WORDS).nth(row as usize) {
            to_row.copy_from_slice(&[from, to, begin, n_seen]);
        }
    }

    /// Cuts a tile at multiples of a number of positions.
    fn cut(&mut self, tile: &Tile<'_>, runs: &[CellRun], (first_run, limits): (u32, PieceLimits)) {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
            return;
        };
        let seen = PosRange::new(first.pos, last.last_pos()).intersection(tile.sees);
        if seen.is_empty() {
            return;
        }
        let is_few = tile.rows.len() == 1;
        let [most, shortest] = if is_few {
            [limits.few, SHORTEST[0]]
        } else {
            [limits.many, SHORTEST[1]]
        };
        let len = (seen.last.0 / most + 1).next_power_of_two().max(shortest);
        let (n_rows, first_slot) = (tile.rows.len() as u32, self.n_slots);
        let mut n_pieces = 0;
        for at in seen.first.0 / len..=seen.last.0 / len {
            let begin = seen.first.0.max(at * len);
            let end = seen.last.0.min(at * len + (len - 1));
            let from = runs.partition_point(|run| run.last_pos().0 < begin);
            let to = runs.partition_point(|run| run.pos.0 <= end);
            if from >= to {
                continue;
            }
            let [from, to] = [from, to].map(|run| first_run + run as u32);
            let slot = first_slot + n_pieces * n_rows;
            if is_few {
                self.few
                    .extend([tile.entry, from, to, begin, end, slot, 0, 0]);
            } else {
                let piece = [tile.entry, n_rows, from, to, begin, end, slot, 0];
                self.many.extend(piece);
            }
            n_pieces += 1;
        }
        self.n_slots += n_pieces * n_rows;
        for (i, row) in (0..).zip(tile.rows) {
            let entry = [first_slot + i, n_pieces, n_rows];
            if let Some(to) = self
                .merge
                .get_mut(*row as usize * 3..)
                .and_then(|rest| rest.first_chunk_mut())
            {
                *to = entry;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::{CellIdx, Pos};

    fn run(cell: u32, pos: u32, len: u32) -> CellRun {
        CellRun {
            cell: CellIdx(cell),
            pos: Pos(pos),
            len,
        }
    }

    /// Rows `rows`, each of which sees everything up to its own position: `first_pos` and so on.
    fn causal(rows: std::ops::Range<u32>, first_pos: u32, runs: Vec<CellRun>) -> VisibleGroup {
        let limits = (0..rows.len() as u32).map(|i| PosRange::new(Pos(0), Pos(first_pos + i)));
        VisibleGroup::new(rows.clone().collect(), runs, limits.collect())
    }

    #[test]
    fn a_single_row_is_cut_at_multiples_of_a_position() {
        let group = causal(0..1, 200, vec![run(10, 0, 100), run(500, 100, 101)]);
        let mut words = vec![0; HEADER_WORDS];
        let counts = write(
            &Visibility::new(1, vec![group]),
            PieceLimits::of(1),
            &mut words,
            0,
        );
        assert_eq!(counts, PieceCounts { few: 4, many: 0 });
        let few = words[1] as usize;
        let pieces: Vec<&[u32]> = words[few..few + 32].chunks(8).map(|p| &p[..6]).collect();
        assert_eq!(pieces[0], [0, 0, 1, 0, 63, 0]);
        assert_eq!(pieces[1], [0, 0, 2, 64, 127, 1]);
        assert_eq!(pieces[3], [0, 1, 2, 192, 200, 3]);
        let [merge, seen] = [6, 7].map(|at| words[at] as usize);
        assert_eq!(words[merge..merge + 3], [0, 4, 1]);
        assert_eq!(words[seen..], [0, 2, 0, 201]);
    }

    #[test]
    fn many_rows_are_tiled_and_blind_rows_have_no_slots() {
        let mut group = causal(0..68, 900, vec![run(0, 0, 968)]);
        group.limits[3] = PosRange::EMPTY;
        let mut words = vec![0; HEADER_WORDS];
        let blind = VisibleGroup::new(vec![68], vec![], vec![PosRange::new(Pos(0), Pos(9))]);
        let visibility = Visibility::new(69, vec![group, blind]);
        let counts = write(&visibility, PieceLimits::of(69), &mut words, 0);
        assert_eq!(counts, PieceCounts { few: 0, many: 4 });
        let (many, rows, merge) = (words[3] as usize, words[5] as usize, words[6] as usize);
        assert_eq!(words[many..many + 7], [0, 64, 0, 1, 0, 511, 0]);
        assert_eq!(words[many + 8..many + 15], [0, 64, 0, 1, 512, 963, 64]);
        assert_eq!(words[many + 16..many + 23], [64, 4, 0, 1, 0, 511, 128]);
        assert_eq!(words[rows + 9..rows + 12], [3, 1, 0]);
        assert_eq!(words[merge + 195..merge + 201], [129, 2, 4, 130, 2, 4]);
        assert_eq!(words[merge + 204..merge + 207], [0, 0, 0]);
    }

    /// Rows whose window begins or ends within a run, or between two.
    #[test]
    fn rows_see_cells_by_rank() {
        let runs = vec![run(30, 4, 6), run(9, 12, 1), run(70, 13, 20)];
        let sees = [(0, 3), (5, 8), (9, 12), (10, 11), (8, 40), (33, 50)];
        let limits = sees.map(|(first, last)| PosRange::new(Pos(first), Pos(last)));
        let before = causal(6..7, 0, vec![run(0, 0, 3)]);
        let group = VisibleGroup::new((0..6).collect(), runs, limits.to_vec());
        let mut words = vec![0; HEADER_WORDS];
        let visibility = Visibility::new(7, vec![before, group]);
        write(&visibility, PieceLimits::of(7), &mut words, 0);
        let seen: Vec<&[u32]> = words[words[7] as usize..].chunks(SEEN_WORDS).collect();
        assert_eq!(seen[0], [0; 4]);
        assert_eq!(seen[1], [1, 2, 1, 4]);
        assert_eq!(seen[2], [1, 3, 5, 2]);
        assert_eq!(seen[3], [0; 4]);
        assert_eq!(seen[4], [1, 4, 4, 23]);
        assert_eq!(seen[5], [0; 4]);
        assert_eq!(seen[6], [0, 1, 0, 1]);
    }

    /// Partial results never need more slots than programs have memory for.
    #[test]
    fn slots_are_bounded() {
        for n_rows in [1usize, 5, 8, 17, 64, 512, 2000] {
            for last in [0u32, 63, 64, 4095, 4096, 131_071, 1_000_000] {
                let limits = PieceLimits::of(n_rows);
                let runs = vec![run(0, 0, last + 1)];
                let one_each = (0..n_rows as u32).map(|r| causal(r..r + 1, last, runs.clone()));
                let one_each = Visibility::new(n_rows as u32, one_each.collect());
                let first = last.saturating_sub(n_rows as u32 - 1);
                let together = vec![causal(0..n_rows as u32, first, runs.clone())];
                let together = Visibility::new(n_rows as u32, together);
                for visibility in [one_each, together] {
                    let mut words = vec![0; HEADER_WORDS];
                    write(&visibility, limits, &mut words, 0);
                    let merge = words[6] as usize;
                    for row in words[merge..][..3 * n_rows].chunks(3) {
                        let end = row[0] + (row[1].max(1) - 1) * row[2];
                        assert!((end as usize) < limits.slots(n_rows), "{n_rows} {last}");
                    }
                }
            }
        }
    }
}
