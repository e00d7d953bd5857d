//! [`RowsOf`]: whose rows a layer without any attends over. Knows no heads.

use kv_core::LayerIdx;

/// The layer whose rows another one attends over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsOf {
    /// An earlier layer of the same graph.
    Earlier(LayerIdx),
    /// A layer whose rows another graph has stored: that of the model, for a head.
    OtherGraph(LayerIdx),
}

impl RowsOf {
    /// The layer.
    pub const fn layer(self) -> LayerIdx {
        match self {
            Self::Earlier(layer) | Self::OtherGraph(layer) => layer,
        }
    }
}
