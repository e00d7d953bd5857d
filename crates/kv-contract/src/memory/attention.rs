//! Attention of the simulated backend, and attention from the definition.
//!
//! The backend only stores bytes: copying and shifting rows are the bodies of the trait. They are
//! compared with a store that keeps K and V of every token of every sequence, in `f64`, and never
//! moves or forgets anything. Keys are rotated to the position that a token has in the end.

use kv_backend::null::{HostRows, NullBackend};
use kv_backend::{Backend, BackendError, RowKind, RowSpan, RowStorage};
use kv_core::{CellIdx, LayerIdx, PartIdx, Pos, Visibility};
use kv_graph::rope::{LayerRope, RopeScaling, RopeSpec, RopeStyle, Rotation};
use kv_rows::RowLayout;

use super::PartView;

/// The bound on the error of outputs.
const TOLERANCE: f64 = 1e-5;

const K_DIM: usize = 4;
const V_DIM: usize = 3;
/// Query heads, which share one K/V head.
const N_HEADS: usize = 2;
const SCALE: f32 = 0.5;

fn rope() -> RopeSpec {
    RopeSpec {
        style: RopeStyle::Norm,
        n_rot: K_DIM,
        base: 100.0,
        scaling: RopeScaling::None,
        factors: None,
    }
}

/// `N` values of a token, between -1 and 1, the same at every call.
fn values<const N: usize>(id: u64, kind: u64) -> [f32; N] {
    let mut state = (id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ kind;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

fn key_before_rope(id: u64) -> [f32; K_DIM] {
    values(id, 0x11)
}

fn value(id: u64) -> [f32; V_DIM] {
    values(id, 0x22)
}

fn query(id: u64) -> [f32; N_HEADS * K_DIM] {
    values(id, 0x33)
}

/// The layer with the rows of a part.
fn layer_of(part: PartIdx) -> LayerIdx {
    LayerIdx(part.0)
}

/// Real rows for every part of a memory.
#[derive(Clone)]
pub(crate) struct RealRows {
    rows: HostRows,
    ropes: Vec<LayerRope>,
}

impl RealRows {
    pub(crate) fn new(parts: &[PartView]) -> Self {
        let layer = |part: &PartView| {
            let number = part.config().part;
            let row = |dim| serde_json::json!({ "heads": 1, "dim": dim, "kv_type": "f32" });
            serde_json::json!({
                "layer": layer_of(number), "part": number, "n_rows": part.n_cells(),
                "k": row(K_DIM), "v": row(V_DIM),
            })
        };
        let layers: Vec<_> = parts.iter().map(layer).collect();
        // Parts of the tests are numbered as no map of layers would.
        let layout = serde_json::from_value(serde_json::json!({ "layers": layers })).unwrap();
        let rope = |part: &PartView| LayerRope {
            layer: layer_of(part.config().part),
            rotation: Some(Rotation::new(rope(), None)),
        };
        let mut real = Self {
            rows: NullBackend.allocate(&layout).unwrap(),
            ropes: parts.iter().map(rope).collect(),
        };
        // What was never stored may be anything.
        for part in parts {
            let cells: Vec<CellIdx> = (0..part.n_cells()).map(CellIdx).collect();
            real.destroy(part.config().part, &cells);
        }
        real
    }

    /// Stores tokens, given by id and position, in their cells.
    pub(crate) fn store(&mut self, part: PartIdx, cells: &[CellIdx], tokens: &[(u64, Pos)]) {
        let (rope, frequencies) = (rope(), rope().frequencies(None));
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for &(id, pos) in tokens {
            let (mut cos, mut sin) = ([0.0; K_DIM / 2], [0.0; K_DIM / 2]);
            rope.angles(&frequencies, pos.0, &mut cos, &mut sin);
            let mut key = key_before_rope(id);
            rope.rotate_head(&mut key, &cos, &sin);
            k.extend(key);
            v.extend(value(id));
        }
        self.store_values(part, cells, &k, &v);
    }

    /// Overwrites these cells as a computation that failed may.
    pub(crate) fn destroy(&mut self, part: PartIdx, cells: &[CellIdx]) {
        let (k, v) = ([f32::NAN; K_DIM], [f32::NAN; V_DIM]);
        self.store_values(part, cells, &k.repeat(cells.len()), &v.repeat(cells.len()));
    }

    /// Stores `k [cells, K_DIM]` and `v [cells, V_DIM]`.
    fn store_values(&mut self, part: PartIdx, cells: &[CellIdx], k: &[f32], v: &[f32]) {
        for (kind, values, dim) in [(RowKind::K, k, K_DIM), (RowKind::V, v, V_DIM)] {
            for (&cell, row) in cells.iter().zip(values.chunks_exact(dim)) {
                let bytes: Vec<u8> = row.iter().flat_map(|v| v.to_le_bytes()).collect();
                self.write(row_of(part, kind, cell), &bytes).unwrap();
            }
        }
    }

    /// The values of one row.
    fn values<const N: usize>(&self, part: PartIdx, kind: RowKind, cell: CellIdx) -> [f64; N] {
        let bytes = self.rows.span(row_of(part, kind, cell)).unwrap();
        let values = bytes.as_chunks().0;
        std::array::from_fn(|i| f64::from(f32::from_le_bytes(values[i])))
    }

    pub(crate) fn layout(&self) -> &RowLayout {
        self.rows.layout()
    }

    pub(crate) fn read(&self, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        NullBackend.read_rows(&self.rows, span, out)
    }

    pub(crate) fn write(&mut self, span: RowSpan, bytes: &[u8]) -> Result<(), BackendError> {
        NullBackend.write_rows(&mut self.rows, span, bytes)
    }

    pub(crate) fn copy(&mut self, copies: &[kv_core::memory::RowCopy]) {
        NullBackend.copy_rows(&mut self.rows, copies).unwrap();
    }

    pub(crate) fn shift(&mut self, shifts: &[kv_core::memory::RowShift]) {
        NullBackend
            .shift_rows(&mut self.rows, shifts, &self.ropes)
            .unwrap();
    }

    /// Attends with the tokens `ids` over what `visibility` shows them, and compares with attention
    /// over `sees`, which gives for each of them the tokens that it must see, by position and id.
    pub(crate) fn check_attention(
        &self,
        part: PartIdx,
        ids: &[u64],
        visibility: &Visibility,
        sees: impl Fn(usize) -> Vec<(Pos, u64)>,
    ) {
        for (row, &id) in (0u32..).zip(ids) {
            let seen: Vec<([f64; K_DIM], [f64; V_DIM])> = visibility
                .row(row)
                .map(|(cell, _)| {
                    let key = self.values(part, RowKind::K, cell);
                    (key, self.values(part, RowKind::V, cell))
                })
                .collect();
            let sees = sees(row as usize);
            for q in query(id).chunks(K_DIM) {
                let (got, wanted) = (attend(q, &seen), by_definition(q, &sees));
                for (got, wanted) in got.iter().zip(wanted) {
                    let off = (got - wanted).abs();
                    assert!(
                        off <= TOLERANCE,
                        "part {part}, row {row}: {got}, not {wanted}"
                    );
                }
            }
        }
    }
}

fn row_of(part: PartIdx, kind: RowKind, first: CellIdx) -> RowSpan {
    RowSpan {
        layer: layer_of(part),
        kind,
        first,
        len: 1,
    }
}

/// `softmax(scale q K^T) V` over stored keys and values.
fn attend(q: &[f32], seen: &[([f64; K_DIM], [f64; V_DIM])]) -> [f64; V_DIM] {
    let weight = |key: &[f64; K_DIM]| {
        let score: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum();
        (score * f64::from(SCALE)).exp()
    };
    let sum: f64 = seen.iter().map(|(key, _)| weight(key)).sum();
    let mut out = [0.0; V_DIM];
    for (key, value) in seen {
        for (o, v) in out.iter_mut().zip(value) {
            *o += weight(key) / sum * v;
        }
    }
    out
}

/// `softmax(scale q K^T) V` over tokens by position and id.
fn by_definition(q: &[f32], tokens: &[(Pos, u64)]) -> [f64; V_DIM] {
    let frequencies = rope().frequencies(None);
    let score = |&(pos, id): &(Pos, u64)| {
        let key = key_before_rope(id).map(f64::from);
        let mut score = 0.0;
        for ((pair, key), frequency) in q.chunks(2).zip(key.chunks(2)).zip(&frequencies) {
            let (sin, cos) = (f64::from(pos.0) * frequency).sin_cos();
            score += f64::from(pair[0]) * (key[0] * cos - key[1] * sin);
            score += f64::from(pair[1]) * (key[0] * sin + key[1] * cos);
        }
        (score * f64::from(SCALE)).exp()
    };
    let weights: Vec<f64> = tokens.iter().map(score).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = [0.0; V_DIM];
    for (weight, &(_, id)) in weights.iter().zip(tokens) {
        for (o, v) in out.iter_mut().zip(value(id)) {
            *o += weight / sum * f64::from(v);
        }
    }
    out
}
