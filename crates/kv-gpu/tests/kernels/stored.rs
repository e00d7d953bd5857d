//! Attention over stored rows of every type, at odd sizes: with scores by distance, and in parts
//! that are merged.
#![allow(clippy::unwrap_used)]

use kv_backend::GraphInputs;
use kv_contract::Random;
use kv_core::{
    CellIdx, CellRun, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::PartInputs,
};
use kv_graph::{
    AttendSpec, Attention, DistanceBuckets, DistanceScores, Distances, GraphBuilder, Input, NodeId,
    ResultForm,
};
use kv_rows::{KvType, KvTypes, RowLayout};

use crate::support::{Case, attend_spec, graph, weights};

const PART: PartIdx = PartIdx(0);

/// Shapes of rows in floats: one row at a time, a few, and many of them, in tiles, over more cells
/// than a block has threads.
fn odd_shapes() -> [(usize, AttendSpec); 4] {
    [
        (1, attend_spec(5, 5, 14, 14)),
        (5, attend_spec(6, 2, 9, 33)),
        (29, attend_spec(3, 3, 64, 40)),
        (110, attend_spec(4, 1, 24, 8)),
    ]
}

/// Each type of K with the next one of V.
fn all_types() -> impl Iterator<Item = KvTypes> {
    let next = KvType::ALL.into_iter().cycle().skip(1);
    KvType::ALL.into_iter().zip(next).map(|(k, v)| KvTypes {
        k,
        v,
        ..KvTypes::from(k)
    })
}

/// Queries, the rows that each layer stored, and what is seen of them.
struct Operands {
    q: NodeId,
    stored: Vec<NodeId>,
    seen: NodeId,
}

/// Adds attention to a graph; gives its outputs.
type Attend<'a> = dyn Fn(&mut GraphBuilder, &Operands) -> Vec<NodeId> + 'a;

/// The number of layers that keep the same keys and values, and what attends over them.
struct SharedRowsCase<'a> {
    n_layers: usize,
    attend: &'a Attend<'a>,
}

impl SharedRowsCase<'_> {
    /// Three times `n` rows of one text, whose runs of 7 positions are in cells in falling order:
    /// each row sees all before it but the first two, the last but one nothing.
    fn check(&self, n: usize, spec: AttendSpec, types: &KvTypes) {
        let shapes = [
            (spec.n_heads, spec.k_dim),
            (spec.kv_heads, spec.k_dim),
            (spec.kv_heads, spec.v_dim),
        ];
        let dim = shapes.iter().map(|(heads, dim)| heads * dim).sum();
        let graph = graph(n, dim, |b, x| {
            let mut first = 0;
            let [q, k, v] = shapes.map(|(heads, dim)| {
                let columns = first..first + heads * dim;
                first = columns.end;
                let flat = b.columns(&format!("{columns:?}"), x, columns).unwrap();
                let shape = [n, heads, dim];
                b.reshape(&format!("{first}"), flat, &shape).unwrap()
            });
            let cells = b.input(Input::Cells { part: PART }).unwrap();
            let window = Window::Full;
            let seen = b.input(Input::Visibility { part: PART, window }).unwrap();
            let stored = (0..self.n_layers as u32).map(|layer| {
                let name = format!("rows{layer}");
                b.store_kv(&name, LayerIdx(layer), [k, v, cells]).unwrap()
            });
            let stored = stored.collect();
            (self.attend)(b, &Operands { q, stored, seen })
        });
        let n_runs = (3 * n).div_ceil(7);
        let parts = [0, 1, 2].map(|step| [part(n, n_runs, step)]);
        let positions = [0, 1, 2].map(|step| (step * n..step * n + n).map(|p| p as u32).collect());
        let mut random = Random::new(n as u64);
        let values = [(); 3].map(|()| random.values(n * dim));
        let step = |step: usize| {
            let positions: &Vec<u32> = &positions[step];
            GraphInputs {
                embeddings: &values[step],
                positions,
                parts: &parts[step],
                ..GraphInputs::default()
            }
        };
        let memory = LayerMemory::Attention(AttentionMemory {
            kv_heads: spec.kv_heads,
            k_dim: spec.k_dim,
            v_dim: spec.v_dim,
            window: Window::Full,
        });
        let map = LayerMap::new(vec![memory; self.n_layers]);
        let case = Case {
            graph: &graph,
            weights: &weights(&graph, 0.0),
            layout: &RowLayout::new(&map, &[n_runs * 7], types).unwrap(),
        };
        case.check(&[0, 1, 2].map(step), 1e-5);
    }
}

/// The cells and the visibility of rows number `n * step` and on.
fn part(n: usize, n_runs: usize, step: usize) -> PartInputs {
    let cell = |pos: usize| CellIdx(((n_runs - 1 - pos / 7) * 7 + pos % 7) as u32);
    let (first, end) = (step * n, step * n + n);
    let runs = (0..end.div_ceil(7)).map(|run| CellRun {
        cell: cell(run * 7),
        pos: Pos(run as u32 * 7),
        len: (end - run * 7).min(7) as u32,
    });
    let sees = |pos: usize| {
        if pos + 2 == end {
            PosRange::EMPTY
        } else {
            PosRange::new(Pos(2), Pos(pos as u32))
        }
    };
    let limits = (first..end).map(sees).collect();
    let group = VisibleGroup::new((0..n as u32).collect(), runs.collect(), limits);
    PartInputs {
        cells: (first..end).map(cell).collect(),
        visibility: Visibility::new(n as u32, vec![group]),
        ..PartInputs::default()
    }
}

/// Attention of this shape by a weight of buckets.
fn check_distances(n: usize, spec: AttendSpec, types: &KvTypes, buckets: DistanceBuckets) {
    let stored = SharedRowsCase {
        n_layers: 1,
        attend: &|b, of| {
            let scores = DistanceScores::Weight("bias");
            let distances = Distances { buckets, scores };
            let operands = [of.q, of.stored[0], of.seen];
            let y = b.attend_relative("y", LayerIdx(0), spec, operands, distances);
            vec![y.unwrap()]
        },
    };
    stored.check(n, spec, types);
}

#[test]
fn stored_keys_have_scores_by_distance() {
    let earlier = DistanceBuckets::Earlier {
        n: 8,
        max_distance: 20,
    };
    let halves = DistanceBuckets::Halves {
        n: 8,
        max_distance: 300,
    };
    for (n, spec) in odd_shapes() {
        check_distances(n, spec, &KvType::F32.into(), earlier);
    }
    for types in all_types() {
        check_distances(4, attend_spec(4, 2, 32, 16), &types, earlier);
        check_distances(13, attend_spec(2, 2, 64, 80), &types, halves);
    }
}

/// Two partial results, one with sinks, and both of them merged.
fn check_partial(n: usize, spec: AttendSpec, types: &KvTypes) {
    let stored = SharedRowsCase {
        n_layers: 2,
        attend: &|b, of| {
            let sinks = Some("sinks");
            let with_sinks = Attention { spec, sinks };
            let mut attend = |name, attention: Attention<'_>, layer: u32| {
                let operands = [of.q, of.stored[layer as usize], of.seen];
                b.attend_partial(name, LayerIdx(layer), attention, operands)
                    .unwrap()
            };
            let (first, second) = (attend("a", with_sinks, 0), attend("z", spec.into(), 1));
            vec![
                first,
                b.merge_partials("y", ResultForm::Whole, [first, second])
                    .unwrap(),
            ]
        },
    };
    stored.check(n, spec, types);
}

#[test]
fn partial_results_are_merged() {
    for (n, spec) in odd_shapes() {
        check_partial(n, spec, &KvType::F32.into());
    }
    for types in all_types() {
        check_partial(4, attend_spec(4, 2, 32, 96), &types);
        check_partial(13, attend_spec(2, 2, 64, 32), &types);
    }
}
