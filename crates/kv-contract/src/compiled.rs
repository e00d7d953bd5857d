//! [`CompiledGraph`]: a graph on the backend under test, with rows to run over.
//!
//! Knows no graph and no wanted value.

use std::sync::Arc;

use super::Subject;
use super::larger::Program;
use kv_backend::GraphInputs;
use kv_backend::{Backend, BackendError, RowStorage};
use kv_graph::Graph;
use kv_graph::weights::MemoryWeights;
use kv_rows::RowLayout;

/// A compiled graph and fresh rows.
pub(crate) struct CompiledGraph<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) program: Program<B>,
    pub(crate) rows: B::Rows,
}

impl<B: Backend> CompiledGraph<'_, B> {
    /// All outputs.
    pub(crate) fn run(&mut self, inputs: &GraphInputs<'_>) -> Result<Vec<Vec<f32>>, BackendError> {
        self.program.run(self.backend, &mut self.rows, inputs)
    }
}

impl<B: Backend> Subject<B> {
    /// Weights on the backend.
    pub(crate) fn load(&self, weights: &MemoryWeights) -> B::Weights {
        let weights = Arc::new(weights.clone());
        (self.backend)
            .load_weights(weights, Default::default())
            .unwrap()
    }

    /// A graph over fresh rows of a layout.
    pub(crate) fn compile(
        &self,
        graph: &Graph,
        weights: &MemoryWeights,
        layout: &RowLayout,
    ) -> Result<CompiledGraph<'_, B>, BackendError> {
        let backend = &self.backend;
        Ok(CompiledGraph {
            backend,
            program: Program::compile(backend, graph, &self.load(weights), layout)?,
            rows: backend.allocate(layout).unwrap(),
        })
    }

    /// All outputs of a graph over rows that are there already.
    pub(crate) fn run(
        &self,
        graph: &Graph,
        weights: &B::Weights,
        rows: &mut B::Rows,
        inputs: &GraphInputs<'_>,
    ) -> Vec<Vec<f32>> {
        let program = Program::compile(&self.backend, graph, weights, rows.layout());
        program.unwrap().run(&self.backend, rows, inputs).unwrap()
    }
}
