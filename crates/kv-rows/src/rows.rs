//! The storage of one layer: rows of K and V for each cell, or states for each sequence.
//!
//! Invariant: a layer's bytes follow from its shapes alone. Does not know where a backend keeps
//! them.

use kv_core::ids::{LayerIdx, PartIdx};
use kv_core::layers::RecurrentMemory;
use serde::{Deserialize, Serialize};

use crate::{RowShape, StateType};

/// The place of the values of an attention layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueRows {
    /// In rows of their own.
    #[default]
    Own,
    /// In the key rows: the first values of each head.
    InKeys,
}

/// Storage of one attention layer: `n_rows` rows of K and as many of V, one for each cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRows {
    /// The layer that owns the rows.
    pub layer: LayerIdx,
    /// The part whose cells number them.
    pub part: PartIdx,
    /// Number of rows: the cells of the part, over all streams.
    pub n_rows: usize,
    /// The key rows.
    pub k: RowShape,
    /// The value rows, as attention sees them.
    pub v: RowShape,
    /// The place of the values.
    #[serde(default, skip_serializing_if = "are_own")]
    pub values: ValueRows,
}

fn are_own(values: &ValueRows) -> bool {
    *values == ValueRows::Own
}

impl LayerRows {
    /// The value rows that are stored; `None` where values are in the key rows.
    pub const fn stored_v(&self) -> Option<RowShape> {
        match self.values {
            ValueRows::Own => Some(self.v),
            ValueRows::InKeys => None,
        }
    }

    /// Bytes of all K and V rows of this layer.
    pub const fn bytes(&self) -> u64 {
        let v = match self.stored_v() {
            Some(v) => v.bytes(),
            None => 0,
        };
        self.n_rows as u64 * (self.k.bytes() + v) as u64
    }
}

/// Storage of one recurrent layer: `n_rows` states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateRows {
    /// The layer that owns the states.
    pub layer: LayerIdx,
    /// Number of states: all that the sequences are at, their snapshots, and room for new ones.
    pub n_rows: usize,
    /// The parts of one state.
    pub row: RecurrentMemory,
    /// The way its values are stored but for the inputs of convolutions, which are always `f32`.
    #[serde(default)]
    pub state_type: StateType,
}

impl StateRows {
    /// Bytes of all states of this layer.
    pub const fn bytes(&self) -> u64 {
        self.n_rows as u64 * (self.conv_bytes() + self.state_bytes()) as u64
    }

    /// Bytes of the inputs of one convolution.
    pub const fn conv_bytes(&self) -> usize {
        self.row.conv_row * size_of::<f32>()
    }

    /// Bytes of one state but for these.
    pub const fn state_bytes(&self) -> usize {
        self.row.state_row * self.state_type.value_bytes()
    }
}
