//! [`Backend`]: what a device must be able to do, and how it may fail.
//!
//! A backend holds K and V rows, loads weights in their stored format, compiles a graph once and
//! runs it many times. Eight methods are required; the others have bodies written with those, right
//! everywhere and slow: a backend overrides them where it can do better. What every method means is
//! defined by the contract suite (the crate `kv-contract`).
//!
//! A backend trusts its caller in what `kv-core` has validated (cells are free, positions grow) and
//! checks what only it can know (weights, memory of the device).

mod args;
mod attend;
mod custom;
mod dynamic;
mod error;
mod profile;
mod recurrent;
mod shift;

use std::fmt::Debug;
use std::sync::Arc;

pub use args::{
    Attend, Conv, LayerRope, RowCopy, RowKind, RowShift, RowSpan, Scan, ScanHeads, StoreRows,
    expect_len,
};
pub use attend::by_reading_rows as attend_by_definition;
pub use custom::{CustomCall, CustomOp, CustomOps, CustomRows, CustomShape, MAX_CUSTOM_OPERANDS};
pub use dynamic::{BoxedBackend, DynBackend};
pub use error::BackendError;
pub use profile::{Profile, Profiler, StepKind, StepTime};
pub use recurrent::{HeadWeights, conv_token, scan_heads_token, scan_token};

use crate::graph::{Graph, GraphInputs, GraphOutputs};
use crate::ids::{CellIdx, LayerIdx};
use crate::kv_type::KvType;
use crate::layers::RowLayout;
use crate::weights::WeightSource;

/// What a backend says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// Short name, as on the command line: `cpu`, `candle`.
    pub name: String,
    /// What it runs on, for people: instruction set and threads, or the device's name.
    pub device: String,
    /// Element types that it can store K and V in.
    pub kv_types: Vec<KvType>,
}

/// A device that remembers rows and computes graphs.
pub trait Backend: Send + Sync + 'static {
    /// K and V rows of all layers.
    type Rows: Send;
    /// Loaded weights.
    type Weights: Send + Sync;
    /// A compiled graph, with the scratch memory that its runs need.
    type Program: Send;

    /// What this backend is.
    fn info(&self) -> BackendInfo;

    /// Takes implementations of custom operations beside those that it has: graphs that are compiled with
    /// weights loaded from now on may name them. One of a name that it has replaces that one.
    ///
    /// # Errors
    /// [`BackendError::NoCustomOps`] where the backend cannot compute any.
    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        let _ = ops;
        let backend = self.info().name;
        Err(BackendError::NoCustomOps { backend })
    }

    /// Allocates all rows of `layout`, filled with zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] where they do not fit; [`BackendError::UnsupportedKvType`].
    fn allocate(&self, layout: &RowLayout) -> Result<Self::Rows, BackendError>;

    /// The layout that `rows` were allocated with.
    fn layout<'a>(&self, rows: &'a Self::Rows) -> &'a RowLayout;

    /// Bytes that the storage of one kind of rows of a layer takes: what
    /// [`MemoryPlan`](crate::memory_plan::MemoryPlan) says. A backend measures its storage; the body
    /// here is for those that have none of their own.
    ///
    /// # Errors
    /// [`BackendError::NoRows`] where the layer has no rows of this kind.
    fn allocated_bytes(
        &self,
        rows: &Self::Rows,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError> {
        let layout = self.layout(rows);
        let n_rows = match kind {
            RowKind::K | RowKind::V => args::layer_rows(layout, layer)?.n_rows,
            RowKind::Conv | RowKind::State => args::state_rows(layout, layer)?.n_rows,
        };
        let all = RowSpan {
            layer,
            kind,
            first: CellIdx(0),
            len: u32::try_from(n_rows).unwrap_or(u32::MAX),
        };
        Ok(all.byte_range(layout)?.len())
    }

    /// Reads the stored bytes of some rows; `out` takes exactly the span's bytes.
    ///
    /// # Errors
    /// [`BackendError::RowOutOfRange`] or [`BackendError::WrongLength`].
    fn read_rows(
        &self,
        rows: &Self::Rows,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError>;

    /// Writes the stored bytes of some rows; the mirror of [`Backend::read_rows`].
    ///
    /// # Errors
    /// [`BackendError::RowOutOfRange`] or [`BackendError::WrongLength`].
    fn write_rows(
        &self,
        rows: &mut Self::Rows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError>;

    /// Takes over the weights of a model. Nothing is read that no graph names.
    ///
    /// # Errors
    /// [`BackendError`] where the device cannot hold them.
    fn load_weights(&self, source: Arc<dyn WeightSource>) -> Result<Self::Weights, BackendError>;

    /// Turns a graph into a program for rows of this layout.
    ///
    /// # Errors
    /// A weight that is absent or has another shape; an operation or format that this backend
    /// cannot compute.
    fn compile(
        &self,
        graph: &Graph,
        weights: &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError>;

    /// Runs a program: stores the tokens' rows and computes the graph's outputs.
    ///
    /// # Errors
    /// [`BackendError::Input`] where inputs do not have the graph's shape; device failures. Rows
    /// outside the inputs' cells are never changed.
    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError>;

    /// Encodes K and V of some tokens and stores them in their cells.
    ///
    /// # Errors
    /// As [`Backend::write_rows`].
    fn store_rows(&self, rows: &mut Self::Rows, args: StoreRows<'_>) -> Result<(), BackendError> {
        let layer = args::layer_rows(self.layout(rows), args.layer)?;
        let v = layer.stored_v().map(|v| (RowKind::V, args.v, v));
        if v.is_none() {
            args::expect_len("values of rows to store", 0, args.v.len())?;
        }
        for (kind, values, shape) in [(RowKind::K, args.k, layer.k)].into_iter().chain(v) {
            args::expect_len(
                "values of rows to store",
                args.cells.len() * shape.len(),
                values.len(),
            )?;
            let mut bytes = vec![0; shape.bytes()];
            for (row, cell) in values.chunks_exact(shape.len().max(1)).zip(args.cells) {
                shape.encode(row, &mut bytes);
                self.write_rows(
                    rows,
                    RowSpan {
                        layer: args.layer,
                        kind,
                        first: *cell,
                        len: 1,
                    },
                    &bytes,
                )?;
            }
        }
        Ok(())
    }

    /// Attention of query rows over visible rows: `out` is `[rows, heads * v_dim]`; a row that sees
    /// nothing gives zeros.
    ///
    /// # Errors
    /// As [`Backend::read_rows`].
    fn attend(
        &self,
        rows: &Self::Rows,
        args: Attend<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        attend::by_reading_rows(self, rows, args, out)
    }

    /// The convolution of a recurrent layer over groups of rows, which leaves its states where the
    /// groups say: `out` is `[rows, channels]`.
    ///
    /// # Errors
    /// [`BackendError::Input`] where groups are unsound; as [`Backend::read_rows`].
    fn conv(
        &self,
        rows: &mut Self::Rows,
        args: Conv<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        recurrent::conv_by_rows(self, rows, args, out)
    }

    /// The selective scan of a recurrent layer over groups of rows, which leaves its states where
    /// the groups say: `out` is `[rows, channels]`.
    ///
    /// # Errors
    /// [`BackendError::Input`] where groups are unsound; as [`Backend::read_rows`].
    fn scan(
        &self,
        rows: &mut Self::Rows,
        args: Scan<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        recurrent::scan_by_rows(self, rows, args, out)
    }

    /// The scan of a recurrent layer head by head over groups of rows, which leaves its states where
    /// the groups say: `out` is `[rows, channels]`.
    ///
    /// # Errors
    /// [`BackendError::Input`] where groups are unsound; as [`Backend::read_rows`].
    fn scan_heads(
        &self,
        rows: &mut Self::Rows,
        args: ScanHeads<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        recurrent::scan_heads_by_rows(self, rows, args, out)
    }

    /// Copies whole rows of every layer of a part from cells to cells. Source and destination of
    /// one copy do not overlap; copies happen in order.
    ///
    /// # Errors
    /// As [`Backend::read_rows`].
    fn copy_rows(&self, rows: &mut Self::Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        for copy in copies {
            for layer in args::layers_of(self.layout(rows), copy.part) {
                let v = layer.stored_v().map(|v| (RowKind::V, v));
                for (kind, shape) in [(RowKind::K, layer.k)].into_iter().chain(v) {
                    let span = |first| RowSpan {
                        layer: layer.layer,
                        kind,
                        first,
                        len: copy.len,
                    };
                    let mut bytes = vec![0; shape.bytes() * copy.len as usize];
                    self.read_rows(rows, span(copy.from), &mut bytes)?;
                    self.write_rows(rows, span(copy.to), &bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Moves keys to other positions: rotates the K rows of every layer of the named parts by the
    /// layer's own rotation, without its magnitude, and leaves all other rows as they are. Rows
    /// that are named twice move twice. `ropes` has an entry for each layer of these parts.
    ///
    /// # Errors
    /// [`BackendError::MissingRope`], [`BackendError::RopeWidth`] and
    /// [`BackendError::RowOutOfRange`] before any row is changed; then as [`Backend::write_rows`].
    fn shift_rows(
        &self,
        rows: &mut Self::Rows,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> Result<(), BackendError> {
        shift::by_rewriting_rows(self, rows, shifts, ropes)
    }
}
