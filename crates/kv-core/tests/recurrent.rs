//! Worked examples of the recurrent memory: which rows are read and stored, what is shared, how far
//! sequences go back, and what is refused.

#![allow(clippy::unwrap_used)] // a test

use std::collections::BTreeSet;

use kv_core::batch::{Batch, BatchRules, MAX_POS, validate};
use kv_core::memory::{
    Division, Memory, MemoryConfigError, MemoryInputs, NeededFor, NoStateRoom, Recurrent,
    RecurrentConfig, Refusal, RestoreInto, RowsWritten, Seqs, TargetRows,
};
use kv_core::{Pos, PosDelta, PosRange, SeqId, TokenId};

use crate::support::next_tokens;

struct Fixture {
    memory: Recurrent,
    inputs: MemoryInputs,
}

impl Fixture {
    fn new(config: RecurrentConfig) -> Self {
        Self {
            memory: Recurrent::new(config).unwrap(),
            inputs: MemoryInputs::default(),
        }
    }

    fn with_snapshots(n: u32) -> Self {
        Self::new(RecurrentConfig::new(4).with_snapshots(n))
    }

    /// Evaluates the next tokens and draws what each ubatch reads and stores.
    fn decode(&mut self, sets: &[(&[u32], u32)]) -> Result<String, Refusal> {
        self.decode_by(sets, 512)
    }

    fn decode_by(&mut self, sets: &[(&[u32], u32)], n_ubatch: u32) -> Result<String, Refusal> {
        let batch = next_tokens(&self.memory, sets);
        let mut ubatches = Vec::new();
        let mut steps = self.memory.begin(&batch, n_ubatch)?;
        while steps.next(&mut self.inputs).is_some() {
            ubatches.push(draw(&self.inputs));
        }
        Ok(ubatches.join(" | "))
    }

    /// Begins to evaluate the next tokens and fails at the first ubatch.
    fn fail(&mut self, sets: &[(&[u32], u32)]) {
        let batch = next_tokens(&self.memory, sets);
        let mut steps = self.memory.begin(&batch, 512).unwrap();
        steps.next(&mut self.inputs).unwrap();
        steps.undo_last(RowsWritten::Perhaps);
    }

    fn remove(&mut self, seq: u32, range: impl Into<PosRange>) -> Result<(u32, u32), Refusal> {
        let removed = self.memory.remove(Seqs::One(SeqId(seq)), range.into())?;
        Ok((removed.n_tokens, removed.n_cells))
    }

    /// Why a removal is refused; it must change nothing then.
    fn refusal(&mut self, seq: u32, range: impl Into<PosRange>) -> String {
        let before = self.memory.clone();
        let refused = self.remove(seq, range).unwrap_err();
        assert_eq!(self.memory, before);
        refused.to_string()
    }

    fn copy(&mut self, from: u32, to: u32, range: impl Into<PosRange>) -> Result<u32, Refusal> {
        let copied = self.memory.copy(SeqId(from), SeqId(to), range.into())?;
        assert!(copied.row_copies.is_empty());
        Ok(copied.n_tokens)
    }

    fn has(&self, seq: u32) -> Option<(u32, u32)> {
        let has = self.memory.positions(SeqId(seq))?;
        Some((has.first.0, has.last.0))
    }

    /// `position@row` of the states that a sequence can be at, oldest first.
    fn states(&self, seq: u32) -> String {
        let states = self.memory.states(SeqId(seq)).iter();
        let states: Vec<_> = states.map(|s| format!("{}@{}", s.pos, s.row)).collect();
        states.join(" ")
    }
}

/// `rows: source -> n_rows@row`, for each group.
fn draw(inputs: &MemoryInputs) -> String {
    let groups = inputs.states.iter().map(|group| {
        let stores: Vec<_> = group
            .stores
            .iter()
            .map(|s| format!("{}@{}", s.n_rows, s.to))
            .collect();
        let source = group
            .source
            .map_or("zeros".to_owned(), |row| row.to_string());
        let (first, n) = (group.rows[0], group.rows.len());
        format!("{first}+{n}: {source} -> {}", stores.join(" "))
    });
    groups.collect::<Vec<_>>().join("; ")
}

#[test]
fn r5_removals_of_a_sequence_without_snapshots() {
    let mut f = Fixture::with_snapshots(0);
    f.decode(&[(&[0], 10)]).unwrap();
    assert_eq!(f.remove(0, Pos(10)..).unwrap(), (0, 0));
    let gone = "sequence 0 is at position 9 and cannot go back to 4: the oldest state that is kept \
                is that after 9 (0 snapshots)";
    assert_eq!(f.refusal(0, Pos(5)..), gone);
    assert!(f.refusal(0, Pos(9)..).contains("cannot go back to 8"));
    let whole = f.memory.clone();
    assert_eq!(f.remove(0, Pos(0)..Pos(10)).unwrap(), (10, 1));
    assert_eq!(f.has(0), None);
    f.memory = whole;
    assert_eq!(f.remove(0, PosRange::ALL).unwrap(), (10, 1));
    assert_eq!(f.remove(0, PosRange::ALL).unwrap(), (0, 0));
    let none = f.memory.remove(Seqs::One(SeqId(4)), PosRange::ALL);
    assert_eq!(
        none.unwrap_err().to_string(),
        "there is no sequence 4: the memory holds 4, counted from 0"
    );
}

#[test]
fn d29_a_range_in_the_past_is_refused_not_faked() {
    let mut f = Fixture::with_snapshots(3);
    f.decode(&[(&[0], 10)]).unwrap();
    assert_eq!(
        f.refusal(0, Pos(0)..Pos(5)),
        "sequence 0 is one state of the tokens at 0..=9: 0..=4 cannot be taken out of it or \
         replaced"
    );
    assert!(f.refusal(0, Pos(2)..Pos(4)).contains("one state"));
    assert!(f.refusal(0, Pos(8)..Pos(9)).contains("one state"));
}

#[test]
fn r13_r16_going_back_to_each_snapshot_once_and_again() {
    let mut f = Fixture::with_snapshots(3);
    assert_eq!(
        f.decode(&[(&[0], 5)]).unwrap(),
        "0+5: zeros -> 2@0 3@1 4@2 5@3"
    );
    assert_eq!(f.states(0), "1@0 2@1 3@2 4@3");
    assert!(
        f.refusal(0, Pos(1)..)
            .contains("the oldest state that is kept is that after 1")
    );
    assert_eq!(f.remove(0, Pos(3)..).unwrap(), (2, 2));
    assert_eq!(f.states(0), "1@0 2@1");
    // Not single use: what is still kept can still be gone back to.
    assert_eq!(f.remove(0, Pos(2)..).unwrap(), (1, 1));
    assert_eq!(f.has(0), Some((0, 1)));
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), "0+1: 0 -> 1@1");
    assert_eq!(f.states(0), "1@0 2@1");
    assert_eq!(f.remove(0, Pos(0)..).unwrap(), (3, 2));
}

#[test]
fn r12_snapshots_reach_over_several_ubatches() {
    let mut f = Fixture::with_snapshots(3);
    f.decode(&[(&[0], 3)]).unwrap();
    f.decode(&[(&[0], 1)]).unwrap();
    f.decode(&[(&[0], 1)]).unwrap();
    assert_eq!(f.states(0), "1@1 2@2 3@3 4@4");
    assert_eq!(f.remove(0, Pos(2)..).unwrap(), (3, 3));
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), "0+1: 1 -> 1@0");
}

#[test]
fn r6_r24_a_shared_state_is_read_by_all_and_written_by_none() {
    let mut f = Fixture::with_snapshots(0);
    // A: sequences 0 and 1 are new. B: one token of 1.
    assert_eq!(
        f.decode(&[(&[0], 2), (&[1], 2)]).unwrap(),
        "0+2: zeros -> 2@0; 2+2: zeros -> 2@1"
    );
    assert_eq!(f.decode(&[(&[1], 1)]).unwrap(), "0+1: 1 -> 1@2");
    // C: 2 becomes a copy of 0. D: one token of each.
    assert_eq!(f.copy(0, 2, PosRange::ALL).unwrap(), 2);
    assert_eq!((f.states(0), f.states(2)), ("1@0".into(), "1@0".into()));
    assert_eq!(
        f.decode(&[(&[0], 1), (&[1], 1), (&[2], 1)]).unwrap(),
        "0+1: 0 -> 1@1; 1+1: 2 -> 1@3; 2+1: 0 -> 1@4"
    );
    // E: one token of 0 and 2; 1 is not touched.
    assert_eq!(
        f.decode(&[(&[0], 1), (&[2], 1)]).unwrap(),
        "0+1: 1 -> 1@0; 1+1: 4 -> 1@2"
    );
    assert_eq!(f.states(1), "3@3");
    // F: 0 goes. G: 3 is new.
    assert_eq!(f.remove(0, PosRange::ALL).unwrap(), (4, 1));
    assert_eq!(f.decode(&[(&[3], 5)]).unwrap(), "0+5: zeros -> 5@0");
    assert_eq!(f.memory.n_used(), 3);
}

#[test]
fn sequences_that_do_not_exist_are_refused() {
    let mut f = Fixture::with_snapshots(0);
    let (seq, n_seqs) = (SeqId(4), 4);
    let refused = Refusal::NoSuchSequence { seq, n_seqs };
    assert_eq!(f.copy(4, 0, PosRange::ALL), Err(refused.clone()));
    assert_eq!(f.copy(0, 4, PosRange::ALL), Err(refused.clone()));
    assert_eq!(f.memory.snapshot(Seqs::One(seq)), Err(refused.clone()));
    let shifted = f.memory.shift(seq, PosRange::ALL, PosDelta(1));
    assert_eq!(shifted, Err(refused.clone()));
    let rules = BatchRules {
        n_batch: 8,
        n_seqs: 5,
        n_vocab: 1,
        n_embd: 1,
    };
    let batch = Batch::prompt(seq, [TokenId(0)]);
    let batch = validate(&batch, &rules, |_| None).unwrap();
    assert_eq!(f.memory.begin(&batch, 8).map(drop).unwrap_err(), refused);
}

#[test]
fn a_copy_onto_itself_changes_nothing() {
    let mut f = Fixture::with_snapshots(1);
    f.decode(&[(&[0], 3)]).unwrap();
    let before = f.memory.clone();
    assert_eq!(f.copy(0, 0, Pos(1)..Pos(2)), Ok(0));
    assert_eq!(f.copy(0, 1, PosRange::EMPTY), Ok(0));
    assert_eq!(f.memory, before);
}

#[test]
fn a_copy_of_a_beginning_whose_state_is_gone_is_refused_with_numbers() {
    let mut f = Fixture::with_snapshots(2);
    f.decode(&[(&[0], 8)]).unwrap();
    let refused = f.copy(0, 1, ..Pos(3));
    let expected = Refusal::StateGone {
        seq: SeqId(0),
        last: Pos(7),
        wanted: Pos(2),
        oldest: Pos(5),
        n_snapshots: 2,
    };
    assert_eq!(refused, Err(expected));
}

#[test]
fn states_move_from_the_first_position_to_the_last() {
    let mut f = Fixture::with_snapshots(0);
    f.decode(&[(&[0], 3)]).unwrap();
    let seq = SeqId(0);
    let before = f.memory.clone();
    let nothing = f
        .memory
        .shift(seq, PosRange::from(Pos(5)..), PosDelta(1))
        .unwrap();
    assert_eq!((nothing.n_tokens, &f.memory), (0, &before));
    let by_zero = f.memory.divide(seq, PosRange::ALL, Division::by(0));
    assert_eq!(by_zero, Err(Refusal::DivideByZero { seq }));
    let to_the_end = (MAX_POS.0 - 2) as i32;
    let there = f.memory.shift(seq, PosRange::ALL, PosDelta(to_the_end));
    assert_eq!(there.unwrap().n_tokens, 3);
    let further = f.memory.shift(seq, PosRange::ALL, PosDelta(1));
    assert!(matches!(further, Err(Refusal::OutOfRange { .. })));
    let back = f.memory.shift(seq, PosRange::ALL, PosDelta(-to_the_end));
    assert_eq!(back.unwrap().n_tokens, 3);
    assert_eq!(f.memory, before);
}

#[test]
fn memories_differ_by_configuration_and_states() {
    let largest = Recurrent::new(RecurrentConfig::new(4096)).unwrap();
    assert_eq!(largest.config().n_seqs(), 4096);
    let mut f = Fixture::with_snapshots(1);
    let empty = f.memory.clone();
    assert_eq!(empty, Fixture::with_snapshots(1).memory);
    assert_ne!(empty, Fixture::with_snapshots(2).memory);
    f.decode(&[(&[0], 1)]).unwrap();
    assert_ne!(f.memory, empty);
}

#[test]
fn saved_states_take_free_rows_first() {
    let config = RecurrentConfig::new(2).with_rows(3);
    let mut f = Fixture::new(config);
    f.decode(&[(&[0], 3), (&[1], 2)]).unwrap();
    let saved = f.memory.snapshot(Seqs::All).unwrap();
    let restore = |f: &mut Fixture, to| {
        let from = SeqId(0);
        f.memory
            .restore(&saved, RestoreInto::One { from, to })
            .unwrap()
    };
    // One row is free.
    let restored = restore(&mut f, SeqId(1));
    assert_eq!(
        (restored.n_tokens, restored.rows_taken),
        (3, TargetRows::Free)
    );
    let to: Vec<u32> = restored
        .state_writes
        .iter()
        .map(|write| write.to.0)
        .collect();
    assert_eq!(to, [2]);
    assert_eq!((f.has(0), f.has(1)), (Some((0, 2)), Some((0, 2))));
    // Two are needed, and one is free until what is there is replaced.
    let restored = f.memory.restore(&saved, RestoreInto::All).unwrap();
    assert_eq!(
        (restored.n_tokens, restored.rows_taken),
        (5, TargetRows::InUse)
    );
    let rows: BTreeSet<u32> = restored
        .state_writes
        .iter()
        .map(|write| write.to.0)
        .collect();
    assert_eq!(rows.len(), 2);
    assert_eq!((f.has(0), f.has(1)), (Some((0, 2)), Some((0, 1))));
}

#[test]
fn a_step_whose_state_a_restore_overwrote_cannot_be_undone() {
    let mut f = Fixture::new(RecurrentConfig::new(2));
    f.decode(&[(&[1], 2)]).unwrap();
    let seq = SeqId(1);
    let saved = f.memory.snapshot(Seqs::One(seq)).unwrap();
    f.remove(1, PosRange::ALL).unwrap();
    f.decode(&[(&[0], 1)]).unwrap();
    let plan = f
        .memory
        .plan(&next_tokens(&f.memory, &[(&[0], 1)]), 8)
        .unwrap();
    let undo: Vec<_> = plan.iter().map(|step| f.memory.commit(step)).collect();
    let check = |f: &Fixture| f.memory.check_rollback(&undo[0], RowsWritten::Perhaps);
    assert_eq!(check(&f), Ok(()));
    let restored = f
        .memory
        .restore(&saved, RestoreInto::One { from: seq, to: seq });
    assert_eq!(restored.unwrap().n_tokens, 2);
    let refused = check(&f).unwrap_err();
    assert!(
        matches!(refused, Refusal::StateOverwritten { seq: SeqId(0), .. }),
        "{refused}"
    );
}

#[test]
fn saved_states_without_room_are_refused_with_numbers() {
    let mut saved = Fixture::with_snapshots(3);
    saved.decode(&[(&[0], 4)]).unwrap();
    let saved = saved.memory.snapshot(Seqs::All).unwrap();
    let mut f = Fixture::new(RecurrentConfig::new(4).with_snapshots(3).with_rows(5));
    f.decode(&[(&[1], 4)]).unwrap();
    let seq = SeqId(0);
    let before = f.memory.clone();
    let refused = f
        .memory
        .restore(&saved, RestoreInto::One { from: seq, to: seq });
    let expected = NoStateRoom {
        needed_for: NeededFor::Restore,
        n_wanted: 4,
        n_free: 1,
        n_rows: 5,
    };
    assert_eq!(refused, Err(Refusal::NoStateRoom(expected)));
    assert_eq!(f.memory, before);
    let restored = f.memory.restore(&saved, RestoreInto::All).unwrap();
    assert_eq!((restored.n_tokens, restored.state_writes.len()), (4, 4));
}

#[test]
fn r7_keeping_one_sequence_and_r4_clearing() {
    let mut f = Fixture::with_snapshots(1);
    f.decode(&[(&[0], 2), (&[1], 3)]).unwrap();
    f.copy(1, 2, PosRange::ALL).unwrap();
    let kept = f.memory.keep_only(SeqId(2)).unwrap();
    assert_eq!((kept.n_tokens, kept.n_cells), (5, 2));
    assert_eq!([f.has(0), f.has(1), f.has(2)], [None, None, Some((0, 2))]);
    assert!(f.memory.keep_only(SeqId(4)).is_err());
    let cleared = f.memory.clear();
    assert_eq!((cleared.n_tokens, cleared.n_cells), (3, 2));
    assert_eq!(f.memory, Recurrent::new(*f.memory.config()).unwrap());
}

#[test]
fn r10_positions_reach_from_the_first_token_to_the_last() {
    let mut f = Fixture::with_snapshots(0);
    f.decode(&[(&[0], 3)]).unwrap();
    f.decode(&[(&[0], 1)]).unwrap();
    assert_eq!(f.has(0), Some((0, 3)));
    assert_eq!(f.has(1), None);
    assert_eq!(f.has(9), None);
}

#[test]
fn r21_coupled_sequences_share_one_state_until_they_part() {
    let mut f = Fixture::with_snapshots(1);
    let drawn = f.decode(&[(&[0, 2], 3), (&[2], 1), (&[0], 2)]).unwrap();
    assert_eq!(
        drawn,
        "0+3: zeros -> 2@0 3@1; 3+1: 1 -> 1@2; 4+2: 1 -> 1@3 2@4"
    );
    assert_eq!(f.states(2), "2@1 3@2");
    assert_eq!(f.states(0), "3@3 4@4");
    f.remove(0, Pos(4)..).unwrap();
    // Both are at position 3 now, but not at the same state.
    let before = f.memory.clone();
    let refused = f.decode(&[(&[0, 2], 1)]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "entry 0 belongs to sequences 0 and 2, which are at different states: only sequences that \
         are copies of one another, or new, can share a token"
    );
    assert_eq!(f.memory, before);
}

#[test]
fn d1_removing_whole_sequences_never_fails() {
    for n in [0, 2] {
        let mut f = Fixture::with_snapshots(n);
        f.decode(&[(&[0], 5), (&[1], 1)]).unwrap();
        f.copy(0, 3, PosRange::ALL).unwrap();
        let removed = f.memory.remove(Seqs::All, PosRange::ALL).unwrap();
        assert_eq!(removed.n_tokens, 11);
        assert_eq!(f.memory.n_used(), 0);
    }
}

#[test]
fn d2_a_state_that_is_not_kept_cannot_be_gone_back_to() {
    let mut f = Fixture::with_snapshots(3);
    f.decode(&[(&[0], 2)]).unwrap();
    // Going back by 3 is within the snapshots, but there never was a fourth token.
    f.decode(&[(&[0], 1)]).unwrap();
    f.decode(&[(&[0], 4)]).unwrap();
    f.remove(0, Pos(5)..).unwrap();
    f.decode(&[(&[0], 1)]).unwrap();
    assert_eq!(f.states(0).split(' ').count(), 3);
    assert!(
        f.refusal(0, Pos(3)..)
            .contains("cannot go back to 2: the oldest state")
    );
    assert_eq!(f.remove(0, Pos(4)..).unwrap().0, 2);
}

#[test]
fn d3_a_copy_of_a_sequence_that_went_back_goes_on_where_that_is() {
    let mut f = Fixture::with_snapshots(2);
    f.decode(&[(&[0], 4)]).unwrap();
    assert_eq!(f.states(0), "1@0 2@1 3@2");
    f.copy(0, 1, PosRange::ALL).unwrap();
    f.remove(0, Pos(3)..).unwrap();
    // The sharer has not moved; a copy made now begins where 0 went back to.
    assert_eq!(f.has(1), Some((0, 3)));
    f.copy(0, 2, PosRange::ALL).unwrap();
    assert_eq!(f.decode(&[(&[2], 1)]).unwrap(), "0+1: 1 -> 1@3");
    assert_eq!(f.remove(2, Pos(2)..).unwrap().0, 2);
}

#[test]
fn d4_a_removed_sequence_leaves_nothing_behind_for_its_id() {
    let mut f = Fixture::with_snapshots(3);
    f.decode(&[(&[0], 4)]).unwrap();
    f.remove(0, Pos(2)..).unwrap();
    f.remove(0, Pos(0)..Pos(2)).unwrap();
    assert_eq!(f.states(0), "");
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), "0+1: zeros -> 1@0");
    assert_eq!(f.has(0), Some((0, 0)));
}

#[test]
fn d5_a_failed_step_loses_neither_the_state_nor_that_it_went_back() {
    let mut f = Fixture::with_snapshots(2);
    f.decode(&[(&[0], 4), (&[1], 2)]).unwrap();
    f.remove(0, Pos(3)..).unwrap();
    let before = f.memory.clone();
    f.fail(&[(&[0], 5), (&[1], 1), (&[2], 1)]);
    assert_eq!(f.memory, before);
    // What the failed step stored is in rows that no sequence could be at.
    let kept: Vec<_> = [0, 1, 2]
        .iter()
        .flat_map(|&seq| f.memory.states(SeqId(seq)))
        .map(|state| state.row)
        .collect();
    let mut stored = f.inputs.states.iter().flat_map(|group| &group.stores);
    assert!(stored.all(|store| !kept.contains(&store.to)));
    assert!(f.decode(&[(&[0], 1)]).unwrap().starts_with("0+1: 1 ->"));
}

#[test]
fn d20_prompts_and_single_tokens_share_a_ubatch() {
    let mut f = Fixture::with_snapshots(0);
    f.decode(&[(&[1], 3), (&[2], 2)]).unwrap();
    let drawn = f.decode(&[(&[1], 1), (&[0], 100), (&[2], 1)]).unwrap();
    assert_eq!(
        drawn,
        "0+1: 0 -> 1@2; 1+100: zeros -> 100@3; 101+1: 1 -> 1@4"
    );
}

#[test]
fn later_ubatches_read_what_earlier_ones_store_and_take_the_rows_they_left() {
    let mut f = Fixture::new(RecurrentConfig::new(4).with_rows(2));
    let drawn = f.decode_by(&[(&[0], 7)], 3).unwrap();
    assert_eq!(drawn, "0+3: zeros -> 3@0 | 0+3: 0 -> 3@1 | 0+1: 1 -> 1@0");
}

#[test]
fn copies_of_a_part_need_the_state_at_its_end() {
    let mut f = Fixture::with_snapshots(2);
    f.decode(&[(&[0], 6), (&[1], 2)]).unwrap();
    assert_eq!(f.copy(0, 2, ..Pos(5)).unwrap(), 5);
    assert_eq!((f.has(2), f.states(2)), (Some((0, 4)), "3@0 4@1".into()));
    let before = f.memory.clone();
    let refused = [
        (f.copy(0, 3, ..Pos(3)), "cannot go back to 2"),
        (f.copy(0, 3, Pos(1)..), "sequence 0 is one state"),
        (f.copy(1, 2, ..Pos(2)), "sequence 2 is one state"),
        (f.copy(3, 2, Pos(1)..Pos(3)), "sequence 2 is one state"),
        (f.copy(0, 4, ..Pos(3)), "there is no sequence 4"),
    ];
    for (refused, text) in refused {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
    }
    assert_eq!(f.memory, before);
    // What is copied replaces what was there; copying nothing takes away.
    assert_eq!(f.copy(0, 1, PosRange::ALL).unwrap(), 6);
    assert_eq!(f.copy(3, 1, Pos(5)..).unwrap(), 0);
    assert_eq!(f.has(1), Some((0, 4)));
    assert_eq!(f.copy(3, 1, PosRange::ALL).unwrap(), 0);
    assert_eq!(f.has(1), None);
}

#[test]
fn too_few_rows_are_refused_with_numbers() {
    let mut f = Fixture::new(RecurrentConfig::new(4).with_snapshots(1).with_rows(4));
    f.decode(&[(&[0], 2)]).unwrap();
    let before = f.memory.clone();
    let refused = f.decode(&[(&[0], 1), (&[1], 1), (&[2], 1), (&[3], 1)]);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "ubatch 0 stores 4 states: 2 of 4 rows are free"
    );
    assert_eq!(f.memory, before);
    // Cut into single tokens, the same sequence stores one state at a time.
    let mut f = Fixture::new(RecurrentConfig::new(4).with_snapshots(1).with_rows(3));
    f.decode(&[(&[0], 2)]).unwrap();
    assert_eq!(
        f.decode(&[(&[0], 2)]).unwrap(),
        "0+1: 1 -> 1@2 | 0+1: 2 -> 1@0"
    );
}

#[test]
fn configurations_that_make_no_memory_are_refused() {
    let error = |config| Recurrent::new(config).unwrap_err();
    assert_eq!(
        error(RecurrentConfig::new(0)),
        MemoryConfigError::SeqCount { n_seqs: 0 }
    );
    assert_eq!(
        error(RecurrentConfig::new(4097)).to_string(),
        "a memory for 4097 sequences: there must be 1 to 4096"
    );
    let too_few = error(RecurrentConfig::new(2).with_snapshots(3).with_rows(4));
    assert!(
        too_few.to_string().contains("one sequence alone needs 5"),
        "{too_few}"
    );
    for config in [
        RecurrentConfig::new(2).with_snapshots(u32::MAX),
        RecurrentConfig::new(2).with_rows(u32::MAX),
    ] {
        let too_many = error(config);
        assert!(matches!(too_many, MemoryConfigError::StateRowCount { .. }));
    }
}

#[test]
fn steps_before_the_last_are_undone_only_where_their_states_are_still_there() {
    let mut f = Fixture::with_snapshots(0);
    f.decode(&[(&[0], 1)]).unwrap();
    let before = f.memory.clone();
    let batch = next_tokens(&f.memory, &[(&[0], 3)]);
    let plan = f.memory.plan(&batch, 1).unwrap();
    let mut undo = Vec::new();
    for planned in &plan {
        undo.push(f.memory.commit(planned));
    }
    // Two rows in turns: the last step stored its state where the one before the second was.
    let written = RowsWritten::Perhaps;
    let (last, second) = (undo.pop().unwrap(), undo.pop().unwrap());
    f.memory.check_rollback(&last, written).unwrap();
    f.memory.rollback(last, written);
    let refused = f.memory.check_rollback(&second, written).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "sequence 0 cannot go back to position 1: later steps stored other states in row 1"
    );
    f.memory.check_rollback(&second, RowsWritten::No).unwrap();
    let mut forgetful = f.memory.clone();
    forgetful.rollback(second.clone(), written);
    assert_eq!(forgetful.positions(SeqId(0)), None);
    f.memory.rollback(second, RowsWritten::No);
    f.memory.rollback(undo.pop().unwrap(), RowsWritten::No);
    assert_eq!(f.memory, before);
}
