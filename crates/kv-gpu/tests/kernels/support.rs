//! Graphs on the devices of the tests, compared with their definitions in `f64`.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_contract::Random;
use kv_contract::evaluate::{Memory, evaluate};
use kv_gpu::{Device, GpuBackend, Precision};
use kv_graph::weights::MemoryWeights;
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input, NodeId};
use kv_rows::RowLayout;

use crate::devices::backends;

/// A builder for graphs of this many tokens, all of which are wanted.
pub(crate) fn builder(n_tokens: usize) -> GraphBuilder {
    GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: n_tokens,
    })
}

/// A graph over rows of `dim` values, the results of `build` being its outputs.
pub(crate) fn graph(
    n_tokens: usize,
    dim: usize,
    build: impl FnOnce(&mut GraphBuilder, NodeId) -> Vec<NodeId>,
) -> Graph {
    let mut b = builder(n_tokens);
    let x = b.input(Input::Embeddings { dim }).unwrap();
    let outputs = build(&mut b, x);
    b.finish(&outputs).unwrap()
}

/// Random weights around `centre`.
pub(crate) fn weights(graph: &Graph, centre: f32) -> MemoryWeights {
    let (mut random, mut weights) = (Random::new(7), MemoryWeights::new());
    for used in graph.weights() {
        let n = used.shape.iter().product();
        let values: Vec<f32> = random.values(n).iter().map(|v| centre + v).collect();
        weights
            .insert_f32(&used.name, &used.shape, &values)
            .unwrap();
    }
    weights
}

/// A graph with what it runs on.
pub(crate) struct Case<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) weights: &'a MemoryWeights,
    pub(crate) layout: &'a RowLayout,
}

/// The results of a graph in several runs.
pub(crate) struct RunResults {
    /// By run and output.
    pub(crate) outputs: Vec<Vec<Vec<f32>>>,
    /// Steps of the program.
    pub(crate) n_steps: usize,
}

impl RunResults {
    /// All values: those that are no numbers, too.
    fn bits(&self) -> impl Iterator<Item = u32> {
        self.outputs.iter().flatten().flatten().map(|v| v.to_bits())
    }
}

impl Case<'_> {
    /// Runs `steps` one after the other, and checks that all devices give the same bits.
    pub(crate) fn run(&self, steps: &[GraphInputs<'_>], precision: Precision) -> RunResults {
        let mut ran = backends(precision)
            .into_iter()
            .map(|backend| self.run_on(&backend, steps));
        let first = ran.next().unwrap();
        for other in ran {
            let text = self.graph.text();
            let same = first.bits().eq(other.bits()) && first.n_steps == other.n_steps;
            assert!(
                same,
                "the order of threads matters, or recording, in\n{text}"
            );
        }
        first
    }

    fn run_on<D: Device>(&self, backend: &GpuBackend<D>, steps: &[GraphInputs<'_>]) -> RunResults {
        let source = Arc::new(self.weights.clone());
        let loaded = backend.load_weights(source, Default::default()).unwrap();
        let mut program = backend.compile(self.graph, &loaded, self.layout).unwrap();
        let mut rows = backend.allocate(self.layout).unwrap();
        let run = |inputs| {
            let mut outputs = GraphOutputs::default();
            backend
                .run(&mut program, &mut rows, inputs, &mut outputs)
                .unwrap();
            outputs.values
        };
        RunResults {
            outputs: steps.iter().map(run).collect(),
            n_steps: program.n_steps(),
        }
    }

    /// Runs `steps` one after the other with floats everywhere, and compares all outputs, within
    /// `tolerance`; returns the program's steps.
    pub(crate) fn check(&self, steps: &[GraphInputs<'_>], tolerance: f64) -> usize {
        self.check_in(Precision::Precise, steps, tolerance)
    }

    fn check_in(&self, precision: Precision, steps: &[GraphInputs<'_>], tolerance: f64) -> usize {
        let ran = self.run(steps, precision);
        let mut memory = Memory::default();
        for (at, (inputs, got)) in steps.iter().zip(&ran.outputs).enumerate() {
            let wanted = evaluate(self.graph, self.weights, self.layout, &mut memory, inputs);
            assert_eq!(got.len(), wanted.len());
            for (i, (got, want)) in got.iter().zip(&wanted).enumerate() {
                let text = self.graph.text();
                let what = format!("{precision:?}, run {at}, output {i} of\n{text}");
                assert_close(&what, got, want, tolerance);
            }
        }
        ran.n_steps
    }
}

/// Compares a graph on rows `x` with its definition, with floats everywhere and as fast as
/// possible: errors are relative to the root mean square of the values, see [`assert_close`].
pub(crate) fn compare(
    graph: &Graph,
    weights: &MemoryWeights,
    x: &[f32],
    [precise, fast]: [f64; 2],
) {
    let steps = [GraphInputs {
        embeddings: x,
        ..GraphInputs::default()
    }];
    let case = Case {
        graph,
        weights,
        layout: &RowLayout::default(),
    };
    case.check_in(Precision::Precise, &steps, precise);
    case.check_in(Precision::Fast, &steps, fast);
}

/// The outputs of a graph without rows.
pub(crate) fn run(
    graph: &Graph,
    weights: &MemoryWeights,
    inputs: GraphInputs<'_>,
    precision: Precision,
) -> Vec<Vec<f32>> {
    let case = Case {
        graph,
        weights,
        layout: &RowLayout::default(),
    };
    let mut ran = case.run(&[inputs], precision);
    ran.outputs.swap_remove(0)
}

/// Asserts that values are close, relative to the root mean square of `wanted`: the mean error, and
/// no error above ten times as much.
fn assert_close(what: &str, got: &[f32], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        (values.map(|v| v * v).sum::<f64>() / wanted.len().max(1) as f64).sqrt()
    };
    let size = rms(&mut wanted.iter().copied()).max(1e-300);
    let errors: Vec<f64> = got
        .iter()
        .zip(wanted)
        .map(|(&g, w)| f64::from(g) - w)
        .collect();
    let (error, most) = (
        rms(&mut errors.iter().copied()) / size,
        errors.iter().fold(0.0, |most: f64, e| most.max(e.abs())) / size,
    );
    // Not `>`: NaN must fail.
    assert!(
        error <= tolerance && most <= 10.0 * tolerance,
        "{what}: off by {error} on average, {most} at most, not {tolerance}"
    );
}

/// Attention of heads of these widths.
pub(crate) fn attend_spec(
    n_heads: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
) -> AttendSpec {
    AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        scale: 0.3,
        soft_cap: None,
        alibi: None,
    }
}
