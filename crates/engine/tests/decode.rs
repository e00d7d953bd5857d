//! The decode loop: what comes out whichever way tokens go in, and what a failure leaves behind.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Moody, engine, ids, references, try_engine};
use cellar_engine::{CancelFlag, ConfigError, EngineConfig, EngineError};
use kv_core::{
    Pos, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{Memory, Refusal, Seqs, Streams},
};
use kv_graph::TopK;
use kv_rows::KvType;

const ALL: PosRange = PosRange::ALL;

fn small() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(64),
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

/// A batch in which every output is wanted.
fn every_row(seq: SeqId, tokens: &[TokenId]) -> Batch {
    let mut batch = Batch::new();
    for &token in tokens {
        batch.push_token(token).in_sequence(seq).with_output();
    }
    batch
}

#[track_caller]
fn assert_close(got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len());
    for (at, (a, b)) in got.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() < 2e-5, "logit {at}: {a} against {b}");
    }
}

#[test]
fn x19_only_wanted_rows_come_out_in_the_order_of_the_batch() {
    let tokens = ids(&references()[0].ids);
    let mut all = engine(&small());
    let all = all
        .decode(&every_row(SeqId(0), &tokens))
        .unwrap()
        .values()
        .to_vec();
    let n_vocab = all.len() / tokens.len();

    let mut some = engine(&EngineConfig {
        n_ubatch: 2,
        ..small()
    });
    let mut batch = Batch::new();
    for (at, &token) in tokens.iter().enumerate() {
        let entry = batch.push_token(token);
        if at == 1 || at == 4 {
            entry.with_output();
        }
    }
    let logits = some.decode(&batch).unwrap();
    assert_eq!(logits.n_rows(), 2);
    assert_close(logits.row(0).unwrap(), &all[n_vocab..2 * n_vocab]);
    assert_close(logits.last().unwrap(), &all[4 * n_vocab..]);
    assert_eq!(logits.row(2), None);
}

#[test]
fn sequences_do_not_see_each_other() {
    let [a, b] = [0, 1].map(|i| ids(&references()[i].ids));
    let alone = |tokens: &[TokenId]| {
        let mut engine = engine(&small());
        engine
            .decode(&Batch::prompt(SeqId(0), tokens.iter().copied()))
            .unwrap()
            .values()
            .to_vec()
    };
    for streams in [Streams::Shared, Streams::PerSequence] {
        let mut both = engine(&EngineConfig {
            n_seqs: 2,
            n_ubatch: 3,
            streams,
            ..small()
        });
        let mut batch = Batch::new();
        for i in 0..a.len().max(b.len()) {
            for (seq, tokens) in [(1, &a), (0, &b)] {
                let Some(&token) = tokens.get(i) else {
                    continue;
                };
                let entry = batch.push_token(token).in_sequence(SeqId(seq));
                if i + 1 == tokens.len() {
                    entry.with_output();
                }
            }
        }
        let logits = both.decode(&batch).unwrap();
        let (first, second) = if a.len() <= b.len() {
            (&a, &b)
        } else {
            (&b, &a)
        };
        assert_close(logits.row(0).unwrap(), &alone(first));
        assert_close(logits.row(1).unwrap(), &alone(second));
    }
}

#[test]
fn a_copied_sequence_goes_on_like_its_original() {
    let prompt = ids(&references()[0].ids);
    let (last, begin) = prompt.split_last().unwrap();
    for streams in [Streams::Shared, Streams::PerSequence] {
        let mut engine = engine(&EngineConfig {
            n_seqs: 2,
            streams,
            ..small()
        });
        engine
            .decode(&Batch::prompt(SeqId(0), begin.iter().copied()))
            .unwrap();
        let n_copied = engine.copy(SeqId(0), SeqId(1), ALL).unwrap();
        assert_eq!(n_copied as usize, begin.len());
        let original = engine
            .decode(&Batch::prompt(SeqId(0), [*last]))
            .unwrap()
            .values()
            .to_vec();
        let copy = engine
            .decode(&Batch::prompt(SeqId(1), [*last]))
            .unwrap()
            .values()
            .to_vec();
        assert_close(&copy, &original);
        engine.remove(Seqs::One(SeqId(0)), ALL).unwrap();
        engine
            .remove(
                Seqs::One(SeqId(1)),
                PosRange::from(Pos(begin.len() as u32)..),
            )
            .unwrap();
        let again = engine
            .decode(&Batch::prompt(SeqId(1), [*last]))
            .unwrap()
            .values()
            .to_vec();
        assert_close(&again, &original);
        engine.clear();
        assert_eq!(engine.memory().n_used(), 0);
    }
}

#[test]
fn a_failure_at_any_ubatch_leaves_no_trace() {
    let tokens = ids(&references()[0].greedy_ids[..10]);
    let prompt = ids(&references()[0].ids);
    let config = EngineConfig {
        n_ubatch: 3,
        n_programs: 2,
        ..small()
    };
    let undisturbed = {
        let mut engine = engine(&config);
        engine
            .decode(&Batch::prompt(SeqId(0), prompt.iter().copied()))
            .unwrap();
        engine
            .decode(&every_row(SeqId(0), &tokens))
            .unwrap()
            .values()
            .to_vec()
    };
    // Ten tokens in ubatches of three: four runs, two shapes that are not compiled yet, and one
    // wait for all of them.
    type Counter = fn(&Moody) -> &AtomicUsize;
    let runs: Counter = |backend| &backend.runs_left;
    let compilations: Counter = |backend| &backend.compilations_left;
    let waits: Counter = |backend| &backend.finishes_left;
    let failures = (0..4).map(|i| (runs, i));
    let failures = failures.chain((0..2).map(|i| (compilations, i)));
    for (left, at) in failures.chain([(waits, 0)]) {
        let mut engine = engine(&config);
        engine
            .decode(&Batch::prompt(SeqId(0), prompt.iter().copied()))
            .unwrap();
        let before = engine.memory().clone();
        left(engine.backend()).store(at, Ordering::Relaxed);
        let failed = engine.decode(&every_row(SeqId(0), &tokens)).unwrap_err();
        assert!(matches!(failed, EngineError::Backend(_)), "{failed}");
        assert!(*engine.memory() == before, "failure {at}");
        let again = engine
            .decode(&every_row(SeqId(0), &tokens))
            .unwrap()
            .values()
            .to_vec();
        assert_eq!(again, undisturbed, "failure {at}");
    }
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let prompt = ids(&references()[0].ids);
    let mut engine = engine(&EngineConfig {
        n_ctx: Some(8),
        ..small()
    });
    engine
        .decode(&Batch::prompt(SeqId(0), prompt.iter().copied()))
        .unwrap();
    let before = engine.memory().clone();
    let logits = engine.last_logits().values().to_vec();
    assert!(!logits.is_empty());
    let refused = engine
        .decode(&Batch::prompt(SeqId(0), prompt.iter().copied()))
        .unwrap_err();
    assert!(
        matches!(refused, EngineError::Refused(Refusal::NoRoom(_))),
        "{refused}"
    );
    let refused = engine
        .decode(&Batch::prompt(SeqId(0), [TokenId(1024)]))
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        "entry 0: token 1024 is not below the vocabulary's 1024"
    );
    assert!(*engine.memory() == before);
    assert_eq!(engine.last_logits().values(), logits);
}

#[test]
fn compiled_shapes_are_bounded() {
    let mut engine = engine(&EngineConfig {
        n_programs: 3,
        ..small()
    });
    for n in 1..8 {
        engine.clear();
        engine
            .decode(&Batch::prompt(SeqId(0), (1..=n).map(TokenId)))
            .unwrap();
        assert!(engine.n_programs() <= 3);
    }
}

#[test]
fn a_configuration_is_checked_with_numbers() {
    let refused = |edit: fn(&mut EngineConfig)| {
        let mut config = EngineConfig::default();
        edit(&mut config);
        match try_engine(&config).unwrap_err() {
            EngineError::Config(error @ ConfigError::OutOfRange { .. }) => error.to_string(),
            other => panic!("{other}"),
        }
    };
    assert_eq!(
        refused(|c| c.n_ctx = Some(0)),
        "the context length is 0: it must be between 1 and 1073741824"
    );
    assert_eq!(
        refused(|c| c.n_seqs = 4097),
        "the number of sequences is 4097: it must be between 1 and 4096"
    );
    assert_eq!(
        refused(|c| c.n_ubatch = 0),
        "the ubatch size is 0: it must be between 1 and 1073741824"
    );
    let too_many = EngineConfig {
        n_ctx: Some(1 << 30),
        n_seqs: 200,
        streams: Streams::PerSequence,
        ..EngineConfig::default()
    };
    let error = try_engine(&too_many).unwrap_err().to_string();
    assert!(
        error.contains("200") && error.contains("1073741824"),
        "{error}"
    );
}

#[test]
fn defaults_follow_the_model() {
    let engine = engine(&EngineConfig {
        n_batch: 100,
        ..EngineConfig::default()
    });
    let settings = engine.settings();
    assert_eq!(settings.n_ctx, 512, "the model's trained length");
    assert_eq!(settings.n_ubatch, 100, "no more than a batch");
    // 6 layers, K and V, 4 heads of 16 values in f16.
    assert_eq!(settings.layout.bytes(), 512 * 6 * 2 * 4 * 16 * 2);
    assert_eq!(engine.memory().positions(SeqId(0)), None);
}

/// Nothing is queued: what is done to sequences after a copy cannot meet the copy.
#[test]
fn d12_a_copy_between_streams_is_done_at_once() {
    let [a, b] = [0, 1].map(|i| ids(&references()[i].ids));
    let config = EngineConfig {
        n_seqs: 2,
        streams: Streams::PerSequence,
        ..small()
    };
    let wanted = engine(&config)
        .decode(&every_row(SeqId(1), &b))
        .unwrap()
        .values()
        .to_vec();
    let mut engine = engine(&config);
    engine.decode(&every_row(SeqId(0), &a)).unwrap();
    let n_copied = engine.copy(SeqId(0), SeqId(1), ALL).unwrap();
    assert_eq!(n_copied as usize, a.len());
    engine.remove(Seqs::One(SeqId(1)), ALL).unwrap();
    let mut got = Vec::new();
    for row in &b {
        let logits = engine.decode(&every_row(SeqId(1), &[*row])).unwrap();
        got.extend_from_slice(logits.values());
    }
    assert_close(&got, &wanted);
}

#[test]
fn d37_the_context_is_as_large_as_was_asked_for() {
    for (n_ctx, n_seqs) in [(512, 4), (100, 3), (1000, 1)] {
        for (streams, n_streams) in [(Streams::Shared, 1), (Streams::PerSequence, n_seqs)] {
            let engine = engine(&EngineConfig {
                n_ctx: Some(n_ctx),
                n_seqs,
                streams,
                ..small()
            });
            let settings = engine.settings();
            assert_eq!(settings.n_ctx, n_ctx);
            let n_rows = settings.layout.layers()[0].n_rows;
            assert_eq!(n_rows as u32, n_ctx * n_streams);
        }
    }
}

#[test]
fn d42_a_shift_and_a_copy_keep_what_is_compiled() {
    let tokens = ids(&references()[0].greedy_ids[..12]);
    let mut engine = engine(&EngineConfig {
        n_seqs: 2,
        streams: Streams::PerSequence,
        ..small()
    });
    engine.decode(&every_row(SeqId(0), &tokens)).unwrap();
    let n_programs = engine.n_programs();
    engine
        .backend()
        .compilations_left
        .store(0, Ordering::Relaxed);
    engine.shift_context(SeqId(0), 2).unwrap();
    engine.copy(SeqId(0), SeqId(1), ALL).unwrap();
    // The same shape again: a compilation would fail.
    engine.decode(&every_row(SeqId(1), &tokens)).unwrap();
    assert_eq!(engine.n_programs(), n_programs);
}

/// Weights that cannot be used are found before the first token, which then compiles nothing.
#[test]
fn the_program_of_one_token_is_compiled_first() {
    let mut engine = engine(&small());
    assert_eq!((engine.n_programs(), engine.n_compiled()), (1, 1));
    for (n_tokens, n_compiled) in [(1, 1), (2, 2), (1, 2), (3, 3)] {
        let tokens = vec![TokenId(5); n_tokens];
        engine.decode(&every_row(SeqId(0), &tokens)).unwrap();
        assert_eq!(engine.n_compiled(), n_compiled);
        assert_eq!(engine.n_programs() as u64, n_compiled);
    }
}

#[test]
fn embeddings_of_a_model_with_logits_are_refused() {
    let mut engine = engine(&small());
    let batch = Batch::prompt(SeqId(0), [TokenId(5)]);
    let refused = engine.embed(&batch).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the model 'llama' gives logits, not embeddings"
    );
    assert_eq!(engine.memory().n_used(), 0);
}

/// What came out last is what was asked for last.
#[test]
fn rows_are_logits_or_candidates_as_they_were_asked_for() {
    let mut engine = engine(&small());
    let cancel = CancelFlag::default();
    let batch = Batch::prompt(SeqId(0), [TokenId(5)]);
    let whole = engine.decode(&batch).unwrap().values().to_vec();
    assert!(engine.last_candidates().is_none());
    engine.clear();
    let top = engine.decode_candidates(&batch, 3, &cancel).unwrap();
    let mut wanted = vec![0.0; TopK::row_len(3)];
    TopK::of(&whole, &mut wanted);
    assert_eq!(top.unwrap().to_row(), wanted);
    assert_eq!(engine.last_candidates().unwrap().to_row(), wanted);
    assert_eq!(engine.last_logits().n_rows(), 0);
    engine.clear();
    engine.decode(&batch).unwrap();
    assert!(engine.last_candidates().is_none());
    assert_eq!(engine.last_logits().values(), whole);
}
