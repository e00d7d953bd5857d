//! Attention with scores by distance at odd sizes, within a batch and over stored rows of every type.
#![allow(clippy::unwrap_used)]

use kv_contract::Random;
use kv_core::graph::{
    Alibi, AttendSpec, BatchVisibility, DistanceBuckets, DistanceScores, Distances, Graph,
    GraphInputs, Input, PartInputs,
};
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory, RowLayout};
use kv_core::{
    CellIdx, CellRun, KvType, KvTypes, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup,
    Window,
};

use crate::support::{Case, graph, weights};

const WINDOW: Window = Window::Symmetric(300);

/// Two texts: all rows but the last three, at positions `first_pos` and on, and these three, the last
/// of which sees nothing. Returns what rows see, and their positions.
fn texts(n: u32, first_pos: u32) -> (Visibility, Vec<u32>) {
    let text = |rows: std::ops::Range<u32>, first_pos: u32| {
        let run = CellRun {
            cell: CellIdx(rows.start),
            pos: Pos(first_pos),
            len: rows.end - rows.start,
        };
        let sees = |row: u32| {
            let at = first_pos + row - rows.start;
            PosRange::new(Pos(at.saturating_sub(150)), Pos(at + 150))
        };
        let limits = rows.clone().map(sees).collect();
        VisibleGroup::new(rows.collect(), vec![run], limits)
    };
    let mut groups = vec![text(0..n - 3, first_pos), text(n - 3..n, 7)];
    groups[1].limits[2] = PosRange::EMPTY;
    let positions = (first_pos..first_pos + n - 3).chain(7..10);
    (Visibility::new(n, groups), positions.collect())
}

/// Attention by a weight of buckets, and by tables.
fn attention(n: usize, spec: AttendSpec, buckets: DistanceBuckets) -> (Graph, usize) {
    let (of_q, of_k) = (spec.n_heads * buckets.n(), spec.kv_heads * buckets.n());
    let lens = [
        spec.n_heads * spec.k_dim,
        spec.kv_heads * spec.k_dim,
        spec.kv_heads * spec.v_dim,
        of_q,
        of_k,
    ];
    let dim = lens.iter().sum();
    let graph = graph(n, dim, |b, x| {
        b.input(Input::Positions).unwrap();
        let mut first = 0;
        let mut parts = Vec::new();
        for (i, (len, heads)) in lens
            .into_iter()
            .zip([
                spec.n_heads,
                spec.kv_heads,
                spec.kv_heads,
                spec.n_heads,
                spec.kv_heads,
            ])
            .enumerate()
        {
            let flat = b.columns(&format!("flat{i}"), x, first..first + len);
            let shape = [n, heads, len / heads];
            parts.push(
                b.reshape(&format!("part{i}"), flat.unwrap(), &shape)
                    .unwrap(),
            );
            first += len;
        }
        let scores = [
            DistanceScores::Weight("bias"),
            DistanceScores::Tables([parts[3], parts[4]]),
        ];
        let qkv = [parts[0], parts[1], parts[2]];
        let attend = |(i, scores)| {
            let distances = Distances { buckets, scores };
            let name = format!("y{i}");
            b.attend_batch_relative(&name, spec, qkv, WINDOW, distances)
                .unwrap()
        };
        scores.into_iter().enumerate().map(attend).collect()
    });
    (graph, dim)
}

fn spec(n_heads: usize, kv_heads: usize, k_dim: usize, v_dim: usize) -> AttendSpec {
    AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        scale: 0.3,
        soft_cap: None,
        alibi: None,
    }
}

#[test]
fn scores_by_distance_of_any_shape() {
    let capped = AttendSpec {
        soft_cap: Some(2.0),
        alibi: Some(Alibi {
            factor: 0.4,
            ..Alibi::new(6.0)
        }),
        ..spec(6, 2, 16, 8)
    };
    let halves = DistanceBuckets::Halves {
        n: 32,
        max_distance: 128,
    };
    let signed = DistanceBuckets::Signed {
        span: 5,
        max_distance: 40,
    };
    let single = DistanceBuckets::Single { span: 200 };
    // Few rows, which are attended one by one, and many, in tiles.
    for (n, first_pos, spec, buckets) in [
        (4, 0, spec(1, 1, 3, 5), halves),
        (12, 90, spec(3, 1, 8, 24), signed),
        (74, 5, spec(2, 2, 40, 37), single),
        (133, 1000, capped, signed),
        (301, 0, spec(1, 1, 64, 64), halves),
    ] {
        let (graph, dim) = attention(n, spec, buckets);
        let (visibility, positions) = texts(n as u32, first_pos);
        let batch = [BatchVisibility {
            window: WINDOW,
            visibility,
        }];
        let mut random = Random::new(n as u64);
        let runs: Vec<Vec<f32>> = (0..3).map(|_| random.values(n * dim)).collect();
        let step = |embeddings| GraphInputs {
            embeddings,
            positions: &positions,
            batch: &batch,
            ..GraphInputs::default()
        };
        let steps: Vec<GraphInputs<'_>> = runs.iter().map(|x| step(x.as_slice())).collect();
        let case = Case {
            graph: &graph,
            weights: &weights(&graph, 0.0),
            layout: &RowLayout::default(),
        };
        case.check(&steps, 1e-5);
    }
}

/// Stores rows of a layer and attends over all that are stored, by a weight of buckets.
fn stored_attention(n: usize, spec: AttendSpec, buckets: DistanceBuckets) -> (Graph, usize) {
    let shapes = [
        (spec.n_heads, spec.k_dim),
        (spec.kv_heads, spec.k_dim),
        (spec.kv_heads, spec.v_dim),
    ];
    let dim = shapes.iter().map(|(heads, dim)| heads * dim).sum();
    let (part, layer) = (PartIdx(0), LayerIdx(0));
    let graph = graph(n, dim, |b, x| {
        let mut first = 0;
        let [q, k, v] = shapes.map(|(heads, dim)| {
            let columns = first..first + heads * dim;
            first = columns.end;
            let flat = b.columns(&format!("{columns:?}"), x, columns).unwrap();
            let shape = [n, heads, dim];
            b.reshape(&format!("{first}"), flat, &shape).unwrap()
        });
        let cells = b.input(Input::Cells { part }).unwrap();
        let window = Window::Full;
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let stored = b.store_kv("rows", layer, [k, v, cells]).unwrap();
        let scores = DistanceScores::Weight("bias");
        let distances = Distances { buckets, scores };
        let y = b.attend_relative("y", layer, spec, [q, stored, seen], distances);
        vec![y.unwrap()]
    });
    (graph, dim)
}

/// Three times `n` rows of one text, whose runs of 7 positions are in cells in falling order: each row
/// sees all before it but the first two, the last but one nothing.
fn check_stored(n: usize, spec: AttendSpec, types: KvTypes, buckets: DistanceBuckets) {
    let (graph, dim) = stored_attention(n, spec, buckets);
    let n_runs = (3 * n).div_ceil(7);
    let cell = |pos: usize| CellIdx(((n_runs - 1 - pos / 7) * 7 + pos % 7) as u32);
    let part = |step: usize| {
        let (first, end) = (step * n, step * n + n);
        let runs = (0..end.div_ceil(7)).map(|run| CellRun {
            cell: cell(run * 7),
            pos: Pos(run as u32 * 7),
            len: (end - run * 7).min(7) as u32,
        });
        let sees = |pos: usize| match pos + 2 == end {
            true => PosRange::EMPTY,
            false => PosRange::new(Pos(2), Pos(pos as u32)),
        };
        let limits = (first..end).map(sees).collect();
        let group = VisibleGroup::new((0..n as u32).collect(), runs.collect(), limits);
        [PartInputs {
            cells: (first..end).map(cell).collect(),
            visibility: Visibility::new(n as u32, vec![group]),
        }]
    };
    let parts = [0, 1, 2].map(part);
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
    let map = LayerMap::new(vec![memory]);
    let case = Case {
        graph: &graph,
        weights: &weights(&graph, 0.0),
        layout: &RowLayout::new(&map, &[n_runs * 7], &types).unwrap(),
    };
    case.check(&[0, 1, 2].map(step), 1e-5);
}

#[test]
fn stored_keys_of_any_type_have_scores_by_distance() {
    let earlier = DistanceBuckets::Earlier {
        n: 8,
        max_distance: 20,
    };
    let halves = DistanceBuckets::Halves {
        n: 8,
        max_distance: 300,
    };
    // One row at a time, a few, and many of them, in tiles, over more cells than a block has threads.
    for (n, spec) in [
        (1, spec(5, 5, 14, 14)),
        (5, spec(6, 2, 9, 33)),
        (29, spec(3, 3, 64, 40)),
        (110, spec(4, 1, 24, 8)),
    ] {
        check_stored(n, spec, KvType::F32.into(), earlier);
    }
    for (i, &k) in KvType::ALL.iter().enumerate() {
        let v = KvType::ALL[(i + 1) % KvType::ALL.len()];
        let types = KvTypes {
            k,
            v,
            ..KvTypes::from(k)
        };
        check_stored(4, spec(4, 2, 32, 16), types.clone(), earlier);
        check_stored(13, spec(2, 2, 64, 80), types, halves);
    }
}
