//! The contract of attention against masks that were computed independently: a backend attends over
//! exactly the cells that each of the 57 golden masks shows, with its linear biases where it has
//! them.
//!
//! What is wanted follows from the masks' tables alone: no window, run or visibility of ours is
//! asked.

use serde::Deserialize;

use super::attend::SPEC;
use super::rows::fill;
use super::scene::layout;
use super::{Attend, OneOp, Random, Subject, assert_close};
use kv_backend::Backend;
use kv_core::cells::{Cell, KvCells};
use kv_core::{
    Causality, CellIdx, LayerIdx, Pos, PosRange, SeqId, SeqSet, Visibility, VisibleGroup, Window,
};
use kv_graph::{Alibi, AttendSpec};

const MASKS: &str = include_str!("../../../tests/fixtures/kv-core/masks.json");

#[derive(Deserialize)]
struct Masks {
    cases: Vec<Mask>,
}

#[derive(Deserialize)]
struct Mask {
    name: String,
    swa_type: String,
    n_swa: u32,
    causal: bool,
    cells: Vec<HeldCell>,
    queries: Vec<Query>,
    visible: Vec<Vec<u8>>,
    alibi: Option<Biases>,
}

#[derive(Deserialize)]
struct HeldCell {
    pos: i64,
    seqs: SeqSet,
}

#[derive(Deserialize)]
struct Query {
    pos: u32,
    seq: u32,
}

#[derive(Deserialize)]
struct Biases {
    n_head: usize,
    max_bias: f32,
    slopes: Vec<f64>,
    distance: Vec<Vec<Option<i64>>>,
}

impl Mask {
    /// The visibility by our windows of its cells and queries: all queries of a sequence in one
    /// group.
    fn visibility(&self) -> Visibility {
        let window = match self.swa_type.as_str() {
            "none" => Window::Full,
            "standard" => Window::Sliding(self.n_swa),
            "chunked" => Window::Chunked(self.n_swa),
            "symmetric" => Window::Symmetric(self.n_swa),
            other => panic!("{}: unknown window {other}", self.name),
        };
        let causality = if self.causal {
            Causality::Causal
        } else {
            Causality::NonCausal
        };
        let mut cells = KvCells::new(0..self.cells.len() as u32, 0..256);
        for (at, cell) in (0u32..).zip(&self.cells) {
            if let Ok(pos) = u32::try_from(cell.pos) {
                cells.insert(CellIdx(at), &Cell::new(Pos(pos), cell.seqs.clone()));
            }
        }
        let mut seqs: Vec<u32> = self.queries.iter().map(|q| q.seq).collect();
        seqs.sort_unstable();
        seqs.dedup();
        let group = |&seq: &u32| {
            let own = (0u32..).zip(&self.queries).filter(|(_, q)| q.seq == seq);
            let limits = |q: &Query| window.visible_keys(Pos(q.pos), causality);
            let (rows, limits) = own.map(|(row, q)| (row, limits(q))).unzip();
            let runs = cells.runs(SeqId(seq)).into_iter();
            let runs = runs.flat_map(|runs| runs.within(PosRange::ALL));
            VisibleGroup::new(rows, runs.collect(), limits)
        };
        let n_rows = self.queries.len() as u32;
        Visibility::new(n_rows, seqs.iter().map(group).collect())
    }

    fn spec(&self) -> AttendSpec {
        match &self.alibi {
            None => SPEC,
            Some(biases) => AttendSpec {
                n_heads: biases.n_head,
                kv_heads: 1,
                alibi: Some(Alibi::new(biases.max_bias)),
                ..SPEC
            },
        }
    }

    /// The bias of head `head` of query `row` on its score of a cell; `None` where that is hidden.
    fn bias(&self, row: usize, head: usize, cell: usize) -> Option<f64> {
        if self.visible[row][cell] == 0 {
            return None;
        }
        let Some(biases) = &self.alibi else {
            return Some(0.0);
        };
        Some(biases.slopes[head] * biases.distance[row][cell].unwrap() as f64)
    }
}

/// Every golden mask, row by row and head by head.
pub fn k43_golden_masks_are_attended<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let Masks { cases } = serde_json::from_str(MASKS).unwrap();
    assert_eq!(cases.len(), 57);
    for mask in &cases {
        let spec = mask.spec();
        let (n_cells, n_rows) = (mask.cells.len(), mask.queries.len());
        assert_eq!(mask.visible.len(), n_rows, "{}", mask.name);
        let widths = (spec.kv_heads, spec.k_dim, spec.v_dim);
        let layout = layout(1, n_cells + n_rows, widths, backend.info().kv_types[0]);
        let mut rows = backend.allocate(&layout).unwrap();
        let stored = fill(backend, &mut rows, 71);
        let [k, v] = [(0, layout.layers()[0].k), (1, layout.layers()[0].v)].map(|(at, shape)| {
            let mut values = vec![0.0; n_cells * shape.len()];
            for (row, values) in stored[at]
                .chunks_exact(shape.bytes())
                .zip(values.chunks_exact_mut(shape.len()))
            {
                shape.decode(row, values);
            }
            values
        });
        let q = Random::new(72).values(n_rows * spec.n_heads * spec.k_dim);
        let positions: Vec<u32> = mask.queries.iter().map(|q| q.pos).collect();
        let args = Attend {
            layer: LayerIdx(0),
            spec,
            q: &q,
            visibility: &mask.visibility(),
            positions: &positions,
            sinks: None,
            spare: CellIdx(n_cells as u32),
        };
        let got = OneOp::attend(&layout, &args).run(backend, &mut rows);
        let mut wanted = Vec::new();
        for (at, q) in q.chunks_exact(spec.k_dim).enumerate() {
            let (row, head) = (at / spec.n_heads, at % spec.n_heads);
            let of_cell = |cell| cell * spec.kv_heads + head * spec.kv_heads / spec.n_heads;
            let weight = |cell: usize| {
                let bias = mask.bias(row, head, cell)?;
                let key = &k[of_cell(cell) * spec.k_dim..][..spec.k_dim];
                let pairs = q.iter().zip(key);
                let dot: f64 = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                Some((dot * f64::from(spec.scale) + bias).exp())
            };
            let mut out = vec![0.0; spec.v_dim];
            let sum: f64 = (0..n_cells).filter_map(weight).sum();
            for cell in 0..n_cells {
                let Some(weight) = weight(cell) else { continue };
                let values = &v[of_cell(cell) * spec.v_dim..][..spec.v_dim];
                for (out, value) in out.iter_mut().zip(values) {
                    *out += weight / sum * f64::from(*value);
                }
            }
            wanted.extend(out);
        }
        assert_close(&mask.name, &got.unwrap(), &wanted, subject.tolerance.attend);
    }
}
