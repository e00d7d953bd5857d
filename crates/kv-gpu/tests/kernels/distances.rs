//! Attention within a batch with scores by distance, at odd sizes.
#![allow(clippy::unwrap_used)]

use kv_backend::GraphInputs;
use kv_contract::Random;
use kv_core::{
    CellIdx, CellRun, Pos, PosRange, Visibility, VisibleGroup, Window, memory::BatchVisibility,
};
use kv_graph::{Alibi, AttendSpec, DistanceBuckets, DistanceScores, Distances, Graph, Input};
use kv_rows::RowLayout;

use crate::support::{Case, attend_spec, graph, weights};

const WINDOW: Window = Window::Symmetric(300);

/// Two texts: all rows but the last three, at positions `first_pos` and on, and these three, the
/// last of which sees nothing. Returns what rows see, and their positions.
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

#[test]
fn scores_by_distance_of_any_shape() {
    let capped = AttendSpec {
        soft_cap: Some(2.0),
        alibi: Some(Alibi {
            factor: 0.4,
            ..Alibi::new(6.0)
        }),
        ..attend_spec(6, 2, 16, 8)
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
        (4, 0, attend_spec(1, 1, 3, 5), halves),
        (12, 90, attend_spec(3, 1, 8, 24), signed),
        (74, 5, attend_spec(2, 2, 40, 37), single),
        (133, 1000, capped, signed),
        (301, 0, attend_spec(1, 1, 64, 64), halves),
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
