//! The reference backend of Cellar: any graph with plain candle operations, on any candle device.
//!
//! Invariant: an operation is computed as its description in [`kv_core::graph::Op`] says, in `f32`,
//! with no fusion and no kernel of its own, so that faster backends can be compared with it.
//! Everything that a call can refuse is checked before the first row changes. Knows nothing of
//! models or of how cells are chosen.
//!
//! ```
//! use kv_candle::CandleBackend;
//! use kv_core::backend::Backend;
//!
//! assert_eq!(CandleBackend::cpu().info().device, "CPU");
//! ```

mod custom;
mod error;
mod execute;
mod inputs;
mod ops;
mod program;
mod rows;
mod weights;

use std::sync::Arc;

use candle_core::{Device, DeviceLocation, Tensor};
use kv_core::backend::{
    Attend, Backend, BackendError, BackendInfo, CustomOps, RowCopy, RowKind, RowSpan, StoreRows,
    expect_len,
};
use kv_core::graph::{Graph, GraphInputs, GraphOutputs};
use kv_core::layers::RowLayout;
use kv_core::weights::WeightSource;
use kv_core::{KvType, LayerIdx};

use error::OnDevice;
use ops::Queries;
pub use program::Program;
pub use rows::Rows;
pub use weights::Weights;

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

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.device
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
        }
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.custom.extend(&ops);
        Ok(())
    }

    fn allocate(&self, layout: &RowLayout) -> Result<Rows, BackendError> {
        Rows::allocate(layout, &self.device)
    }

    fn layout<'a>(&self, rows: &'a Rows) -> &'a RowLayout {
        rows.layout()
    }

    fn allocated_bytes(
        &self,
        rows: &Rows,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError> {
        rows.n_bytes(layer, kind)
    }

    fn read_rows(&self, rows: &Rows, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        rows.read(span, out)
    }

    fn write_rows(&self, rows: &mut Rows, span: RowSpan, bytes: &[u8]) -> Result<(), BackendError> {
        rows.write(span, bytes)
    }

    fn load_weights(&self, source: Arc<dyn WeightSource>) -> Result<Weights, BackendError> {
        Ok(Weights::new(
            source,
            self.device.clone(),
            self.custom.clone(),
        ))
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

    fn store_rows(&self, rows: &mut Rows, args: StoreRows<'_>) -> Result<(), BackendError> {
        let (layer, tensors) = rows.layer(args.layer)?;
        let n = args.cells.len();
        expect_len("values of K rows to store", n * layer.k.len(), args.k.len())?;
        let v_len = layer.stored_v().map_or(0, |v| v.len());
        expect_len("values of V rows to store", n * v_len, args.v.len())?;
        rows::check_cells(layer, args.cells)?;
        let tensor = |values: &[f32], len| Tensor::from_slice(values, (n, len), &self.device);
        let k = tensor(args.k, layer.k.len()).on_device()?;
        let v = tensor(args.v, v_len).on_device()?;
        ops::store_rows(tensors, [&k, &v], args.cells).on_device()
    }

    fn attend(&self, rows: &Rows, args: Attend<'_>, out: &mut [f32]) -> Result<(), BackendError> {
        let (layer, tensors) = rows.attended(args.layer)?;
        rows::check_spec(layer, &args.spec)?;
        let spec = args.spec;
        let n = args.visibility.n_rows as usize;
        expect_len(
            "values of query rows",
            n * spec.n_heads * spec.k_dim,
            args.q.len(),
        )?;
        expect_len(
            "values of attention output",
            n * spec.n_heads * spec.v_dim,
            out.len(),
        )?;
        inputs::check_visibility(args.visibility, layer.n_rows)?;
        args.check_extras()?;
        if out.is_empty() {
            return Ok(());
        }
        let q = Tensor::from_slice(args.q, (n, spec.n_heads, spec.k_dim), &self.device);
        let sinks = args
            .sinks
            .map(|sinks| Tensor::from_slice(sinks, sinks.len(), &self.device))
            .transpose()
            .on_device()?;
        let queries = Queries {
            q: &q.on_device()?,
            visibility: args.visibility,
            positions: args.positions,
            sinks: sinks.as_ref(),
        };
        let result = ops::attend(tensors, &spec, queries).on_device()?;
        execute::copy_out(&result, out)
    }

    fn copy_rows(&self, rows: &mut Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        rows.copy(copies)
    }
}
