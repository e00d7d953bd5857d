//! Snapshots that no memory could hold are refused, one test for each reason; sequences without
//! tokens come back as such.

#![allow(clippy::unwrap_used)] // a test

use kv_core::batch::{Batch, BatchRules, MAX_POS, validate};
use kv_core::cells::Cell;
use kv_core::memory::{
    CellRecord, Composite, KeptState, Memory, MemoryInputs, NeededFor, NoRoom, PartSnapshot,
    Refusal, RestoreInto, RowWrite, Seqs, Snapshot, SnapshotError, StateHistory, Streams,
    TargetRows, UnifiedConfig, WindowForgotten,
};
use kv_core::{
    Causality, CellIdx, PartIdx, Pos, PosRange, SeqId, SeqSet, StreamIdx, TokenId, Window,
};

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);

fn cell(row: u32, pos: u32, seqs: &[u32]) -> CellRecord {
    let seqs: SeqSet = seqs.iter().copied().map(SeqId).collect();
    CellRecord {
        row: CellIdx(row),
        cell: Cell::new(Pos(pos), seqs),
    }
}

/// A part with a window of 4 in which sequence A is at positions 2 and 3.
fn part() -> PartSnapshot {
    PartSnapshot {
        part: PartIdx(0),
        window: Window::Sliding(4),
        cells: vec![cell(0, 2, &[0]), cell(1, 3, &[0])],
        forgotten: Vec::new(),
    }
}

fn forgotten(seq: u32, ranges: &[(u32, u32)]) -> (SeqId, Vec<PosRange>) {
    let range = |&(first, last): &(u32, u32)| PosRange::new(Pos(first), Pos(last));
    (SeqId(seq), ranges.iter().map(range).collect())
}

/// States after positions 2 and 3 of sequence A.
fn states() -> StateHistory {
    let state = |(row, pos): (u32, u32)| KeptState {
        row: CellIdx(row),
        pos: Pos(pos),
        n_tokens: pos + 1,
    };
    StateHistory {
        seq: A,
        first: Pos(0),
        states: [(0, 2), (1, 3)].map(state).to_vec(),
    }
}

#[track_caller]
fn part_is_refused(change: impl FnOnce(&mut PartSnapshot)) -> SnapshotError {
    let mut changed = part();
    change(&mut changed);
    Snapshot::new(vec![changed], None).unwrap_err()
}

#[track_caller]
fn states_are_refused(change: impl FnOnce(&mut StateHistory)) -> SnapshotError {
    let mut changed = states();
    change(&mut changed);
    Snapshot::new(Vec::new(), Some(vec![changed])).unwrap_err()
}

fn twice(what: &'static str, number: u32) -> SnapshotError {
    SnapshotError::Twice { what, number }
}

#[test]
fn what_a_memory_could_hold_is_taken() {
    let mut with_forgotten = part();
    // The next token, at 4, sees 1 and later ones.
    with_forgotten.forgotten = vec![forgotten(0, &[(0, 0)])];
    let snapshot = Snapshot::new(vec![with_forgotten], Some(vec![states()])).unwrap();
    assert_eq!(snapshot.seqs(), SeqSet::one(A));
    assert_eq!(snapshot.positions(A), Some(PosRange::new(Pos(2), Pos(3))));
}

#[test]
fn the_largest_position_is_taken() {
    let mut last = part();
    last.cells = vec![cell(0, MAX_POS.0 - 1, &[0]), cell(1, MAX_POS.0, &[0])];
    assert!(Snapshot::new(vec![last], None).is_ok());
}

#[test]
fn parts_rows_and_sequences_are_there_once() {
    let parts = Snapshot::new(vec![part(), part()], None).unwrap_err();
    assert_eq!(parts, twice("part", 0));
    let rows = part_is_refused(|part| part.cells[1].row = CellIdx(0));
    assert_eq!(rows, twice("row", 0));
    let lists = part_is_refused(|part| part.forgotten = vec![forgotten(0, &[]); 2]);
    assert_eq!(lists, twice("sequence", 0));
    let histories = Snapshot::new(Vec::new(), Some(vec![states(); 2])).unwrap_err();
    assert_eq!(histories, twice("sequence", 0));
    let states = states_are_refused(|states| states.states[1].row = CellIdx(0));
    assert_eq!(states, twice("state row", 0));
}

#[test]
fn sequences_that_cannot_be_are_refused() {
    let seq = SeqId(4096);
    let wanted = SnapshotError::Seq { seq };
    let part = part_is_refused(|part| part.forgotten = vec![forgotten(4096, &[])]);
    assert_eq!(part, wanted);
    assert_eq!(states_are_refused(|states| states.seq = seq), wanted);
}

#[test]
fn a_token_belongs_to_a_sequence() {
    let error = part_is_refused(|part| part.cells[1] = cell(1, 3, &[]));
    let (part, row) = (PartIdx(0), CellIdx(1));
    assert_eq!(error, SnapshotError::NoSequence { part, row });
}

#[test]
fn positions_that_cannot_be_are_refused() {
    let pos = MAX_POS.next();
    let wanted = SnapshotError::Position { pos };
    let cell = part_is_refused(|part| part.cells[1].cell.pos = pos);
    assert_eq!(cell, wanted);
    let recycled = part_is_refused(|part| part.forgotten = vec![forgotten(0, &[(0, pos.0)])]);
    assert_eq!(recycled, wanted);
    assert_eq!(
        states_are_refused(|states| states.states[1].pos = pos),
        wanted
    );
}

#[test]
fn forgotten_ranges_are_in_order() {
    let wanted = SnapshotError::Ranges { seq: A };
    for ranges in [
        &[(1, 0)][..],
        &[(0, 0), (0, 0)],
        // Two that touch are one.
        &[(0, 0), (1, 1)],
        &[(5, 5), (0, 0)],
    ] {
        let error = part_is_refused(|part| part.forgotten = vec![forgotten(0, ranges)]);
        assert_eq!(error, wanted, "{ranges:?}");
    }
}

#[test]
fn states_follow_one_another() {
    let wanted = SnapshotError::Chain { seq: A };
    let changes: [fn(&mut StateHistory); 5] = [
        |states| states.states.clear(),
        |states| states.states[1].n_tokens = 3,
        |states| states.states[1].n_tokens = 5,
        |states| states.states[1].pos = Pos(1),
        |states| {
            states.states.truncate(1);
            states.states[0].n_tokens = 0;
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        assert_eq!(states_are_refused(change), wanted, "{number}");
    }
    let first = states_are_refused(|states| states.first = Pos(3));
    assert_eq!(first, wanted);
}

#[test]
fn a_sequence_ends_at_one_position_everywhere() {
    let mut shorter = part();
    shorter.part = PartIdx(1);
    shorter.cells.pop();
    let error = Snapshot::new(vec![part(), shorter], None).unwrap_err();
    let ends = (Some(Pos(3)), Some(Pos(2)));
    assert_eq!(error, SnapshotError::Ends { seq: A, ends });
    let mut other = states();
    other.seq = B;
    let error = Snapshot::new(vec![part()], Some(vec![other])).unwrap_err();
    let ends = (Some(Pos(3)), None);
    assert_eq!(error, SnapshotError::Ends { seq: A, ends });
    assert_eq!(
        error.to_string(),
        "sequence 0 ends at 3 in one place and at no position in another"
    );
}

#[test]
fn the_next_token_misses_nothing() {
    // The newest of what is forgotten counts.
    let newer = |part: &mut PartSnapshot| part.forgotten = vec![forgotten(0, &[(0, 0), (2, 2)])];
    let error = part_is_refused(newer);
    assert!(
        matches!(error, SnapshotError::WindowForgotten(_)),
        "{error}"
    );
    let error = part_is_refused(|part| part.forgotten = vec![forgotten(0, &[(0, 1)])]);
    let SnapshotError::WindowForgotten(WindowForgotten {
        seq,
        needed_from,
        forgotten: lost,
        ..
    }) = error
    else {
        panic!("{error}");
    };
    assert_eq!((seq, needed_from), (A, Pos(1)));
    assert_eq!(lost, PosRange::new(Pos(0), Pos(1)));
    // Nor can a sequence be forgotten whole.
    let error = part_is_refused(|part| part.forgotten = vec![forgotten(1, &[(0, 0)])]);
    assert!(
        matches!(error, SnapshotError::WindowForgotten(_)),
        "{error}"
    );
}

fn config() -> UnifiedConfig {
    UnifiedConfig {
        part: PartIdx(0),
        n_seqs: 3,
        n_cells: 16,
        streams: Streams::Shared,
        window: Window::Full,
        causality: Causality::Causal,
    }
}

fn memory() -> Composite {
    Composite::unified(config()).unwrap()
}

fn feed(memory: &mut Composite, seq: SeqId) {
    let rules = BatchRules {
        n_batch: 8,
        n_seqs: 3,
        n_vocab: 10,
        n_embd: 1,
    };
    let batch = Batch::prompt(seq, (0..4).map(TokenId));
    let batch = validate(&batch, &rules, |seq| memory.positions(seq)).unwrap();
    let mut steps = memory.begin(&batch, 8).unwrap();
    while steps.next(&mut MemoryInputs::default()).is_some() {}
}

#[test]
fn a_sequence_without_tokens_is_saved_and_restored_as_such() {
    let (mut saved, mut target) = (memory(), memory());
    feed(&mut saved, A);
    feed(&mut target, A);
    feed(&mut target, B);
    for seqs in [Seqs::One(B), Seqs::All] {
        let snapshot = saved.snapshot(seqs).unwrap();
        assert!(snapshot.empty_seqs().contains(B));
        let mut memory = target.clone();
        let restored = memory.restore(&snapshot, RestoreInto::One { from: B, to: A });
        assert_eq!(restored.unwrap().n_tokens, 0);
        assert_eq!((memory.positions(A), memory.n_tokens(B)), (None, 4));
    }
    // What was not saved is not empty.
    let snapshot = saved.snapshot(Seqs::One(B)).unwrap();
    let into = RestoreInto::One { from: A, to: A };
    let error = target.restore(&snapshot, into).unwrap_err();
    assert!(matches!(error, Refusal::NotSaved { seq: A, .. }), "{error}");
}

fn with_window(n_cells: u32) -> Composite {
    let window = Window::Sliding(2);
    Composite::unified(UnifiedConfig {
        n_cells,
        window,
        ..config()
    })
    .unwrap()
}

#[test]
fn hidden_tokens_come_back_where_there_is_room() {
    let mut saved = with_window(4);
    feed(&mut saved, A);
    let snapshot = saved.snapshot(Seqs::All).unwrap();
    let range = |first, last| PosRange::new(Pos(first), Pos(last));
    let (part, from, to) = (PartIdx(0), CellIdx(0), CellIdx(0));
    let write = |from, len| RowWrite {
        part,
        from,
        to,
        len,
    };
    let mut memory = with_window(4);
    let restored = memory.restore(&snapshot, RestoreInto::All).unwrap();
    assert_eq!(
        (restored.n_tokens, memory.token_ranges(A)),
        (4, vec![range(0, 3)])
    );
    assert_eq!(restored.row_writes, [write(from, 4)]);
    assert_eq!(restored.rows_taken, TargetRows::Free);
    // All cells are those of the sequence that is replaced.
    let again = memory.restore(&snapshot, RestoreInto::All).unwrap();
    assert_eq!(
        (again.row_writes, again.rows_taken),
        (restored.row_writes, TargetRows::InUse)
    );
    // The next token sees positions 2 and 3 alone.
    let mut small = with_window(3);
    let restored = small.restore(&snapshot, RestoreInto::All).unwrap();
    assert_eq!(restored.row_writes, [write(CellIdx(2), 2)]);
    let ranges = vec![range(2, 3), range(0, 1)];
    assert_eq!(
        (restored.n_tokens, small.token_ranges(A)),
        (2, ranges.clone())
    );
    // What was forgotten stays so.
    let snapshot = small.snapshot(Seqs::All).unwrap();
    let restored = memory.restore(&snapshot, RestoreInto::All).unwrap();
    assert_eq!((restored.n_tokens, memory.token_ranges(A)), (2, ranges));
}

#[test]
fn saved_tokens_without_room_are_refused_with_numbers() {
    let mut saved = memory();
    feed(&mut saved, A);
    let snapshot = saved.snapshot(Seqs::All).unwrap();
    let mut small = Composite::unified(UnifiedConfig {
        n_cells: 3,
        ..config()
    })
    .unwrap();
    let expected = NoRoom {
        needed_for: NeededFor::Restore,
        part: PartIdx(0),
        stream: StreamIdx(0),
        window: Window::Full,
        n_wanted: 4,
        n_free: 3,
        n_recyclable: 0,
        n_cells: 3,
        n_free_elsewhere: 0,
    };
    let refused = small.restore(&snapshot, RestoreInto::All);
    assert_eq!(refused, Err(Refusal::NoRoom(expected)));
}

#[test]
fn sequences_that_the_memory_does_not_have_are_refused() {
    let mut saved = memory();
    feed(&mut saved, SeqId(2));
    let snapshot = saved.snapshot(Seqs::All).unwrap();
    let mut smaller = Composite::unified(UnifiedConfig {
        n_seqs: 2,
        ..config()
    })
    .unwrap();
    let (seq, n_seqs) = (SeqId(2), 2);
    let refused = Refusal::NoSuchSequence { seq, n_seqs };
    assert_eq!(
        smaller.restore(&snapshot, RestoreInto::All),
        Err(refused.clone())
    );
    let into = RestoreInto::One { from: seq, to: seq };
    assert_eq!(smaller.restore(&snapshot, into), Err(refused));
}

#[test]
fn a_memory_of_another_kind_refuses_a_snapshot_and_stays_as_it_is() {
    let mut saved = memory();
    feed(&mut saved, A);
    let snapshot = saved.snapshot(Seqs::All).unwrap();
    let refused = |change: &dyn Fn(&mut UnifiedConfig)| {
        let mut config = config();
        change(&mut config);
        let mut memory = Composite::unified(config).unwrap();
        feed(&mut memory, B);
        let before = memory.clone();
        let error = memory.restore(&snapshot, RestoreInto::All).unwrap_err();
        assert_eq!(memory, before);
        error
    };
    let part = PartIdx(1);
    let window = Window::Full;
    let error = refused(&|config| config.part = part);
    assert_eq!(error, Refusal::NoPart { part, window });
    let (part, here) = (PartIdx(0), Window::Sliding(8));
    let error = refused(&|config| config.window = here);
    let saved = Window::Full;
    assert_eq!(error, Refusal::OtherWindow { part, saved, here });
}

/// What is kept of cells costs memory once they are used.
#[test]
fn a_billion_cells_cost_little_before_they_are_used() {
    let mut config = *memory().parts()[0].config();
    config.n_cells = 1 << 30;
    let mut memory = Composite::unified(config).unwrap();
    feed(&mut memory, A);
    let bytes = memory.parts()[0].bookkeeping_bytes();
    assert!(bytes < 160 << 20, "{bytes}");
    assert!(memory.compact().unwrap().row_copies.is_empty());
}
