//! [`LayoutError`]: rows of layers that cannot be laid out.

use kv_core::LayerIdx;
use kv_core::memory::MemoryConfigError;

use crate::KvType;

/// Rows of layers that cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Layers that cannot be as they are declared.
    #[error(transparent)]
    Layers(#[from] MemoryConfigError),
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
