//! What is planned is what an engine compiles: the same graphs, before a backend is opened.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::sync::{Arc, Mutex};

use crate::model::{Layered, Remembers, VOCAB};
use crate::support::stories;
use cellar_engine::{AttentionMode, CancelFlag, Engine, EngineConfig, PromptOutputs, Workload};
use kv_backend::null::NullBackend;
use kv_backend::{Backend, BackendError};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{SeqId, TokenId, Window, batch::Batch, layers::LayerMap};
use kv_graph::{Graph, GraphBuilder, GraphShape, Input};
use kv_rows::RowLayout;
use model_core::architecture::{Model, ModelError, SourceEncoder};

/// Computes nothing, and notes the graphs that it compiles.
#[derive(Debug, Default)]
struct Noting {
    inner: NullBackend,
    capacities: &'static [usize],
    compiled: Mutex<Vec<Graph>>,
}

impl Backend for Noting {
    type Rows = <NullBackend as Backend>::Rows;
    type Weights = <NullBackend as Backend>::Weights;
    type Program = Graph;

    kv_backend::delegate!(info, allocate, load_weights, read_rows, write_rows);

    fn program_capacities(&self) -> &'static [usize] {
        self.capacities
    }

    fn compile(
        &self,
        graph: &Graph,
        _: &Self::Weights,
        _: &RowLayout,
    ) -> Result<Graph, BackendError> {
        self.compiled.lock().unwrap().push(graph.clone());
        Ok(graph.clone())
    }

    fn run(
        &self,
        graph: &mut Graph,
        _: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        let row_lens = graph
            .outputs()
            .iter()
            .map(|&id| graph.node(id).unwrap().row_len());
        outputs.resize(row_lens.map(|len| len * inputs.output_rows.len()));
        Ok(())
    }
}

/// More than the rows of a window, and tokens that leave room for a batch of each kind.
const N_CTX: u32 = 300;
const N_HELD: u32 = 280;

const N_SEQS: u32 = 3;
const N_UBATCH: u32 = 8;

/// One of them is no ubatch, and one is larger than all.
const CAPACITIES: &[usize] = &[4, 6, 30];

fn config(attention: AttentionMode) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(N_CTX),
        n_seqs: N_SEQS,
        n_ubatch: N_UBATCH,
        attention,
        ..EngineConfig::default()
    }
}

fn layered() -> Layered {
    let windows = [Window::Full, Window::Sliding(4)];
    Layered::new(&windows.map(Remembers::Tokens))
}

fn shapes(graphs: &[Graph]) -> Vec<(usize, usize)> {
    let shapes = graphs.iter().map(Graph::shape);
    shapes.map(|s| (s.n_tokens, s.n_outputs)).collect()
}

/// An engine that holds more than fits the smallest tables of plain attention.
fn engine(config: &EngineConfig, capacities: &'static [usize]) -> Engine<Noting> {
    let backend = Noting {
        capacities,
        ..Noting::default()
    };
    let weights = layered().random_weights();
    let mut engine = Engine::new(backend, Arc::new(layered()), weights, config).unwrap();
    let mut held = Batch::new();
    for _ in 0..N_HELD {
        held.push_token(TokenId(1)).in_sequence(SeqId(0));
    }
    engine.decode(&held).unwrap();
    engine
}

/// One token of each sequence, all rows wanted.
fn step() -> Batch {
    let mut batch = Batch::new();
    for seq in (0..N_SEQS).map(SeqId) {
        batch.push_token(TokenId(1)).in_sequence(seq).with_output();
    }
    batch
}

/// Two ubatches of a sequence.
fn prompt() -> Batch {
    Batch::prompt(SeqId(0), (0..2 * N_UBATCH).map(TokenId))
}

fn compiled(mut engine: Engine<Noting>, batches: &[Batch], k: Option<usize>) -> Vec<Graph> {
    for batch in batches {
        match k {
            None => drop(engine.decode(batch).unwrap()),
            Some(k) => drop(
                engine
                    .decode_candidates(batch, k, &CancelFlag::default())
                    .unwrap(),
            ),
        }
    }
    engine.backend().compiled.lock().unwrap().clone()
}

#[test]
fn the_graphs_of_a_text_are_those_that_an_engine_compiles() {
    for attention in [AttentionMode::Fused, AttentionMode::Plain] {
        let (config, model) = (config(attention), Arc::new(layered()));
        let work = Workload::new(&(model as _), &config, PromptOutputs::Last).unwrap();
        assert_eq!(shapes(&work.graphs), [(8, 0), (8, 1), (3, 3)]);
        let batches = [prompt(), step()];
        let compiled_for = |k| compiled(engine(&config, &[]), &batches, k);
        assert!(compiled_for(None).ends_with(&work.graphs));
        // With candidates of all tokens, of which there are fewer than a sampler may want.
        let chosen = compiled_for(Some(VOCAB as usize));
        assert_eq!(shapes(&work.with_candidates), [(8, 1), (3, 3)]);
        assert!(chosen.ends_with(&work.with_candidates));
        assert_eq!(work.n_outputs, 3);
    }
}

#[test]
fn on_a_backend_of_few_shapes_the_graphs_are_those_that_it_is_given() {
    let (config, model) = (config(AttentionMode::Fused), Arc::new(layered()));
    let outputs = PromptOutputs::Last;
    let work = Workload::with_capacities(&(model as _), &config, outputs, CAPACITIES).unwrap();
    assert_eq!(shapes(&work.graphs), [(8, 4), (4, 4)]);
    let compiled = compiled(engine(&config, CAPACITIES), &[prompt(), step()], None);
    assert!(compiled.ends_with(&work.graphs));
    assert_eq!(
        work.n_outputs, 3,
        "rows that come out are those of ubatches"
    );
}

#[test]
fn a_text_that_is_measured_gives_a_row_for_each_token() {
    let (config, model) = (config(AttentionMode::Fused), Arc::new(layered()));
    let work = Workload::new(&(model as _), &config, PromptOutputs::All).unwrap();
    assert_eq!(shapes(&work.graphs), [(8, 8)]);
    assert!(work.with_candidates.is_empty());
    assert_eq!(work.n_outputs, 8);
}

#[test]
fn no_ubatch_is_larger_than_the_context() {
    let config = EngineConfig {
        n_ubatch: 512,
        ..config(AttentionMode::Fused)
    };
    let model: Arc<dyn Model> = Arc::new(layered());
    let work = Workload::new(&model, &config, PromptOutputs::All).unwrap();
    assert_eq!(shapes(&work.graphs), [(300, 300)]);
}

#[test]
fn a_model_without_logits_has_no_candidates() {
    let model = stories().model().without_head().unwrap();
    let config = config(AttentionMode::Fused);
    let work = Workload::new(&model, &config, PromptOutputs::Last).unwrap();
    assert_eq!(shapes(&work.graphs), [(8, 8)]);
    assert!(work.with_candidates.is_empty());
}

/// A model whose sources are encoded by itself.
#[derive(Debug)]
struct Encoding(Layered);

impl Model for Encoding {
    fn architecture(&self) -> &str {
        "encoding"
    }

    fn layers(&self) -> &LayerMap {
        self.0.layers()
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    fn context_length(&self) -> usize {
        self.0.context_length()
    }

    fn embedding_dim(&self) -> usize {
        self.0.embedding_dim()
    }

    fn source_encoder(&self) -> Option<SourceEncoder> {
        let model = Arc::new(layered());
        let start = vec![TokenId(0)];
        Some(SourceEncoder { model, start })
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        self.0.graph(shape)
    }
}

#[test]
fn sources_are_encoded_in_one_ubatch_without_a_row() {
    let model: Arc<dyn Model> = Arc::new(Encoding(layered()));
    for (n_ubatch, n_tokens) in [(N_UBATCH, 8), (512, 300)] {
        let config = EngineConfig {
            n_ubatch,
            ..config(AttentionMode::Fused)
        };
        let work = Workload::new(&model, &config, PromptOutputs::Last).unwrap();
        let (encoder, rest) = work.graphs.split_last().unwrap();
        assert_eq!(
            (encoder.shape().n_tokens, encoder.shape().n_outputs),
            (n_tokens, 0)
        );
        assert_eq!(rest.len(), 3);
        assert_eq!(work.with_candidates.len(), 2);
    }
}

/// Adds wanted rows to all rows, where these are the same.
#[derive(Debug)]
struct Mixed(LayerMap);

impl Model for Mixed {
    fn architecture(&self) -> &str {
        "mixed"
    }

    fn layers(&self) -> &LayerMap {
        &self.0
    }

    fn vocab_size(&self) -> usize {
        VOCAB as usize
    }

    fn context_length(&self) -> usize {
        64
    }

    fn embedding_dim(&self) -> usize {
        16
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let all = b.embed("embd", tokens, "tokens", [VOCAB as usize, 16])?;
        let wanted = b.input(Input::OutputRows)?;
        let mut rows = b.take_rows("wanted", all, wanted)?;
        if shape.n_tokens == shape.n_outputs {
            rows = b.add("both", all, rows)?;
        }
        let logits = b.linear("logits", rows, "tokens", VOCAB as usize)?;
        Ok(b.finish(&[logits])?)
    }
}

#[test]
fn a_model_whose_rows_cannot_be_counted_has_a_program_for_each_shape() {
    let backend = Noting {
        capacities: CAPACITIES,
        ..Noting::default()
    };
    let model = Arc::new(Mixed(layered().layers().clone()));
    let (weights, config) = (layered().random_weights(), config(AttentionMode::Fused));
    let engine = Engine::new(backend, model, weights, &config).unwrap();
    let compiled = compiled(engine, &[prompt(), step()], None);
    assert_eq!(shapes(&compiled), [(1, 1), (8, 0), (8, 1), (3, 3)]);
}
