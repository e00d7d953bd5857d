//! Attention of the simulated backend, and attention from the definition.
//!
//! The backend has only what a backend must have: it keeps bytes. Storing, attending, copying and
//! shifting rows are those of the trait, so what every backend is measured by is itself measured here
//! against a store that keeps K and V of every token of every sequence, in `f64`, and never moves or
//! forgets anything. Keys are rotated to the position that a token has in the end.

use std::sync::Arc;

use kv_core::backend::{
    Attend, Backend, BackendError, BackendInfo, LayerRope, RowKind, RowSpan, StoreRows,
};
use kv_core::graph::{AttendSpec, Graph, GraphInputs, GraphOutputs};
use kv_core::layers::RowLayout;
use kv_core::memory::Unified;
use kv_core::rope::{RopeScaling, RopeSpec, RopeStyle, Rotation};
use kv_core::weights::WeightSource;
use kv_core::{CellIdx, KvType, LayerIdx, PartIdx, Pos, Visibility};

/// How far outputs may be from the definition's.
const TOLERANCE: f64 = 1e-5;

const K_DIM: usize = 4;
const V_DIM: usize = 3;
const SPEC: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 1,
    k_dim: K_DIM,
    v_dim: V_DIM,
    scale: 0.5,
    soft_cap: None,
    alibi: None,
};

fn rope() -> RopeSpec {
    RopeSpec {
        style: RopeStyle::Norm,
        n_rot: K_DIM,
        base: 100.0,
        scaling: RopeScaling::None,
        factors: None,
    }
}

/// Keeps bytes and computes nothing.
struct Bytes;

struct StoredBytes {
    layout: RowLayout,
    /// By layer of the layout: K and V.
    layers: Vec<[Vec<u8>; 2]>,
}

impl StoredBytes {
    fn at(&self, span: RowSpan) -> (usize, usize) {
        let layers = self.layout.layers();
        let layer = layers.iter().position(|l| l.layer == span.layer);
        (layer.unwrap(), usize::from(span.kind == RowKind::V))
    }
}

impl Backend for Bytes {
    type Rows = StoredBytes;
    type Weights = ();
    type Program = ();

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "bytes".to_owned(),
            device: "none".to_owned(),
            kv_types: vec![KvType::F32],
        }
    }

    fn allocate(&self, layout: &RowLayout) -> Result<StoredBytes, BackendError> {
        let rows = |l: &kv_core::layers::LayerRows| {
            [l.k, l.v].map(|shape| vec![0xff; l.n_rows * shape.bytes()]) // NaN
        };
        Ok(StoredBytes {
            layout: layout.clone(),
            layers: layout.layers().iter().map(rows).collect(),
        })
    }

    fn layout<'a>(&self, rows: &'a StoredBytes) -> &'a RowLayout {
        &rows.layout
    }

    fn read_rows(
        &self,
        rows: &StoredBytes,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        let (layer, kind) = rows.at(span);
        let range = span.byte_range(&rows.layout)?;
        out.copy_from_slice(&rows.layers[layer][kind][range]);
        Ok(())
    }

    fn write_rows(
        &self,
        rows: &mut StoredBytes,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let (layer, kind) = rows.at(span);
        let range = span.byte_range(&rows.layout)?;
        rows.layers[layer][kind][range].copy_from_slice(bytes);
        Ok(())
    }

    fn load_weights(&self, _: Arc<dyn WeightSource>) -> Result<(), BackendError> {
        Ok(())
    }

    fn compile(&self, _: &Graph, _: &(), _: &RowLayout) -> Result<(), BackendError> {
        Ok(())
    }

    fn run(
        &self,
        _: &mut (),
        _: &mut StoredBytes,
        _: &GraphInputs<'_>,
        _: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        Ok(())
    }
}

/// `N` values of a token, between -1 and 1, the same whenever they are asked for.
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

fn query(id: u64) -> [f32; 2 * K_DIM] {
    values(id, 0x33)
}

/// The layer with the rows of a part.
fn layer_of(part: PartIdx) -> LayerIdx {
    LayerIdx(part.0)
}

/// Real rows for every part of a memory.
pub(crate) struct RealRows {
    rows: StoredBytes,
    ropes: Vec<LayerRope>,
}

impl RealRows {
    pub(crate) fn new(parts: &[&Unified]) -> Self {
        let layer = |part: &&Unified| {
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
        let rope = |part: &&Unified| LayerRope {
            layer: layer_of(part.config().part),
            rotation: Some(Rotation::new(rope(), None)),
        };
        Self {
            rows: Bytes.allocate(&layout).unwrap(),
            ropes: parts.iter().map(rope).collect(),
        }
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
        let args = StoreRows {
            layer: layer_of(part),
            k: &k,
            v: &v,
            cells,
        };
        Bytes.store_rows(&mut self.rows, args).unwrap();
    }

    /// What a computation that failed may leave in these cells.
    pub(crate) fn destroy(&mut self, part: PartIdx, cells: &[CellIdx]) {
        let args = StoreRows {
            layer: layer_of(part),
            k: &vec![f32::NAN; cells.len() * K_DIM],
            v: &vec![f32::NAN; cells.len() * V_DIM],
            cells,
        };
        Bytes.store_rows(&mut self.rows, args).unwrap();
    }

    pub(crate) fn layout(&self) -> &RowLayout {
        &self.rows.layout
    }

    pub(crate) fn read(&self, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        Bytes.read_rows(&self.rows, span, out)
    }

    pub(crate) fn write(&mut self, span: RowSpan, bytes: &[u8]) -> Result<(), BackendError> {
        Bytes.write_rows(&mut self.rows, span, bytes)
    }

    pub(crate) fn copy(&mut self, copies: &[kv_core::backend::RowCopy]) {
        Bytes.copy_rows(&mut self.rows, copies).unwrap();
    }

    pub(crate) fn shift(&mut self, shifts: &[kv_core::backend::RowShift]) {
        Bytes
            .shift_rows(&mut self.rows, shifts, &self.ropes)
            .unwrap();
    }

    /// Attends with the tokens `ids` over what `visibility` shows them, and compares with attention
    /// over `sees`, which gives for each of them the tokens that it must see, by position and id.
    pub(crate) fn check_attention(
        &self,
        part: PartIdx,
        (ids, visibility): (&[u64], &Visibility),
        sees: impl Fn(usize) -> Vec<(Pos, u64)>,
    ) {
        let q: Vec<f32> = ids.iter().flat_map(|&id| query(id)).collect();
        let args = Attend {
            layer: layer_of(part),
            spec: SPEC,
            q: &q,
            visibility,
            positions: &[],
            sinks: None,
        };
        let mut out = vec![f32::NAN; ids.len() * SPEC.n_heads * V_DIM];
        Bytes.attend(&self.rows, args, &mut out).unwrap();
        for (row, (&id, out)) in ids.iter().zip(out.chunks(SPEC.n_heads * V_DIM)).enumerate() {
            let sees = sees(row);
            let heads = query(id);
            for (q, got) in heads.chunks(K_DIM).zip(out.chunks(V_DIM)) {
                let wanted = by_definition(q, &sees);
                for (got, wanted) in got.iter().zip(wanted) {
                    let off = (f64::from(*got) - wanted).abs();
                    assert!(
                        off <= TOLERANCE,
                        "part {part}, row {row}: {got}, not {wanted}"
                    );
                }
            }
        }
    }
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
        (score * f64::from(SPEC.scale)).exp()
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
