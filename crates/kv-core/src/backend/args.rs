//! Arguments of the backend's operations, with named fields, and the checks that all share.

use serde::{Deserialize, Serialize};

use super::error::BackendError;
use crate::graph::{AttendSpec, StateGroup};
use crate::ids::{CellIdx, LayerIdx, PartIdx, PosDelta};
use crate::layers::{LayerRows, RowLayout, StateRows};
use crate::rope::Rotation;
use crate::visibility::Visibility;

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
    /// Whose rows.
    pub layer: LayerIdx,
    /// Which of the layer's rows.
    pub kind: RowKind,
    /// The first row.
    pub first: CellIdx,
    /// Number of rows.
    pub len: u32,
}

/// Rows of every layer of a part, to be copied within that part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    /// Which part.
    pub part: PartIdx,
    /// First row to read.
    pub from: CellIdx,
    /// First row to write.
    pub to: CellIdx,
    /// Number of rows.
    pub len: u32,
}

/// Keys of every layer of a part that move to other positions of their sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShift {
    /// Which part.
    pub part: PartIdx,
    /// The first row.
    pub first: CellIdx,
    /// Number of rows.
    pub len: u32,
    /// By how much they move: a key at position `p` becomes one at `p + delta`.
    pub delta: PosDelta,
}

/// How the keys of one layer depend on their positions.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRope {
    /// Whose keys.
    pub layer: LayerIdx,
    /// Their rotation; `None` where keys do not depend on positions.
    pub rotation: Option<Rotation>,
}

/// K and V of some tokens, to be stored in one layer.
#[derive(Clone, Copy, Debug)]
pub struct StoreRows<'a> {
    /// Whose rows.
    pub layer: LayerIdx,
    /// `[tokens, kv_heads, k_dim]`.
    pub k: &'a [f32],
    /// `[tokens, kv_heads, v_dim]`; empty where values are in the keys.
    pub v: &'a [f32],
    /// The cell of each token.
    pub cells: &'a [CellIdx],
}

/// Query rows that attend over one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// Whose rows.
    pub layer: LayerIdx,
    /// Heads, widths and scale.
    pub spec: AttendSpec,
    /// `[rows, heads, k_dim]`.
    pub q: &'a [f32],
    /// What each row sees.
    pub visibility: &'a Visibility,
    /// Position of each row, `[rows]`; only needed where `spec` has ALiBi, else it may be empty.
    pub positions: &'a [u32],
    /// A score without a value for each head, `[heads]`, where the layer has sinks.
    pub sinks: Option<&'a [f32]>,
}

impl Attend<'_> {
    /// Whether there are as many sinks as heads, and as many positions as rows where needed.
    ///
    /// # Errors
    /// [`BackendError::WrongLength`].
    pub fn check_extras(&self) -> Result<(), BackendError> {
        if let Some(sinks) = self.sinks {
            expect_len("attention sinks", self.spec.n_heads, sinks.len())?;
        }
        if self.spec.alibi.is_some() {
            let n_rows = self.visibility.n_rows as usize;
            expect_len("positions of queries", n_rows, self.positions.len())?;
        }
        Ok(())
    }
}

/// Rows of a ubatch that a recurrent layer's convolution takes.
#[derive(Clone, Copy, Debug)]
pub struct Conv<'a> {
    /// Whose states.
    pub layer: LayerIdx,
    /// `[rows, channels]`.
    pub x: &'a [f32],
    /// `[channels, width]`, oldest input first.
    pub weight: &'a [f32],
    /// `[channels]`.
    pub bias: Option<&'a [f32]>,
    /// Which rows continue which state.
    pub groups: &'a [StateGroup],
}

/// Rows of a ubatch that a recurrent layer's selective scan takes.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    /// Whose states.
    pub layer: LayerIdx,
    /// `[rows, channels]`.
    pub x: &'a [f32],
    /// Step sizes before the softplus, `[rows, channels]`.
    pub dt: &'a [f32],
    /// What of an input goes into the state, `[rows, d_state]`.
    pub b: &'a [f32],
    /// What of the state comes out, `[rows, d_state]`.
    pub c: &'a [f32],
    /// Decay, negative, `[channels, d_state]`.
    pub a: &'a [f32],
    /// What of the input is added to the output, `[channels]`.
    pub d: &'a [f32],
    /// Which rows continue which state.
    pub groups: &'a [StateGroup],
}

/// Rows of a ubatch that a recurrent layer's scan takes head by head.
#[derive(Clone, Copy, Debug)]
pub struct ScanHeads<'a> {
    /// Whose states.
    pub layer: LayerIdx,
    /// Groups of heads that share B and C.
    pub n_groups: usize,
    /// `[rows, channels]`.
    pub x: &'a [f32],
    /// Step sizes before bias and softplus, `[rows, heads]`.
    pub dt: &'a [f32],
    /// What of an input goes into the state, `[rows, groups, d_state]`.
    pub b: &'a [f32],
    /// What of the state comes out, `[rows, groups, d_state]`.
    pub c: &'a [f32],
    /// Decay, negative, `[heads]`.
    pub a: &'a [f32],
    /// What of the input is added to the output, `[heads]`.
    pub d: &'a [f32],
    /// Added to step sizes, `[heads]`.
    pub dt_bias: &'a [f32],
    /// Which rows continue which state.
    pub groups: &'a [StateGroup],
}

/// The rows of `layer`, or the error that it has none.
pub(super) fn layer_rows(layout: &RowLayout, layer: LayerIdx) -> Result<LayerRows, BackendError> {
    layout
        .layer(layer)
        .copied()
        .ok_or(BackendError::NoRows { layer })
}

/// The rows over which `layer` attends, or the error that there are none.
pub(super) fn attended_rows(
    layout: &RowLayout,
    layer: LayerIdx,
) -> Result<LayerRows, BackendError> {
    let attended = layout.attended(layer).map(|(_, rows)| *rows);
    attended.ok_or(BackendError::NoRows { layer })
}

/// The states of `layer`, or the error that it has none.
pub(super) fn state_rows(layout: &RowLayout, layer: LayerIdx) -> Result<StateRows, BackendError> {
    layout
        .state(layer)
        .copied()
        .ok_or(BackendError::NoRows { layer })
}

pub(super) fn layers_of(layout: &RowLayout, part: PartIdx) -> Vec<LayerRows> {
    layout
        .layers()
        .iter()
        .filter(|l| l.part == part)
        .copied()
        .collect()
}

/// Whether a buffer has the length that it must have.
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

impl RowSpan {
    /// The bytes that this span takes within its layer's K or V storage.
    ///
    /// # Errors
    /// [`BackendError::NoRows`] or [`BackendError::RowOutOfRange`].
    pub fn byte_range(&self, layout: &RowLayout) -> Result<std::ops::Range<usize>, BackendError> {
        let (row, n_rows) = match self.kind {
            RowKind::K => layer_rows(layout, self.layer).map(|l| (l.k.bytes(), l.n_rows))?,
            RowKind::V => {
                let rows = layer_rows(layout, self.layer)?;
                let layer = self.layer;
                let v = rows.stored_v().ok_or(BackendError::NoRows { layer })?;
                (v.bytes(), rows.n_rows)
            }
            RowKind::Conv | RowKind::State => {
                let states = state_rows(layout, self.layer)?;
                let len = match self.kind {
                    RowKind::Conv => states.row.conv_row,
                    _ => states.row.state_row,
                };
                (len * size_of::<f32>(), states.n_rows)
            }
        };
        let first = self.first.as_usize();
        let end = first + self.len as usize;
        if end > n_rows {
            let layer = self.layer;
            return Err(BackendError::RowOutOfRange { layer, end, n_rows });
        }
        Ok(first * row..end * row)
    }
}
