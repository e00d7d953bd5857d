//! [`LayerError`]: layers that cannot be as they are declared, or whose rows cannot be laid out.

use crate::ids::LayerIdx;
use crate::kv_type::KvType;

/// Layers that cannot be as they are declared, or whose rows cannot be laid out.
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
    /// The number of cells was not given for every part.
    #[error("the layers need {wanted} parts, but cells were given for {got}")]
    WrongPartCount {
        /// Parts that the layers need.
        wanted: usize,
        /// Parts that cells were given for.
        got: usize,
    },
    /// A row is no whole number of blocks.
    #[error(
        "layer {layer}: {kind} rows of {heads} heads of {dim} values cannot be stored as {kv_type}, \
         whose blocks hold {block_len} values", block_len = .kv_type.block_len()
    )]
    PartialBlocks {
        /// The layer.
        layer: LayerIdx,
        /// `"K"` or `"V"`.
        kind: &'static str,
        /// Heads of a row.
        heads: usize,
        /// Values of a head.
        dim: usize,
        /// The type that was chosen.
        kv_type: KvType,
    },
    /// Types were chosen for a layer that the model does not have.
    #[error("types were chosen for layer {layer}, but the model has {n_layers} layers")]
    NoSuchLayer {
        /// The last layer that was named.
        layer: LayerIdx,
        /// Layers there are.
        n_layers: usize,
    },
    /// Types were chosen for rows that are no longer recent, but no layer keeps those apart.
    #[error("types were chosen for old rows, but no layer keeps them apart from recent ones")]
    NoOldRows,
    /// The bytes of all rows overflow.
    #[error("{n_cells} cells of layer {layer} take more bytes than can be counted")]
    TooLarge {
        /// The layer.
        layer: LayerIdx,
        /// Its number of cells.
        n_cells: usize,
    },
}
