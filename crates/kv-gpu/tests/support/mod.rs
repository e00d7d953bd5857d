//! Graphs on the simulator, in both precisions and both orders of threads, against their
//! definitions in `f64`.

use std::sync::Arc;

use kv_contract::evaluate::{Memory, evaluate};
use kv_core::backend::Backend;
use kv_core::graph::{Graph, GraphBuilder, GraphInputs, GraphOutputs, GraphShape, Input, NodeId};
use kv_core::layers::RowLayout;
use kv_core::weights::MemoryWeights;
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};

/// A graph over rows of `dim` values.
pub(crate) fn graph(
    n_tokens: usize,
    dim: usize,
    build: impl FnOnce(&mut GraphBuilder, NodeId) -> Vec<NodeId>,
) -> Graph {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: 0,
    });
    let x = b.input(Input::Embeddings { dim }).unwrap();
    let outputs = build(&mut b, x);
    b.finish(&outputs).unwrap()
}

/// The outputs of a graph on the simulator.
pub(crate) fn run(
    graph: &Graph,
    weights: &MemoryWeights,
    inputs: &GraphInputs<'_>,
    precision: Precision,
    order: Order,
) -> Vec<Vec<f32>> {
    let backend = GpuBackend::new(Sim::new(order), GpuConfig { precision });
    let weights = backend
        .load_weights(Arc::new(weights.clone()), Default::default())
        .unwrap();
    let layout = RowLayout::default();
    let mut program = backend.compile(graph, &weights, &layout).unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let mut outputs = GraphOutputs::default();
    backend
        .run(&mut program, &mut rows, inputs, &mut outputs)
        .unwrap();
    outputs.values
}

/// Compares a graph with its definition, within `precise` or `fast`, in either order of threads,
/// which must not matter at all.
pub(crate) fn compare(
    graph: &Graph,
    weights: &MemoryWeights,
    x: &[f32],
    [precise, fast]: [f64; 2],
) {
    let inputs = GraphInputs {
        embeddings: x,
        ..GraphInputs::default()
    };
    let layout = RowLayout::default();
    let wanted = evaluate(graph, weights, &layout, &mut Memory::default(), &inputs);
    for (precision, tolerance) in [(Precision::Precise, precise), (Precision::Fast, fast)] {
        let got = run(graph, weights, &inputs, precision, Order::Forward);
        let reversed = run(graph, weights, &inputs, precision, Order::Reverse);
        for (at, wanted) in wanted.iter().enumerate() {
            let what = format!("{precision:?}, output {at} of\n{}", graph.text());
            assert_close(&what, &got[at], wanted, tolerance);
            assert_eq!(
                got[at], reversed[at],
                "{what}: the order of threads matters"
            );
        }
    }
}

/// Asserts that values are close, relative to the root mean square of `wanted`: the mean error, and
/// no error above ten times as much.
fn assert_close(what: &str, got: &[f32], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        (values.map(|v| v * v).sum::<f64>() / wanted.len() as f64).sqrt()
    };
    let size = rms(&mut wanted.iter().copied());
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
