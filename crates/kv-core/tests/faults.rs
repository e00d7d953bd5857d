//! Plans that fail at every one of their ubatches, for every kind of memory.
//!
//! Sizes are chosen so that the plan finds places for the ubatches before. The memory must be as it
//! was, and the batch without the tokens that had no place must still fit.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::{
    Composite, Memory, MemoryInputs, NeededFor, NoRoom, NoStateRoom, Recurrent, RecurrentConfig,
    Refusal, RowsWritten, Streams, Unified, UnifiedConfig, invariants,
};
use kv_core::{SeqId, TokenId, Window};

const N_SEQS: u32 = 8;
const N_TOKENS: u32 = 8;

fn unified(part: u32, n_cells: u32, window: Window, streams: Streams) -> Unified {
    Unified::new(UnifiedConfig {
        n_seqs: N_SEQS,
        ..*crate::support::part(part, n_cells, window, streams).config()
    })
    .unwrap()
}

fn recurrent(n_rows: u32) -> Recurrent {
    Recurrent::new(RecurrentConfig::new(N_SEQS).with_rows(n_rows)).unwrap()
}

/// `n` tokens, the `i`-th of sequence `seq(i)`.
fn batch(memory: &impl Memory, n: u32, seq: fn(u32) -> u32) -> ValidBatch {
    let mut batch = Batch::new();
    for i in 0..n {
        batch.push_token(TokenId(i)).in_sequence(SeqId(seq(i)));
    }
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: N_SEQS,
        n_vocab: 100,
        n_embd: 1,
    };
    validate(&batch, &rules, |seq| memory.positions(seq)).unwrap()
}

/// The ubatch that has no place, of ubatches of `n_ubatch` tokens.
fn fails_at(error: &Refusal) -> usize {
    match error {
        Refusal::NoRoom(NoRoom { needed_for, .. })
        | Refusal::NoStateRoom(NoStateRoom { needed_for, .. }) => match needed_for {
            NeededFor::Ubatch(ubatch) => *ubatch,
            other => panic!("{other:?}"),
        },
        other => panic!("{other}"),
    }
}

/// A plan of `N_TOKENS` ubatches of one token fails at number `at`, the first that finds nothing.
fn fails<M>(memory: M, at: u32, seq: fn(u32) -> u32, check: impl Fn(&M))
where
    M: Memory + Clone + PartialEq + std::fmt::Debug,
{
    let before = memory.clone();
    let mut memory = memory;
    let whole = batch(&memory, N_TOKENS, seq);
    let Err(error) = memory.plan(&whole, 1) else {
        panic!("{at}: {memory:?} has places for everything");
    };
    assert_eq!(fails_at(&error), at as usize, "{error}");
    assert!(memory.begin(&whole, 1).is_err());
    assert_eq!(memory, before);
    check(&memory);
    let shorter = batch(&memory, at, seq);
    let mut inputs = MemoryInputs::default();
    let mut steps = memory.begin(&shorter, 1).unwrap();
    let mut n_done = 0;
    while steps.next(&mut inputs).is_some() {
        n_done += 1;
    }
    assert_eq!(n_done, at);
    check(&memory);
    // What fits now fits no more.
    let before = memory.clone();
    assert!(memory.plan(&batch(&memory, N_TOKENS - at, seq), 1).is_err());
    assert_eq!(memory, before);
}

fn check_all(parts: &[&Unified]) {
    parts
        .iter()
        .for_each(|part| invariants::check(part).unwrap());
}

fn one_sequence(_: u32) -> u32 {
    0
}

fn each_its_own(i: u32) -> u32 {
    i
}

#[test]
fn d6_plans_that_fail_at_any_ubatch_change_nothing() {
    use Streams::{PerSequence, Shared};
    for at in 1..N_TOKENS {
        for (streams, seq) in [
            (Shared, one_sequence as fn(u32) -> u32),
            (Shared, each_its_own),
            (PerSequence, one_sequence),
        ] {
            let memory = unified(0, at, Window::Full, streams);
            fails(memory, at, seq, |m| check_all(&[m]));
        }
        // Sequences keep their last token, whatever the window.
        for window in [Window::Sliding(3), Window::Chunked(4), Window::Symmetric(4)] {
            let memory = unified(0, at, window, Shared);
            fails(memory, at, each_its_own, |m| check_all(&[m]));
        }
    }
}

#[test]
fn d6_plans_that_fail_in_one_part_change_neither() {
    use Streams::Shared;
    for at in 1..N_TOKENS {
        let full = |n_cells| unified(0, n_cells, Window::Full, Shared);
        let sliding = |n_cells| unified(1, n_cells, Window::Sliding(3), Shared);
        for (first, second) in [(full(at), sliding(64)), (full(64), sliding(at))] {
            let memory = Composite::from_parts(vec![first, second], None).unwrap();
            let check = |m: &Composite| check_all(&m.parts().iter().collect::<Vec<_>>());
            fails(memory, at, each_its_own, check);
        }
    }
}

#[test]
fn d5_plans_that_fail_for_states_change_nothing() {
    for at in 2..N_TOKENS {
        fails(recurrent(at), at, each_its_own, |_| ());
        let full = |n_cells| unified(0, n_cells, Window::Full, Streams::Shared);
        for (first, second) in [(full(64), recurrent(at)), (full(at), recurrent(64))] {
            let memory = Composite::from_parts(vec![first], Some(second)).unwrap();
            fails(memory, at, each_its_own, |m| check_all(&[&m.parts()[0]]));
        }
    }
}

/// The states of a memory after each number of steps of one token.
fn after_steps<M: Memory + Clone>(memory: &M, batch: &ValidBatch) -> Vec<M> {
    let n_steps = memory.plan(batch, 1).unwrap().len();
    let after = |n: usize| {
        let mut memory = memory.clone();
        let mut steps = memory.begin(batch, 1).unwrap();
        for n_done in 0..n {
            assert_eq!(steps.n_done(), n_done);
            steps.next(&mut MemoryInputs::default()).unwrap();
        }
        assert_eq!(steps.n_done(), n);
        drop(steps);
        memory
    };
    (0..=n_steps).map(after).collect()
}

/// Undoes all of the first `n` steps.
fn undo_all<M: Memory + Clone>(memory: &M, batch: &ValidBatch, n: usize, rows: RowsWritten) -> M {
    let mut memory = memory.clone();
    let mut steps = memory.begin(batch, 1).unwrap();
    for _ in 0..n {
        steps.next(&mut MemoryInputs::default()).unwrap();
    }
    steps.undo_all(rows);
    memory
}

#[test]
fn steps_that_recycled_nothing_are_all_undone() {
    let memory = unified(0, 16, Window::Full, Streams::Shared);
    let batch = batch(&memory, N_TOKENS, each_its_own);
    for n in 0..=N_TOKENS as usize {
        for rows in [RowsWritten::No, RowsWritten::Perhaps] {
            assert_eq!(undo_all(&memory, &batch, n, rows), memory, "{n}, {rows:?}");
        }
    }
}

/// Positions 0 to 2 are in all cells there are; steps give their cells to 3, 4 and 5. The rows of
/// the last step may not have been written, those of the steps before it have been: without 5 and 4
/// the window of the next token, 4, reaches 2, and without 3 it would reach 1, which is
/// overwritten.
#[test]
fn steps_are_undone_until_a_window_would_miss_what_they_recycled() {
    let mut memory = unified(0, 3, Window::Sliding(3), Streams::Shared);
    let first = batch(&memory, 3, one_sequence);
    let mut steps = memory.begin(&first, 3).unwrap();
    while steps.next(&mut MemoryInputs::default()).is_some() {}
    let more = batch(&memory, 3, one_sequence);
    let last = |memory: &Unified| memory.positions(SeqId(0)).unwrap().last.0;
    let after = after_steps(&memory, &more);
    assert_eq!(after.iter().map(last).collect::<Vec<_>>(), [2, 3, 4, 5]);
    assert_eq!(undo_all(&memory, &more, 1, RowsWritten::No), after[0]);
    for (rows, ends) in [
        (RowsWritten::No, [2, 2, 2, 3]),
        (RowsWritten::Perhaps, [2, 2, 3, 4]),
    ] {
        let undone = (0..=3).map(|n| last(&undo_all(&memory, &more, n, rows)));
        assert_eq!(undone.collect::<Vec<_>>(), ends, "{rows:?}");
    }
}
