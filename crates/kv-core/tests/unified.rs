//! Worked examples of the unified memory: which cells are taken, shared, recycled and copied, and
//! what is refused.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::RowCopy;
use kv_core::memory::{
    BatchVisibility, Composite, Memory, MemoryConfigError, MemoryInputs, NeededFor, NoRoom,
    Refusal, RowCounts, RowsWritten, Seqs, Streams, Unified, UnifiedConfig, batch_visibility,
    invariants,
};
use kv_core::{
    Causality, CellIdx, PartIdx, Pos, PosRange, SeqId, StreamIdx, TokenId, Visibility, Window,
};

use crate::support::next_tokens;

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

    fn shared(n_cells: u32, window: Window) -> Self {
        Self::new(n_cells, window, Streams::Shared)
    }

    /// The next `n` tokens of each of these sequence sets, one set after the other.
    fn batch(&self, sets: &[(&[u32], u32)]) -> ValidBatch {
        next_tokens(&self.memory, sets)
    }

    /// Evaluates the next tokens in ubatches of at most 64 and returns their cells.
    fn decode(&mut self, sets: &[(&[u32], u32)]) -> Result<Vec<u32>, Refusal> {
        let batch = self.batch(sets);
        let mut cells = Vec::new();
        let mut steps = self.memory.begin(&batch, 64)?;
        while steps.next(&mut self.inputs).is_some() {
            cells.extend(self.inputs.parts[0].cells.iter().map(|c| c.0));
        }
        invariants::check(&self.memory).unwrap();
        Ok(cells)
    }

    /// Compacts, pass by pass.
    fn compact(&mut self) {
        while self.memory.n_holes() > 0 {
            let pass = self.memory.compact().unwrap();
            assert!(pass.n_cells > 0, "a pass without progress");
            invariants::check(&self.memory).unwrap();
        }
    }

    /// Positions and sequences of all cells.
    fn draw(&self) -> String {
        crate::support::draw(&self.memory)
    }

    fn has(&self, seq: u32) -> Option<(u32, u32)> {
        self.memory
            .positions(SeqId(seq))
            .map(|has| (has.first.0, has.last.0))
    }

    fn remove(&mut self, seq: u32, range: impl Into<PosRange>) -> Result<(u32, u32), Refusal> {
        let removed = self.memory.remove(Seqs::One(SeqId(seq)), range.into())?;
        Ok((removed.n_tokens, removed.n_cells))
    }
}

#[test]
fn k13_k23_removed_cells_are_filled_once_a_run_cannot_go_on() {
    let mut f = Fixture::shared(8, Window::Full);
    assert_eq!(f.decode(&[(&[0], 4)]).unwrap(), [0, 1, 2, 3]);
    assert_eq!(f.decode(&[(&[1], 2)]).unwrap(), [4, 5]);
    assert_eq!(f.remove(0, Pos(1)..Pos(3)).unwrap(), (2, 2));
    assert_eq!(f.draw(), "0:0 . . 3:0 0:1 1:1 . .");
    // Behind its last token first, so that its run goes on; then the holes.
    assert_eq!(f.decode(&[(&[1], 3)]).unwrap(), [6, 7, 1]);
    assert_eq!(f.decode(&[(&[1], 1)]).unwrap(), [2]);
    assert_eq!(f.draw(), "0:0 4:1 5:1 3:0 0:1 1:1 2:1 3:1");
    let before = f.memory.clone();
    assert_eq!(
        f.decode(&[(&[1], 2)]).unwrap_err().to_string(),
        "ubatch 0 needs 2 cells of part 0, stream 0 (full): 0 of 8 are free and 0 recyclable"
    );
    assert_eq!(f.memory, before);
}

#[test]
fn k23_a_k28_a_sliding_window_is_a_ring() {
    let mut f = Fixture::shared(8, Window::Sliding(4));
    f.decode(&[(&[0], 8)]).unwrap();
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [0]);
    assert_eq!(f.has(0), Some((1, 8)));
    assert_eq!(f.decode(&[(&[0], 3)]).unwrap(), [1, 2, 3]);
    assert_eq!(f.draw(), "8:0 9:0 10:0 11:0 4:0 5:0 6:0 7:0");
    assert_eq!(f.decode(&[(&[0], 4)]).unwrap(), [4, 5, 6, 7]);
    assert_eq!(f.has(0), Some((8, 15)));
    assert_eq!(f.decode(&[(&[0], 5)]).unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(f.draw(), "16:0 17:0 18:0 19:0 20:0 13:0 14:0 15:0");
}

#[test]
fn a_ubatch_that_the_window_has_no_room_for_is_cut_smaller() {
    let mut f = Fixture::shared(8, Window::Sliding(4));
    f.decode(&[(&[0], 8)]).unwrap();
    let batch = f.batch(&[(&[0], 6)]);
    assert!(
        f.memory
            .find_slots(f.memory.split_policy().split(&batch, 6).unwrap())
            .is_err()
    );
    let plan = f.memory.plan(&batch, 6).unwrap();
    assert_eq!(plan.len(), 2);
    assert_eq!(f.decode(&[(&[0], 6)]).unwrap(), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn k28_b_what_is_older_than_a_recycled_token_goes_with_it() {
    let mut f = Fixture::shared(8, Window::Sliding(2));
    f.decode(&[(&[0], 2)]).unwrap();
    f.decode(&[(&[1], 1)]).unwrap();
    f.decode(&[(&[0], 5)]).unwrap();
    assert_eq!(f.remove(1, PosRange::ALL).unwrap(), (1, 1));
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [2]);
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [3]);
    assert_eq!(f.draw(), ". . 7:0 8:0 3:0 4:0 5:0 6:0");
    assert_eq!(f.has(0), Some((3, 8)));
}

#[test]
fn d6_planning_and_failing_lose_nothing() {
    let mut f = Fixture::shared(8, Window::Sliding(2));
    f.decode(&[(&[0], 8)]).unwrap();
    let before = f.memory.clone();
    let batch = f.batch(&[(&[0], 3)]);
    let plan = f.memory.plan(&batch, 3).unwrap();
    assert_eq!(plan[0].slot, [CellIdx(0), CellIdx(1), CellIdx(2)]);
    assert_eq!(f.memory, before);

    let mut steps = f.memory.begin(&batch, 3).unwrap();
    steps.next(&mut f.inputs).unwrap();
    assert_ne!(steps.memory(), &before);
    steps.undo_last(RowsWritten::No);
    assert_eq!(f.memory, before);

    // Rows of cells 0 to 2 may be overwritten: positions 0 to 2 are not claimed any more.
    let mut steps = f.memory.begin(&batch, 3).unwrap();
    steps.next(&mut f.inputs).unwrap();
    steps.undo_last(RowsWritten::Perhaps);
    assert_eq!(f.draw(), ". . . 3:0 4:0 5:0 6:0 7:0");
}

#[test]
fn k23_c_d17_shared_cells_are_recycled() {
    let mut f = Fixture::shared(6, Window::Sliding(2));
    f.decode(&[(&[0, 1], 6)]).unwrap();
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [0]);
    assert_eq!(f.draw(), "6:0 1:0+1 2:0+1 3:0+1 4:0+1 5:0+1");
}

#[test]
fn k23_d_a_chunked_window() {
    let mut f = Fixture::shared(8, Window::Chunked(4));
    f.decode(&[(&[0], 8)]).unwrap();
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [0]);
    assert_eq!(f.decode(&[(&[0], 3)]).unwrap(), [1, 2, 3]);
    assert_eq!(f.has(0), Some((4, 11)));
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [4]);
    assert_eq!(f.has(0), Some((5, 12)));
}

#[test]
fn a_stranger_never_takes_the_last_token_of_a_sequence() {
    // The next token of sequence 0 begins a chunk and sees nothing, but it has to be number 4.
    let mut f = Fixture::shared(4, Window::Chunked(4));
    f.decode(&[(&[0], 4)]).unwrap();
    assert_eq!(f.decode(&[(&[1], 3)]).unwrap(), [0, 1, 2]);
    assert_eq!(f.has(0), Some((3, 3)));
    assert!(f.decode(&[(&[1], 1)]).is_err());
}

/// Not for a batch, whatever the window and the streams: no attention has a span that holes use up,
/// so there is nothing that [`Memory::compact`] could be offered for.
#[test]
fn d16_holes_are_never_why_there_is_no_room() {
    use Streams::{PerSequence, Shared};
    for window in [
        Window::Full,
        Window::Sliding(20),
        Window::Chunked(16),
        Window::Symmetric(40),
    ] {
        for (streams, seq) in [(Shared, 2), (PerSequence, 0)] {
            let mut f = Fixture::new(9, window, streams);
            f.decode(&[(&[0], 9)]).unwrap();
            // What a window needs stays; every second token of the rest goes.
            for pos in [1, 3, 5] {
                f.remove(0, Pos(pos)..Pos(pos + 1)).unwrap();
            }
            for _ in 0..2 {
                assert!(f.memory.plan(&f.batch(&[(&[seq], 3)]), 8).is_ok());
                let error = f.memory.plan(&f.batch(&[(&[seq], 4)]), 8).unwrap_err();
                let Refusal::NoRoom(no_room) = error else {
                    panic!("{error}");
                };
                assert_eq!((no_room.n_wanted, no_room.n_free), (4, 3), "{window}");
                f.compact();
            }
        }
    }
}

#[test]
fn d16_holes_between_sequences_are_room_for_others() {
    let mut f = Fixture::shared(9, Window::Full);
    f.decode(&[(&[0], 3), (&[1], 3), (&[0], 3)]).unwrap();
    f.remove(0, Pos(1)..Pos(2)).unwrap();
    f.remove(1, PosRange::ALL).unwrap();
    assert_eq!(f.draw(), "0:0 . 2:0 . . . 3:0 4:0 5:0");
    for _ in 0..2 {
        assert!(f.memory.plan(&f.batch(&[(&[2], 4)]), 8).is_ok());
        let error = f.memory.plan(&f.batch(&[(&[2], 5)]), 8).unwrap_err();
        let Refusal::NoRoom(no_room) = error else {
            panic!("{error}");
        };
        assert_eq!((no_room.n_wanted, no_room.n_free), (5, 4));
        f.compact();
    }
}

#[test]
fn a_stream_s_limit_is_told_from_the_memory_s() {
    let mut f = Fixture::new(4, Window::Full, Streams::PerSequence);
    f.decode(&[(&[0], 3), (&[1], 1)]).unwrap();
    let error = f.decode(&[(&[0], 2)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ubatch 0 needs 2 cells of part 0, stream 0 (full): 1 of 4 are free and 0 recyclable; 7 are \
         free in other streams, which sequences that share cells could use"
    );
    let mut f = Fixture::shared(4, Window::Full);
    let error = f.decode(&[(&[0], 5)]).unwrap_err();
    assert!(error.to_string().ends_with("0 recyclable"), "{error}");
}

#[test]
fn k23_e_streams_have_cells_of_their_own() {
    let mut f = Fixture::new(8, Window::Full, Streams::PerSequence);
    f.decode(&[(&[1], 3)]).unwrap();
    assert_eq!(f.decode(&[(&[1], 2), (&[2], 2)]).unwrap(), [11, 12, 16, 17]);
    let mask = f.inputs.parts[0].visibility.dense_mask(24).unwrap();
    insta::assert_snapshot!(mask, @r"
    ........####............
    ........#####...........
    ................#.......
    ................##......
    ");
    let coupled = f.batch(&[(&[0], 1)]);
    assert!(f.memory.plan(&coupled, 8).is_ok());
    let mut f = Fixture::new(8, Window::Full, Streams::PerSequence);
    let error = f.decode(&[(&[0], 1), (&[1, 2], 1)]).unwrap_err();
    let set = [SeqId(1), SeqId(2)].into_iter().collect();
    assert_eq!(error, Refusal::CoupledStreams { entry: 1, set });
}

#[test]
fn rows_see_by_position_whatever_the_cells() {
    let mut f = Fixture::shared(12, Window::Full);
    f.decode(&[(&[1], 2), (&[0], 2), (&[1], 2)]).unwrap();
    f.remove(1, Pos(0)..Pos(1)).unwrap();
    f.decode(&[(&[0], 2)]).unwrap();
    f.decode(&[(&[0], 1), (&[2], 1)]).unwrap();
    let visibility = &f.inputs.parts[0].visibility;
    let seen = |row| {
        visibility
            .row(row)
            .map(|(c, p)| (c.0, p.0))
            .collect::<Vec<_>>()
    };
    assert_eq!(seen(0), [(2, 0), (3, 1), (0, 2), (6, 3), (7, 4)]);
    assert_eq!(seen(1), [(8, 0)]);
    assert_eq!(visibility.groups.len(), 2);
}

#[test]
fn k14_a_copy_in_one_stream_shares_cells_and_replaces_its_range() {
    let mut f = Fixture::shared(12, Window::Full);
    f.decode(&[(&[0], 4), (&[1], 3)]).unwrap();
    let copied = f
        .memory
        .copy(SeqId(0), SeqId(1), PosRange::from(Pos(1)..Pos(3)))
        .unwrap();
    assert_eq!((copied.n_tokens, copied.row_copies.len()), (2, 0));
    assert_eq!(f.draw(), "0:0 1:0+1 2:0+1 3:0 0:1 . . . . . . .");
    assert_eq!(f.decode(&[(&[1], 1)]).unwrap(), [5]);
}

#[test]
fn k15_d13_a_copy_between_streams_copies_the_used_rows_of_any_range() {
    let mut f = Fixture::new(8, Window::Full, Streams::PerSequence);
    f.decode(&[(&[0], 6), (&[1], 5)]).unwrap();
    let copied = f
        .memory
        .copy(SeqId(0), SeqId(1), PosRange::from(Pos(2)..Pos(5)))
        .unwrap();
    let copy = |from, to, len| RowCopy {
        part: PartIdx(0),
        from,
        to,
        len,
    };
    assert_eq!(copied.row_copies, [copy(CellIdx(2), CellIdx(10), 3)]);
    assert_eq!(
        f.draw(),
        "0:0 1:0 2:0 3:0 4:0 5:0 . . 0:1 1:1 2:1 3:1 4:1 . . . . . . . . . . ."
    );
}

#[test]
fn a_copy_between_streams_needs_room() {
    let mut f = Fixture::new(4, Window::Full, Streams::PerSequence);
    f.decode(&[(&[0], 2), (&[1], 4)]).unwrap();
    f.remove(0, Pos(0)..Pos(1)).unwrap();
    f.remove(1, Pos(0)..Pos(2)).unwrap();
    f.decode(&[(&[0], 2)]).unwrap();
    f.decode(&[(&[1], 2)]).unwrap();
    // Sequence 1 holds 2 to 5 in all of its cells; 1 of sequence 0 would be one more.
    let range = PosRange::from(Pos(1)..Pos(2));
    let refused = f.memory.copy(SeqId(0), SeqId(1), range).unwrap_err();
    let (part, stream) = (PartIdx(0), StreamIdx(1));
    let (from, n_wanted, n_free, n_cells) = (SeqId(0), 1, 0, 4);
    let no_room = Refusal::NoRoom(NoRoom {
        needed_for: NeededFor::Copy(from),
        part,
        stream,
        window: Window::Full,
        n_wanted,
        n_free,
        n_recyclable: 0,
        n_cells,
        n_free_elsewhere: 0,
    });
    assert_eq!(refused, no_room);
}

#[test]
fn k16_keep_only_reaches_every_stream() {
    for streams in [Streams::Shared, Streams::PerSequence] {
        let mut f = Fixture::new(8, Window::Full, streams);
        f.decode(&[(&[0], 2), (&[1], 3), (&[2], 1)]).unwrap();
        let removed = f.memory.keep_only(SeqId(1)).unwrap();
        assert_eq!((removed.n_tokens, removed.n_cells), (3, 3));
        assert_eq!((f.has(0), f.has(1), f.has(2)), (None, Some((0, 2)), None));
        assert!(f.memory.keep_only(SeqId(3)).is_err());
    }
}

#[test]
fn d41_a_cut_below_the_window_is_refused_with_numbers() {
    let mut f = Fixture::shared(8, Window::Sliding(4));
    f.decode(&[(&[0], 8)]).unwrap();
    f.decode(&[(&[0], 4)]).unwrap();
    assert_eq!(f.has(0), Some((4, 11)));
    let before = f.memory.clone();
    assert_eq!(
        f.remove(0, Pos(6)..).unwrap_err().to_string(),
        "sequence 0 cannot go on at position 6: it needs sliding(4) from 3 on, but everything up to \
         3 is forgotten"
    );
    assert!(f.remove(0, Pos(2)..).is_err());
    assert!(
        f.memory
            .remove(Seqs::All, PosRange::from(Pos(6)..))
            .is_err()
    );
    assert!(
        f.memory
            .copy(SeqId(0), SeqId(1), PosRange::from(..Pos(6)))
            .is_err()
    );
    assert_eq!(f.memory, before);
    assert_eq!(f.remove(0, Pos(7)..).unwrap(), (5, 5));
    assert_eq!(f.remove(0, Pos(0)..).unwrap(), (3, 3));
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap().len(), 1);
    assert_eq!(f.has(0), Some((0, 0)));
}

#[test]
fn d37_d47_operations_on_sequences_that_do_not_exist_are_refused() {
    let mut f = Fixture::shared(8, Window::Full);
    let before = f.memory.clone();
    for seq in [3, 4095, 4096, u32::MAX].map(SeqId) {
        assert!(f.memory.remove(Seqs::One(seq), PosRange::ALL).is_err());
        assert!(f.memory.copy(seq, SeqId(0), PosRange::ALL).is_err());
        assert!(f.memory.copy(SeqId(0), seq, PosRange::ALL).is_err());
        assert!(f.memory.keep_only(seq).is_err());
        assert!(f.memory.snapshot(Seqs::One(seq)).is_err());
        assert_eq!(f.memory.positions(seq), None);
    }
    assert_eq!(f.memory, before);
    assert_eq!(f.memory.cell(CellIdx(u32::MAX)), None);
}

#[test]
fn tokens_of_sequences_that_do_not_exist_are_refused() {
    for streams in [Streams::Shared, Streams::PerSequence] {
        let mut f = Fixture::new(8, Window::Full, streams);
        let batch = Batch::prompt(SeqId(3), [TokenId(0)]);
        let rules = BatchRules {
            n_batch: 8,
            n_seqs: 4,
            n_vocab: 1,
            n_embd: 1,
        };
        let batch = validate(&batch, &rules, |_| None).unwrap();
        let refused = f.memory.begin(&batch, 8).map(drop).unwrap_err();
        let (seq, n_seqs) = (SeqId(3), 3);
        assert_eq!(refused, Refusal::NoSuchSequence { seq, n_seqs });
    }
}

#[test]
fn tokens_of_sequences_may_alternate() {
    let mut f = Fixture::new(8, Window::Sliding(4), Streams::PerSequence);
    let sets: &[(&[u32], u32)] = &[(&[0], 1), (&[1], 1), (&[0], 1), (&[1], 2)];
    let before = f.memory.clone();
    let batch = f.batch(sets);
    let mut steps = f.memory.begin(&batch, 64).unwrap();
    steps.next(&mut f.inputs).unwrap();
    steps.undo_last(RowsWritten::No);
    assert_eq!(f.memory, before);
    assert_eq!(f.decode(sets).unwrap(), [0, 8, 1, 9, 10]);
}

#[test]
fn a_step_that_wrote_nothing_can_always_be_undone() {
    let mut f = Fixture::shared(3, Window::Sliding(2));
    f.decode(&[(&[0], 3)]).unwrap();
    let plan = f.memory.plan(&f.batch(&[(&[0], 3)]), 1).unwrap();
    let undo: Vec<_> = plan.iter().map(|step| f.memory.commit(step)).collect();
    assert_eq!(f.has(0), Some((3, 5)));
    // Cells of positions 0 to 2 were given to others, and the next token would see position 2.
    let check = |rows| f.memory.check_rollback(&undo[0], rows);
    assert!(matches!(
        check(RowsWritten::Perhaps),
        Err(Refusal::WindowForgotten(_))
    ));
    assert_eq!(check(RowsWritten::No), Ok(()));
}

#[test]
fn rows_are_counted_by_the_number_of_the_part() {
    let memory = crate::support::part(2, 8, Window::Full, Streams::PerSequence);
    let (cells, states) = (vec![0, 0, 24], 0);
    assert_eq!(memory.n_rows(), RowCounts { cells, states });
    assert_eq!(memory.max_take_back(), u32::MAX);
}

#[test]
fn a_plan_counts_what_it_leaves_free_in_other_streams() {
    let f = Fixture::new(4, Window::Full, Streams::PerSequence);
    let refused = f.memory.plan(&f.batch(&[(&[0], 2), (&[1], 5)]), 64);
    let Err(Refusal::NoRoom(no_room)) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((no_room.stream, no_room.n_free), (StreamIdx(1), 4));
    assert_eq!(no_room.n_free_elsewhere, 2 + 4);
}

#[test]
fn an_emptied_stream_is_filled_from_its_beginning() {
    let mut f = Fixture::new(8, Window::Full, Streams::PerSequence);
    assert_eq!(f.decode(&[(&[1], 4)]).unwrap(), [8, 9, 10, 11]);
    assert_eq!(f.remove(1, PosRange::ALL).unwrap(), (4, 4));
    assert_eq!(f.decode(&[(&[1], 2)]).unwrap(), [8, 9]);
}

#[test]
fn what_was_recycled_is_remembered_until_it_is_removed() {
    let mut f = Fixture::shared(8, Window::Sliding(2));
    f.decode(&[(&[0], 2)]).unwrap();
    f.decode(&[(&[1], 1)]).unwrap();
    f.decode(&[(&[0], 5)]).unwrap();
    f.remove(1, PosRange::ALL).unwrap();
    f.decode(&[(&[0], 1)]).unwrap();
    // The token at position 2 gives its cell, and with it go the older ones.
    assert_eq!(f.decode(&[(&[0], 1)]).unwrap(), [3]);
    let ranges = |f: &Fixture| f.memory.token_ranges(SeqId(0));
    let range = |first, last| PosRange::new(Pos(first), Pos(last));
    assert_eq!(ranges(&f), [range(3, 6), range(7, 8), range(0, 2)]);
    assert_eq!(f.remove(0, ..Pos(2)).unwrap(), (0, 0));
    assert_eq!(ranges(&f), [range(3, 6), range(7, 8), range(2, 2)]);
}

#[test]
fn configurations_that_hold_nothing_are_refused() {
    let config = UnifiedConfig {
        part: PartIdx(0),
        n_seqs: 2,
        n_cells: 4,
        streams: Streams::PerSequence,
        window: Window::Full,
        causality: Causality::Causal,
    };
    let with = |n_seqs, n_cells| {
        Unified::new(UnifiedConfig {
            n_seqs,
            n_cells,
            ..config
        })
    };
    assert!(matches!(
        with(0, 4),
        Err(MemoryConfigError::SeqCount { n_seqs: 0 })
    ));
    assert!(matches!(
        with(4097, 4),
        Err(MemoryConfigError::SeqCount { n_seqs: 4097 })
    ));
    assert_eq!(with(4096, 4).unwrap().n_seqs(), 4096);
    assert!(matches!(
        with(2, 0),
        Err(MemoryConfigError::CellCount { .. })
    ));
    assert!(matches!(
        with(2, 1 << 30),
        Err(MemoryConfigError::CellCount { .. })
    ));
    assert_eq!(with(2, 4).unwrap().n_cells(), 8);
}

#[test]
fn nothing_is_undone_where_nothing_was_committed() {
    let mut f = Fixture::shared(8, Window::Full);
    f.decode(&[(&[0], 3)]).unwrap();
    let before = f.memory.clone();
    let batch = f.batch(&[(&[0], 2)]);
    f.memory
        .begin(&batch, 64)
        .unwrap()
        .undo_last(RowsWritten::Perhaps);
    f.memory
        .begin(&batch, 64)
        .unwrap()
        .undo_all(RowsWritten::Perhaps);
    assert_eq!(f.memory, before);
}

/// Without a memory, tokens see later ones, too, as far as their chunk goes.
#[test]
fn tokens_of_an_encoder_see_their_chunk() {
    let mut memory = Composite::encoder(1);
    let batch = next_tokens(&memory, &[(&[0], 7)]);
    let steps = memory.begin(&batch, 64).unwrap();
    let ubatch = steps.ubatches().next().unwrap();
    let mut seen = BatchVisibility {
        window: Window::Chunked(3),
        visibility: Visibility::default(),
    };
    batch_visibility(ubatch, &mut seen);
    let mask = seen.visibility.dense_mask(7).unwrap();
    for row in 0..7 {
        for cell in 0..7 {
            let sees = mask.sees(row, CellIdx(cell));
            assert_eq!(sees, row / 3 == cell / 3, "{row} and {cell}");
        }
    }
}
