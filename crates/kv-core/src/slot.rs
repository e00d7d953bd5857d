//! Slot search: in which cells do the tokens of a ubatch go?
//!
//! A token goes into the cell behind the last one of its sequence. Where that is not usable, the
//! sequence begins a block of its own ([`KvCells::block_len`]): the first one, in ring order from
//! the head, whose cells are all usable. So sequences that grow together keep long runs. Where no
//! such block is left, any usable cell will do, in ring order, too: no capacity is lost.
//!
//! Reads [`KvCells`] and changes nothing. Invariant: a slot has exactly one cell for each token,
//! all different, each free or holding a token that no other can see any more. Slots need not be
//! contiguous. Knows nothing of ubatches or KV rows.

use std::collections::HashMap;

use crate::cells::KvCells;
use crate::ids::{CellIdx, SeqId};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// A search for cells of one stream. Cells that it has found count as used from then on.
#[derive(Clone, Debug)]
pub struct SlotSearch<'a> {
    cells: &'a KvCells,
    /// The number in the stream at which the next search begins.
    head: u32,
    recycling: Recycling,
    found: Candidates,
}

/// The used cells that count as usable.
#[derive(Clone, Debug)]
enum Recycling {
    Never,
    Expired {
        window: Window,
        /// Sequences whose next token is at their last position again.
        repeating: SeqSet,
    },
}

/// The cells that a search has found so far.
#[derive(Clone, Debug, Default)]
struct Candidates {
    n_cells: u32,
    /// The cells, as words of a bitmap by number of the word.
    words: HashMap<u32, u64>,
    /// The last cell of each sequence that was given some.
    last: HashMap<SeqId, u32>,
}

/// There are too few usable cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Cells wanted.
    pub n_wanted: u32,
    /// Cells that are free.
    pub n_free: u32,
    /// Cells in use that no token can see any more.
    pub n_recyclable: u32,
    /// All cells of the stream.
    pub n_cells: u32,
}

/// The order of a search: from a start to the end of the cells, and then from the first cell to the
/// start.
#[derive(Clone, Copy, Debug)]
struct Ring {
    next: u32,
    /// The end of the second half; `None` once it is under way.
    start: Option<u32>,
    end: u32,
}

impl<'a> SlotSearch<'a> {
    /// A search for free cells, beginning `head` cells behind the first.
    pub fn new(cells: &'a KvCells, head: u32) -> Self {
        Self {
            cells,
            head,
            recycling: Recycling::Never,
            found: Candidates::default(),
        }
    }

    /// Takes cells, too, that `window` hides from all tokens to come. `repeating` are the sequences
    /// that go on with a token at their last position again, which sees one position further back
    /// than one at the next position would.
    pub fn with_recycling(mut self, window: Window, repeating: SeqSet) -> Self {
        self.recycling = match window.width() {
            None => Recycling::Never,
            Some(_) => Recycling::Expired { window, repeating },
        };
        self
    }

    /// Number of cells that are free and not found yet.
    pub fn n_free(&self) -> u32 {
        let n_free = self.cells.free().n_free();
        match self.recycling {
            Recycling::Never => n_free - self.found.n_cells,
            Recycling::Expired { .. } => n_free,
        }
    }

    /// Appends a usable cell for a token of each of these sequences to `slot`, in this order.
    ///
    /// If many cells before the head are free, the search begins at the front.
    ///
    /// # Errors
    /// [`Shortage`] where there are too few; `slot` is then as it was, and the search is of no
    /// more use.
    pub fn find(
        &mut self,
        seqs: impl ExactSizeIterator<Item = SeqId>,
        slot: &mut Vec<CellIdx>,
    ) -> Result<(), Shortage> {
        let n_wanted = seqs.len() as u32;
        let (n_cells, n_free) = (self.cells.n_cells(), self.n_free());
        let shortage = |n_recyclable| Shortage {
            n_wanted,
            n_free,
            n_recyclable,
            n_cells,
        };
        if matches!(self.recycling, Recycling::Never) && n_wanted > n_free {
            return Err(shortage(0));
        }
        let n_before = slot.len();
        let n_used = n_cells - n_free;
        let start = if self.head > n_used.saturating_add(n_wanted.saturating_mul(2)) {
            0
        } else {
            self.head
        };
        let block_len = self.cells.block_len();
        let mut blocks = Ring::new(start.next_multiple_of(block_len), n_cells);
        let mut any = Ring::new(start, n_cells);
        for seq in seqs {
            let cell = self
                .behind_last(seq)
                .or_else(|| self.next_block(&mut blocks, block_len))
                .or_else(|| self.next_usable(&mut any));
            let Some(cell) = cell else {
                slot.truncate(n_before);
                return Err(shortage(self.n_recyclable()));
            };
            self.found.add(cell, seq);
            self.head = cell + 1;
            slot.push(self.cells.first_cell().offset(cell));
        }
        Ok(())
    }

    /// The cell behind the last one of a sequence, where it is usable.
    fn behind_last(&self, seq: SeqId) -> Option<u32> {
        let first = self.cells.first_cell().0;
        let last = self.found.last.get(&seq).copied().or_else(|| {
            let run = self.cells.runs(seq)?.as_slice().last()?;
            run.last_cell().0.checked_sub(first)
        });
        let next = last? + 1;
        (next < self.cells.n_cells() && self.is_usable(next)).then_some(next)
    }

    /// The first cell of a block whose cells are all usable.
    fn next_block(&self, blocks: &mut Ring, len: u32) -> Option<u32> {
        if len < 2 {
            return None;
        }
        loop {
            let next = match self.recycling {
                Recycling::Never => self.cells.free().next_free_block(blocks.next, len),
                Recycling::Expired { .. } => Some(blocks.next),
            };
            let next = next.filter(|next| next + len <= blocks.end);
            let Some(at) = next else {
                blocks.wrap()?;
                continue;
            };
            blocks.next = at + len;
            if (at..at + len).all(|cell| self.is_usable(cell)) {
                return Some(at);
            }
        }
    }

    /// The next usable cell.
    fn next_usable(&self, ring: &mut Ring) -> Option<u32> {
        loop {
            let next = match self.recycling {
                Recycling::Never => self.cells.free().next_free(ring.next),
                Recycling::Expired { .. } => Some(ring.next),
            };
            let next = next.filter(|next| *next < ring.end);
            let Some(at) = next else {
                ring.wrap()?;
                continue;
            };
            ring.next = at + 1;
            if self.is_usable(at) {
                return Some(at);
            }
        }
    }

    #[inline]
    fn is_usable(&self, cell: u32) -> bool {
        let is_free = self.cells.free().is_free(cell) || self.is_expired(cell);
        is_free && !self.found.contains(cell)
    }

    /// True if a cell holds a token that none of its sequences can see any more.
    fn is_expired(&self, cell: u32) -> bool {
        let Recycling::Expired { window, repeating } = &self.recycling else {
            return false;
        };
        let cell = self.cells.first_cell().offset(cell);
        self.cells.all_seqs(cell, |seq, pos| {
            self.expired(seq, *window, repeating).contains(pos)
        })
    }

    /// The positions that a sequence needs no more: not what its next token sees, and not its last
    /// token in any case, so that a sequence never forgets how long it is.
    fn expired(&self, seq: SeqId, window: Window, repeating: &SeqSet) -> PosRange {
        let Some(has) = self.cells.positions(seq) else {
            return PosRange::EMPTY;
        };
        let next = if repeating.contains(seq) {
            has.last
        } else {
            has.last.next()
        };
        let before_last = PosRange::from(..has.last);
        window.expired(next).intersection(before_last)
    }

    fn n_recyclable(&self) -> u32 {
        (0..self.cells.n_cells())
            .filter(|&cell| self.is_expired(cell))
            .count() as u32
    }
}

impl Candidates {
    fn add(&mut self, cell: u32, seq: SeqId) {
        *self.words.entry(cell / u64::BITS).or_default() |= 1 << (cell % u64::BITS);
        self.last.insert(seq, cell);
        self.n_cells += 1;
    }

    #[inline]
    fn contains(&self, cell: u32) -> bool {
        let word = self.words.get(&(cell / u64::BITS));
        word.is_some_and(|word| word >> (cell % u64::BITS) & 1 != 0)
    }
}

impl Ring {
    fn new(start: u32, n_cells: u32) -> Self {
        Self {
            next: start,
            start: Some(start),
            end: n_cells,
        }
    }

    /// Goes on from the first cell; `None` where that was done already.
    fn wrap(&mut self) -> Option<()> {
        self.end = self.start.take()?.min(self.end);
        self.next = 0;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cells::Cell;
    use crate::ids::Pos;
    use crate::visibility::CellRun;

    /// A stream from `pos:seq+seq…` or `.` for each cell.
    fn cells(text: &str) -> KvCells {
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut cells = KvCells::new(0..words.len() as u32, 0..8);
        for (i, word) in (0u32..).zip(words) {
            if let Some((pos, seqs)) = word.split_once(':') {
                let seqs: SeqSet = seqs.split('+').map(|s| SeqId(s.parse().unwrap())).collect();
                cells.insert(CellIdx(i), &Cell::new(Pos(pos.parse().unwrap()), seqs));
            }
        }
        cells
    }

    fn find(text: &str, head: u32, window: Window, n: u32) -> Result<Vec<u32>, Shortage> {
        // A sequence without cells, so that it has no cell to go on behind.
        find_for(text, head, window, &vec![7; n as usize])
    }

    /// Cells for a token of each of these sequences.
    fn find_for(text: &str, head: u32, window: Window, seqs: &[u32]) -> Result<Vec<u32>, Shortage> {
        let mut slot = Vec::new();
        let cells = cells(text);
        let mut search = SlotSearch::new(&cells, head).with_recycling(window, SeqSet::EMPTY);
        search.find(seqs.iter().copied().map(SeqId), &mut slot)?;
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
            let search = SlotSearch::new(&cells, 0);
            let mut search = search.with_recycling(Window::Sliding(3), repeating);
            let mut slot = Vec::new();
            let seqs = [SeqId(7), SeqId(7)].into_iter();
            search.find(seqs, &mut slot).map(|()| slot)
        };
        assert_eq!(found(SeqSet::EMPTY).unwrap(), [CellIdx(0), CellIdx(1)]);
        assert_eq!(found(SeqSet::one(SeqId(0))).unwrap_err().n_recyclable, 1);
    }

    #[test]
    fn a_search_goes_on_where_it_found_cells_before() {
        let cells = cells("0:0 . . . 1:0 .");
        let mut slot = vec![CellIdx(9)];
        let mut search = SlotSearch::new(&cells, 0);
        let of = |seq, n| std::iter::repeat_n(SeqId(seq), n);
        search.find(of(1, 2), &mut slot).unwrap();
        search.find(of(0, 1), &mut slot).unwrap();
        assert_eq!(slot, [9, 1, 2, 5].map(CellIdx));
        assert_eq!(search.n_free(), 1);
        assert_eq!(search.find(of(1, 2), &mut slot).unwrap_err().n_free, 1);
        assert_eq!(slot.len(), 4);
        let mut search = SlotSearch::new(&cells, 0);
        search.find(of(1, 2), &mut slot).unwrap();
        search.find(of(1, 1), &mut slot).unwrap();
        assert_eq!(slot[4..], [1, 2, 3].map(CellIdx));
    }

    #[test]
    fn a_search_that_fails_half_way_gives_nothing() {
        let cells = cells("8:0 9:0 10:0 11:0 12:0 13:0 14:0 15:0");
        let search = SlotSearch::new(&cells, 8);
        let mut search = search.with_recycling(Window::Sliding(4), SeqSet::EMPTY);
        let mut slot = vec![CellIdx(9)];
        let seqs = std::iter::repeat_n(SeqId(7), 6);
        assert_eq!(search.find(seqs, &mut slot).unwrap_err().n_recyclable, 5);
        assert_eq!(slot, [CellIdx(9)]);
    }

    #[test]
    fn searches_leave_no_gaps() {
        let cells = cells(". . . . . . . .");
        let mut slot = Vec::new();
        let mut search = SlotSearch::new(&cells, 0);
        for seq in 0..3 {
            search.find([SeqId(seq)].into_iter(), &mut slot).unwrap();
        }
        assert_eq!(slot, [0, 1, 2].map(CellIdx));
        // From the front where much of it is free, so the first cell is among the found.
        let at_front = find(". 0:0 . . . . . .", 6, Window::Full, 1);
        assert_eq!(at_front.unwrap(), [0]);
    }

    #[test]
    fn the_last_block_is_a_block() {
        let block_len = |n_seqs| KvCells::new(0..64, 0..n_seqs).block_len();
        assert_eq!([1, 2, 3, 4].map(block_len), [1, 8, 4, 4]);
        let mut cells = KvCells::new(0..64, 0..4);
        for i in (0..60).filter(|&i| i != 1) {
            cells.insert(CellIdx(i), &Cell::new(Pos(i), SeqSet::one(SeqId(3))));
        }
        let mut slot = Vec::new();
        let mut search = SlotSearch::new(&cells, 0);
        search.find([SeqId(0)].into_iter(), &mut slot).unwrap();
        assert_eq!(slot, [CellIdx(60)]);
    }

    #[test]
    fn a_token_goes_behind_the_last_of_its_sequence() {
        let text = "0:0 . . 0:1 . . .";
        assert_eq!(
            find_for(text, 1, Window::Full, &[1, 0, 1, 0]).unwrap(),
            [4, 1, 5, 2]
        );
        // What is in the way is passed over, as long as somebody can see it.
        assert_eq!(
            find_for(text, 1, Window::Full, &[0, 0, 0]).unwrap(),
            [1, 2, 4]
        );
        let expired = "2:0 1:1 5:1 6:1 7:1 . .";
        assert_eq!(
            find_for(expired, 5, Window::Sliding(2), &[0, 0]).unwrap(),
            [1, 2]
        );
    }

    #[test]
    fn sequences_that_grow_together_get_blocks() {
        // 64 cells of 4 sequences: blocks of 4.
        let mut cells = KvCells::new(0..64, 0..4);
        assert_eq!(cells.block_len(), 4);
        let mut head = 0;
        let mut next = |cells: &mut KvCells, seq: u32| {
            let mut slot = Vec::new();
            let mut search = SlotSearch::new(cells, head);
            search.find([SeqId(seq)].into_iter(), &mut slot).ok()?;
            let pos = cells
                .positions(SeqId(seq))
                .map_or(Pos(0), |has| has.last.next());
            cells.insert(slot[0], &Cell::new(pos, SeqSet::one(SeqId(seq))));
            head = slot[0].0 + 1;
            Some(slot[0].0)
        };
        for _ in 0..10 {
            (0..3).for_each(|seq| assert!(next(&mut cells, seq).is_some()));
        }
        let first_runs = |seq| -> Vec<_> {
            let runs = cells.runs(SeqId(seq)).unwrap().as_slice();
            runs.iter().map(|run| (run.cell.0, run.len)).collect()
        };
        assert_eq!(first_runs(0), [(0, 4), (12, 4), (24, 2)]);
        assert_eq!(first_runs(1), [(4, 4), (16, 4), (28, 2)]);
        // Blocks run out, cells do not: the last ones are those that others would have had.
        for _ in 30..64 {
            assert!(next(&mut cells, 3).is_some());
        }
        assert_eq!((cells.n_used(), next(&mut cells, 3)), (64, None));
        let blocks = cells.runs(SeqId(3)).unwrap().as_slice();
        assert_eq!(
            blocks[0],
            CellRun {
                cell: CellIdx(36),
                pos: Pos(0),
                len: 28
            }
        );
        assert_eq!(blocks.len(), 4);
    }

    #[test]
    fn small_memories_and_lone_sequences_have_no_blocks() {
        assert_eq!(KvCells::new(0..1 << 20, 0..1).block_len(), 1);
        assert_eq!(KvCells::new(0..15, 0..4).block_len(), 1);
        assert_eq!(KvCells::new(0..1 << 16, 0..16).block_len(), 64);
        assert_eq!(KvCells::new(0..1 << 20, 0..4096).block_len(), 64);
        assert_eq!(KvCells::new(0..1 << 16, 0..4096).block_len(), 4);
    }
}
