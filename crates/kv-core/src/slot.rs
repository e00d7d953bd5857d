//! Slot search: in which cells do the tokens of a ubatch go?
//!
//! Reads [`KvCells`] and changes nothing. Invariant: a slot has exactly one cell for each token, all
//! different, each free or holding a token that nobody can see any more. Slots need not be
//! contiguous. Knows nothing of ubatches or rows.

use crate::cells::{FreeMap, KvCells};
use crate::ids::{CellIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::window::Window;

/// Where to look for cells in one stream.
#[derive(Clone, Copy, Debug)]
pub struct SlotSearch<'a> {
    free: &'a FreeMap,
    first_cell: CellIdx,
    /// The number in the stream at which the search begins.
    head: u32,
    recycling: Recycling<'a>,
}

/// Which used cells count as usable.
#[derive(Clone, Copy, Debug)]
enum Recycling<'a> {
    Never,
    Expired(Expired<'a>),
}

/// What it takes to tell whether anybody will see a cell again.
#[derive(Clone, Copy, Debug)]
struct Expired<'a> {
    cells: &'a KvCells,
    window: Window,
    /// Sequences whose next token is at their last position again.
    repeating: SeqSet,
}

/// There are too few usable cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Cells wanted.
    pub n_wanted: u32,
    /// Cells that are free.
    pub n_free: u32,
    /// Cells in use that nobody can see any more.
    pub n_recyclable: u32,
    /// All cells of the stream.
    pub n_cells: u32,
}

impl<'a> SlotSearch<'a> {
    /// A search in `cells`, beginning `head` cells behind the first.
    pub fn new(cells: &'a KvCells, head: u32, window: Window) -> Self {
        let recycling = match window {
            Window::Full => Recycling::Never,
            _ => Recycling::Expired(Expired {
                cells,
                window,
                repeating: SeqSet::EMPTY,
            }),
        };
        Self {
            free: cells.free(),
            first_cell: cells.first_cell(),
            head,
            recycling,
        }
    }

    /// Names the sequences that go on with a token at their last position again, which sees one
    /// position further back than one at the next position would.
    pub fn with_repeating(mut self, seqs: SeqSet) -> Self {
        if let Recycling::Expired(expired) = &mut self.recycling {
            expired.repeating = seqs;
        }
        self
    }

    /// A search that only takes free cells, of which `free` says which they are.
    pub fn in_free(free: &'a FreeMap, first_cell: CellIdx, head: u32) -> Self {
        Self {
            free,
            first_cell,
            head,
            recycling: Recycling::Never,
        }
    }

    /// Appends `n` usable cells to `slot`, in ring order from the head. Where many cells before the
    /// head are free, the search begins at the front.
    ///
    /// # Errors
    /// [`Shortage`] where there are fewer; `slot` is then as it was.
    pub fn find(&self, n: u32, slot: &mut Vec<CellIdx>) -> Result<(), Shortage> {
        let n_cells = self.free.n_cells();
        let n_used = n_cells - self.free.n_free();
        let start = if self.head > n_used.saturating_add(n.saturating_mul(2)) {
            0
        } else {
            self.head
        };
        let start = start.min(n_cells);
        let before = slot.len();
        let wanted = before + n as usize;
        if matches!(self.recycling, Recycling::Expired(_)) || n <= self.free.n_free() {
            self.collect(start, n_cells, slot, wanted);
            self.collect(0, start, slot, wanted);
        }
        if slot.len() == wanted {
            return Ok(());
        }
        slot.truncate(before);
        let n_free = self.free.n_free();
        Err(Shortage {
            n_wanted: n,
            n_free,
            n_recyclable: self.n_recyclable(),
            n_cells,
        })
    }

    /// Appends usable cells of `from..to` until the slot has `wanted`.
    fn collect(&self, from: u32, to: u32, slot: &mut Vec<CellIdx>, wanted: usize) {
        let mut at = from;
        while slot.len() < wanted && at < to {
            match self.recycling {
                Recycling::Never => match self.free.next_free(at) {
                    Some(free) => at = free,
                    None => return,
                },
                Recycling::Expired(expired) => {
                    let cell = self.first_cell.offset(at);
                    if !self.free.is_free(at) && !expired.is_recyclable(cell) {
                        at += 1;
                        continue;
                    }
                }
            }
            if at < to {
                slot.push(self.first_cell.offset(at));
            }
            at += 1;
        }
    }

    fn n_recyclable(&self) -> u32 {
        let Recycling::Expired(expired) = self.recycling else {
            return 0;
        };
        let all = (0..self.free.n_cells()).map(|i| self.first_cell.offset(i));
        all.filter(|&cell| expired.is_recyclable(cell)).count() as u32
    }
}

impl Expired<'_> {
    /// Whether a cell holds a token that none of its sequences can see any more.
    fn is_recyclable(&self, cell: CellIdx) -> bool {
        self.cells
            .get(cell)
            .is_some_and(|held| held.seqs.iter().all(|seq| held.pos < self.oldest_kept(seq)))
    }

    /// The position from which on the tokens of a sequence are kept: what its next token sees, and
    /// its last token in any case, so that a sequence never forgets how long it is.
    fn oldest_kept(&self, seq: SeqId) -> Pos {
        let Some(has) = self.cells.positions(seq) else {
            return Pos(0);
        };
        let next = if self.repeating.contains(seq) {
            has.last
        } else {
            has.last.next()
        };
        self.window.oldest_key(next).min(has.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cells::Cell;

    /// A stream from `pos:seq+seq…` or `.` for each cell.
    fn cells(text: &str) -> KvCells {
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut cells = KvCells::new(0..words.len() as u32, 0..8);
        for (i, word) in (0u32..).zip(words) {
            if let Some((pos, seqs)) = word.split_once(':') {
                let seqs: SeqSet = seqs.split('+').map(|s| SeqId(s.parse().unwrap())).collect();
                cells.put(CellIdx(i), Cell::new(Pos(pos.parse().unwrap()), seqs));
            }
        }
        cells
    }

    fn find(text: &str, head: u32, window: Window, n: u32) -> Result<Vec<u32>, Shortage> {
        let mut slot = Vec::new();
        let cells = cells(text);
        SlotSearch::new(&cells, head, window).find(n, &mut slot)?;
        Ok(slot.iter().map(|c| c.0).collect())
    }

    #[test]
    fn k23_the_search_is_a_ring_from_the_head() {
        let text = "0:0 . . 3:0 0:1 1:1 . .";
        assert_eq!(find(text, 1, Window::Full, 3).unwrap(), [1, 2, 6]);
        assert_eq!(find(text, 6, Window::Full, 3).unwrap(), [6, 7, 1]);
        assert_eq!(find(text, 8, Window::Full, 1).unwrap(), [1]);
        let shortage = Shortage {
            n_wanted: 5,
            n_free: 4,
            n_recyclable: 0,
            n_cells: 8,
        };
        assert_eq!(find(text, 6, Window::Full, 5), Err(shortage));
    }

    #[test]
    fn k23_many_holes_before_the_head_are_filled_first() {
        // One cell is used: a head of 3 is beyond 1 + 2·n only for n = 0.
        assert_eq!(find("0:0 . . . . . . .", 3, Window::Full, 1).unwrap(), [3]);
        assert_eq!(find("0:0 . . . . . . .", 4, Window::Full, 1).unwrap(), [1]);
        assert_eq!(
            find("0:0 . . . . . . .", 5, Window::Full, 2).unwrap(),
            [5, 6]
        );
        assert_eq!(
            find("0:0 . . . . . . .", 6, Window::Full, 2).unwrap(),
            [1, 2]
        );
    }

    #[test]
    fn k23_a_expired_cells_are_taken_in_ring_order() {
        let w = Window::Sliding(4);
        assert_eq!(
            find("0:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0", 8, w, 1).unwrap(),
            [0]
        );
        assert_eq!(
            find("8:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0", 1, w, 3).unwrap(),
            [1, 2, 3]
        );
        let ring = "8:0 9:0 10:0 11:0 12:0 13:0 14:0 15:0";
        assert_eq!(find(ring, 8, w, 5).unwrap(), [0, 1, 2, 3, 4]);
        let shortage = Shortage {
            n_wanted: 6,
            n_free: 0,
            n_recyclable: 5,
            n_cells: 8,
        };
        assert_eq!(find(ring, 8, w, 6), Err(shortage));
    }

    #[test]
    fn k23_c_d17_shared_cells_are_taken_once_expired_for_all_owners() {
        let shared = "0:0+1 1:0+1 2:0+1 3:0+1 4:0+1 5:0+1";
        assert_eq!(find(shared, 6, Window::Sliding(2), 1).unwrap(), [0]);
        // The next token of sequence 1, at position 2, still sees 0 and 1.
        let one_behind = "0:0+1 1:0+1 2:0 3:0 4:0 5:0";
        assert_eq!(find(one_behind, 6, Window::Sliding(3), 1).unwrap(), [2]);
    }

    #[test]
    fn k23_d_a_finished_chunk_is_free_but_for_its_last_token() {
        let w = Window::Chunked(4);
        assert_eq!(
            find("0:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0", 8, w, 1).unwrap(),
            [0]
        );
        assert_eq!(
            find("0:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0", 7, w, 7).unwrap(),
            [0, 1, 2, 3, 4, 5, 6]
        );
        assert_eq!(
            find("8:0 9:0 10:0 11:0 4:0 5:0 6:0 7:0", 4, w, 1).unwrap(),
            [4]
        );
    }

    #[test]
    fn a_repeated_position_keeps_what_it_sees() {
        let cells = cells("3:0 4:0 5:0 6:0");
        let found = |repeating| {
            let search = SlotSearch::new(&cells, 0, Window::Sliding(3)).with_repeating(repeating);
            let mut slot = Vec::new();
            search.find(2, &mut slot).map(|()| slot)
        };
        assert_eq!(found(SeqSet::EMPTY).unwrap(), [CellIdx(0), CellIdx(1)]);
        assert_eq!(found(SeqSet::one(SeqId(0))).unwrap_err().n_recyclable, 1);
    }

    #[test]
    fn a_search_over_a_snapshot_of_free_cells_does_not_recycle() {
        let cells = cells("0:0 1:0 2:0 .");
        let mut slot = vec![CellIdx(9)];
        let search = SlotSearch::in_free(cells.free(), CellIdx(0), 0);
        assert!(search.find(2, &mut slot).is_err());
        assert_eq!(slot, [CellIdx(9)]);
        search.find(1, &mut slot).unwrap();
        assert_eq!(slot, [CellIdx(9), CellIdx(3)]);
    }
}
