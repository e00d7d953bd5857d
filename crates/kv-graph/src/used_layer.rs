//! Which layer's memory an operation uses.

use kv_core::ids::LayerIdx;

use crate::Op;

impl Op {
    /// The layer whose K and V rows it stores or reads.
    pub(super) fn layer_of_rows(&self) -> Option<LayerIdx> {
        match *self {
            Self::StoreKv { layer }
            | Self::StoreK { layer }
            | Self::Attend { layer, .. }
            | Self::AttendPartial { layer, .. }
            | Self::Index { layer, .. }
            | Self::AttendSparse { layer, .. }
            | Self::Kq { layer, .. }
            | Self::Kqv { layer, .. } => Some(layer),
            _ => None,
        }
    }

    /// The layer whose rows or states it uses.
    pub(super) fn used_layer(&self) -> Option<LayerIdx> {
        match *self {
            Self::Conv { layer, .. }
            | Self::Scan { layer, .. }
            | Self::ScanHeads { layer, .. }
            | Self::Delta { layer, .. } => Some(layer),
            Self::Custom { ref custom } => custom.layer(),
            _ => self.layer_of_rows(),
        }
    }
}
