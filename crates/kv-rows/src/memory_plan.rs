//! [`MemoryPlan`]: what a memory's rows take in bytes, line by line, before any of it is allocated.
//!
//! Invariant: made from a [`RowLayout`] alone, which is also what a backend allocates, so the two
//! cannot disagree (`RowStorage::allocated_bytes` of `kv-backend` measures
//! the storage, and tests compare). Knows nothing of weights, of scratch memory or of the
//! machine.
//!
//! ```
//! use kv_core::Window;
//! use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory};
//! use kv_rows::{KvType, MemoryPlan, PlannedKind, RowLayout};
//!
//! let layer = AttentionMemory { kv_heads: 4, k_dim: 16, v_dim: 16, window: Window::Full };
//! let map = LayerMap::new(vec![LayerMemory::Attention(layer); 6]);
//! let plan = MemoryPlan::new(&RowLayout::new(&map, &[1000], KvType::F16)?);
//! assert_eq!(plan.bytes(), 6 * 1000 * 2 * (4 * 16 * 2));
//! assert_eq!(plan.bytes_of_kind(PlannedKind::V), plan.bytes() / 2);
//! # Ok::<(), kv_rows::LayoutError>(())
//! ```

use std::fmt;

use kv_core::{
    ids::{LayerIdx, PartIdx},
    memory::MAX_N_CTX,
};
use serde::Serialize;

use crate::{KvType, LayerRows, RowLayout, StateRows};

/// The largest context length that fits, where all shorter ones do; `None` where none does.
pub fn largest_n_ctx(fits: impl Fn(u32) -> bool) -> Option<u32> {
    Some(largest_that_fits(MAX_N_CTX, fits)).filter(|&n_ctx| n_ctx > 0)
}

/// The largest number up to `most` that fits, where all smaller ones do; 0 is taken to fit.
pub fn largest_that_fits(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut fitting, mut too_large) = (0, most.saturating_add(1));
    while too_large - fitting > 1 {
        let middle = fitting + (too_large - fitting) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            too_large = middle;
        }
    }
    fitting
}

/// The contents of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannedKind {
    /// Keys.
    K,
    /// Values.
    V,
    /// Last inputs of convolutions.
    Conv,
    /// Recurrent states.
    State,
    /// Earlier recurrent states, with the inputs of their convolutions, that can be gone back to.
    Snapshots,
}

impl PlannedKind {
    /// All kinds, in the order of a plan's lines.
    pub const ALL: [Self; 5] = [Self::K, Self::V, Self::Conv, Self::State, Self::Snapshots];
}

/// Rows of one kind of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedRows {
    /// The layer that owns the rows.
    pub layer: LayerIdx,
    /// The part whose cells number them; `None` for what is recurrent.
    pub part: Option<PartIdx>,
    /// The contents of the rows.
    pub kind: PlannedKind,
    /// The way values are stored; those of snapshots but for the inputs of their convolutions,
    /// which are `f32`.
    pub kv_type: KvType,
    /// Number of rows.
    pub n_rows: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

impl PlannedRows {
    /// Bytes of all these rows.
    pub const fn bytes(&self) -> u64 {
        (self.n_rows as u64).saturating_mul(self.row_bytes as u64)
    }
}

/// All rows of a memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    rows: Vec<PlannedRows>,
}

impl MemoryPlan {
    /// The allocations of a backend for `layout`.
    pub fn new(layout: &RowLayout) -> Self {
        Self::with_snapshots(layout, 0)
    }

    /// The same, where the last `n_snapshot_rows` states of each recurrent layer are there only to
    /// be gone back to.
    pub fn with_snapshots(layout: &RowLayout, n_snapshot_rows: usize) -> Self {
        let attention = layout.layers().iter().flat_map(attention_rows);
        let states = layout.states().iter();
        let states = states.flat_map(|states| state_rows(states, n_snapshot_rows));
        let mut rows: Vec<PlannedRows> = attention.chain(states).collect();
        rows.sort_by_key(|rows| (rows.layer, rows.kind));
        Self { rows }
    }

    /// The lines of the plan, by layer and kind. None is empty.
    pub fn rows(&self) -> &[PlannedRows] {
        &self.rows
    }

    /// Bytes of everything.
    pub fn bytes(&self) -> u64 {
        self.sum(|_| true)
    }

    /// Bytes of one kind of rows.
    pub fn bytes_of_kind(&self, kind: PlannedKind) -> u64 {
        self.sum(|rows| rows.kind == kind)
    }

    /// Bytes of one layer.
    pub fn bytes_of_layer(&self, layer: LayerIdx) -> u64 {
        self.sum(|rows| rows.layer == layer)
    }

    /// Bytes of one part; `None` names all that is recurrent.
    pub fn bytes_of_part(&self, part: Option<PartIdx>) -> u64 {
        self.sum(|rows| rows.part == part)
    }

    /// The layers that remember something of their own, ascending.
    pub fn layers(&self) -> impl Iterator<Item = LayerIdx> + '_ {
        let one_layer = self.rows.chunk_by(|a, b| a.layer == b.layer);
        one_layer.filter_map(|rows| rows.first()).map(|r| r.layer)
    }

    fn sum(&self, which: impl Fn(&PlannedRows) -> bool) -> u64 {
        let bytes = self.rows.iter().filter(|rows| which(rows));
        // Beyond all memory anyway where it saturates.
        bytes.fold(0, |sum: u64, rows| sum.saturating_add(rows.bytes()))
    }
}

fn attention_rows(layer: &LayerRows) -> impl Iterator<Item = PlannedRows> {
    let stored_v = layer.stored_v().map(|v| (PlannedKind::V, v));
    let LayerRows {
        layer,
        part,
        n_rows,
        k,
        ..
    } = *layer;
    let kinds = [(PlannedKind::K, k)].into_iter().chain(stored_v);
    let rows = kinds.map(move |(kind, shape)| PlannedRows {
        layer,
        part: Some(part),
        kind,
        kv_type: shape.kv_type,
        n_rows,
        row_bytes: shape.bytes(),
    });
    rows.filter(|rows| rows.bytes() > 0)
}

fn state_rows(states: &StateRows, n_snapshot_rows: usize) -> impl Iterator<Item = PlannedRows> {
    let StateRows { layer, n_rows, .. } = *states;
    let n_snapshots = n_snapshot_rows.min(n_rows);
    let n_live = n_rows - n_snapshots;
    let (conv, state) = (states.conv_bytes(), states.state_bytes());
    let state_type = states.state_type.kv_type();
    let kinds = [
        (PlannedKind::Conv, n_live, conv, KvType::F32),
        (PlannedKind::State, n_live, state, state_type),
        (
            PlannedKind::Snapshots,
            n_snapshots,
            conv.saturating_add(state),
            state_type,
        ),
    ];
    let rows = kinds.map(|(kind, n_rows, row_bytes, kv_type)| PlannedRows {
        layer,
        part: None,
        kind,
        kv_type,
        n_rows,
        row_bytes,
    });
    rows.into_iter().filter(|rows| rows.bytes() > 0)
}

impl fmt::Display for PlannedKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::K => "K",
            Self::V => "V",
            Self::Conv => "conv",
            Self::State => "state",
            Self::Snapshots => "snapshots",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateType;
    use kv_core::{
        layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory},
        window::Window,
    };

    #[test]
    fn every_row_is_in_one_line_of_the_plan() {
        let attention = |window| {
            LayerMemory::Attention(AttentionMemory {
                kv_heads: 2,
                k_dim: 8,
                v_dim: 4,
                window,
            })
        };
        let row = RecurrentMemory {
            conv_row: 6,
            state_row: 10,
        };
        let map = LayerMap::new(vec![
            attention(Window::Full),
            LayerMemory::Recurrent(row),
            LayerMemory::Nothing,
            attention(Window::Sliding(16)),
        ]);
        let layout = RowLayout::new(&map, &[100, 20], KvType::F16).unwrap();
        let layout = layout.with_states(&map, 8).unwrap();
        let plan = MemoryPlan::with_snapshots(&layout, 6);
        assert_eq!(plan.bytes(), layout.bytes());
        let layers: Vec<LayerIdx> = plan.layers().collect();
        assert_eq!(layers, [LayerIdx(0), LayerIdx(1), LayerIdx(3)]);
        assert_eq!(plan.bytes_of_kind(PlannedKind::K), (100 + 20) * 2 * 8 * 2);
        assert_eq!(plan.bytes_of_kind(PlannedKind::V), (100 + 20) * 2 * 4 * 2);
        assert_eq!(plan.bytes_of_kind(PlannedKind::Conv), 2 * 6 * 4);
        assert_eq!(plan.bytes_of_kind(PlannedKind::State), 2 * 10 * 4);
        assert_eq!(plan.bytes_of_kind(PlannedKind::Snapshots), 6 * 16 * 4);
        assert_eq!(plan.bytes_of_part(Some(PartIdx(1))), 20 * 2 * 12 * 2);
        assert_eq!(plan.bytes_of_part(None), 8 * 16 * 4);
        assert_eq!(plan.bytes_of_layer(LayerIdx(2)), 0);
        let layout = layout.with_state_type(StateType::F16);
        let plan = MemoryPlan::with_snapshots(&layout, 6);
        assert_eq!(plan.bytes(), layout.bytes());
        assert_eq!(plan.bytes_of_kind(PlannedKind::Conv), 2 * 6 * 4);
        assert_eq!(plan.bytes_of_kind(PlannedKind::State), 2 * 10 * 2);
        assert_eq!(
            plan.bytes_of_kind(PlannedKind::Snapshots),
            6 * (6 * 4 + 10 * 2)
        );
    }
}
