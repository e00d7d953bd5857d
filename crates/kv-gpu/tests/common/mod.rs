//! Graphs on the simulator in both orders of threads, compared with the definition in `f64`.
#![allow(clippy::unwrap_used, dead_code)]

use std::sync::Arc;

use kv_contract::evaluate::{Memory, evaluate};
use kv_contract::{Random, assert_close};
use kv_core::backend::Backend;
use kv_core::graph::{Graph, GraphBuilder, GraphInputs, GraphOutputs, GraphShape};
use kv_core::layers::RowLayout;
use kv_core::weights::MemoryWeights;
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};

/// A builder for graphs of this many tokens, all of which are wanted.
pub(crate) fn builder(n_tokens: usize) -> GraphBuilder {
    GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: n_tokens,
    })
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
    pub(crate) tolerance: f64,
}

impl Case<'_> {
    /// Runs `steps` one after the other and compares all outputs; returns the program's steps.
    pub(crate) fn check(&self, steps: &[GraphInputs<'_>]) -> usize {
        let all = [Order::Forward, Order::Reverse].map(|order| self.check_in(order, steps));
        assert_eq!(all[0], all[1]);
        all[0]
    }

    fn check_in(&self, order: Order, steps: &[GraphInputs<'_>]) -> usize {
        let precision = Precision::Precise;
        let backend = GpuBackend::new(Sim::new(order), GpuConfig { precision });
        let source = Arc::new(self.weights.clone());
        let loaded = backend.load_weights(source, Default::default()).unwrap();
        let mut program = backend.compile(self.graph, &loaded, self.layout).unwrap();
        let mut rows = backend.allocate(self.layout).unwrap();
        let (mut memory, mut outputs) = (Memory::default(), GraphOutputs::default());
        for (at, inputs) in steps.iter().enumerate() {
            let wanted = evaluate(self.graph, self.weights, self.layout, &mut memory, inputs);
            backend
                .run(&mut program, &mut rows, inputs, &mut outputs)
                .unwrap();
            for (i, (got, want)) in outputs.values.iter().zip(&wanted).enumerate() {
                let what = format!("{order:?}, run {at}, output {i}");
                assert_close(&what, got, want, self.tolerance);
            }
        }
        program.n_steps()
    }
}
