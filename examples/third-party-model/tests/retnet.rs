//! The model against an independent implementation, on both backends, and its graph as a snapshot.

use cellar_engine::{Engine, EngineConfig, EngineError};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::batch::Batch;
use kv_core::memory::{Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::GraphShape;
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");

fn file() -> ModelFile {
    let mut registry = Registry::new();
    retnet_for_cellar::register(&mut registry);
    ModelFile::open(format!("{DATA}/retnet-tiny.gguf"), &registry).unwrap()
}

/// Prompts and the logits of each of their tokens, `[tokens, vocab]`.
fn reference() -> Vec<(Vec<u32>, Vec<f32>)> {
    let bytes = std::fs::read(format!("{DATA}/reference.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: String| {
        file.tensor(&name)
            .unwrap()
            .data()
            .as_chunks::<4>()
            .0
            .to_vec()
    };
    let prompt = |number| {
        let ids = words(format!("ids_{number}"));
        let logits = words(format!("logits_{number}"));
        let ids = ids.into_iter().map(u32::from_le_bytes).collect();
        (ids, logits.into_iter().map(f32::from_le_bytes).collect())
    };
    (0..2).map(prompt).collect()
}

fn cpu() -> CpuBackend {
    let mut backend = CpuBackend::new(CpuConfig::default()).unwrap();
    backend
        .set_custom_ops(retnet_for_cellar::custom_ops())
        .unwrap();
    backend
}

fn candle() -> CandleBackend {
    let mut backend = CandleBackend::cpu();
    backend
        .set_custom_ops(retnet_for_cellar::custom_ops())
        .unwrap();
    backend
}

fn engine<B: Backend>(backend: B) -> Engine<B> {
    let config = EngineConfig {
        n_seqs: 2,
        ..EngineConfig::default()
    };
    let file = file();
    Engine::new(backend, file.model().clone(), file.weights(), &config).unwrap()
}

fn batch(tokens: &[(u32, u32)]) -> Batch {
    let mut batch = Batch::new();
    for &(seq, token) in tokens {
        batch
            .push_token(TokenId(token))
            .in_sequence(SeqId(seq))
            .with_output();
    }
    batch
}

fn of(seq: u32, tokens: &[u32]) -> Vec<(u32, u32)> {
    tokens.iter().map(|&token| (seq, token)).collect()
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 2e-4, "value {at}: {got}, not {want}");
    }
}

fn logits_are_the_reference<B: Backend>(backend: fn() -> B) {
    let reference = reference();
    for (ids, logits) in &reference {
        let n_vocab = logits.len() / ids.len();
        assert_close(
            engine(backend())
                .decode(&batch(&of(0, ids)))
                .unwrap()
                .values(),
            logits,
        );
        for n_at_once in [1, 7] {
            let mut engine = engine(backend());
            for (ids, logits) in ids
                .chunks(n_at_once)
                .zip(logits.chunks(n_at_once * n_vocab))
            {
                assert_close(engine.decode(&batch(&of(0, ids))).unwrap().values(), logits);
            }
        }
    }
}

#[test]
fn logits_are_the_reference_on_kv_cpu() {
    logits_are_the_reference(cpu);
}

#[test]
fn logits_are_the_reference_on_kv_candle() {
    logits_are_the_reference(candle);
}

#[test]
fn two_sequences_in_turns_do_not_see_each_other() {
    let [(a, a_logits), (b, b_logits)] = reference().try_into().unwrap();
    let n_vocab = a_logits.len() / a.len();
    let mut engine = engine(cpu());
    // a a a b a a a b …
    let mut left = b.iter();
    let mixed = a.chunks(3).flat_map(|a| {
        let b = left.next().map(|&b| (1, b));
        of(0, a).into_iter().chain(b).collect::<Vec<_>>()
    });
    let mixed: Vec<(u32, u32)> = mixed.collect();
    let n_b = mixed.iter().filter(|(seq, _)| *seq == 1).count();
    let got = engine.decode(&batch(&mixed)).unwrap().values().to_vec();
    let rows_of = |seq| {
        let rows = mixed.iter().zip(got.chunks(n_vocab));
        rows.filter(|((s, _), _)| *s == seq)
            .flat_map(|(_, row)| row.to_vec())
            .collect::<Vec<_>>()
    };
    assert_close(&rows_of(0), &a_logits);
    assert_close(&rows_of(1), &b_logits[..n_b * n_vocab]);
}

#[test]
fn a_copied_sequence_goes_on_by_itself() {
    let (ids, logits) = reference().swap_remove(0);
    let n_vocab = logits.len() / ids.len();
    let mut engine = engine(cpu());
    engine.decode(&batch(&of(0, &ids[..12]))).unwrap();
    assert_eq!(engine.copy(SeqId(0), SeqId(1), PosRange::ALL).unwrap(), 12);
    engine.decode(&batch(&of(0, &[5, 6, 7]))).unwrap();
    let got = engine.decode(&batch(&of(1, &ids[12..]))).unwrap();
    assert_close(got.values(), &logits[12 * n_vocab..]);
}

#[test]
fn a_state_cannot_forget_its_middle_and_says_so() {
    let mut engine = engine(cpu());
    engine.decode(&batch(&of(0, &[3, 4, 5, 6]))).unwrap();
    let refused = engine.remove(Seqs::One(SeqId(0)), PosRange::new(Pos(1), Pos(2)));
    assert!(
        matches!(refused, Err(EngineError::Refused(_))),
        "{refused:?}"
    );
    let positions = engine.memory().positions(SeqId(0));
    assert_eq!(positions, Some(PosRange::new(Pos(0), Pos(3))));
}

#[test]
fn a_backend_without_the_operation_says_which_is_missing() {
    let file = file();
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    let config = EngineConfig::default();
    let error = Engine::new(backend, file.model().clone(), file.weights(), &config).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("'retnet.retention' (node 'retention-0'): not registered"),
        "{text}"
    );
}

#[test]
fn the_graph_is_as_it_was() {
    let file = file();
    for (name, n_tokens, n_outputs) in [("one", 1, 1), ("many", 7, 2)] {
        let graph = file
            .model()
            .graph(GraphShape {
                n_tokens,
                n_outputs,
            })
            .unwrap();
        insta::assert_snapshot!(name, graph.text());
    }
}
