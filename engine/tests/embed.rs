//! Models that remember nothing: tokens see each other within a batch, and final rows come out.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::sync::Arc;

use engine::{Engine, EngineConfig, EngineError};
use kv_candle::CandleBackend;
use kv_core::batch::Batch;
use kv_core::contract::tiny_weights;
use kv_core::graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input};
use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{SeqId, TokenId, Window};
use model_core::architecture::{Model, ModelError, OutputKind};

const DIM: usize = 8;
const VOCAB: usize = 20;

/// Embedding, two attentions among a batch's tokens through different windows, final rows.
#[derive(Debug)]
struct Encoder {
    layers: LayerMap,
}

impl Model for Encoder {
    fn architecture(&self) -> &str {
        "encoder"
    }

    fn layers(&self) -> &LayerMap {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn context_length(&self) -> usize {
        64
    }

    fn embedding_dim(&self) -> usize {
        DIM
    }

    fn output(&self) -> OutputKind {
        OutputKind::Embeddings
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let spec = AttendSpec {
            n_heads: 2,
            kv_heads: 2,
            k_dim: 4,
            v_dim: 4,
            scale: 0.5,
            soft_cap: None,
            alibi: None,
        };
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("embd", tokens, "embd.w", [VOCAB, DIM])?;
        for (layer, window) in [Window::Symmetric(2), Window::Full].into_iter().enumerate() {
            let mut heads = |what: &str| {
                let flat = b.linear(
                    &format!("{what}-{layer}"),
                    x,
                    &format!("{what}.{layer}"),
                    DIM,
                )?;
                b.reshape(
                    &format!("{what}_heads-{layer}"),
                    flat,
                    &[shape.n_tokens, 2, 4],
                )
            };
            let qkv = [heads("q")?, heads("k")?, heads("v")?];
            let kqv = b.attend_batch(&format!("kqv-{layer}"), (spec, None), qkv, window)?;
            x = b.add(&format!("out-{layer}"), kqv, x)?;
        }
        let rows = b.input(Input::OutputRows)?;
        let x = b.take_rows("wanted", x, rows)?;
        Ok(b.finish(&[x])?)
    }
}

fn engine(n_ubatch: u32) -> Engine<CandleBackend> {
    let layers = LayerMap::new(vec![LayerMemory::Nothing; 2]);
    let model = Arc::new(Encoder { layers });
    let shape = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    let weights = tiny_weights(&model.graph(shape).unwrap(), 5);
    let config = EngineConfig {
        n_seqs: 4,
        n_ubatch,
        ..EngineConfig::default()
    };
    Engine::new(CandleBackend::cpu(), model, weights, &config).unwrap()
}

fn batch(texts: &[(u32, &[u32])]) -> Batch {
    let mut batch = Batch::new();
    for (seq, tokens) in texts {
        for &token in *tokens {
            let entry = batch.push_token(TokenId(token)).in_sequence(SeqId(*seq));
            entry.with_output();
        }
    }
    batch
}

fn rows(engine: &mut Engine<CandleBackend>, texts: &[(u32, &[u32])]) -> Vec<Vec<f32>> {
    let embeddings = engine.embed(&batch(texts)).unwrap();
    assert_eq!(embeddings.dim(), DIM);
    embeddings.rows().map(<[f32]>::to_vec).collect()
}

fn assert_close(a: &[Vec<f32>], b: &[Vec<f32>]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn a_text_gives_the_same_rows_alone_and_beside_others_and_again() {
    let texts: [&[u32]; 3] = [&[3, 1, 4, 1, 5, 9, 2], &[6, 5], &[3, 5, 8, 9, 7]];
    let mut engine = engine(8);
    let alone: Vec<Vec<f32>> = texts
        .iter()
        .flat_map(|text| rows(&mut engine, &[(0, text)]))
        .collect();
    // Two ubatches: the first text fills one, the others share the next.
    let together = rows(&mut engine, &[(2, texts[0]), (0, texts[1]), (3, texts[2])]);
    assert_close(&together, &alone);
    let again = rows(&mut engine, &[(0, texts[0])]);
    assert_close(&again, &alone[..7]);
    // Tokens see later ones: through one layer's window and the other's.
    let shorter = rows(&mut engine, &[(0, &texts[0][..6])]);
    assert!(
        shorter[0]
            .iter()
            .zip(&alone[0])
            .any(|(a, b)| (a - b).abs() > 1e-4)
    );
}

#[test]
fn only_wanted_rows_come_out() {
    let mut engine = engine(8);
    let all = rows(&mut engine, &[(0, &[3, 1, 4])]);
    let wanted = Batch::prompt(SeqId(0), [3, 1, 4].map(TokenId));
    let last = engine.embed(&wanted).unwrap();
    assert_close(&[last.values().to_vec()], &all[2..]);
}

#[test]
fn a_text_that_does_not_fit_a_ubatch_is_refused_with_numbers() {
    let mut engine = engine(4);
    let error = engine.embed(&batch(&[(1, &[1, 2, 3, 4, 5])])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the batch has 5 tokens of sequences {1}, which see each other and must be in one ubatch: \
         it takes 4"
    );
    assert_eq!(rows(&mut engine, &[(1, &[1, 2, 3, 4])]).len(), 4);
}

#[test]
fn logits_of_an_encoder_are_refused() {
    let error = engine(4).decode(&batch(&[(0, &[1])])).unwrap_err();
    assert!(matches!(error, EngineError::OtherOutput { .. }));
    assert_eq!(
        error.to_string(),
        "the model 'encoder' gives embeddings, not logits"
    );
}
