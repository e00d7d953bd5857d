//! [`BackendError`]: everything that a backend can refuse or fail at.

use kv_block::BlockFormat;
use kv_core::ids::LayerIdx;
use kv_graph::weights::WeightError;
use kv_rows::{KvType, StateType};

/// Why a backend could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The graph names a weight that the model does not have.
    #[error("weight '{name}' is missing; node '{node}' needs it as {shape:?}")]
    MissingWeight {
        /// The weight.
        name: String,
        /// The node that names it.
        node: String,
        /// The shape it should have.
        shape: Vec<usize>,
    },
    /// A weight is there but cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A weight has another shape than the graph says.
    #[error("weight '{name}' has shape {got:?}, but the model's settings need {wanted:?}")]
    WeightShape {
        /// The weight.
        name: String,
        /// The shape it should have.
        wanted: Vec<usize>,
        /// The shape it has.
        got: Vec<usize>,
    },
    /// A weight's format cannot be used in this place.
    #[error("the {backend} backend cannot use weight '{name}' in format {format} for {node}")]
    UnsupportedFormat {
        /// The backend.
        backend: &'static str,
        /// The weight.
        name: String,
        /// Its format.
        format: BlockFormat,
        /// The node that uses it.
        node: String,
    },
    /// An operation that this backend does not have.
    #[error("the {backend} backend cannot compute {op} (node '{node}')")]
    UnsupportedOp {
        /// The backend.
        backend: &'static str,
        /// The operation.
        op: &'static str,
        /// The node.
        node: String,
    },
    /// A custom operation that is not registered, refuses its operands, or failed.
    #[error("custom operation '{op}' (node '{node}'): {reason}")]
    CustomOp {
        /// Its name.
        op: String,
        /// The node.
        node: String,
        /// The reason, in the operation's words.
        reason: String,
    },
    /// A backend that computes its own operations only.
    #[error("the {backend} backend cannot compute custom operations")]
    NoCustomOps {
        /// The backend.
        backend: String,
    },
    /// A backend that holds weights for as long as it computes.
    #[error("the {backend} backend cannot exchange single weights ('{name}')")]
    KeepsWeights {
        /// The backend.
        backend: String,
        /// The weight.
        name: String,
    },
    /// K or V rows of this type cannot be stored.
    #[error("the {backend} backend cannot store K and V rows as {kv_type}")]
    UnsupportedKvType {
        /// The backend.
        backend: &'static str,
        /// The type.
        kv_type: KvType,
    },
    /// Recurrent states of this type cannot be stored.
    #[error(
        "the {backend} backend stores recurrent states as f32 only so far, not as {state_type}"
    )]
    UnsupportedStateType {
        /// The backend.
        backend: &'static str,
        /// The type.
        state_type: StateType,
    },
    /// An operation whose states can only be stored as `f32`.
    #[error(
        "layer {layer}: the states of '{op}' are stored as f32 only, not as {state_type} (node '{node}')"
    )]
    StateTypeOfOp {
        /// The layer.
        layer: LayerIdx,
        /// The operation.
        op: String,
        /// The node.
        node: String,
        /// The type that was chosen.
        state_type: StateType,
    },
    /// A layer of the graph has no rows, or rows of another shape.
    #[error("layer {layer} has no rows of this kind in the memory")]
    NoRows {
        /// The layer.
        layer: LayerIdx,
    },
    /// Keys of a layer are to move, but how they depend on positions was not said.
    #[error("layer {layer}: keys cannot move to other positions without the layer's RoPE")]
    MissingRope {
        /// The layer.
        layer: LayerIdx,
    },
    /// A rotation of more values than a key has.
    #[error("layer {layer}: RoPE rotates {n_rot} values of a head, but keys have {dim}")]
    RopeWidth {
        /// The layer.
        layer: LayerIdx,
        /// Values that are rotated.
        n_rot: usize,
        /// Values of a key head.
        dim: usize,
    },
    /// The graph's layer and the memory's layer differ in heads or width.
    #[error("layer {layer}: the graph works with {wanted}, the memory has {got}")]
    RowShape {
        /// The layer.
        layer: LayerIdx,
        /// The value in the graph.
        wanted: String,
        /// The value in the allocated rows.
        got: String,
    },
    /// A row beyond the last.
    #[error("layer {layer}: rows up to {end} were asked for, there are {n_rows}")]
    RowOutOfRange {
        /// The layer.
        layer: LayerIdx,
        /// One past the last row asked for.
        end: usize,
        /// Rows that exist.
        n_rows: usize,
    },
    /// A buffer of the wrong length.
    #[error("{what}: expected {wanted}, got {got}")]
    WrongLength {
        /// The contents of the buffer.
        what: &'static str,
        /// Length needed.
        wanted: usize,
        /// Length given.
        got: usize,
    },
    /// Inputs that do not have the graph's shape, or values outside their range.
    #[error("input {input}: {reason}")]
    Input {
        /// The input.
        input: &'static str,
        /// The reason, with numbers.
        reason: String,
    },
    /// The device has too little memory.
    #[error("the {backend} backend cannot allocate {wanted} bytes for {what}")]
    OutOfMemory {
        /// The backend.
        backend: &'static str,
        /// Bytes wanted.
        wanted: usize,
        /// The purpose of the allocation.
        what: String,
    },
    /// Rows, weights or programs of another backend were handed in.
    #[error("{what} of another backend")]
    Foreign {
        /// The name of the thing that was handed in.
        what: &'static str,
    },
    /// The backend cannot be used on this machine.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// The backend.
        backend: &'static str,
        /// Why, for people.
        reason: String,
    },
    /// The run's [`CancelFlag`](super::CancelFlag) was set. Some rows may have been written.
    #[error("the run was cancelled")]
    Cancelled,
    /// The device is gone, with all rows and weights that it held. Nothing can be undone then: the
    /// backend and whatever was made with it are to be dropped.
    #[error("the {backend} backend lost its device: {reason}")]
    DeviceLost {
        /// The backend.
        backend: &'static str,
        /// Why, in the device library's words.
        reason: String,
    },
    /// The device failed.
    #[error("the {backend} backend failed: {reason}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// Why, in the device library's words.
        reason: String,
    },
}

/// Checks that a buffer has the length that it must have.
///
/// # Errors
/// [`BackendError::WrongLength`] where it has not.
pub fn expect_len(what: &'static str, wanted: usize, got: usize) -> Result<(), BackendError> {
    if wanted == got {
        Ok(())
    } else {
        Err(BackendError::WrongLength { what, wanted, got })
    }
}
