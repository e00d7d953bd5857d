//! [`CandleBackend`]: the [`Backend`] of this crate, put together from its parts.

use std::sync::Arc;

use candle_core::{Device, DeviceLocation};
use kv_backend::{
    Backend, BackendError, BackendInfo, CustomOps, DeviceMemory, OnProgress, RowKind, RowSpan,
    RowStorage,
};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{LayerIdx, memory::RowCopy};
use kv_graph::Graph;
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, RowLayout, StateType};

use crate::error;
use crate::execute;
use crate::program::Program;
use crate::rows::Rows;
use crate::weights::Weights;

/// Runs graphs with candle's operations on one device.
#[derive(Clone, Debug)]
pub struct CandleBackend {
    device: Device,
    custom: CustomOps,
}

impl CandleBackend {
    /// A backend on this device.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            custom: CustomOps::new(),
        }
    }

    /// A backend on the CPU.
    pub fn cpu() -> Self {
        Self::new(Device::Cpu)
    }

    /// A backend on an NVIDIA GPU, by its number, with candle's kernels: the feature `cuda`.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] in candle's words: built without the feature, no such GPU.
    pub fn cuda(ordinal: usize) -> Result<Self, BackendError> {
        Device::new_cuda(ordinal)
            .map(Self::new)
            .map_err(unavailable)
    }

    /// A backend on a GPU of a Mac, by its number, with candle's kernels: the feature `metal`.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] in candle's words: built without the feature, no such GPU.
    pub fn metal(ordinal: usize) -> Result<Self, BackendError> {
        Device::new_metal(ordinal)
            .map(Self::new)
            .map_err(unavailable)
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

fn unavailable(error: candle_core::Error) -> BackendError {
    BackendError::Unavailable {
        backend: error::NAME,
        reason: error.to_string(),
    }
}

impl Backend for CandleBackend {
    type Rows = Rows;
    type Weights = Weights;
    type Program = Program;

    fn info(&self) -> BackendInfo {
        let device = match self.device.location() {
            DeviceLocation::Cpu => "CPU".to_owned(),
            DeviceLocation::Cuda { gpu_id } => format!("CUDA device {gpu_id}"),
            DeviceLocation::Metal { gpu_id } => format!("Metal device {gpu_id}"),
        };
        BackendInfo {
            name: error::NAME.to_owned(),
            device,
            kv_types: KvType::ALL.to_vec(),
            state_types: StateType::ALL.to_vec(),
        }
    }

    /// That of the machine where tensors are in it; candle does not say what another device has.
    fn memory(&self) -> Option<DeviceMemory> {
        self.device.is_cpu().then(DeviceMemory::of_host).flatten()
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.custom.extend(&ops);
        Ok(())
    }

    fn allocate(&self, layout: &RowLayout) -> Result<Rows, BackendError> {
        Rows::allocate(layout, &self.device)
    }

    fn read_rows(&self, rows: &Rows, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        rows.read(span, out)
    }

    fn write_rows(&self, rows: &mut Rows, span: RowSpan, bytes: &[u8]) -> Result<(), BackendError> {
        rows.write(span, bytes)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        _on_progress: OnProgress,
    ) -> Result<Weights, BackendError> {
        Ok(Weights::new(
            source,
            self.device.clone(),
            self.custom.clone(),
        ))
    }

    fn forget_weights(&self, weights: &Weights, names: &[String]) -> Result<(), BackendError> {
        weights.forget(names);
        Ok(())
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &Weights,
        layout: &RowLayout,
    ) -> Result<Program, BackendError> {
        Program::compile(graph, weights, layout)
    }

    fn run(
        &self,
        program: &mut Program,
        rows: &mut Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        execute::run(program, rows, inputs, outputs)
    }

    fn copy_rows(&self, rows: &mut Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        rows.copy(copies)
    }
}

impl RowStorage for Rows {
    fn layout(&self) -> &RowLayout {
        Self::layout(self)
    }

    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        self.n_bytes(layer, kind)
    }
}

#[cfg(all(test, not(any(feature = "cuda", feature = "metal"))))]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_features() {
        for (opened, name) in [
            (CandleBackend::cuda(0), "cuda"),
            (CandleBackend::metal(0), "metal"),
        ] {
            let error = opened.unwrap_err();
            let wanted = format!(
                "the candle backend is not available: the candle crate has not been built with \
                 {name} support"
            );
            assert_eq!(error.to_string(), wanted);
        }
    }
}
