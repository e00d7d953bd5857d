//! An engine with models that attend and recur: what they refuse, and that copies, rollbacks and
//! failures leave no trace.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::sync::atomic::Ordering;

use crate::support::{Moody, NEVER};
use cellar_engine::{Engine, EngineConfig, EngineError, LongContext};
use kv_core::{
    Pos, PosDelta, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{Edit, Memory, PosChange, Refusal, Seqs},
};
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_tests::Recipe;

const N_SNAPSHOTS: u32 = 4;
/// Layers of one kind or the other, and layers that are both.
const MODELS: [&str; 2] = ["bamba", "falcon_h1"];

fn engine(model: &str) -> Engine<Moody> {
    let mut registry = Registry::new();
    model_mamba::register(&mut registry);
    let directory = Recipe::named(model).directory(&registry).unwrap();
    let config = EngineConfig {
        n_ctx: Some(128),
        n_seqs: 3,
        kv_types: KvType::F32.into(),
        n_snapshots: N_SNAPSHOTS,
        ..EngineConfig::default()
    };
    let (model, weights) = (directory.model().clone(), directory.weights().clone());
    Engine::new(Moody::new(), model, weights, &config).unwrap()
}

fn tokens(n: usize) -> Vec<TokenId> {
    (0..n).map(|i| TokenId((i * 7 % 500) as u32 + 3)).collect()
}

fn feed(engine: &mut Engine<Moody>, seq: u32, tokens: &[TokenId]) -> Vec<f32> {
    let batch = Batch::prompt(SeqId(seq), tokens.iter().copied());
    engine.decode(&batch).unwrap().values().to_vec()
}

/// No rows move: cells and states are shared.
fn copy(engine: &mut Engine<Moody>, from: u32, to: u32) {
    let [from, to] = [from, to].map(SeqId);
    let copied = engine.memory().clone().copy(from, to, PosRange::ALL);
    assert!(copied.unwrap().row_copies.is_empty());
    engine.copy(from, to, PosRange::ALL).unwrap();
}

/// An engine that remembers 20 tokens, the tokens that follow them, and the logits that those give.
fn begun(model: &str) -> (Engine<Moody>, Vec<TokenId>, Vec<f32>) {
    let mut all = tokens(30);
    let rest = all.split_off(20);
    let [mut undisturbed, mut begun] = [0; 2].map(|_| engine(model));
    for engine in [&mut undisturbed, &mut begun] {
        feed(engine, 0, &all);
    }
    let wanted = feed(&mut undisturbed, 0, &rest);
    (begun, rest, wanted)
}

fn back_to(engine: &mut Engine<Moody>, seq: u32, n: u32) {
    let rest = PosRange::from(Pos(n)..);
    engine.remove(Seqs::One(SeqId(seq)), rest).unwrap();
}

#[test]
fn a_middle_is_refused_with_its_reason_and_nothing_changes() {
    for model in MODELS {
        let (mut engine, all) = (engine(model), tokens(24));
        feed(&mut engine, 0, &all[..20]);
        assert!(engine.memory().states().is_some());
        let before = engine.memory().clone();
        let seq = Seqs::One(SeqId(0));
        let middle = engine.remove(seq, PosRange::new(Pos(5), Pos(9)));
        assert!(
            matches!(
                middle,
                Err(EngineError::Refused(Refusal::StateIndivisible { .. }))
            ),
            "{middle:?}"
        );
        let start = engine.remove(seq, PosRange::new(Pos(0), Pos(9)));
        assert!(
            matches!(
                start,
                Err(EngineError::Refused(Refusal::StateIndivisible { .. }))
            ),
            "{start:?}"
        );
        let too_far = engine.remove(seq, PosRange::from(Pos(7)..)).unwrap_err();
        let gone = Refusal::StateGone {
            seq: SeqId(0),
            last: Pos(19),
            wanted: Pos(6),
            oldest: Pos(15),
            n_snapshots: N_SNAPSHOTS,
        };
        assert_eq!(too_far.to_string(), gone.to_string());
        assert!(*engine.memory() == before);
        // As if none of it had been asked.
        let mut undisturbed = self::engine(model);
        feed(&mut undisturbed, 0, &all[..20]);
        assert!(feed(&mut engine, 0, &all[20..]) == feed(&mut undisturbed, 0, &all[20..]));
    }
}

#[test]
fn copies_and_rollbacks_go_on_exactly() {
    for model in MODELS {
        let (mut engine, rest, wanted) = begun(model);
        copy(&mut engine, 0, 1);
        // Wrong tokens for both, at once and one by one.
        feed(&mut engine, 0, &[7, 8, 9].map(TokenId));
        for token in [10, 11] {
            feed(&mut engine, 1, &[TokenId(token)]);
        }
        copy(&mut engine, 1, 2);
        for seq in [0, 1, 2] {
            back_to(&mut engine, seq, 20);
        }
        for seq in [2, 0, 1] {
            assert!(
                feed(&mut engine, seq, &rest) == wanted,
                "{model}, sequence {seq}"
            );
        }
    }
}

#[test]
fn a_failed_call_leaves_no_trace() {
    for model in MODELS {
        let (mut engine, rest, wanted) = begun(model);
        let before = engine.memory().clone();
        engine.backend().runs_left.store(0, Ordering::Relaxed);
        let batch = Batch::prompt(SeqId(0), [1, 2, 3].map(TokenId));
        engine.decode(&batch).unwrap_err();
        engine.backend().runs_left.store(NEVER, Ordering::Relaxed);
        assert!(*engine.memory() == before);
        assert!(feed(&mut engine, 0, &rest) == wanted, "{model}");
    }
}

#[test]
fn positions_cannot_be_moved() {
    for model in MODELS {
        let mut engine = engine(model);
        feed(&mut engine, 0, &tokens(20));
        let before = engine.memory().clone();
        let change = PosChange::Shift(PosDelta(-3));
        let refused = engine.memory().check(&Edit::Reposition {
            seq: SeqId(0),
            range: PosRange::from(Pos(5)..),
            change,
        });
        assert!(!matches!(refused, Err(Refusal::NoSuchSequence { .. })));
        assert!(refused.is_err());
        assert!(engine.shift_context(SeqId(0), 2).is_err());
        assert!(*engine.memory() == before);
    }
}

#[test]
fn a_text_with_states_ends_with_its_context() {
    for model in MODELS {
        let engine = engine(model);
        engine.check_long_context(LongContext::Stop).unwrap();
        let refused = engine.check_long_context(LongContext::Shift { n_keep: 1 });
        assert!(
            matches!(refused, Err(EngineError::OneState { .. })),
            "{model}: {refused:?}"
        );
    }
}
