//! [`LayerError`]: layers that cannot be as they are declared.

use crate::ids::LayerIdx;

/// Layers that cannot be as they are declared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// Rows of a layer that has not been computed yet.
    #[error("layer {layer} shares the rows of layer {with}, which does not come before it")]
    SharedWithLater {
        /// The layer.
        layer: LayerIdx,
        /// The layer whose rows it would share.
        with: LayerIdx,
    },
    /// A layer without rows of its own.
    #[error("layer {layer} shares the rows of layer {with}, which has none of its own")]
    NothingToShare {
        /// The layer.
        layer: LayerIdx,
        /// The layer whose rows it would share.
        with: LayerIdx,
    },
    /// Keys that are too narrow to hold the values.
    #[error("layer {layer}: {v_dim} values of a head cannot be among the {k_dim} of its key")]
    LatentTooNarrow {
        /// The layer.
        layer: LayerIdx,
        /// Values of a key head.
        k_dim: usize,
        /// Values of a value head.
        v_dim: usize,
    },
}
