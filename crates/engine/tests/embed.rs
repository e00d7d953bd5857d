//! Models whose tokens see later ones of their batch, with a memory and without, and whose final
//! rows come out.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::sync::Arc;

use cellar_engine::{AttentionMode, CancelFlag, ConfigError, Engine, EngineConfig, EngineError};
use kv_candle::CandleBackend;
use kv_contract::tiny_weights;
use kv_core::{
    Causality, Pos, SeqId, TokenId, Window,
    batch::Batch,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::Memory,
};
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input};
use kv_rows::KvType;
use model_core::architecture::{Model, ModelError, OutputKind};

const DIM: usize = 8;
const VOCAB: usize = 20;

const WINDOWS: [Window; 2] = [Window::Symmetric(2), Window::Full];

/// Embedding, two attentions through different windows in which tokens see later ones, final rows.
/// Layers remember their keys and values, or nothing.
#[derive(Debug)]
struct Encoder {
    layers: LayerMap,
    /// What the graph's layers use of it.
    used: LayerMap,
    causality: Causality,
}

impl Encoder {
    fn forgetful(n_layers: usize) -> Arc<Self> {
        Arc::new(Self::of(vec![LayerMemory::Nothing; n_layers]))
    }

    fn remembering(n_layers: usize) -> Arc<Self> {
        Arc::new(Self::of(WINDOWS.map(cells)[..n_layers].to_vec()))
    }

    fn of(memories: Vec<LayerMemory>) -> Self {
        let layers = LayerMap::new(memories);
        Self {
            used: layers.clone(),
            layers,
            causality: Causality::NonCausal,
        }
    }
}

fn cells(window: Window) -> LayerMemory {
    LayerMemory::Attention(AttentionMemory {
        kv_heads: 2,
        k_dim: 4,
        v_dim: 4,
        window,
    })
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

    fn causality(&self) -> Causality {
        self.causality
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
        for ((index, memory), window) in self.used.iter().zip(WINDOWS) {
            let layer = index.as_usize();
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
            let [q, k, v] = [heads("q")?, heads("k")?, heads("v")?];
            let name = format!("kqv-{layer}");
            let kqv = match (memory, self.layers.part_of(index)) {
                (LayerMemory::Attention(_), Some(part)) => {
                    let cells = b.input(Input::Cells { part })?;
                    let stored = b.store_kv(&format!("store-{layer}"), index, [k, v, cells])?;
                    let seen = b.input(Input::Visibility { part, window })?;
                    b.attend(&name, index, spec, [q, stored, seen])?
                }
                _ => b.attend_batch(&name, spec, [q, k, v], window)?,
            };
            x = b.add(&format!("out-{layer}"), kqv, x)?;
        }
        let rows = b.input(Input::OutputRows)?;
        let x = b.take_rows("wanted", x, rows)?;
        Ok(b.finish(&[x])?)
    }
}

fn engine_of(model: Arc<Encoder>, n_ubatch: u32) -> Engine<CandleBackend> {
    engine_with(model, n_ubatch, AttentionMode::Fused)
}

fn engine_with(
    model: Arc<Encoder>,
    n_ubatch: u32,
    attention: AttentionMode,
) -> Engine<CandleBackend> {
    let shape = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    // The same weights for every encoder of these layers.
    let n_layers = model.layers.n_layers();
    let weights = tiny_weights(&Encoder::forgetful(n_layers).graph(shape).unwrap(), 5);
    let config = EngineConfig {
        n_seqs: 4,
        n_ubatch,
        n_ctx: Some(64),
        attention,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    Engine::new(CandleBackend::cpu(), model, weights, &config).unwrap()
}

fn engine(n_ubatch: u32) -> Engine<CandleBackend> {
    engine_of(Encoder::forgetful(2), n_ubatch)
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
    let (mut engine, batch) = (engine(4), batch(&[(0, &[1])]));
    let cancel = CancelFlag::default();
    let errors = [
        engine.decode(&batch).map(drop),
        engine.decode_candidates(&batch, 1, &cancel).map(drop),
        engine.decode_masks(&batch, &cancel).map(drop),
    ];
    for (error, wanted) in errors
        .into_iter()
        .zip(["logits", "logits", "logits of masks"])
    {
        let error = error.unwrap_err();
        assert!(matches!(error, EngineError::OtherOutput { .. }));
        let text = format!("the model 'encoder' gives embeddings, not {wanted}");
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn a_non_causal_batch_over_a_memory_sees_what_one_without_sees() {
    let texts: [(u32, &[u32]); 2] = [(1, &[3, 1, 4, 1, 5, 9, 2]), (0, &[6, 5, 3])];
    let wanted = rows(&mut engine(16), &texts);
    let mut engine = engine_of(Encoder::remembering(2), 16);
    assert_close(&rows(&mut engine, &texts), &wanted);
    assert_eq!(engine.memory().positions(SeqId(1)).unwrap().last, Pos(6));
}

#[test]
fn later_batches_see_the_memory_and_symmetric_windows_recycle() {
    // In one layer keys do not depend on what their tokens saw: pieces see, of what came before,
    // exactly what the whole would.
    let text: Vec<u32> = (0..100u32).map(|i| i * 7 % VOCAB as u32).collect();
    let wanted = rows(&mut engine_of(Encoder::forgetful(1), 128), &[(0, &text)]);
    let mut engine = engine_of(Encoder::remembering(1), 8);
    let (mut rows_in_pieces, mut at) = (Vec::new(), 0);
    for n in [5, 8, 1, 7, 8, 8, 3].into_iter().cycle().take(16) {
        let piece = &text[at..(at + n).min(100)];
        at += piece.len();
        rows_in_pieces.push((at, rows(&mut engine, &[(0, piece)])));
    }
    assert_eq!(at, 93);
    // More tokens than cells: those behind the window gave theirs away.
    assert!(engine.memory().positions(SeqId(0)).unwrap().first > Pos(20));
    for (end, got) in rows_in_pieces {
        // The last token of a piece misses the one after it.
        let first = end - got.len();
        assert_close(&got[..got.len() - 1], &wanted[first..end - 1]);
    }
}

#[test]
fn a_non_causal_batch_that_is_cut_is_refused_with_numbers_and_leaves_no_trace() {
    let mut engine = engine_of(Encoder::remembering(2), 4);
    rows(&mut engine, &[(1, &[1, 2, 3])]);
    let error = engine.embed(&batch(&[(1, &[1, 2, 3, 4, 5])])).unwrap_err();
    assert!(error.to_string().ends_with("it takes 4"), "{error}");
    assert_eq!(engine.memory().n_tokens(SeqId(1)), 3);
    assert_eq!(rows(&mut engine, &[(1, &[4, 5, 6, 7]), (0, &[9])]).len(), 5);
}

#[test]
fn plain_attention_gives_the_rows_of_the_fused_one() {
    let texts: [(u32, &[u32]); 2] = [(1, &[3, 1, 4, 1, 5, 9, 2]), (0, &[6, 5, 3])];
    let mut fused = engine_of(Encoder::remembering(2), 16);
    let mut plain = engine_with(Encoder::remembering(2), 16, AttentionMode::Plain);
    for text in [&texts[..], &[(1, &[7, 8])], &[(0, &[4])]] {
        assert_close(&rows(&mut plain, text), &rows(&mut fused, text));
    }
}

#[test]
fn a_memory_that_cuts_sequences_is_refused_where_tokens_see_later_ones() {
    let made = |causality| {
        let shape = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        // Attends over the tokens of its ubatch, and has cells for other tokens all the same.
        let model = Encoder {
            layers: LayerMap::new(vec![cells(Window::Full)]),
            causality,
            ..Encoder::of(vec![LayerMemory::Nothing])
        };
        let weights = tiny_weights(&model.graph(shape).unwrap(), 5);
        let (backend, config) = (CandleBackend::cpu(), EngineConfig::default());
        Engine::new(backend, Arc::new(model), weights, &config).map(drop)
    };
    made(Causality::NonCausal).unwrap();
    let refused = made(Causality::Causal).unwrap_err();
    let is_named = matches!(
        refused,
        EngineError::Config(ConfigError::CutSequences { window }) if window == WINDOWS[0]
    );
    assert!(is_named, "{refused}");
}
