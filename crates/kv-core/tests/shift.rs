//! Worked examples of moving tokens to other positions and of closing holes: which rows are copied
//! and rotated, by how much, and what is refused.

#![allow(clippy::unwrap_used)] // a test

use kv_core::batch::{Batch, BatchRules, MAX_POS, validate};
use kv_core::memory::{
    Division, Edited, Memory, MemoryInputs, NeededFor, NoRoom, PosChange, Refusal, RowsWritten,
    Seqs, Streams, Unified, WindowForgotten, invariants,
};
use kv_core::memory::{RowCopy, RowShift};
use kv_core::{CellIdx, PartIdx, Pos, PosDelta, PosRange, SeqId, StreamIdx, TokenId, Window};

const S0: SeqId = SeqId(0);
const S1: SeqId = SeqId(1);
const S2: SeqId = SeqId(2);

struct Fixture {
    memory: Unified,
    inputs: MemoryInputs,
}

impl Fixture {
    fn new(n_cells: u32, window: Window, streams: Streams) -> Self {
        Self {
            memory: crate::support::part(0, n_cells, window, streams),
            inputs: MemoryInputs::default(),
        }
    }

    fn shared(n_cells: u32) -> Self {
        Self::new(n_cells, Window::Full, Streams::Shared)
    }

    /// Evaluates the next `n` tokens of some sequences.
    fn decode(&mut self, seqs: &[SeqId], n: u32) -> &mut Self {
        let seqs: Vec<u32> = seqs.iter().map(|seq| seq.0).collect();
        let batch = crate::support::next_tokens(&self.memory, &[(&seqs, n)]);
        let mut steps = self.memory.begin(&batch, 64).unwrap();
        while steps.next(&mut self.inputs).is_some() {}
        self
    }

    fn remove(&mut self, seq: SeqId, range: PosRange) -> &mut Self {
        self.memory.remove(Seqs::One(seq), range).unwrap();
        self
    }

    fn shift(&mut self, range: PosRange, delta: i32) -> Result<Edited, Refusal> {
        self.change(range, PosChange::Shift(PosDelta(delta)))
    }

    fn divide(&mut self, range: PosRange, by: u32) -> Result<Edited, Refusal> {
        self.change(range, PosChange::Divide(Division::by(by)))
    }

    /// Moves tokens of sequence 0.
    fn change(&mut self, range: PosRange, change: PosChange) -> Result<Edited, Refusal> {
        let before = self.memory.clone();
        let shifted = self.memory.reposition(S0, range, change);
        invariants::check(&self.memory).unwrap();
        if shifted.is_err() {
            assert_eq!(self.memory, before, "a refusal changed something");
        }
        shifted
    }

    /// Positions and sequences of all cells.
    fn draw(&self) -> String {
        crate::support::draw(&self.memory)
    }
}

fn range(first: u32, end: u32) -> PosRange {
    PosRange::from(Pos(first)..Pos(end))
}

fn from(first: u32) -> PosRange {
    PosRange::from(Pos(first)..)
}

fn row_copy(from: u32, to: u32, len: u32) -> RowCopy {
    RowCopy {
        part: PartIdx(0),
        from: CellIdx(from),
        to: CellIdx(to),
        len,
    }
}

/// First row, number of rows, distance.
fn shifts(shifted: &Edited) -> Vec<(u32, u32, i32)> {
    let one = |s: &RowShift| (s.first.0, s.len, s.delta.0);
    shifted.row_shifts.iter().map(one).collect()
}

#[test]
fn k17_a_shift_moves_the_tokens_of_a_range_and_names_their_rows() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 6).remove(S0, range(2, 4));
    let shifted = f.shift(from(4), -2).unwrap();
    assert_eq!(f.draw(), "0:0 1:0 . . 2:0 3:0 . .");
    assert_eq!((shifted.n_tokens, shifts(&shifted)), (2, vec![(4, 2, -2)]));
    assert!(shifted.row_copies.is_empty());
    f.decode(&[S0], 1);
    // Its run goes on; the hole is for when it cannot.
    assert_eq!(f.draw(), "0:0 1:0 . . 2:0 3:0 4:0 .");
}

#[test]
fn k53_rows_that_do_not_move_are_not_named() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 4);
    for nothing in [
        f.shift(PosRange::ALL, 0),
        f.shift(PosRange::EMPTY, 3),
        f.shift(from(9), 3),
        f.divide(PosRange::ALL, 1),
        f.divide(range(0, 1), 2),
    ] {
        assert_eq!(nothing, Ok(Edited::default()));
    }
    assert_eq!(f.draw(), "0:0 1:0 2:0 3:0 . . . .");
}

#[test]
fn k18_d15b_division_rotates_towards_the_beginning() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 6);
    let divided = f.divide(range(0, 5), 2).unwrap();
    assert_eq!(f.draw(), "0:0 0:0 1:0 1:0 2:0 5:0 . .");
    assert_eq!(divided.n_tokens, 4);
    assert_eq!(shifts(&divided), [(1, 2, -1), (3, 2, -2)]);
}

#[test]
fn c25_a_shift_and_a_division_add_up() {
    let mut f = Fixture::shared(4);
    f.decode(&[S0], 1);
    assert_eq!(shifts(&f.shift(PosRange::ALL, 5).unwrap()), [(0, 1, 5)]);
    assert_eq!(shifts(&f.divide(PosRange::ALL, 2).unwrap()), [(0, 1, -3)]);
    assert_eq!(f.draw(), "2:0 . . .");
}

#[test]
fn k18_division_from_an_origin_keeps_what_is_before_it() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 8);
    let division = Division {
        by: 3,
        origin: Pos(2),
    };
    let divided = f
        .change(PosRange::ALL, PosChange::Divide(division))
        .unwrap();
    assert_eq!(f.draw(), "0:0 1:0 2:0 2:0 2:0 3:0 3:0 3:0");
    assert_eq!(
        shifts(&divided),
        [(3, 1, -1), (4, 2, -2), (6, 1, -3), (7, 1, -4)]
    );
}

#[test]
fn d14_shared_tokens_get_cells_of_their_own_before_they_move() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0, S1], 4).decode(&[S0], 1);
    let shifted = f.shift(from(2), 10).unwrap();
    assert_eq!(f.draw(), "0:0+1 1:0+1 2:1 3:1 14:0 12:0 13:0 .");
    assert_eq!(shifted.n_tokens, 3);
    assert_eq!(shifted.row_copies, [row_copy(2, 5, 2)]);
    assert_eq!(shifts(&shifted), [(5, 2, 10), (4, 1, 10)]);
    // The next slot begins behind them.
    f.decode(&[S1], 1);
    assert_eq!(f.draw(), "0:0+1 1:0+1 2:1 3:1 14:0 12:0 13:0 4:1");
}

#[test]
fn d14_shared_tokens_without_room_are_refused_with_numbers() {
    let mut f = Fixture::shared(6);
    f.decode(&[S0, S1], 4).decode(&[S0], 1);
    let refused = Refusal::NoRoom(NoRoom {
        needed_for: NeededFor::Move(S0),
        part: PartIdx(0),
        stream: StreamIdx(0),
        window: Window::Full,
        n_wanted: 3,
        n_free: 1,
        n_recyclable: 0,
        n_cells: 6,
        n_free_elsewhere: 0,
    });
    assert_eq!(f.divide(PosRange::ALL, 2), Err(refused.clone()));
    assert_eq!(f.shift(from(1), 1), Err(refused));
    assert_eq!(f.shift(from(3), 1).unwrap().n_tokens, 2);
}

#[test]
fn k17_nobody_falls_off_an_end() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 6);
    let change = PosChange::Shift(PosDelta(-3));
    let moved = PosRange::new(Pos(2), Pos(5));
    let refused = Refusal::OutOfRange {
        seq: S0,
        moved,
        change,
        first: -1,
        last: 2,
    };
    f.remove(S0, range(0, 2));
    assert_eq!(f.shift(PosRange::ALL, -3), Err(refused.clone()));
    assert!(
        refused
            .to_string()
            .starts_with("shifting by -3 would move positions 2..=5")
    );
    let up = i32::try_from(MAX_POS.0).unwrap() - 5;
    assert_eq!(f.shift(PosRange::ALL, up).unwrap().n_tokens, 4);
    assert_eq!(f.memory.positions(S0).unwrap().last, MAX_POS);
    let beyond = f.shift(PosRange::ALL, 1).unwrap_err();
    assert!(matches!(
        beyond,
        Refusal::OutOfRange {
            last: 0x8000_0000,
            ..
        }
    ));
    assert_eq!(f.shift(PosRange::ALL, -up).unwrap().n_tokens, 4);
    // Those that would have fallen off are removed first.
    f.remove(S0, range(0, 3));
    assert_eq!(f.shift(PosRange::ALL, -3).unwrap().n_tokens, 3);
    assert_eq!(f.memory.positions(S0), Some(PosRange::new(Pos(0), Pos(2))));
}

#[test]
fn tokens_keep_their_order() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 8).remove(S0, range(3, 5));
    // 0 1 2 . . 5 6 7
    for (named, delta, other) in [
        (from(5), -3, 2),
        (from(5), -5, 2),
        (range(0, 3), 3, 5),
        (range(1, 2), 1, 2),
        (range(1, 2), -1, 0),
        (range(1, 2), 5, 2),
    ] {
        let refused = f.shift(named, delta).unwrap_err();
        assert!(
            matches!(refused, Refusal::Overtakes { other: at, .. } if at == Pos(other)),
            "{refused}"
        );
    }
    let refused = f.divide(from(5), 2).unwrap_err();
    assert!(matches!(refused, Refusal::Overtakes { other: Pos(2), .. }));
    assert_eq!(f.shift(from(5), -2).unwrap().n_tokens, 3);
}

#[test]
fn k18_a_division_by_zero_is_refused() {
    let mut f = Fixture::shared(4);
    f.decode(&[S0], 3);
    let refused = Refusal::DivideByZero { seq: S0 };
    assert_eq!(f.divide(PosRange::ALL, 0), Err(refused));
}

#[test]
fn d47_a_sequence_that_does_not_exist_is_refused() {
    let mut f = Fixture::shared(4);
    let (seq, n_seqs) = (SeqId(3), 3);
    let refused = f.memory.shift(seq, PosRange::ALL, PosDelta(1));
    let wanted = Refusal::NoSuchSequence { seq, n_seqs };
    assert_eq!(refused, Err(wanted));
}

#[test]
fn w7_d46_a_window_that_slid_can_be_shifted() {
    let mut f = Fixture::new(8, Window::Sliding(4), Streams::Shared);
    (0..12).for_each(|_| {
        f.decode(&[S0], 1);
    });
    assert_eq!(f.draw(), "8:0 9:0 10:0 11:0 4:0 5:0 6:0 7:0");
    // Keep 2, drop 2..7, move the rest down by 5: what the window needs is there.
    f.remove(S0, range(2, 7));
    let shifted = f.shift(from(7), -5).unwrap();
    assert_eq!(f.draw(), "3:0 4:0 5:0 6:0 . . . 2:0");
    assert_eq!(shifts(&shifted), [(7, 1, -5), (0, 4, -5)]);
    f.decode(&[S0], 1);
    assert_eq!(f.memory.positions(S0).unwrap().last, Pos(7));
}

#[test]
fn what_is_forgotten_moves_too() {
    let mut f = Fixture::new(8, Window::Sliding(4), Streams::Shared);
    (0..12).for_each(|_| {
        f.decode(&[S0], 1);
    });
    let ranges = |f: &Fixture| {
        let mut ranges = f.memory.token_ranges(S0);
        ranges.sort_by_key(|range| range.first);
        ranges
    };
    let wanted = [range(0, 4), range(4, 8), range(8, 12)];
    assert_eq!(ranges(&f), wanted);
    // It is in the way like everything else.
    let refused = f.shift(range(0, 2), 1).unwrap_err();
    assert!(
        matches!(refused, Refusal::Overtakes { other: Pos(2), .. }),
        "{refused}"
    );
    let shifted = f.shift(PosRange::ALL, 10).unwrap();
    assert_eq!(shifted.n_tokens, 8);
    assert_eq!(
        ranges(&f),
        wanted.map(|r| range(r.first.0 + 10, r.last.0 + 11))
    );
}

#[test]
fn positions_without_tokens_move_anywhere() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 4);
    for delta in [-9, -1, 1, 9] {
        assert_eq!(f.shift(range(5, 8), delta), Ok(Edited::default()));
    }
    assert_eq!(f.divide(range(5, 8), 2), Ok(Edited::default()));
}

#[test]
fn a_move_that_would_show_what_is_forgotten_is_refused() {
    let mut f = Fixture::new(4, Window::Sliding(4), Streams::Shared);
    (0..9).for_each(|_| {
        f.decode(&[S0], 1);
    });
    assert_eq!(f.draw(), "8:0 5:0 6:0 7:0");
    // Halved, the next token at 5 would see 2 and 3, which tokens 4 and 5 … 7 share.
    let refused = WindowForgotten {
        seq: S0,
        window: Window::Sliding(4),
        next: Pos(5),
        needed_from: Pos(2),
        forgotten: range(0, 3),
    };
    assert_eq!(f.divide(PosRange::ALL, 2), Err(refused.into()));
    // What is forgotten keeps its place in the order, too.
    let refused = f.shift(from(5), -3).unwrap_err();
    assert!(matches!(refused, Refusal::Overtakes { other: Pos(4), .. }));
    f.remove(S0, range(2, 5));
    assert_eq!(f.shift(from(5), -3).unwrap().n_tokens, 4);
}

#[test]
fn a_step_after_a_division_can_be_undone_though_the_last_position_is_forgotten_in_part() {
    let mut f = Fixture::new(4, Window::Sliding(1), Streams::Shared);
    f.decode(&[S0], 4).decode(&[S0], 3).decode(&[S0], 1);
    f.remove(S0, from(5));
    assert_eq!(f.draw(), "4:0 . . .");
    // 3, which is recycled, and 4 share a position then.
    let division = Division {
        by: 2,
        origin: Pos(3),
    };
    let _ = f
        .change(PosRange::ALL, PosChange::Divide(division))
        .unwrap();
    assert_eq!(f.draw(), "3:0 . . .");
    let before = f.memory.clone();
    let batch = Batch::prompt(S0, (0..2).map(TokenId));
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: 3,
        n_vocab: 2,
        n_embd: 1,
    };
    let batch = validate(&batch, &rules, |seq| f.memory.positions(seq)).unwrap();
    let plan = f.memory.plan(&batch, 64).unwrap();
    let undo = f.memory.commit(&plan[0]);
    assert_eq!(f.memory.check_rollback(&undo, RowsWritten::Perhaps), Ok(()));
    f.memory.rollback(undo, RowsWritten::Perhaps);
    assert_eq!(f.memory, before);
}

#[test]
fn a_stream_moves_alone() {
    let mut f = Fixture::new(4, Window::Full, Streams::PerSequence);
    f.decode(&[S1], 2).decode(&[S0], 2);
    let shifted = f.memory.shift(S1, from(1), PosDelta(6)).unwrap();
    assert_eq!(f.draw(), "0:0 1:0 . . 0:1 7:1 . . . . . .");
    assert_eq!(shifts(&shifted), [(5, 1, 6)]);
}

#[test]
fn d16_compaction_moves_the_last_cells_into_the_holes() {
    let mut f = Fixture::shared(10);
    f.decode(&[S0], 4).decode(&[S1], 2).decode(&[S0], 3);
    f.remove(S0, range(1, 4));
    assert_eq!(f.draw(), "0:0 . . . 0:1 1:1 4:0 5:0 6:0 .");
    assert_eq!(f.memory.n_holes(), 3);
    let compacted = f.memory.compact().unwrap();
    invariants::check(&f.memory).unwrap();
    assert_eq!(f.draw(), "0:0 4:0 5:0 6:0 0:1 1:1 . . . .");
    assert_eq!((compacted.n_cells, f.memory.n_holes()), (3, 0));
    assert_eq!(compacted.row_copies, [row_copy(6, 1, 3)]);
    assert_eq!(f.memory.compact().unwrap().row_copies, []);
    f.decode(&[S1], 1);
    assert_eq!(f.draw(), "0:0 4:0 5:0 6:0 0:1 1:1 2:1 . . .");
}

#[test]
fn d16_compaction_puts_sequences_one_after_the_other() {
    let mut f = Fixture::shared(8);
    f.decode(&[S1], 4).decode(&[S0], 2);
    f.remove(S1, range(0, 2)).decode(&[S0], 4);
    assert_eq!(f.draw(), "4:0 5:0 2:1 3:1 0:0 1:0 2:0 3:0");
    f.remove(S0, range(2, 4));
    let mut copies = Vec::new();
    while f.memory.n_holes() > 0 {
        copies.push(f.memory.compact().unwrap().row_copies);
        invariants::check(&f.memory).unwrap();
    }
    // No pass writes what is used: the first one makes room.
    let passes = [
        row_copy(0, 6, 2),
        row_copy(4, 0, 2),
        row_copy(2, 4, 2),
        row_copy(6, 2, 2),
    ];
    assert_eq!(copies, passes.map(|copy| vec![copy]));
    assert_eq!(f.draw(), "0:0 1:0 4:0 5:0 2:1 3:1 . .");
}

#[test]
fn compaction_gives_sequences_that_grew_together_a_run_each() {
    let mut f = Fixture::shared(64);
    for _ in 0..12 {
        f.decode(&[S0], 1).decode(&[S1], 1).decode(&[S2], 1);
    }
    let n_runs = |f: &Fixture| [S0, S1, S2].map(|seq| f.memory.runs(seq).len());
    // Blocks of four cells.
    assert_eq!(n_runs(&f), [3, 3, 3]);
    while f.memory.n_holes() > 0 {
        let pass = f.memory.compact().unwrap();
        assert!(pass.n_cells > 0);
        invariants::check(&f.memory).unwrap();
    }
    assert_eq!(n_runs(&f), [1, 1, 1]);
}

#[test]
fn compaction_leaves_sequences_in_the_order_that_they_have() {
    let mut f = Fixture::shared(8);
    f.decode(&[S1], 3).decode(&[S0], 2);
    let drawn = "0:1 1:1 2:1 0:0 1:0 . . .";
    assert_eq!((f.draw().as_str(), f.memory.n_holes()), (drawn, 0));
    assert_eq!(f.memory.compact().unwrap(), Edited::default());
    assert_eq!(f.draw(), drawn);
}

#[test]
fn compaction_of_an_almost_full_memory_moves_the_last_tokens_alone() {
    let mut f = Fixture::shared(130);
    f.decode(&[S1], 60).decode(&[S0], 60).decode(&[S1], 10);
    f.remove(S1, range(5, 6));
    assert_eq!(f.memory.n_holes(), 1);
    let compacted = f.memory.compact().unwrap();
    assert_eq!(compacted.row_copies, [row_copy(129, 5, 1)]);
    assert_eq!(f.memory.n_holes(), 0);
    invariants::check(&f.memory).unwrap();
}

#[test]
fn compaction_of_a_full_memory_changes_nothing() {
    let mut f = Fixture::shared(8);
    f.decode(&[S0], 1).decode(&[S1], 1).decode(&[S0], 6);
    let before = f.memory.clone();
    assert_eq!(f.memory.n_holes(), 0);
    assert_eq!(f.memory.compact().unwrap().row_copies, []);
    assert_eq!(f.memory, before);
}
