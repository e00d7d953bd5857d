//! Indexers of any shape, and attention over what they chose: each by itself against the
//! definition, with rows in scattered cells.
#![allow(clippy::unwrap_used)]

use kv_backend::GraphInputs;
use kv_contract::Random;
use kv_core::{
    CellIdx, CellRun, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::PartInputs,
};
use kv_graph::{AttendSpec, Graph, IndexSpec, Input};
use kv_rows::{KvType, RowLayout};

use crate::support::{Case, graph, weights};

const PART: PartIdx = PartIdx(0);
/// The layers of the latents and of the indexer's keys.
const LAYERS: [LayerIdx; 2] = [LayerIdx(0), LayerIdx(1)];

struct Sizes {
    n: usize,
    n_cells: usize,
    /// Cells of the rows from which on each row sees one more.
    n_before: usize,
    spec: AttendSpec,
    index: IndexSpec,
    kv_type: KvType,
}

impl Sizes {
    fn layout(&self) -> RowLayout {
        let memory = |k_dim, v_dim| {
            LayerMemory::Latent(AttentionMemory {
                kv_heads: 1,
                k_dim,
                v_dim,
                window: Window::Full,
            })
        };
        let layers = vec![
            memory(self.spec.k_dim, self.spec.v_dim),
            memory(self.index.dim, 0),
        ];
        RowLayout::new(&LayerMap::new(layers), &[self.n_cells], self.kv_type).unwrap()
    }

    /// Stores rows and keys, chooses, attends over what was chosen.
    fn graph(&self) -> (Graph, usize) {
        let (n, spec, index) = (self.n, self.spec, self.index);
        let shapes = [
            (1, spec.k_dim),
            (1, index.dim),
            (spec.n_heads, spec.k_dim),
            (index.n_heads, index.dim),
        ];
        let heads_len: usize = shapes.iter().map(|(heads, dim)| heads * dim).sum();
        let dim = heads_len + index.n_heads;
        let graph = graph(n, dim, |b, x| {
            let cells = b.input(Input::Cells { part: PART }).unwrap();
            let window = Window::Full;
            let seen = b.input(Input::Visibility { part: PART, window }).unwrap();
            let mut first = 0;
            let parts = shapes.map(|(heads, dim)| {
                let columns = first..first + heads * dim;
                first = columns.end;
                let flat = b.columns(&format!("{columns:?}"), x, columns).unwrap();
                b.reshape(&format!("{first}"), flat, &[n, heads, dim])
                    .unwrap()
            });
            let [row, key, q, index_q] = parts;
            let weights = b.columns("weights", x, heads_len..dim).unwrap();
            let rows = b.store_k("rows", LAYERS[0], [row, cells]).unwrap();
            let keys = b.store_k("keys", LAYERS[1], [key, cells]).unwrap();
            let operands = [index_q, weights, keys, seen];
            let chosen = b.index("chosen", LAYERS[1], index, operands).unwrap();
            let operands = [q, rows, seen, chosen];
            let y = b.attend_sparse("y", LAYERS[0], spec, operands).unwrap();
            vec![chosen, y]
        });
        (graph, dim)
    }

    /// Stores `n_cells` rows, `n` at a time, of one text: its position `p` is in a cell that
    /// depends on the run of 5 positions that it is in. Every row sees those before it from a third
    /// on.
    fn check(&self) {
        let (graph, dim) = self.graph();
        let n_runs = self.n_cells / 5;
        let cell = |pos: usize| (pos / 5 * 7 % n_runs * 5 + pos % 5) as u32;
        let mut random = Random::new(77);
        let n_steps = (self.n_before / self.n + 1).min(n_runs * 5 / self.n);
        let values: Vec<Vec<f32>> = (0..n_steps).map(|_| random.values(self.n * dim)).collect();
        let parts: Vec<[PartInputs; 1]> = (0..n_steps)
            .map(|step| {
                let first = step * self.n;
                let end = first + self.n;
                let runs = (0..end.div_ceil(5)).map(|run| CellRun {
                    cell: CellIdx(cell(run * 5)),
                    pos: Pos(run as u32 * 5),
                    len: (end - run * 5).min(5) as u32,
                });
                let limits =
                    (first..end).map(|pos| PosRange::new(Pos((first / 3) as u32), Pos(pos as u32)));
                let rows = (0..self.n as u32).collect();
                let group = VisibleGroup::new(rows, runs.collect(), limits.collect());
                [PartInputs {
                    cells: (first..end).map(|pos| CellIdx(cell(pos))).collect(),
                    visibility: Visibility::new(self.n as u32, vec![group]),
                    ..PartInputs::default()
                }]
            })
            .collect();
        let steps: Vec<GraphInputs<'_>> = parts
            .iter()
            .zip(&values)
            .map(|(parts, embeddings)| GraphInputs {
                embeddings,
                parts,
                ..GraphInputs::default()
            })
            .collect();
        let case = Case {
            graph: &graph,
            weights: &weights(&graph, 0.0),
            layout: &self.layout(),
        };
        case.check(&steps, 1e-5);
    }
}

#[test]
fn indexers_and_what_they_choose_of_any_shape() {
    // Heads of the indexer, width, choice; heads, widths of keys and values.
    for (n, n_cells, n_before, index, attend) in [
        (1, 20, 19, [1, 1, 1], [1, 1, 1]),
        (3, 100, 95, [3, 7, 5], [2, 9, 4]),
        (1, 150, 110, [5, 64, 70], [5, 40, 32]),
        (70, 350, 280, [17, 33, 130], [3, 24, 16]),
        (9, 110, 100, [18, 130, 65], [6, 72, 64]),
    ] {
        let [n_heads, dim, top_k] = index;
        let [attend_heads, k_dim, v_dim] = attend;
        let sizes = Sizes {
            n,
            n_cells,
            n_before,
            spec: AttendSpec {
                n_heads: attend_heads,
                kv_heads: 1,
                k_dim,
                v_dim,
                scale: 0.2,
                soft_cap: (n == 3).then_some(4.0),
                alibi: None,
            },
            index: IndexSpec {
                n_heads,
                dim,
                top_k,
            },
            kv_type: KvType::F32,
        };
        sizes.check();
    }
}
