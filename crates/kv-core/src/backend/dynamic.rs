//! The object-safe twin of [`Backend`], for the one place that chooses a backend at run time.
//!
//! [`BoxedBackend`] is itself a [`Backend`], so everything generic over backends runs on a chosen
//! one. Rows, weights and programs travel as `Any`; handing in another backend's is an error.

use std::any::Any;
use std::sync::Arc;

use super::{
    Attend, Backend, BackendError, BackendInfo, Conv, CustomOps, LayerRope, RowCopy, RowKind,
    RowShift, RowSpan, Scan, ScanHeads, StoreRows,
};
use crate::graph::{Graph, GraphInputs, GraphOutputs};
use crate::ids::LayerIdx;
use crate::layers::RowLayout;
use crate::weights::WeightSource;

type Opaque = Box<dyn Any + Send>;
type SharedOpaque = Box<dyn Any + Send + Sync>;
type Done = Result<(), BackendError>;

/// [`Backend`] without associated types. Implemented for every backend; not meant to be written by
/// hand.
#[allow(missing_docs, clippy::missing_errors_doc)] // each method is its twin's
pub trait DynBackend: Send + Sync + 'static {
    fn dyn_info(&self) -> BackendInfo;
    fn dyn_set_custom_ops(&mut self, ops: CustomOps) -> Done;
    fn dyn_allocate(&self, layout: &RowLayout) -> Result<Opaque, BackendError>;
    fn dyn_layout<'a>(&self, rows: &'a dyn Any) -> Option<&'a RowLayout>;
    fn dyn_allocated_bytes(
        &self,
        rows: &dyn Any,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError>;
    fn dyn_read_rows(&self, rows: &dyn Any, span: RowSpan, out: &mut [u8]) -> Done;
    fn dyn_write_rows(&self, rows: &mut dyn Any, span: RowSpan, bytes: &[u8]) -> Done;
    fn dyn_load(&self, source: Arc<dyn WeightSource>) -> Result<SharedOpaque, BackendError>;
    fn dyn_compile(
        &self,
        graph: &Graph,
        weights: &dyn Any,
        layout: &RowLayout,
    ) -> Result<Opaque, BackendError>;
    fn dyn_run(
        &self,
        program: &mut dyn Any,
        rows: &mut dyn Any,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Done;
    fn dyn_store_rows(&self, rows: &mut dyn Any, args: StoreRows<'_>) -> Done;
    fn dyn_attend(&self, rows: &dyn Any, args: Attend<'_>, out: &mut [f32]) -> Done;
    fn dyn_conv(&self, rows: &mut dyn Any, args: Conv<'_>, out: &mut [f32]) -> Done;
    fn dyn_scan(&self, rows: &mut dyn Any, args: Scan<'_>, out: &mut [f32]) -> Done;
    fn dyn_scan_heads(&self, rows: &mut dyn Any, args: ScanHeads<'_>, out: &mut [f32]) -> Done;
    fn dyn_copy_rows(&self, rows: &mut dyn Any, copies: &[RowCopy]) -> Done;
    fn dyn_shift_rows(&self, rows: &mut dyn Any, shifts: &[RowShift], ropes: &[LayerRope]) -> Done;
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

impl<B: Backend> DynBackend for B
where
    B::Rows: 'static,
    B::Weights: 'static,
    B::Program: 'static,
{
    fn dyn_info(&self) -> BackendInfo {
        self.info()
    }

    fn dyn_set_custom_ops(&mut self, ops: CustomOps) -> Done {
        self.set_custom_ops(ops)
    }

    fn dyn_allocate(&self, layout: &RowLayout) -> Result<Opaque, BackendError> {
        Ok(Box::new(self.allocate(layout)?))
    }

    fn dyn_layout<'a>(&self, rows: &'a dyn Any) -> Option<&'a RowLayout> {
        rows.downcast_ref::<B::Rows>().map(|rows| self.layout(rows))
    }

    fn dyn_allocated_bytes(
        &self,
        rows: &dyn Any,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError> {
        self.allocated_bytes(own(rows)?, layer, kind)
    }

    fn dyn_read_rows(&self, rows: &dyn Any, span: RowSpan, out: &mut [u8]) -> Done {
        self.read_rows(own(rows)?, span, out)
    }

    fn dyn_write_rows(&self, rows: &mut dyn Any, span: RowSpan, bytes: &[u8]) -> Done {
        self.write_rows(own_mut(rows)?, span, bytes)
    }

    fn dyn_load(&self, source: Arc<dyn WeightSource>) -> Result<SharedOpaque, BackendError> {
        Ok(Box::new(self.load_weights(source)?))
    }

    fn dyn_compile(
        &self,
        graph: &Graph,
        weights: &dyn Any,
        layout: &RowLayout,
    ) -> Result<Opaque, BackendError> {
        Ok(Box::new(self.compile(graph, own(weights)?, layout)?))
    }

    fn dyn_run(
        &self,
        program: &mut dyn Any,
        rows: &mut dyn Any,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Done {
        self.run(own_mut(program)?, own_mut(rows)?, inputs, outputs)
    }

    fn dyn_store_rows(&self, rows: &mut dyn Any, args: StoreRows<'_>) -> Done {
        self.store_rows(own_mut(rows)?, args)
    }

    fn dyn_attend(&self, rows: &dyn Any, args: Attend<'_>, out: &mut [f32]) -> Done {
        self.attend(own(rows)?, args, out)
    }

    fn dyn_conv(&self, rows: &mut dyn Any, args: Conv<'_>, out: &mut [f32]) -> Done {
        self.conv(own_mut(rows)?, args, out)
    }

    fn dyn_scan(&self, rows: &mut dyn Any, args: Scan<'_>, out: &mut [f32]) -> Done {
        self.scan(own_mut(rows)?, args, out)
    }

    fn dyn_scan_heads(&self, rows: &mut dyn Any, args: ScanHeads<'_>, out: &mut [f32]) -> Done {
        self.scan_heads(own_mut(rows)?, args, out)
    }

    fn dyn_copy_rows(&self, rows: &mut dyn Any, copies: &[RowCopy]) -> Done {
        self.copy_rows(own_mut(rows)?, copies)
    }

    fn dyn_shift_rows(&self, rows: &mut dyn Any, shifts: &[RowShift], ropes: &[LayerRope]) -> Done {
        self.shift_rows(own_mut(rows)?, shifts, ropes)
    }
}

/// A backend chosen at run time.
pub struct BoxedBackend(Box<dyn DynBackend>);

/// Rows of a [`BoxedBackend`], with the layout beside them.
pub struct BoxedRows {
    rows: Opaque,
    layout: RowLayout,
}

impl BoxedBackend {
    /// Boxes a backend.
    pub fn new<B: Backend>(backend: B) -> Self
    where
        B::Rows: 'static,
        B::Weights: 'static,
        B::Program: 'static,
    {
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
    type Program = Opaque;

    fn info(&self) -> BackendInfo {
        self.0.dyn_info()
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Done {
        self.0.dyn_set_custom_ops(ops)
    }

    fn allocate(&self, layout: &RowLayout) -> Result<BoxedRows, BackendError> {
        Ok(BoxedRows {
            rows: self.0.dyn_allocate(layout)?,
            layout: layout.clone(),
        })
    }

    fn layout<'a>(&self, rows: &'a BoxedRows) -> &'a RowLayout {
        self.0.dyn_layout(&*rows.rows).unwrap_or(&rows.layout)
    }

    fn allocated_bytes(
        &self,
        rows: &BoxedRows,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError> {
        self.0.dyn_allocated_bytes(&*rows.rows, layer, kind)
    }

    fn read_rows(&self, rows: &BoxedRows, span: RowSpan, out: &mut [u8]) -> Done {
        self.0.dyn_read_rows(&*rows.rows, span, out)
    }

    fn write_rows(&self, rows: &mut BoxedRows, span: RowSpan, bytes: &[u8]) -> Done {
        self.0.dyn_write_rows(&mut *rows.rows, span, bytes)
    }

    fn load_weights(&self, source: Arc<dyn WeightSource>) -> Result<SharedOpaque, BackendError> {
        self.0.dyn_load(source)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &SharedOpaque,
        layout: &RowLayout,
    ) -> Result<Opaque, BackendError> {
        self.0.dyn_compile(graph, &**weights, layout)
    }

    fn run(
        &self,
        program: &mut Opaque,
        rows: &mut BoxedRows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Done {
        self.0
            .dyn_run(&mut **program, &mut *rows.rows, inputs, outputs)
    }

    fn store_rows(&self, rows: &mut BoxedRows, args: StoreRows<'_>) -> Done {
        self.0.dyn_store_rows(&mut *rows.rows, args)
    }

    fn attend(&self, rows: &BoxedRows, args: Attend<'_>, out: &mut [f32]) -> Done {
        self.0.dyn_attend(&*rows.rows, args, out)
    }

    fn conv(&self, rows: &mut BoxedRows, args: Conv<'_>, out: &mut [f32]) -> Done {
        self.0.dyn_conv(&mut *rows.rows, args, out)
    }

    fn scan(&self, rows: &mut BoxedRows, args: Scan<'_>, out: &mut [f32]) -> Done {
        self.0.dyn_scan(&mut *rows.rows, args, out)
    }

    fn scan_heads(&self, rows: &mut BoxedRows, args: ScanHeads<'_>, out: &mut [f32]) -> Done {
        self.0.dyn_scan_heads(&mut *rows.rows, args, out)
    }

    fn copy_rows(&self, rows: &mut BoxedRows, copies: &[RowCopy]) -> Done {
        self.0.dyn_copy_rows(&mut *rows.rows, copies)
    }

    fn shift_rows(&self, rows: &mut BoxedRows, shifts: &[RowShift], ropes: &[LayerRope]) -> Done {
        self.0.dyn_shift_rows(&mut *rows.rows, shifts, ropes)
    }
}
