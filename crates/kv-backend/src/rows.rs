//! [`RowStorage`]: the rows that a backend stores, and the names of what is in them.
//!
//! Invariant: the bytes of a row are those of [`RowShape`], in whatever order a device keeps them.
//! Knows nothing of devices.

use std::any::Any;
use std::ops::Range;

use kv_core::ids::{CellIdx, LayerIdx, PartIdx};
use kv_rows::{LayerRows, RowLayout, RowShape};
use serde::{Deserialize, Serialize};

use crate::error::BackendError;

/// Stored rows of all layers, wherever they are.
pub trait RowStorage: Any + Send {
    /// The layout that they were allocated with.
    fn layout(&self) -> &RowLayout;

    /// Bytes that one kind of rows of a layer takes: what was allocated for it, measured and not
    /// computed from the layout. It must be what [`MemoryPlan`](kv_rows::MemoryPlan)
    /// said.
    ///
    /// # Errors
    /// [`BackendError::NoRows`] where the layer has no rows of this kind.
    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError>;
}

/// Keys, values, or what recurrent layers remember.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowKind {
    /// Key rows.
    K,
    /// Value rows.
    V,
    /// Last inputs of a recurrent layer's convolution.
    Conv,
    /// States of a recurrent layer.
    State,
}

/// `len` consecutive rows of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// The layer that owns the rows.
    pub layer: LayerIdx,
    /// The kind of the layer's rows.
    pub kind: RowKind,
    /// The first row.
    pub first: CellIdx,
    /// Number of rows.
    pub len: u32,
}

impl RowSpan {
    /// The bytes of this span within all rows of its kind of its layer.
    ///
    /// # Errors
    /// [`BackendError::NoRows`] or [`BackendError::RowOutOfRange`].
    pub fn byte_range(&self, layout: &RowLayout) -> Result<Range<usize>, BackendError> {
        let layer = self.layer;
        let none = || BackendError::NoRows { layer };
        let (row_bytes, n_rows) = match self.kind {
            RowKind::K | RowKind::V => {
                let rows = layout.layer(layer).ok_or_else(none)?;
                let shape = match self.kind {
                    RowKind::K => rows.k,
                    _ => rows.stored_v().ok_or_else(none)?,
                };
                (shape.bytes(), rows.n_rows)
            }
            RowKind::Conv | RowKind::State => {
                let states = layout.state(layer).ok_or_else(none)?;
                let row_bytes = match self.kind {
                    RowKind::Conv => states.conv_bytes(),
                    _ => states.state_bytes(),
                };
                (row_bytes, states.n_rows)
            }
        };
        let first = self.first.as_usize();
        let end = first + self.len as usize;
        if end > n_rows {
            return Err(BackendError::RowOutOfRange { layer, end, n_rows });
        }
        Ok(first * row_bytes..end * row_bytes)
    }
}

/// The layers that have rows in a part.
pub(super) fn layers_of(layout: &RowLayout, part: PartIdx) -> Vec<LayerRows> {
    let layers = layout.layers().iter();
    layers.filter(|l| l.part == part).copied().collect()
}

/// The rows that an attention layer stores: K, and V where values are not in the keys. K, and V
/// where values are not in the keys.
pub(super) fn stored_kinds(layer: &LayerRows) -> impl Iterator<Item = (RowKind, RowShape)> {
    let v = layer.stored_v().map(|v| (RowKind::V, v));
    [(RowKind::K, layer.k)].into_iter().chain(v)
}
