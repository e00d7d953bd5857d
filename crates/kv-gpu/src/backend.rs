//! [`GpuBackend`]: the [`Backend`] of this crate, put together from its parts.

use std::sync::Arc;

use kv_backend::{
    Backend, BackendError, BackendInfo, CustomOps, DeviceMemory, OnProgress, RowSpan, check_rows,
};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::memory::{RowCopy, RowShift};
use kv_graph::Graph;
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, RowLayout, StateType};

use crate::config::GpuConfig;
use crate::device::Device;
use crate::edits;
use crate::lower::{Context, lower};
use crate::program::{GpuProgram, ProgramContext};
use crate::rows::GpuRows;
use crate::weights::GpuWeights;

/// Runs graphs on one device.
#[derive(Debug)]
pub struct GpuBackend<D: Device> {
    shared: Arc<ProgramContext<D>>,
    config: GpuConfig,
    custom: CustomOps,
}

impl<D: Device> GpuBackend<D> {
    /// A backend on this device.
    pub fn new(device: D, config: GpuConfig) -> Self {
        Self {
            shared: Arc::new(ProgramContext::new(device)),
            config,
            custom: CustomOps::new(),
        }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.shared.device
    }
}

impl<D: Device> Backend for GpuBackend<D> {
    type Rows = GpuRows<D>;
    type Weights = GpuWeights<D>;
    type Program = GpuProgram<D>;

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: self.device().name().to_owned(),
            device: self.device().description(),
            kv_types: KvType::ALL.to_vec(),
            state_types: StateType::ALL.to_vec(),
        }
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.device().memory()
    }

    fn prefers_candidates(&self) -> bool {
        true
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.custom.extend(&ops);
        Ok(())
    }

    fn allocate(&self, layout: &RowLayout) -> Result<GpuRows<D>, BackendError> {
        GpuRows::allocate(self.device(), layout)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<GpuWeights<D>, BackendError> {
        Ok(GpuWeights::new(source, self.custom.clone(), on_progress))
    }

    fn forget_weights(
        &self,
        weights: &GpuWeights<D>,
        names: &[String],
    ) -> Result<(), BackendError> {
        weights.forget(names);
        Ok(())
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &GpuWeights<D>,
        layout: &RowLayout,
    ) -> Result<GpuProgram<D>, BackendError> {
        check_rows(graph, layout)?;
        let lowered = lower(Context {
            shared: &self.shared,
            config: self.config,
            graph,
            weights,
            layout,
        })?;
        GpuProgram::new(Arc::clone(&self.shared), graph, layout, lowered)
    }

    fn run(
        &self,
        program: &mut GpuProgram<D>,
        rows: &mut GpuRows<D>,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        program.run(rows, inputs, outputs)
    }

    fn finish(&self, _rows: &mut GpuRows<D>) -> Result<(), BackendError> {
        self.device().wait()
    }

    fn read_rows(
        &self,
        rows: &GpuRows<D>,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        self.device().read(rows.span(span, out.len())?, out)
    }

    fn write_rows(
        &self,
        rows: &mut GpuRows<D>,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.device().write(rows.span(span, bytes.len())?, bytes)
    }

    fn copy_rows(&self, rows: &mut GpuRows<D>, copies: &[RowCopy]) -> Result<(), BackendError> {
        edits::copy_rows(self.device(), rows, copies)
    }

    fn shift_rows(
        &self,
        rows: &mut GpuRows<D>,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> Result<(), BackendError> {
        edits::shift_rows(&self.shared, rows, shifts, ropes)
    }
}
