//! The object-safe twin of [`Backend`], for the one place that chooses a backend at run time.
//!
//! [`BoxedBackend`] is itself a [`Backend`], so everything generic over backends runs on a chosen
//! one. Rows, weights and programs travel as `Any`; handing in another backend's is an error.

use std::any::Any;
use std::sync::Arc;

use kv_core::{
    ids::LayerIdx,
    memory::{RowCopy, RowShift},
};
use kv_graph::Graph;
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource;
use kv_rows::RowLayout;

use crate::{
    Backend, BackendError, BackendInfo, CustomOps, DeviceMemory, ExpertMeter, OnProgress, RowKind,
    RowSpan, RowStorage,
};
use crate::{GraphInputs, GraphOutputs};

type AnyRows = Box<dyn Any + Send>;
type SharedOpaque = Box<dyn Any + Send + Sync>;
type DynResult = Result<(), BackendError>;

/// [`Backend`] without associated types. Implemented for every backend; not meant to be written by
/// hand.
#[allow(missing_docs, clippy::missing_errors_doc)] // each method is its twin's
pub trait DynBackend: Send + Sync + 'static {
    fn dyn_info(&self) -> BackendInfo;
    fn dyn_memory(&self) -> Option<DeviceMemory>;
    fn dyn_expert_meter(&self) -> Option<Arc<ExpertMeter>>;
    fn dyn_prefers_candidates(&self) -> bool;
    fn dyn_program_capacities(&self) -> &'static [usize];
    fn dyn_set_custom_ops(&mut self, ops: CustomOps) -> DynResult;
    fn dyn_allocate(&self, layout: &RowLayout) -> Result<Box<dyn RowStorage>, BackendError>;
    fn dyn_load(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<SharedOpaque, BackendError>;
    fn dyn_forget(&self, weights: &dyn Any, names: &[String]) -> DynResult;
    fn dyn_compile(
        &self,
        graph: &Graph,
        weights: &dyn Any,
        layout: &RowLayout,
    ) -> Result<AnyRows, BackendError>;
    fn dyn_run(
        &self,
        program: &mut dyn Any,
        rows: &mut dyn Any,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> DynResult;
    fn dyn_finish(&self, rows: &mut dyn Any) -> DynResult;
    fn dyn_read_rows(&self, rows: &dyn Any, span: RowSpan, out: &mut [u8]) -> DynResult;
    fn dyn_write_rows(&self, rows: &mut dyn Any, span: RowSpan, bytes: &[u8]) -> DynResult;
    fn dyn_copy_rows(&self, rows: &mut dyn Any, copies: &[RowCopy]) -> DynResult;
    fn dyn_shift_rows(
        &self,
        rows: &mut dyn Any,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> DynResult;
}

fn own<T: 'static>(any: &dyn Any) -> Result<&T, BackendError> {
    any.downcast_ref().ok_or(BackendError::Foreign {
        what: std::any::type_name::<T>(),
    })
}

fn own_mut<T: 'static>(any: &mut dyn Any) -> Result<&mut T, BackendError> {
    any.downcast_mut().ok_or(BackendError::Foreign {
        what: std::any::type_name::<T>(),
    })
}

impl<B: Backend> DynBackend for B {
    fn dyn_info(&self) -> BackendInfo {
        self.info()
    }

    fn dyn_memory(&self) -> Option<DeviceMemory> {
        self.memory()
    }

    fn dyn_expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        self.expert_meter()
    }

    fn dyn_prefers_candidates(&self) -> bool {
        self.prefers_candidates()
    }

    fn dyn_program_capacities(&self) -> &'static [usize] {
        self.program_capacities()
    }

    fn dyn_set_custom_ops(&mut self, ops: CustomOps) -> DynResult {
        self.set_custom_ops(ops)
    }

    fn dyn_allocate(&self, layout: &RowLayout) -> Result<Box<dyn RowStorage>, BackendError> {
        Ok(Box::new(self.allocate(layout)?))
    }

    fn dyn_load(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<SharedOpaque, BackendError> {
        Ok(Box::new(self.load_weights(source, on_progress)?))
    }

    fn dyn_forget(&self, weights: &dyn Any, names: &[String]) -> DynResult {
        self.forget_weights(own(weights)?, names)
    }

    fn dyn_compile(
        &self,
        graph: &Graph,
        weights: &dyn Any,
        layout: &RowLayout,
    ) -> Result<AnyRows, BackendError> {
        Ok(Box::new(self.compile(graph, own(weights)?, layout)?))
    }

    fn dyn_run(
        &self,
        program: &mut dyn Any,
        rows: &mut dyn Any,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> DynResult {
        self.run(own_mut(program)?, own_mut(rows)?, inputs, outputs)
    }

    fn dyn_finish(&self, rows: &mut dyn Any) -> DynResult {
        self.finish(own_mut(rows)?)
    }

    fn dyn_read_rows(&self, rows: &dyn Any, span: RowSpan, out: &mut [u8]) -> DynResult {
        self.read_rows(own(rows)?, span, out)
    }

    fn dyn_write_rows(&self, rows: &mut dyn Any, span: RowSpan, bytes: &[u8]) -> DynResult {
        self.write_rows(own_mut(rows)?, span, bytes)
    }

    fn dyn_copy_rows(&self, rows: &mut dyn Any, copies: &[RowCopy]) -> DynResult {
        self.copy_rows(own_mut(rows)?, copies)
    }

    fn dyn_shift_rows(
        &self,
        rows: &mut dyn Any,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> DynResult {
        self.shift_rows(own_mut(rows)?, shifts, ropes)
    }
}

/// A backend chosen at run time.
pub struct BoxedBackend(Box<dyn DynBackend>);

/// Rows of a [`BoxedBackend`].
pub struct BoxedRows(Box<dyn RowStorage>);

impl BoxedRows {
    fn any(&self) -> &dyn Any {
        &*self.0
    }

    fn any_mut(&mut self) -> &mut dyn Any {
        &mut *self.0
    }
}

impl RowStorage for BoxedRows {
    fn layout(&self) -> &RowLayout {
        self.0.layout()
    }

    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        self.0.allocated_bytes(layer, kind)
    }
}

impl BoxedBackend {
    /// Boxes a backend.
    pub fn new(backend: impl Backend) -> Self {
        Self(Box::new(backend))
    }
}

impl std::fmt::Debug for BoxedBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BoxedBackend")
            .field(&self.0.dyn_info())
            .finish()
    }
}

impl Backend for BoxedBackend {
    type Rows = BoxedRows;
    type Weights = SharedOpaque;
    type Program = AnyRows;

    fn info(&self) -> BackendInfo {
        self.0.dyn_info()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.0.dyn_memory()
    }

    fn expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        self.0.dyn_expert_meter()
    }

    fn prefers_candidates(&self) -> bool {
        self.0.dyn_prefers_candidates()
    }

    fn program_capacities(&self) -> &'static [usize] {
        self.0.dyn_program_capacities()
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> DynResult {
        self.0.dyn_set_custom_ops(ops)
    }

    fn allocate(&self, layout: &RowLayout) -> Result<BoxedRows, BackendError> {
        self.0.dyn_allocate(layout).map(BoxedRows)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<SharedOpaque, BackendError> {
        self.0.dyn_load(source, on_progress)
    }

    fn forget_weights(&self, weights: &SharedOpaque, names: &[String]) -> DynResult {
        self.0.dyn_forget(&**weights, names)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &SharedOpaque,
        layout: &RowLayout,
    ) -> Result<AnyRows, BackendError> {
        self.0.dyn_compile(graph, &**weights, layout)
    }

    fn run(
        &self,
        program: &mut AnyRows,
        rows: &mut BoxedRows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> DynResult {
        self.0
            .dyn_run(&mut **program, rows.any_mut(), inputs, outputs)
    }

    fn finish(&self, rows: &mut BoxedRows) -> DynResult {
        self.0.dyn_finish(rows.any_mut())
    }

    fn read_rows(&self, rows: &BoxedRows, span: RowSpan, out: &mut [u8]) -> DynResult {
        self.0.dyn_read_rows(rows.any(), span, out)
    }

    fn write_rows(&self, rows: &mut BoxedRows, span: RowSpan, bytes: &[u8]) -> DynResult {
        self.0.dyn_write_rows(rows.any_mut(), span, bytes)
    }

    fn copy_rows(&self, rows: &mut BoxedRows, copies: &[RowCopy]) -> DynResult {
        self.0.dyn_copy_rows(rows.any_mut(), copies)
    }

    fn shift_rows(
        &self,
        rows: &mut BoxedRows,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> DynResult {
        self.0.dyn_shift_rows(rows.any_mut(), shifts, ropes)
    }
}
