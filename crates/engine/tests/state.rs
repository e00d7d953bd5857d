//! Saved and restored: the same logits to the bit, the same texts, and what is left where it fails.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use crate::support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::model::{Layered, Remembers};
use crate::support::text::by_hand;
use crate::support::{Moody, NEVER};
use cellar_engine::sampler::SamplerConfig;
use cellar_engine::{
    Completion, CompletionOptions, Engine, EngineConfig, EngineError, LongContext, Replaced,
    SaveOptions,
};
use kv_backend::Backend;
use kv_backend::null::NullBackend;
use kv_backend::state::{SavedState, SeqTokens, StateError};
use kv_candle::CandleBackend;
use kv_core::{
    Pos, PosRange, SeqId, TokenId, Window,
    batch::Batch,
    memory::{Memory, RestoreInto, Seqs, Streams},
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use serde::Deserialize;

/// The models without their endings.
const MODELS: [&str; 3] = [
    "models/stories-llama",
    "tests/fixtures/stories/stories-gemma3",
    "tests/fixtures/stories/stories-mamba",
];
const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);

fn model(path: &str) -> ModelFile {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    let root = env!("CARGO_MANIFEST_DIR");
    ModelFile::open(format!("{root}/../../{path}-f16.gguf"), &registry).unwrap()
}

fn cpu(file: &ModelFile, config: &EngineConfig) -> Engine<CpuBackend> {
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    Engine::new(backend, Arc::clone(file.model()), file.weights(), config).unwrap()
}

fn config(kv_type: KvType) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(400),
        n_ubatch: 16,
        n_seqs: 2,
        kv_types: kv_type.into(),
        n_snapshots: 3,
        ..EngineConfig::default()
    }
}

fn tokens(seed: usize, n: usize) -> Vec<TokenId> {
    (0..n)
        .map(|i| TokenId(((i + seed) * 7 % 900) as u32 + 3))
        .collect()
}

/// The logits of the last of these tokens, as bits.
fn feed<D: Backend>(engine: &mut Engine<D>, seq: SeqId, tokens: &[TokenId]) -> Vec<u32> {
    let batch = Batch::prompt(seq, tokens.iter().copied());
    let logits = engine.decode(&batch).unwrap();
    logits.last().unwrap().iter().map(|v| v.to_bits()).collect()
}

fn save<D: Backend>(engine: &Engine<D>, seqs: Seqs) -> Vec<u8> {
    let options = SaveOptions {
        seqs,
        tokens: &[],
        kv_type: None,
        state_type: None,
    };
    let mut bytes = Vec::new();
    engine.save_state(&options, &mut bytes).unwrap();
    bytes
}

fn restore<D: Backend>(
    engine: &mut Engine<D>,
    bytes: &[u8],
    into: RestoreInto,
) -> Result<(), EngineError> {
    let state = SavedState::parse(bytes)?;
    engine.restore_state(&state, into).map(drop)
}

#[test]
fn what_comes_after_is_the_same_to_the_bit_wherever_it_was_restored() {
    for path in MODELS {
        let file = model(path);
        for kv_type in [KvType::F32, KvType::F16] {
            let mut first = cpu(&file, &config(kv_type));
            feed(&mut first, A, &tokens(0, 90));
            feed(&mut first, B, &tokens(5, 70));
            feed(&mut first, A, &tokens(9, 3));
            let bytes = save(&first, Seqs::All);
            let others = [
                config(kv_type),
                EngineConfig {
                    n_ctx: Some(1000),
                    n_ubatch: 64,
                    ..config(kv_type)
                },
                EngineConfig {
                    streams: Streams::PerSequence,
                    ..config(kv_type)
                },
            ];
            let after = |engine: &mut Engine<CpuBackend>| {
                let one_by_one = [A, B, A, B].map(|seq| feed(engine, seq, &tokens(3, 1)));
                // Further removal, as far as there are snapshots.
                let last = engine.memory().positions(B).unwrap().last;
                let back = PosRange::from(Pos(last.0 - 1)..);
                engine.remove(Seqs::One(B), back).unwrap();
                (one_by_one, feed(engine, B, &tokens(8, 20)))
            };
            let wanted = after(&mut first);
            for other in &others {
                let mut engine = cpu(&file, other);
                feed(&mut engine, B, &tokens(1, 30));
                restore(&mut engine, &bytes, RestoreInto::All).unwrap();
                assert!(after(&mut engine) == wanted, "{path}, {other:?}");
            }
            // A sequence alone, under another number, beside one that has nothing to do with it.
            let mut engine = cpu(&file, &config(kv_type));
            feed(&mut engine, A, &tokens(2, 40));
            restore(&mut engine, &bytes, RestoreInto::One { from: A, to: B }).unwrap();
            let one = feed(&mut engine, B, &tokens(3, 1));
            assert!(one == wanted.0[0], "{path}, {kv_type}");
        }
    }
}

/// Prompts with their greedy continuations by an independent implementation.
#[derive(Debug, Deserialize)]
struct Reference {
    ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

fn references(path: &str) -> Vec<Reference> {
    #[derive(Deserialize)]
    struct File {
        prompts: Vec<Reference>,
    }
    let root = env!("CARGO_MANIFEST_DIR");
    let text = std::fs::read_to_string(format!("{root}/../../{path}.reference.json")).unwrap();
    serde_json::from_str::<File>(&text).unwrap().prompts
}

/// Greedy text of a sequence, of `n` tokens; what is not evaluated yet comes first and last.
fn go_on(
    engine: &mut Engine<CpuBackend>,
    file: &ModelFile,
    seq: SeqId,
    (prompt, n): (&[TokenId], usize),
) -> Vec<TokenId> {
    let options = CompletionOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(n),
        ..CompletionOptions::default()
    };
    let mut text = Completion::new(file.tokenizer(), options).unwrap();
    by_hand(engine, seq, prompt, &mut text, LongContext::Stop);
    text.tokens().to_vec()
}

#[test]
fn two_texts_beside_each_other_go_on_after_an_interruption_as_if_there_were_none() {
    for path in MODELS {
        let file = model(path);
        let references = references(path);
        let [one, other] = [&references[0], &references[1]];
        for kv_type in [KvType::F32, KvType::F16] {
            let mut first = cpu(&file, &config(kv_type));
            let mut told: Vec<SeqTokens> = Vec::new();
            for (seq, reference) in [(A, one), (B, other)] {
                let prompt: Vec<TokenId> = reference.ids.iter().copied().map(TokenId).collect();
                let half = reference.greedy_ids.len() / 2;
                let mut text = go_on(&mut first, &file, seq, (&prompt, half));
                // What was chosen last is not evaluated yet.
                let pending = text.pop().into_iter().collect();
                told.push(SeqTokens {
                    seq,
                    evaluated: [prompt, text].concat(),
                    pending,
                });
            }
            let mut bytes = Vec::new();
            let options = SaveOptions {
                seqs: Seqs::All,
                tokens: &told,
                kv_type: None,
                state_type: None,
            };
            first.save_state(&options, &mut bytes).unwrap();
            drop(first);
            let mut second = cpu(&file, &config(kv_type));
            let state = SavedState::parse(&bytes).unwrap();
            let restored = second.restore_state(&state, RestoreInto::All).unwrap();
            assert_eq!(restored.tokens, told);
            for ((seq, reference), told) in [(A, one), (B, other)].into_iter().zip(told) {
                let n = reference.greedy_ids.len();
                let rest = go_on(&mut second, &file, seq, (&told.pending, n - n / 2));
                let all = [told.evaluated, told.pending, rest].concat();
                let ids: Vec<u32> = all.iter().map(|t| t.0).collect();
                // The token that ends a text is none of its tokens.
                let mut greedy = reference.greedy_ids.clone();
                let ends = |id: u32| file.tokenizer().is_end_of_generation(TokenId(id));
                greedy.pop_if(|id| ends(*id));
                let wanted = [&reference.ids[..], &greedy].concat();
                assert_eq!(ids, wanted, "{path}, {kv_type}, sequence {seq}");
            }
        }
    }
}

/// Greedy texts of two sequences whose tokens are always in one batch; half-way they move into
/// another engine.
fn side_by_side<D: Backend>(new: impl Fn() -> Engine<D>, two: [&Reference; 2]) -> [Vec<u32>; 2] {
    let mut engine = new();
    let mut next = two.map(|reference| reference.ids.clone());
    let mut told = [const { Vec::new() }; 2];
    let longest = two.iter().map(|r| r.greedy_ids.len()).max().unwrap();
    for step in 0..longest {
        if step == longest / 2 {
            let bytes = save(&engine, Seqs::All);
            engine = new();
            restore(&mut engine, &bytes, RestoreInto::All).unwrap();
        }
        let mut batch = Batch::new();
        let mut going_on = Vec::new();
        for (i, ids) in next.iter().enumerate() {
            if step < two[i].greedy_ids.len() {
                let (last, before) = ids.split_last().unwrap();
                let seq = SeqId(i as u32);
                for &id in before {
                    batch.push_token(TokenId(id)).in_sequence(seq);
                }
                let last = batch.push_token(TokenId(*last));
                last.in_sequence(seq).with_output();
                going_on.push(i);
            }
        }
        let logits = engine.decode(&batch).unwrap();
        for (row, i) in going_on.into_iter().enumerate() {
            let row = logits.row(row).unwrap();
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            next[i] = vec![best.unwrap() as u32];
            told[i].extend_from_slice(&next[i]);
        }
    }
    told
}

#[test]
fn two_texts_in_one_batch_are_told_as_each_alone() {
    for path in MODELS {
        let file = model(path);
        let references = references(path);
        let two = [&references[0], &references[1]];
        let wanted = two.map(|reference| reference.greedy_ids.clone());
        for kv_type in [KvType::F32, KvType::F16] {
            let config = config(kv_type);
            let told = side_by_side(|| cpu(&file, &config), two);
            assert_eq!(told, wanted, "{path}, {kv_type}");
            let candle = || {
                let model = Arc::clone(file.model());
                Engine::new(CandleBackend::cpu(), model, file.weights(), &config).unwrap()
            };
            assert_eq!(side_by_side(candle, two), wanted, "{path}, {kv_type}");
        }
    }
}

fn moody(n_ctx: u32) -> Engine<Moody> {
    support::engine(&EngineConfig {
        n_ctx: Some(n_ctx),
        ..config(KvType::F32)
    })
}

#[test]
fn a_device_that_fails_at_any_write_leaves_what_was_there_where_there_is_room() {
    let mut source = moody(100);
    feed(&mut source, A, &tokens(0, 30));
    let bytes = save(&source, Seqs::One(A));
    let into = RestoreInto::One { from: A, to: B };
    let mut engine = moody(100);
    feed(&mut engine, A, &tokens(1, 10));
    feed(&mut engine, B, &tokens(2, 10));
    let memory = engine.memory().clone();
    // K and V of 6 layers.
    for n_writes in 0..12 {
        engine
            .backend()
            .writes_left
            .store(n_writes, Ordering::Relaxed);
        let error = restore(&mut engine, &bytes, into).unwrap_err();
        let kept = matches!(
            &error,
            EngineError::RestoreRows {
                replaced: Replaced::Kept,
                ..
            }
        );
        assert!(kept, "{error}");
        engine.backend().writes_left.store(NEVER, Ordering::Relaxed);
        assert_eq!(engine.memory(), &memory);
    }
    let mut undisturbed = moody(100);
    feed(&mut undisturbed, A, &tokens(1, 10));
    feed(&mut undisturbed, B, &tokens(2, 10));
    for seq in [A, B] {
        assert_eq!(
            feed(&mut engine, seq, &[TokenId(9)]),
            feed(&mut undisturbed, seq, &[TokenId(9)])
        );
    }
    restore(&mut engine, &bytes, into).unwrap();
    assert_eq!(
        feed(&mut engine, B, &[TokenId(9)]),
        feed(&mut source, A, &[TokenId(9)])
    );
}

#[test]
fn where_there_is_no_room_for_both_a_failed_write_forgets_what_was_to_be_replaced() {
    let mut source = moody(100);
    feed(&mut source, A, &tokens(0, 30));
    let bytes = save(&source, Seqs::All);
    for into in [RestoreInto::All, RestoreInto::One { from: A, to: B }] {
        let mut engine = moody(45);
        feed(&mut engine, A, &tokens(1, 5));
        feed(&mut engine, B, &tokens(2, 35));
        engine.backend().writes_left.store(7, Ordering::Relaxed);
        let error = restore(&mut engine, &bytes, into).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the saved rows could not be written, and what they were to replace is forgotten"
        );
        let source = std::error::Error::source(&error).unwrap();
        assert_eq!(source.to_string(), "the moody backend failed: as told");
        assert_eq!(engine.memory().positions(B), None);
        let others = matches!(into, RestoreInto::One { .. });
        assert_eq!(engine.memory().positions(A).is_some(), others);
    }
}

#[test]
fn d19_weights_of_another_training_are_told_apart() {
    let file = model(MODELS[0]);
    let mut engine = cpu(&file, &config(KvType::F32));
    feed(&mut engine, A, &tokens(0, 5));
    let bytes = save(&engine, Seqs::All);
    // The same model but for the last byte of one weight.
    let source = file.weights();
    let mut weights = kv_graph::weights::MemoryWeights::new();
    for name in source.names() {
        let weight = source.get(&name).unwrap();
        let mut bytes = weight.bytes().to_vec();
        if name == "blk.3.ffn_down.weight" {
            *bytes.last_mut().unwrap() ^= 1;
        }
        let (shape, format) = (weight.shape().to_vec(), weight.format());
        let weight = kv_graph::weights::Weight::new(name, shape, format, bytes.into()).unwrap();
        weights.insert(weight);
    }
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    let mut other = Engine::new(
        backend,
        Arc::clone(file.model()),
        Arc::new(weights),
        &config(KvType::F32),
    )
    .unwrap();
    let error = restore(&mut other, &bytes, RestoreInto::All).unwrap_err();
    let differ = matches!(
        &error,
        EngineError::State(StateError::OtherModel {
            what: "weights",
            ..
        })
    );
    assert!(differ, "{error}");
}

#[test]
fn a_sequence_without_tokens_comes_back_as_such() {
    let file = model(MODELS[0]);
    let mut engine = cpu(&file, &config(KvType::F16));
    let bytes = save(&engine, Seqs::One(A));
    feed(&mut engine, B, &tokens(0, 5));
    let state = SavedState::parse(&bytes).unwrap();
    let into = RestoreInto::One { from: A, to: B };
    assert_eq!(engine.restore_state(&state, into).unwrap().n_tokens, 0);
    assert_eq!(engine.memory().positions(B), None);
}

#[test]
fn tokens_outside_the_vocabulary_are_not_saved() {
    let file = model(MODELS[0]);
    let engine = cpu(&file, &config(KvType::F16));
    let n_vocab = engine.settings().rules.n_vocab;
    let tokens = [SeqTokens {
        seq: A,
        evaluated: vec![TokenId(n_vocab)],
        pending: Vec::new(),
    }];
    let options = SaveOptions {
        seqs: Seqs::All,
        tokens: &tokens,
        kv_type: None,
        state_type: None,
    };
    let error = engine.save_state(&options, &mut Vec::new()).unwrap_err();
    let wanted = TokenId(n_vocab);
    assert!(
        matches!(error, EngineError::State(StateError::Token { token, .. }) if token == wanted),
        "{error}"
    );
}

/// Rows of 8 values are no block of 32.
#[test]
fn types_that_no_row_fits_are_refused_before_a_text_is_computed() {
    let model = Arc::new(Layered::new(&[Remembers::Tokens(Window::Full)]));
    let weights = model.random_weights();
    let engine = Engine::new(NullBackend, model, weights, &config(KvType::F16)).unwrap();
    engine.check_save_type(KvType::F32).unwrap();
    let refused = engine.check_save_type(KvType::Q8_0).unwrap_err();
    assert!(matches!(refused, EngineError::State(_)), "{refused}");
}
