//! [`delegate!`](crate::delegate): the methods that a backend leaves to the one that it wraps.

/// Writes methods of [`Backend`](crate::Backend) that are those of `self.inner`, for a backend
/// that wraps another and changes a few of them: one that records, counts or fails when told to.
///
/// ```
/// use kv_backend::{Backend, BackendError, GraphInputs, GraphOutputs, null::NullBackend};
///
/// /// Fails every run.
/// struct Failing {
///     inner: NullBackend,
/// }
///
/// impl Backend for Failing {
///     type Rows = <NullBackend as Backend>::Rows;
///     type Weights = <NullBackend as Backend>::Weights;
///     type Program = <NullBackend as Backend>::Program;
///
///     kv_backend::delegate!(info, allocate, load_weights, compile, read_rows, write_rows);
///
///     fn run(
///         &self,
///         _: &mut Self::Program,
///         _: &mut Self::Rows,
///         _: &GraphInputs<'_>,
///         _: &mut GraphOutputs,
///     ) -> Result<(), BackendError> {
///         Err(BackendError::Cancelled)
///     }
/// }
/// ```
#[macro_export]
macro_rules! delegate {
    (@method info) => {
        fn info(&self) -> $crate::BackendInfo {
            $crate::Backend::info(&self.inner)
        }
    };
    (@method memory) => {
        fn memory(&self) -> Option<$crate::DeviceMemory> {
            $crate::Backend::memory(&self.inner)
        }
    };
    (@method expert_meter) => {
        fn expert_meter(&self) -> Option<std::sync::Arc<$crate::ExpertMeter>> {
            $crate::Backend::expert_meter(&self.inner)
        }
    };
    (@method prefers_candidates) => {
        fn prefers_candidates(&self) -> bool {
            $crate::Backend::prefers_candidates(&self.inner)
        }
    };
    (@method program_capacities) => {
        fn program_capacities(&self) -> &'static [usize] {
            $crate::Backend::program_capacities(&self.inner)
        }
    };
    (@method set_custom_ops) => {
        fn set_custom_ops(&mut self, ops: $crate::CustomOps) -> Result<(), $crate::BackendError> {
            $crate::Backend::set_custom_ops(&mut self.inner, ops)
        }
    };
    (@method allocate) => {
        fn allocate(&self, layout: &$crate::kv_rows::RowLayout) -> Result<Self::Rows, $crate::BackendError> {
            $crate::Backend::allocate(&self.inner, layout)
        }
    };
    (@method load_weights) => {
        fn load_weights(&self, source: std::sync::Arc<dyn $crate::kv_graph::weights::WeightSource>, on_progress: $crate::OnProgress) -> Result<Self::Weights, $crate::BackendError> {
            $crate::Backend::load_weights(&self.inner, source, on_progress)
        }
    };
    (@method forget_weights) => {
        fn forget_weights(&self, weights: &Self::Weights, names: &[String]) -> Result<(), $crate::BackendError> {
            $crate::Backend::forget_weights(&self.inner, weights, names)
        }
    };
    (@method compile) => {
        fn compile(&self, graph: &$crate::kv_graph::Graph, weights: &Self::Weights, layout: &$crate::kv_rows::RowLayout) -> Result<Self::Program, $crate::BackendError> {
            $crate::Backend::compile(&self.inner, graph, weights, layout)
        }
    };
    (@method run) => {
        fn run(&self, program: &mut Self::Program, rows: &mut Self::Rows, inputs: &$crate::GraphInputs<'_>, outputs: &mut $crate::GraphOutputs) -> Result<(), $crate::BackendError> {
            $crate::Backend::run(&self.inner, program, rows, inputs, outputs)
        }
    };
    (@method finish) => {
        fn finish(&self, rows: &mut Self::Rows) -> Result<(), $crate::BackendError> {
            $crate::Backend::finish(&self.inner, rows)
        }
    };
    (@method read_rows) => {
        fn read_rows(&self, rows: &Self::Rows, span: $crate::RowSpan, out: &mut [u8]) -> Result<(), $crate::BackendError> {
            $crate::Backend::read_rows(&self.inner, rows, span, out)
        }
    };
    (@method write_rows) => {
        fn write_rows(&self, rows: &mut Self::Rows, span: $crate::RowSpan, bytes: &[u8]) -> Result<(), $crate::BackendError> {
            $crate::Backend::write_rows(&self.inner, rows, span, bytes)
        }
    };
    (@method copy_rows) => {
        fn copy_rows(&self, rows: &mut Self::Rows, copies: &[$crate::kv_core::memory::RowCopy]) -> Result<(), $crate::BackendError> {
            $crate::Backend::copy_rows(&self.inner, rows, copies)
        }
    };
    (@method shift_rows) => {
        fn shift_rows(&self, rows: &mut Self::Rows, shifts: &[$crate::kv_core::memory::RowShift], ropes: &[$crate::kv_graph::rope::LayerRope]) -> Result<(), $crate::BackendError> {
            $crate::Backend::shift_rows(&self.inner, rows, shifts, ropes)
        }
    };
    ($($method:ident),+ $(,)?) => {
        $($crate::delegate!(@method $method);)+
    };
}
