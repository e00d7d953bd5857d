//! The memory that layers ask for, where some of them are recurrent.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory};
use kv_core::memory::BatchVisibility;
use kv_core::memory::{
    Composite, Division, Edit, Memory, MemoryConfig, MemoryInputs, RestoreInto, RowCounts,
    RowsWritten, Seqs, Streams, SwaSize, batch_visibility,
};
use kv_core::{Causality, LayerIdx, Pos, PosDelta, PosRange, SeqId, TokenId, Visibility, Window};

fn attention(window: Window) -> LayerMemory {
    LayerMemory::Attention(AttentionMemory {
        kv_heads: 1,
        k_dim: 2,
        v_dim: 2,
        window,
    })
}

const STATES: LayerMemory = LayerMemory::Recurrent(RecurrentMemory {
    conv_row: 3,
    state_row: 4,
});

fn config() -> MemoryConfig {
    MemoryConfig {
        n_ctx: 64,
        n_seqs: 2,
        streams: Streams::Shared,
        n_ubatch: 16,
        causality: Causality::Causal,
        swa: SwaSize::Window,
        n_snapshots: 0,
        n_active: None,
    }
}

fn memory(layers: &[LayerMemory]) -> Composite {
    let config = config();
    assert_eq!(config.n_state_rows(), 4, "two rows for each sequence");
    Composite::new(&LayerMap::new(layers.to_vec()), &config).unwrap()
}

/// All shapes with states.
fn with_states() -> [Composite; 3] {
    let (full, near) = (attention(Window::Full), attention(Window::Sliding(8)));
    let memories = [
        memory(&[STATES, LayerMemory::Nothing]),
        memory(&[STATES, full, STATES]),
        memory(&[full, STATES, near]),
    ];
    let n_parts = memories.iter().map(|memory| memory.parts().len());
    assert_eq!(n_parts.collect::<Vec<_>>(), [0, 1, 2]);
    assert!(memories.iter().all(|memory| memory.states().is_some()));
    memories
}

fn feed(memory: &mut Composite, n: u32, n_ubatch: u32) -> MemoryInputs {
    let mut inputs = MemoryInputs::default();
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: 2,
        n_vocab: 10,
        n_embd: 1,
    };
    let prompt = Batch::prompt(SeqId(0), (0..n).map(|_| TokenId(1)));
    let batch = validate(&prompt, &rules, |seq| memory.positions(seq)).unwrap();
    let mut steps = memory.begin(&batch, n_ubatch).unwrap();
    while steps.next(&mut inputs).is_some() {}
    inputs
}

#[test]
fn states_and_cells_take_the_same_ubatches() {
    for mut memory in with_states() {
        let n_parts = memory.parts().len();
        let inputs = feed(&mut memory, 5, 16);
        assert_eq!(inputs.parts.len(), n_parts);
        assert!(inputs.parts.iter().all(|part| part.cells.len() == 5));
        assert_eq!(inputs.states.len(), 1, "one sequence");
        assert_eq!(inputs.states[0].rows, [0, 1, 2, 3, 4]);
        assert_eq!(inputs.states[0].source, None, "begins from zeros");
        let next = feed(&mut memory, 1, 16);
        assert_eq!(next.states[0].source, Some(inputs.states[0].stores[0].to));
        assert_eq!(memory.positions(SeqId(0)).unwrap().last, Pos(5));
    }
}

#[test]
fn sizes_and_limits_are_those_of_all_parts() {
    for (memory, n_parts) in with_states().iter().zip(0..) {
        let cells: Vec<usize> = memory
            .parts()
            .iter()
            .map(|part| part.n_cells() as usize)
            .collect();
        assert_eq!((cells.len(), cells.contains(&0)), (n_parts, false));
        let states = 4;
        assert_eq!(memory.n_rows(), RowCounts { cells, states });
        assert_eq!(memory.max_take_back(), 0, "no state is kept to go back to");
        assert_eq!(memory.n_used(), 0);
    }
    let full = memory(&[attention(Window::Full)]);
    assert_eq!((full.max_take_back(), full.n_rows().states), (u32::MAX, 0));
    let snapshots = MemoryConfig {
        n_snapshots: 3,
        ..config()
    };
    assert_eq!(
        (snapshots.n_state_rows(), snapshots.n_snapshot_rows()),
        (16, 12)
    );
    let layers = LayerMap::new(vec![attention(Window::Full), STATES]);
    let hybrid = Composite::new(&layers, &snapshots).unwrap();
    assert_eq!(hybrid.max_take_back(), 3);
}

#[test]
fn a_sequence_has_the_tokens_of_the_part_that_remembers_most() {
    let layers = LayerMap::new([Window::Full, Window::Sliding(8)].map(attention).to_vec());
    let long = MemoryConfig {
        n_ctx: 512,
        ..config()
    };
    let mut memory = Composite::new(&layers, &long).unwrap();
    (0..10).for_each(|_| drop(feed(&mut memory, 50, 16)));
    let n_tokens = |part: usize| memory.parts()[part].n_tokens(SeqId(0));
    assert!(n_tokens(1) < 500, "the window recycled cells");
    assert_eq!((n_tokens(0), memory.n_tokens(SeqId(0))), (500, 500));
    assert_eq!(memory.n_used(), n_tokens(0) + n_tokens(1));
}

#[test]
fn layers_and_numbers_that_no_memory_has_are_refused() {
    let shared_with_later = vec![
        LayerMemory::SharedWith(LayerIdx(1)),
        attention(Window::Full),
    ];
    assert!(config().parts(&LayerMap::new(shared_with_later)).is_err());
    let layers = LayerMap::new(vec![attention(Window::Full)]);
    let parts = |n_active| {
        let config = MemoryConfig {
            n_active,
            ..config()
        };
        config.parts(&layers).map(|parts| parts.len())
    };
    for n_active in [None, Some(1), Some(2)] {
        assert_eq!(parts(n_active), Ok(1));
    }
    assert!(parts(Some(0)).is_err() && parts(Some(3)).is_err());
}

#[test]
fn d29_the_past_of_a_hybrid_cannot_be_cut_out() {
    for mut memory in with_states() {
        feed(&mut memory, 6, 16);
        let before = memory.clone();
        let middle = PosRange::from(Pos(1)..Pos(3));
        let refused = memory.remove(Seqs::One(SeqId(0)), middle).unwrap_err();
        assert_eq!(memory, before, "{refused}: no part was edited");
        memory.remove(Seqs::One(SeqId(0)), PosRange::ALL).unwrap();
        assert_eq!(memory.positions(SeqId(0)), None);
    }
}

#[test]
fn a_failed_step_is_undone_in_every_part() {
    for mut memory in with_states() {
        feed(&mut memory, 4, 16);
        let before = memory.clone();
        let rules = BatchRules {
            n_batch: 8,
            n_seqs: 2,
            n_vocab: 10,
            n_embd: 1,
        };
        let prompt = Batch::prompt(SeqId(0), [TokenId(2)]);
        let batch = validate(&prompt, &rules, |seq| memory.positions(seq)).unwrap();
        let mut steps = memory.begin(&batch, 8).unwrap();
        steps.next(&mut MemoryInputs::default()).unwrap();
        steps.undo_last(RowsWritten::Perhaps);
        assert_eq!(memory, before);
    }
}

#[test]
fn d40_a_state_moves_as_a_whole_and_never_below_zero() {
    for mut memory in with_states() {
        let seq = SeqId(0);
        feed(&mut memory, 6, 16);
        let before = memory.clone();
        let refused = [
            memory.shift(seq, PosRange::from(Pos(3)..), PosDelta(2)),
            memory.shift(seq, PosRange::ALL, PosDelta(-1)),
            memory.divide(seq, PosRange::ALL, Division::by(2)),
        ];
        assert!(refused.iter().all(Result::is_err), "{refused:?}");
        assert_eq!(memory, before, "no part was edited");
        let shifted = memory.shift(seq, PosRange::ALL, PosDelta(4)).unwrap();
        assert_eq!(shifted.n_tokens, 6);
        assert_eq!(memory.positions(seq), Some(PosRange::new(Pos(4), Pos(9))));
        let n_keys: u32 = shifted.row_shifts.iter().map(|s| s.len).sum();
        let n_parts = memory.parts().len();
        assert_eq!(n_keys as usize, 6 * n_parts, "every key, once a part");
        feed(&mut memory, 1, 16);
        assert_eq!(memory.positions(seq).unwrap().last, Pos(10));
    }
}

#[test]
fn layers_that_remember_nothing_are_evaluated_as_if_for_the_first_time() {
    let mut memory = memory(&[LayerMemory::Nothing; 2]);
    assert!(memory.parts().is_empty() && memory.states().is_none());
    assert_eq!(memory.max_take_back(), 0);
    // It has as many sequences as it was made for.
    assert!(memory.snapshot(Seqs::One(SeqId(2))).is_err());
    let saved = memory.snapshot(Seqs::All).unwrap();
    let into = |to| RestoreInto::One { from: SeqId(0), to };
    assert!(memory.check_restore(&saved, into(SeqId(2))).is_err());
    assert!(memory.check_restore(&saved, into(SeqId(1))).is_ok());
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: 2,
        n_vocab: 10,
        n_embd: 1,
    };
    let batch = Batch::prompt(SeqId(1), (0..5).map(TokenId));
    for _ in 0..2 {
        let valid = validate(&batch, &rules, |seq| memory.positions(seq)).unwrap();
        assert_eq!(valid.entries()[4].pos, Pos(4));
        let error = memory.plan(&valid, 4).unwrap_err();
        assert!(
            error.to_string().contains("has 5 tokens of sequences {1}"),
            "{error}"
        );
        let mut steps = memory.begin(&valid, 5).unwrap();
        let mut inputs = MemoryInputs::default();
        assert_eq!(steps.next(&mut inputs).map(|u| u.n_tokens()), Some(5));
        assert!(steps.next(&mut inputs).is_none() && inputs.parts.is_empty());
        assert_eq!(memory.positions(SeqId(1)), None);
    }
    let one = |seq| Seqs::One(SeqId(seq));
    assert_eq!(memory.remove(one(1), PosRange::ALL).unwrap().n_tokens, 0);
    assert!(memory.remove(one(2), PosRange::ALL).is_err());
    assert!(memory.copy(SeqId(0), SeqId(2), PosRange::ALL).is_err());
    assert_eq!(
        memory
            .shift(SeqId(0), PosRange::ALL, PosDelta(3))
            .unwrap()
            .n_tokens,
        0
    );
    assert_eq!((memory.n_used(), memory.n_holes()), (0, 0));
}

#[test]
fn tokens_that_are_not_remembered_see_each_other_within_a_window() {
    let mut memory = memory(&[LayerMemory::Nothing; 2]);
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: 2,
        n_vocab: 10,
        n_embd: 1,
    };
    let mut batch = Batch::new();
    for seq in [0, 1, 0, 1, 1] {
        batch.push_token(TokenId(1)).in_sequence(SeqId(seq));
    }
    let batch = validate(&batch, &rules, |_| None).unwrap();
    let mut inputs = MemoryInputs::default();
    let mut steps = memory.begin(&batch, 8).unwrap();
    let ubatch = steps.next(&mut inputs).unwrap();
    let mut seen = BatchVisibility {
        window: Window::Full,
        visibility: Visibility::default(),
    };
    // Rows of the sequence and their positions; twice, over what was there.
    let sees = |seen: &BatchVisibility, row: usize| {
        let row = seen.visibility.row(row as u32);
        row.map(|(cell, pos)| (cell.0, pos.0)).collect::<Vec<_>>()
    };
    let rows_of = |seq: u32| {
        let rows = (0u32..).zip(&ubatch.first_seqs);
        let of_seq = rows.filter(|(_, first)| first.0 == seq);
        of_seq.map(|(row, _)| row).zip(0..).collect::<Vec<_>>()
    };
    for _ in 0..2 {
        batch_visibility(ubatch, &mut seen);
        assert_eq!(seen.visibility.check(5), Ok(()));
        for (row, seq) in ubatch.first_seqs.iter().enumerate() {
            assert_eq!(sees(&seen, row), rows_of(seq.0));
        }
    }
    seen.window = Window::Symmetric(2);
    batch_visibility(ubatch, &mut seen);
    let long = rows_of(1);
    assert_eq!(sees(&seen, long[0].0 as usize), long[..2]);
    assert_eq!(sees(&seen, long[1].0 as usize), long);
}

/// Of one sequence or of all, from a memory of any shape, whose windows slid and whose sequences
/// share their beginnings.
#[test]
fn d1_everything_can_go_from_every_memory() {
    let (full, near) = (attention(Window::Full), attention(Window::Sliding(8)));
    let attention_only = [memory(&[full]), memory(&[near]), memory(&[full, near])];
    let empty = with_states().into_iter().chain(attention_only);
    for (shape, mut memory) in empty.enumerate() {
        let empty = memory.clone();
        for _ in 0..6 {
            feed(&mut memory, 10, 16);
        }
        let copied = memory.copy(SeqId(0), SeqId(1), PosRange::ALL).unwrap();
        assert!(copied.row_copies.is_empty());
        let full = memory.clone();
        for seq in [0, 1].map(SeqId) {
            let whole = Edit::Remove {
                seqs: Seqs::One(seq),
                range: PosRange::ALL,
            };
            memory.check(&whole).unwrap();
            let whole = PosRange::from(Pos(0)..Pos(60));
            memory.remove(Seqs::One(seq), whole).unwrap();
            assert_eq!(memory.positions(seq), None, "{shape}");
        }
        memory = full;
        let all = Edit::Remove {
            seqs: Seqs::All,
            range: PosRange::ALL,
        };
        memory.check(&all).unwrap();
        let removed = memory.remove(Seqs::All, PosRange::ALL).unwrap();
        assert!(removed.n_tokens > 60, "{shape}: {removed:?}");
        assert_eq!([0, 1].map(|seq| memory.positions(SeqId(seq))), [None; 2]);
        // Nothing is left behind: the next tokens are as the first ones.
        let (mut again, mut fresh) = (memory, empty);
        let [again, fresh] = [&mut again, &mut fresh].map(|memory| {
            feed(memory, 10, 16);
            memory.positions(SeqId(0))
        });
        assert_eq!((again, fresh), (Some(PosRange::new(Pos(0), Pos(9))), again));
    }
}
