//! Rows of a state: how they are described, and how they become those of a memory.
//!
//! Bytes pass as they are where rows are stored in the same way; otherwise each row is decoded and
//! encoded by its [`RowShape`], the one definition of what a row's bytes mean.

use kv_core::ids::{LayerIdx, PartIdx};
use kv_rows::{HeadRotation, KvType, MAX_GROUP, RowLayout, RowShape};
use serde::{Deserialize, Serialize};

use crate::RowKind;

/// The largest row that is believed, in values.
const MAX_ROW: usize = 1 << 28;

/// The rows of one section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowFormat {
    /// The layer that owns the rows.
    pub layer: LayerIdx,
    /// The kind of the layer's rows.
    pub kind: RowKind,
    /// Number of rows.
    pub n_rows: u32,
    /// The way one row is stored.
    pub stored: RowEncoding,
}

/// The way a row is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowEncoding {
    /// Keys or values of a part's tokens.
    Heads {
        /// The part.
        part: PartIdx,
        /// Heads, widths and type.
        shape: RowShape,
    },
    /// So many `f32` values of a recurrent state.
    Floats(usize),
    /// So many values of a recurrent state in another type.
    Values {
        /// Their number.
        len: usize,
        /// Their type.
        kv_type: KvType,
    },
}

impl RowEncoding {
    /// Values of a recurrent state.
    pub(super) fn of_state(len: usize, kv_type: KvType) -> Self {
        match kv_type {
            KvType::F32 => Self::Floats(len),
            _ => Self::Values { len, kv_type },
        }
    }

    /// The meaning of a row's bytes.
    pub fn shape(&self) -> RowShape {
        let values = |dim, kv_type| RowShape {
            heads: 1,
            dim,
            kv_type,
            rotation: HeadRotation::None,
        };
        match *self {
            Self::Heads { shape, .. } => shape,
            Self::Floats(len) => values(len, KvType::F32),
            Self::Values { len, kv_type } => values(len, kv_type),
        }
    }
}

impl RowFormat {
    /// Bytes of one row, or `None` where no row is like that.
    pub fn row_bytes(&self) -> Option<usize> {
        let shape = self.stored.shape();
        let values = shape.heads.checked_mul(shape.dim)?;
        (values <= MAX_ROW && is_sound(&shape)).then(|| shape.bytes())
    }

    /// Bytes of all rows, or `None` beyond all counting.
    pub fn n_bytes(&self) -> Option<u64> {
        (self.row_bytes()? as u64).checked_mul(u64::from(self.n_rows))
    }

    /// In words, for errors and people.
    pub fn describe(&self) -> String {
        match self.stored {
            RowEncoding::Heads { shape, .. } => describe_shape(&shape),
            RowEncoding::Floats(n) => format!("{n} floats"),
            RowEncoding::Values { len, kv_type } => format!("{len} values in {kv_type}"),
        }
    }
}

/// True if rows are whole blocks, and heads whole groups of a rotation that exists.
fn is_sound(shape: &RowShape) -> bool {
    let block = shape.kv_type.block_len();
    let group = shape.rotation.group();
    let groups = group.is_power_of_two()
        && group <= MAX_GROUP
        && shape.dim.is_multiple_of(group)
        && group.is_multiple_of(block);
    shape.len().is_multiple_of(block) && (shape.rotation.is_none() || groups)
}

fn describe_shape(shape: &RowShape) -> String {
    format!(
        "{} heads of {} values in {}",
        shape.heads, shape.dim, shape.kv_type
    )
}

/// The rows that a memory of this layout has: what each row is, and which part numbers it. Rows
/// without values are left out.
pub(super) fn formats(
    layout: &RowLayout,
    n_rows: impl Fn(Option<PartIdx>) -> u32,
) -> Vec<RowFormat> {
    let mut formats = Vec::new();
    for rows in layout.layers() {
        // Values that are the beginnings of keys have no rows.
        let v = rows.stored_v().map(|shape| (RowKind::V, shape));
        for (kind, shape) in [(RowKind::K, rows.k)].into_iter().chain(v) {
            formats.push(RowFormat {
                layer: rows.layer,
                kind,
                n_rows: n_rows(Some(rows.part)),
                stored: RowEncoding::Heads {
                    part: rows.part,
                    shape,
                },
            });
        }
    }
    for states in layout.states() {
        let state_type = states.state_type.kv_type();
        for (kind, stored) in [
            (RowKind::Conv, RowEncoding::Floats(states.row.conv_row)),
            (
                RowKind::State,
                RowEncoding::of_state(states.row.state_row, state_type),
            ),
        ] {
            formats.push(RowFormat {
                layer: states.layer,
                kind,
                n_rows: n_rows(None),
                stored,
            });
        }
    }
    formats.retain(|format| format.row_bytes() != Some(0));
    formats
}

/// Turns rows of one shape into rows of another with as many heads and values.
pub(super) struct Converter {
    from: RowShape,
    to: RowShape,
    values: Vec<f32>,
    row: Vec<u8>,
}

impl Converter {
    pub(super) fn new(from: RowShape, to: RowShape) -> Self {
        Self {
            from,
            to,
            values: vec![0.0; from.len()],
            row: vec![0; to.bytes()],
        }
    }

    /// Appends the rows of `bytes`, converted.
    pub(super) fn convert(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        for row in bytes.chunks_exact(self.from.bytes().max(1)) {
            self.from.decode(row, &mut self.values);
            self.to.encode(&self.values, &mut self.row);
            out.extend_from_slice(&self.row);
        }
    }
}
