//! [`ExactShapes`]: a backend whose programs run with the shape of their graph alone, to compare
//! with.
//!
//! Knows nothing of what is computed.

use std::sync::Arc;

use kv_backend::{
    Backend, BackendError, BackendInfo, CustomOps, DeviceMemory, OnProgress, RowSpan,
};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::memory::{RowCopy, RowShift};
use kv_graph::Graph;
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource;
use kv_rows::RowLayout;

/// A backend without [`Backend::program_capacities`].
#[derive(Debug)]
pub struct ExactShapes<B>(pub B);

impl<B: Backend> Backend for ExactShapes<B> {
    type Rows = B::Rows;
    type Weights = B::Weights;
    type Program = B::Program;

    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.0.memory()
    }

    fn prefers_candidates(&self) -> bool {
        self.0.prefers_candidates()
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.0.set_custom_ops(ops)
    }

    fn allocate(&self, layout: &RowLayout) -> Result<B::Rows, BackendError> {
        self.0.allocate(layout)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<B::Weights, BackendError> {
        self.0.load_weights(source, on_progress)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &B::Weights,
        layout: &RowLayout,
    ) -> Result<B::Program, BackendError> {
        self.0.compile(graph, weights, layout)
    }

    fn run(
        &self,
        program: &mut B::Program,
        rows: &mut B::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        self.0.run(program, rows, inputs, outputs)
    }

    fn finish(&self, rows: &mut B::Rows) -> Result<(), BackendError> {
        self.0.finish(rows)
    }

    fn read_rows(&self, rows: &B::Rows, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        self.0.read_rows(rows, span, out)
    }

    fn write_rows(
        &self,
        rows: &mut B::Rows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.0.write_rows(rows, span, bytes)
    }

    fn copy_rows(&self, rows: &mut B::Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        self.0.copy_rows(rows, copies)
    }

    fn shift_rows(
        &self,
        rows: &mut B::Rows,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> Result<(), BackendError> {
        self.0.shift_rows(rows, shifts, ropes)
    }
}
