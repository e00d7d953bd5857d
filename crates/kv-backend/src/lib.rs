//! [`Backend`]: what a device must be able to do, and how it may fail.
//!
//! A backend stores K and V rows, loads weights in their stored format, compiles a graph once and
//! runs it many times. Its trait has only what an engine calls: what an operation computes is
//! tested through graphs of one node, so no backend passes the contract suite (the crate
//! `kv-contract`) with code that runs elsewhere than its graphs. [`null`] is the smallest backend,
//! to start from.
//!
//! A backend trusts its caller in what `kv-core` has validated (cells are free, positions grow) and
//! checks what only it can know (weights, memory of the device).

mod cancel;
pub mod checks;
mod copy;
mod custom;
mod delegate;
mod dynamic;
mod error;
mod expert_meter;
mod expert_share;
#[cfg(feature = "host")]
mod host;
mod inputs;
pub mod null;
mod profile;
mod progress;
mod rows;
mod shift;
mod split;
pub mod state;

#[doc(hidden)] // for `delegate!`
pub use {kv_core, kv_graph, kv_rows};

use std::fmt::Debug;
use std::sync::Arc;

pub use cancel::CancelFlag;
pub use checks::{check_inputs, check_rows, check_run, check_state_types, check_weights};
pub use custom::{
    CustomCall, CustomOp, CustomOps, CustomRows, CustomShape, CustomStates, MAX_CUSTOM_OPERANDS,
};
pub use dynamic::{BoxedBackend, DynBackend};
pub use error::{BackendError, expect_len};
pub use expert_meter::{ExpertCell, ExpertMap, ExpertMeter, ExpertUse};
pub use expert_share::{DetachedExperts, DetachedProgram, ExpertShare, SharedGraph};
pub use inputs::{GraphInputs, GraphOutputs};
pub use profile::{Profile, Profiler, StepKind, StepTime};
pub use progress::{LoadProgress, OnProgress, RunProgress};
pub use rows::{RowKind, RowSpan, RowStorage};
pub use split::{Split, SplitProgram, SplitRows};

use kv_core::memory::{RowCopy, RowShift};
use kv_graph::Graph;
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, RowLayout, StateType};

/// A backend's name and device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// Short name, as on the command line: `cpu`, `candle`.
    pub name: String,
    /// The device, as text: instruction set and threads, or the device's name.
    pub device: String,
    /// Element types that it can store K and V in.
    pub kv_types: Vec<KvType>,
    /// Element types that it can store recurrent states in.
    pub state_types: Vec<StateType>,
}

/// The memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All of it.
    pub total: u64,
    /// Bytes that can be allocated now.
    pub free: u64,
}

/// A device that stores rows and computes graphs.
pub trait Backend: Send + Sync + 'static {
    /// K and V rows and recurrent states of all layers.
    type Rows: RowStorage;
    /// Loaded weights.
    type Weights: Send + Sync + 'static;
    /// A compiled graph, with the scratch memory that its runs need.
    type Program: Send + 'static;

    /// The backend's name and device.
    fn info(&self) -> BackendInfo;

    /// The device's memory, where it is known, so that callers find out whether something fits
    /// before it is allocated.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// The counter of reads of experts of mixtures that are read as they are needed; `None` where
    /// all weights are held.
    fn expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        None
    }

    /// True if an engine should have the candidates of a sampler found by the graph
    /// ([`Graph::with_candidates`]), where they suffice, instead of reading rows of logits back:
    /// for devices with memory of their own.
    fn prefers_candidates(&self) -> bool {
        false
    }

    /// Numbers of tokens, ascending, that are worth a program of their own: an engine compiles for
    /// the smallest that a ubatch fits, or for its largest ubatch, and runs the program with as
    /// many tokens and outputs as there are ([`GraphInputs::shape`]).
    ///
    /// A backend that returns any promises that such a run gives the bits of a program of exactly
    /// that shape, for every graph whose rows can be counted ([`Graph::row_counts`]). The body here
    /// is for backends whose programs run with the shape of their graph alone: each shape is
    /// compiled.
    fn program_capacities(&self) -> &'static [usize] {
        &[]
    }

    /// Takes implementations of custom operations: graphs that are compiled with weights loaded
    /// from now on may name them. One with the name of another replaces it.
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
    /// [`BackendError::OutOfMemory`] where they do not fit; [`BackendError::UnsupportedKvType`] and
    /// [`BackendError::UnsupportedStateType`].
    fn allocate(&self, layout: &RowLayout) -> Result<Self::Rows, BackendError>;

    /// Loads the weights of a model, now or when a graph first names them. A backend that copies or
    /// packs weights reports to `on_progress` as it does so, in this call or in later ones of
    /// [`Backend::compile`].
    ///
    /// # Errors
    /// [`BackendError`] where the device cannot hold them.
    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<Self::Weights, BackendError>;

    /// Lets go of what is held of these weights, because their source has others under the same
    /// names, or none, from now on. Programs that were compiled with them are not run any more;
    /// those that are compiled from now on take what the source has. The body here is for backends
    /// that cannot: an engine does not exchange a model's adapters then.
    ///
    /// # Errors
    /// [`BackendError::KeepsWeights`]; nothing has changed then.
    fn forget_weights(
        &self,
        weights: &Self::Weights,
        names: &[String],
    ) -> Result<(), BackendError> {
        let _ = weights;
        let backend = self.info().name;
        names.first().map_or(Ok(()), |name| {
            let name = name.clone();
            Err(BackendError::KeepsWeights { backend, name })
        })
    }

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
    /// Outputs are complete when it returns. A run of a graph without output rows may return with
    /// work under way: [`Backend::finish`] waits for it. Inputs may be changed or dropped as soon
    /// as it has returned.
    ///
    /// A run polls [`GraphInputs::check_cancelled`] between the steps of the program, so that
    /// cancelling takes effect within a layer, and reports each with
    /// [`GraphInputs::report_step`].
    ///
    /// # Errors
    /// [`BackendError::Input`] where inputs do not have the run's shape, or that is none of the
    /// program's;
    /// [`BackendError::Cancelled`]; device failures. Rows outside the inputs' cells are never
    /// changed.
    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError>;

    /// Waits for all runs that are under way on these rows. An engine calls it before it gives up
    /// the possibility to undo them. The body here is for backends whose runs are complete when
    /// they return.
    ///
    /// # Errors
    /// The first failure since the last call. Every run since then counts as failed.
    fn finish(&self, rows: &mut Self::Rows) -> Result<(), BackendError> {
        let _ = rows;
        Ok(())
    }

    /// Reads the stored bytes of some rows; `out` takes exactly the span's bytes. Runs that are
    /// under way are waited for.
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

    /// Copies whole rows of every layer of a part from cells to cells. Source and destination of
    /// one copy do not overlap; copies happen in order. The body here goes through the host.
    ///
    /// # Errors
    /// As [`Backend::read_rows`].
    fn copy_rows(&self, rows: &mut Self::Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        copy::through_the_host(self, rows, copies)
    }

    /// Moves keys to other positions: rotates the K rows of every layer of the named parts by the
    /// layer's own rotation, without its magnitude, and leaves all other rows as they are. Rows
    /// that are named twice move twice. `ropes` has an entry for each layer of these parts. The
    /// body here goes through the host.
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
        shift::through_the_host(self, rows, shifts, ropes)
    }
}
