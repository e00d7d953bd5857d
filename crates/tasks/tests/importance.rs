//! What a recording backend sums is what the definitions give: the graph of each model evaluated in
//! `f64`, and the inputs of its matrices summed by hand.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cellar_engine::{Engine, EngineConfig};
use cellar_tasks::{ActivationSums, RecordedMatrices, RecordingBackend};
use kv_backend::{Backend, BackendError, OnProgress};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_candle::CandleBackend;
use kv_contract::evaluate::{self, evaluate};
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape, NodeId, Op};
use kv_rows::{KvType, RowLayout};
use model_core::architecture::Registry;
use model_tests::{Recipe, candle, cpu};

/// Sums of squares and counts of each matrix of a weight.
type Sums = BTreeMap<String, (Vec<f64>, Vec<f64>)>;

/// Computes with candle, and once more in `f64`, node by node.
struct Defined {
    inner: CandleBackend,
    weights: Mutex<Option<Arc<dyn WeightSource>>>,
    memory: Mutex<evaluate::Memory>,
    sums: Arc<Mutex<Sums>>,
}

struct DefinedProgram {
    program: <CandleBackend as Backend>::Program,
    graph: Graph,
    layout: RowLayout,
}

impl Backend for Defined {
    type Rows = <CandleBackend as Backend>::Rows;
    type Weights = <CandleBackend as Backend>::Weights;
    type Program = DefinedProgram;

    kv_backend::delegate!(info, allocate, read_rows, write_rows);

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<Self::Weights, BackendError> {
        *self.weights.lock().unwrap() = Some(Arc::clone(&source));
        self.inner.load_weights(source, on_progress)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        Ok(DefinedProgram {
            program: self.inner.compile(graph, weights, layout)?,
            graph: graph.clone(),
            layout: layout.clone(),
        })
    }

    fn run(
        &self,
        program: &mut DefinedProgram,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        self.inner
            .run(&mut program.program, rows, inputs, outputs)?;
        let graph = &program.graph;
        let n_own = graph.outputs().len();
        let nodes: Vec<NodeId> = (0..graph.nodes().len() as u32).map(NodeId).collect();
        let every_node = graph.with_outputs(&nodes).unwrap();
        let (weights, memory) = (
            self.weights.lock().unwrap(),
            &mut self.memory.lock().unwrap(),
        );
        let weights = &**weights.as_ref().unwrap();
        let values = evaluate(&every_node, weights, &program.layout, memory, inputs);
        sum(graph, &values[n_own..], &mut self.sums.lock().unwrap());
        Ok(())
    }
}

/// Adds what each matrix of layers multiplies.
fn sum(graph: &Graph, values: &[Vec<f64>], sums: &mut Sums) {
    for node in graph.nodes() {
        let weight = match &node.op {
            Op::Linear { weight, .. }
            | Op::ExpertLinear { weight, .. }
            | Op::HeadLinear { weight } => weight,
            _ => continue,
        };
        if !weight.starts_with("blk.") {
            continue;
        }
        let width = *graph.node(node.operands[0]).unwrap().shape.last().unwrap();
        let x = &values[node.operands[0].as_usize()];
        let (routes, n_experts) = match node.operands.get(1) {
            Some(&id) => (&values[id.as_usize()][..], graph.node(id).unwrap().shape[1]),
            // Heads have a matrix each.
            None => (
                &[][..],
                graph.node(node.operands[0]).unwrap().row_len() / width,
            ),
        };
        let (squares, counts) = sums
            .entry(weight.clone())
            .or_insert_with(|| (vec![0.0; n_experts * width], vec![0.0; n_experts]));
        let mut add = |expert: usize, row: &[f64]| {
            counts[expert] += 1.0;
            for (sum, x) in squares[expert * width..].iter_mut().zip(row) {
                *sum += x * x;
            }
        };
        if routes.is_empty() {
            let rows = x.chunks(width).enumerate();
            rows.for_each(|(at, row)| add(at % n_experts, row));
            continue;
        }
        let n_tokens = routes.len() / n_experts;
        let per_token = x.len() / n_tokens;
        for (x, route) in x.chunks(per_token).zip(routes.chunks(n_experts)) {
            let chosen = (0..n_experts).filter(|&expert| route[expert] != 0.0);
            for (slot, expert) in chosen.enumerate() {
                let at = if per_token == width { 0 } else { slot * width };
                add(expert, &x[at..at + width]);
            }
        }
    }
}

/// Evaluates a prompt of a model in ubatches of 7 tokens.
fn read<B: Backend>(backend: B, recipe: &Recipe) {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    let directory = recipe.directory(&registry).unwrap();
    let config = EngineConfig {
        n_ctx: Some(64),
        n_ubatch: 7,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let (model, weights) = (directory.model().clone(), Arc::clone(directory.weights()));
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let mut batch = Batch::new();
    for id in &recipe.reference().prompts()[0] {
        let token = batch.push_token(TokenId(*id));
        token.in_sequence(SeqId(0)).with_output();
    }
    engine.decode(&batch).unwrap();
}

fn recorded<B: Backend>(backend: B, recipe: &Recipe) -> ActivationSums {
    let sums = ActivationSums::default();
    let recording = RecordingBackend::new(backend, RecordedMatrices::Layers, sums.clone());
    read(recording, recipe);
    sums
}

fn assert_same(name: &str, wanted: &Sums, found: &ActivationSums) {
    let found = found.importance();
    assert!(found.keys().eq(wanted.keys()), "{name}: {:?}", found.keys());
    for (weight, (squares, counts)) in wanted {
        let entry = &found[weight];
        let ours: Vec<f64> = entry.counts.iter().map(|&n| f64::from(n)).collect();
        assert_eq!(&ours, counts, "{name}: {weight}");
        assert_eq!(entry.sums.len(), squares.len(), "{name}: {weight}");
        let largest = squares.iter().fold(0.0f64, |m, s| m.max(*s));
        assert!(largest > 0.0, "{name}: {weight}");
        for (a, b) in entry.sums.iter().zip(squares) {
            let off = (f64::from(*a) - b).abs() / largest;
            assert!(off < 1e-4, "{name}: {weight}: {a} instead of {b}");
        }
    }
}

#[test]
fn sums_are_those_of_the_definitions() {
    for name in [
        "llama_gqa_tied",
        "phi3",
        "mixtral",
        "gpt_oss_swa8",
        "deepseek_v3",
        "jamba",
        "mamba2",
        "falcon_h1",
    ] {
        let recipe = Recipe::named(name);
        let wanted = Arc::<Mutex<Sums>>::default();
        let defined = Defined {
            inner: CandleBackend::cpu(),
            weights: Mutex::default(),
            memory: Mutex::default(),
            sums: Arc::clone(&wanted),
        };
        read(defined, &recipe);
        let wanted = wanted.lock().unwrap();
        assert!(!wanted.is_empty(), "{name}");
        assert_same(name, &wanted, &recorded(cpu(), &recipe));
        assert_same(name, &wanted, &recorded(candle(), &recipe));
    }
}

/// The output matrix is recorded on request; a token costs what the distinct inputs take.
#[test]
fn all_matrices_are_recorded_on_request() {
    let recipe = Recipe::named("llama_gqa_untied");
    let sums = ActivationSums::default();
    let backend = RecordingBackend::new(cpu(), RecordedMatrices::All, sums.clone());
    read(backend, &recipe);
    let (all, layers) = (sums.importance(), recorded(cpu(), &recipe).importance());
    let extra: Vec<&String> = all.keys().filter(|k| !layers.contains_key(*k)).collect();
    assert_eq!(extra, ["output.weight"]);
    let n_tokens = recipe.reference().prompts()[0].len();
    assert_eq!(all["output.weight"].counts, [n_tokens as f32]);
    assert!(layers.iter().all(|(name, entry)| all[name] == *entry));

    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let directory = recipe.directory(&registry).unwrap();
    let shape = GraphShape {
        n_tokens: 5,
        n_outputs: 5,
    };
    let graph = directory.model().graph(shape).unwrap();
    let columns = |name: &str| all[name].sums.len();
    let layer = |layer: usize| {
        // Q, K and V share their input, as do gate and up.
        let inputs = ["attn_q", "attn_output", "ffn_up", "ffn_down"];
        let of = inputs.map(|name| columns(&format!("blk.{layer}.{name}.weight")));
        of.iter().sum::<usize>()
    };
    let n_layers = directory.model().layers().n_layers();
    let wanted = (0..n_layers).map(layer).sum::<usize>() * 4;
    assert_eq!(RecordedMatrices::Layers.bytes_per_token(&graph), wanted);
    let wanted = wanted + columns("output.weight") * 4;
    assert_eq!(RecordedMatrices::All.bytes_per_token(&graph), wanted);
}
