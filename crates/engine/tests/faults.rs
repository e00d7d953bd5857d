//! Computations that fail at every node of every ubatch, for every kind of memory.
//!
//! A backend computes a graph up to a node, with all that this stores, and fails there. The memory
//! must be as it was before the call, found so by recounting, or, where states were stored over
//! that the call began with, as it was before one of its ubatches; and going on must give the same
//! logits, bit for bit, as if nothing had failed: what the failures stored is never looked at.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

#[path = "faults/backend.rs"]
mod backend;

use std::sync::Arc;

use crate::model::{Layered, Remembers};
use backend::{Fault, FaultyBackend};
use cellar_engine::{Engine, EngineConfig, EngineError};
use kv_core::{
    PosRange, SeqId, TokenId, Window,
    batch::Batch,
    memory::{Composite, Memory, Streams, invariants},
};
use kv_rows::KvType;

const FULL: Remembers = Remembers::Tokens(Window::Full);
const STATES: Remembers = Remembers::State;

fn engine(layers: &[Remembers], config: &EngineConfig) -> Engine<FaultyBackend> {
    let model = Arc::new(Layered::new(layers));
    let weights = model.random_weights();
    Engine::new(FaultyBackend::default(), model, weights, config).unwrap()
}

/// Tokens with the ids `first`, `first + 1`, …, for each of `seqs` in turn; all rows wanted.
fn batch(seqs: &[u32], n_tokens: u32, first: u32) -> Batch {
    let mut batch = Batch::new();
    for i in 0..n_tokens {
        let seq = SeqId(seqs[i as usize % seqs.len()]);
        let token = TokenId((first + i) % crate::model::VOCAB);
        batch.push_token(token).in_sequence(seq).with_output();
    }
    batch
}

/// Sequences 0 and 1 of different lengths, and 2, which begins like 0.
fn begin(engine: &mut Engine<FaultyBackend>) {
    engine.decode(&batch(&[0, 1, 0], 9, 3)).unwrap();
    engine.copy(SeqId(0), SeqId(2), PosRange::ALL).unwrap();
}

/// Recounts every part of a memory.
fn check(memory: &Composite) {
    for part in memory.parts() {
        invariants::check(part).unwrap();
    }
}

/// A call of 7 tokens in ubatches of 3, and its tokens from number `first` on.
const N_TOKENS: u32 = 7;

fn call(first: u32) -> Batch {
    tokens_of_call(first..N_TOKENS)
}

fn tokens_of_call(range: std::ops::Range<u32>) -> Batch {
    let seqs = [2, 0, 1, 2, 2, 0, 1];
    batch(
        &seqs[range.start as usize..],
        range.len() as u32,
        11 + range.start,
    )
}

/// Whether the ubatches before the one that failed are undone too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undone {
    All,
    /// Where states were stored over that they began with, they stay.
    AllButStates,
}

fn fails_everywhere((name, undone): (&str, Undone), layers: &[Remembers], config: &EngineConfig) {
    let fresh = || {
        let mut engine = engine(layers, config);
        begin(&mut engine);
        engine
    };
    let n_ubatches = N_TOKENS.div_ceil(config.n_ubatch);
    let undisturbed = fresh().decode(&call(0)).unwrap().values().to_vec();
    // The memory before each ubatch.
    let mut steps = vec![fresh().memory().clone()];
    let mut stepwise = fresh();
    for step in 1..n_ubatches {
        let first = (step - 1) * config.n_ubatch;
        let ubatch = tokens_of_call(first..first + config.n_ubatch);
        stepwise.decode(&ubatch).unwrap();
        steps.push(stepwise.memory().clone());
    }
    let mut engine = fresh();
    let mut n_failures = 0;
    for run in 0..n_ubatches as usize {
        for node in 0.. {
            let fault = Fault { run, node };
            engine.backend().fail(fault);
            let Err(error) = engine.decode(&call(0)) else {
                panic!("{name}, {fault:?}: did not fail");
            };
            assert!(matches!(error, EngineError::Backend(_)), "{name}: {error}");
            check(engine.memory());
            n_failures += 1;
            let is_last = engine.backend().take_was_last_node();
            let is_before = |step: &&Composite| *step == engine.memory();
            let at = steps[..=run].iter().rposition(|step| is_before(&step));
            let at = at.unwrap_or_else(|| panic!("{name}, {fault:?}: in between"));
            if at > 0 {
                assert_eq!(undone, Undone::AllButStates, "{name}, {fault:?}");
                let first = at as u32 * config.n_ubatch;
                let rest = engine.decode(&call(first)).unwrap().values().to_vec();
                let wanted = &undisturbed[undisturbed.len() - rest.len()..];
                assert_eq!(rest, wanted, "{name}, {fault:?}");
                engine = fresh();
            }
            if is_last {
                break;
            }
        }
    }
    assert!(n_failures > 15 * n_ubatches, "{name}: {n_failures}");
    let again = engine.decode(&call(0)).unwrap().values().to_vec();
    assert_eq!(again, undisturbed, "{name}");
}

fn config() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(64),
        n_ubatch: 3,
        n_seqs: 3,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

fn streams() -> EngineConfig {
    EngineConfig {
        streams: Streams::PerSequence,
        ..config()
    }
}

#[test]
fn d6_a_computation_that_fails_at_any_node_leaves_attention_as_it_was() {
    fails_everywhere(("shared cells", Undone::All), &[FULL, FULL], &config());
    fails_everywhere(("streams", Undone::All), &[FULL], &streams());
    let sliding = Remembers::Tokens(Window::Sliding(20));
    fails_everywhere(("sliding", Undone::All), &[sliding], &config());
}

#[test]
fn d6_a_computation_that_fails_at_any_node_leaves_both_windows_as_they_were() {
    let sliding = Remembers::Tokens(Window::Sliding(20));
    fails_everywhere(
        ("sliding and full", Undone::All),
        &[sliding, FULL],
        &config(),
    );
    let chunked = Remembers::Tokens(Window::Chunked(16));
    fails_everywhere(
        ("full and chunked, streams", Undone::All),
        &[FULL, chunked],
        &streams(),
    );
}

#[test]
fn d5_a_computation_that_fails_at_any_node_leaves_states_as_they_were() {
    fails_everywhere(("states", Undone::AllButStates), &[STATES], &config());
    fails_everywhere(("hybrid", Undone::AllButStates), &[STATES, FULL], &config());
    let sliding = Remembers::Tokens(Window::Sliding(20));
    fails_everywhere(
        ("hybrid of three", Undone::AllButStates),
        &[FULL, STATES, sliding],
        &streams(),
    );
}

/// Where a window recycles cells in the call itself, ubatches before the one that failed may stay;
/// then a sequence goes on from where its positions say.
#[test]
fn d6_a_failure_at_any_node_after_a_window_slid_leaves_what_can_go_on() {
    let layers = &[Remembers::Tokens(Window::Sliding(4))];
    let config = EngineConfig {
        n_ctx: Some(8),
        n_seqs: 1,
        ..config()
    };
    let tokens = |range: std::ops::Range<u32>| batch(&[0], range.len() as u32, 5 + range.start);
    let undisturbed = {
        let mut engine = engine(layers, &config);
        engine.decode(&tokens(0..5)).unwrap();
        engine.decode(&tokens(5..14)).unwrap().values().to_vec()
    };
    let (mut run, mut node) = (0, 0);
    while run < 3 {
        let mut engine = engine(layers, &config);
        engine.decode(&tokens(0..5)).unwrap();
        engine.backend().fail(Fault { run, node });
        engine.decode(&tokens(5..14)).unwrap_err();
        check(engine.memory());
        let has = engine.memory().positions(SeqId(0)).unwrap();
        let n = has.last.0 + 1;
        assert!((5..=5 + 3 * run as u32).contains(&n) && (n - 5).is_multiple_of(3));
        let again = engine.decode(&tokens(n..14)).unwrap().values().to_vec();
        let rest = &undisturbed[undisturbed.len() - again.len()..];
        assert_eq!(again, rest, "run {run}, node {node}");
        (run, node) = if engine.backend().take_was_last_node() {
            (run + 1, 0)
        } else {
            (run, node + 1)
        };
    }
}
