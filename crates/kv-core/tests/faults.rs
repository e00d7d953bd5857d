//! Plans that fail at every one of their ubatches, for every kind of memory.
//!
//! Sizes are chosen so that the plan finds places for the ubatches before. The memory must be as it
//! was, and the batch without the tokens that had no place must still fit.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

mod support;

use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::{
    Composite, Memory, MemoryInputs, NeededFor, NoRoom, NoStateRoom, Recurrent, RecurrentConfig,
    Refusal, Streams, Unified, UnifiedConfig, invariants,
};
use kv_core::{SeqId, TokenId, Window};

const N_SEQS: u32 = 8;
const N_TOKENS: u32 = 8;

fn unified(part: u32, n_cells: u32, window: Window, streams: Streams) -> Unified {
    Unified::new(UnifiedConfig {
        n_seqs: N_SEQS,
        ..*support::part(part, n_cells, window, streams).config()
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
