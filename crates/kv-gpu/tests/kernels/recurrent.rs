//! Convolutions and scans at odd sizes, over groups that continue each other within a run.
#![allow(clippy::unwrap_used)]

use kv_backend::GraphInputs;
use kv_contract::Random;
use kv_core::{
    CellIdx, LayerIdx,
    layers::{LayerMap, LayerMemory, RecurrentMemory},
    memory::{StateGroup, StateStore},
};
use kv_graph::{Activation, ConvKernels, ConvSpec, DecaySpec, DeltaSpec, Graph};
use kv_graph::{HeadScanSpec, Input, KeySharing, ScanSpec};
use kv_rows::{KvType, RowLayout, StateType};

use crate::support::{Case, builder, weights};

const LAYER: LayerIdx = LayerIdx(0);

fn group(rows: &[u32], source: Option<u32>, stores: &[(u32, u32)]) -> StateGroup {
    let store = |&(n_rows, to)| StateStore {
        n_rows,
        to: CellIdx(to),
    };
    StateGroup {
        rows: rows.to_vec(),
        source: source.map(CellIdx),
        stores: stores.iter().map(store).collect(),
    }
}

/// Runs of 9 rows of three sequences: groups of one row, groups that begin with what another group
/// of the run stored, several stores, and more chains than one.
fn runs() -> Vec<Vec<StateGroup>> {
    vec![
        vec![
            group(&[0, 2, 5], None, &[(1, 0), (3, 1)]),
            group(&[1], None, &[(1, 2)]),
            group(&[3, 4], Some(1), &[(2, 3)]),
            group(&[6], Some(0), &[(1, 4)]),
            group(&[7, 8], Some(3), &[(1, 5), (2, 6)]),
        ],
        vec![
            group(&[8], Some(6), &[(1, 0)]),
            group(
                &[0, 1, 2, 3, 4, 5, 6, 7],
                Some(2),
                &[(2, 1), (3, 3), (8, 7)],
            ),
        ],
        vec![group(&[0, 1, 2, 3, 4, 5, 6, 7, 8], Some(7), &[(9, 1)])],
    ]
}

/// Checks a layer of `dim` inputs, whose state is `memory`; steps are columns `dt`.
fn check(graph: &Graph, dim: usize, dt: std::ops::Range<usize>, memory: RecurrentMemory) {
    let map = LayerMap::new(vec![LayerMemory::Recurrent(memory)]);
    let layout = RowLayout::new(&map, &[], KvType::F32).unwrap();
    let layout = layout.with_states(&map, 8).unwrap();
    let mut random = Random::new(11);
    let mut weights = weights(graph, 0.0);
    if let Some(a) = graph.weights().iter().find(|used| used.name == "a") {
        let decay = random.values(a.shape.iter().product());
        let decay: Vec<f32> = decay.iter().map(|v| -0.2 - v.abs()).collect();
        weights.insert_f32("a", &a.shape, &decay).unwrap();
    }
    let runs = runs();
    let values: Vec<Vec<f32>> = runs
        .iter()
        .map(|_| {
            let mut rows = random.values(9 * dim);
            for row in rows.chunks_exact_mut(dim) {
                row[dt.clone()]
                    .iter_mut()
                    .for_each(|dt| *dt = 30.0 * *dt - 6.0);
            }
            rows
        })
        .collect();
    let step = |(states, embeddings)| GraphInputs {
        embeddings,
        states,
        ..GraphInputs::default()
    };
    let states = runs.iter().map(Vec::as_slice);
    let steps: Vec<_> = states
        .zip(values.iter().map(Vec::as_slice))
        .map(step)
        .collect();
    // A value may be rounded one way or the other where the last bits of an operation differ.
    for (state_type, tolerance) in [
        (StateType::F32, 1e-5),
        (StateType::F16, 2e-3),
        (StateType::BF16, 1.6e-2),
    ] {
        let case = Case {
            graph,
            weights: &weights,
            layout: &layout.clone().with_state_type(state_type),
        };
        case.check(&steps, tolerance);
    }
}

#[test]
fn convolutions_of_any_width() {
    for (channels, width) in [(1, 1), (33, 4), (70, 9), (32, 2)] {
        let mut b = builder(9);
        let x = b.input(Input::Embeddings { dim: channels }).unwrap();
        let states = b.input(Input::States).unwrap();
        let conv = ConvSpec {
            width,
            weight: "w".into(),
            further: Vec::new(),
            bias: (width > 2).then(|| "b".into()),
        };
        let y = b.conv("y", LAYER, &conv, [x, states]).unwrap();
        let memory = RecurrentMemory {
            conv_row: (width - 1) * channels,
            state_row: 0,
        };
        check(&b.finish(&[y]).unwrap(), channels, 0..0, memory);
    }
}

/// Kernels in three weights, one for each third of the channels.
#[test]
fn joined_convolutions_of_any_width() {
    for (part, width) in [(1, 3), (23, 4), (32, 1)] {
        let channels = 3 * part;
        let mut b = builder(9);
        let x = b.input(Input::Embeddings { dim: channels }).unwrap();
        let states = b.input(Input::States).unwrap();
        let kernels = ConvKernels {
            width,
            weights: ["q", "k", "v"].map(str::to_owned),
            shape: vec![part, 1, width],
        };
        let y = b.conv_joined("y", LAYER, &kernels, [x, states]).unwrap();
        let memory = RecurrentMemory {
            conv_row: (width - 1) * channels,
            state_row: 0,
        };
        check(&b.finish(&[y]).unwrap(), channels, 0..0, memory);
    }
}

#[test]
fn scans_of_any_state() {
    for (channels, d_state) in [(1, 1), (35, 16), (3, 37), (32, 5)] {
        let mut b = builder(9);
        let dim = 2 * (channels + d_state);
        let all = b.input(Input::Embeddings { dim }).unwrap();
        let states = b.input(Input::States).unwrap();
        let mut first = 0;
        let [x, dt, bs, cs] = [
            ("x", channels),
            ("dt", channels),
            ("b", d_state),
            ("c", d_state),
        ]
        .map(|(name, len)| {
            first += len;
            b.columns(name, all, first - len..first).unwrap()
        });
        let scan = ScanSpec {
            d_state,
            a: "a".into(),
            d: "d".into(),
        };
        let y = b.scan("y", LAYER, &scan, [x, dt, bs, cs, states]).unwrap();
        let memory = RecurrentMemory {
            conv_row: 0,
            state_row: channels * d_state,
        };
        let graph = b.finish(&[y]).unwrap();
        check(&graph, dim, channels..2 * channels, memory);
    }
}

#[test]
fn scans_by_heads_of_any_shape() {
    for (n_heads, head_dim, n_groups, d_state) in
        [(1, 1, 1, 1), (4, 37, 2, 16), (2, 3, 1, 150), (3, 64, 3, 20)]
    {
        let mut b = builder(9);
        let (channels, narrow) = (n_heads * head_dim, n_groups * d_state);
        let dim = n_heads + channels + 2 * narrow;
        let all = b.input(Input::Embeddings { dim }).unwrap();
        let states = b.input(Input::States).unwrap();
        let mut first = 0;
        let [dt, x, bs, cs] = [
            ("dt", n_heads),
            ("x", channels),
            ("b", narrow),
            ("c", narrow),
        ]
        .map(|(name, len)| {
            first += len;
            b.columns(name, all, first - len..first).unwrap()
        });
        let scan = HeadScanSpec {
            n_heads,
            n_groups,
            d_state,
            a: "a".into(),
            d: "d".into(),
            dt_bias: "dt.b".into(),
        };
        let y = b.scan_heads("y", LAYER, &scan, [x, dt, bs, cs, states]);
        let memory = RecurrentMemory {
            conv_row: 0,
            state_row: channels * d_state,
        };
        check(&b.finish(&[y.unwrap()]).unwrap(), dim, 0..n_heads, memory);
    }
}

/// Heads, key heads, values of a key and of a value, decays of a head.
const DELTAS: [[usize; 5]; 5] = [
    [1, 1, 1, 1, 1],
    [4, 2, 37, 35, 37],
    [6, 2, 150, 3, 1],
    [2, 2, 256, 32, 256],
    [3, 1, 16, 70, 1],
];

#[test]
fn delta_rules_of_any_shape() {
    for (sharing, [n_heads, key_heads, k_dim, v_dim, n_decays]) in DELTAS
        .into_iter()
        .flat_map(|sizes| [KeySharing::Neighbours, KeySharing::Interleaved].map(|s| (s, sizes)))
    {
        let mut b = builder(9);
        let (keys, channels) = (key_heads * k_dim, n_heads * v_dim);
        let widths = [keys, keys, channels, n_heads, n_heads * n_decays];
        let dim = widths.iter().sum();
        let all = b.input(Input::Embeddings { dim }).unwrap();
        let states = b.input(Input::States).unwrap();
        let mut first = 0;
        let mut columns = |b: &mut kv_graph::GraphBuilder, name: &str, len: usize| {
            first += len;
            b.columns(name, all, first - len..first).unwrap()
        };
        let [q, k, v, beta, dt] =
            [0, 1, 2, 3, 4].map(|i| columns(&mut b, ["q", "k", "v", "beta", "dt"][i], widths[i]));
        // Keys of length 1 or so, as models have them.
        let k = b
            .scale("short_k", k, (k_dim as f32).sqrt().recip())
            .unwrap();
        let beta = b.activate("gate", Activation::Sigmoid, beta).unwrap();
        let decay = DecaySpec {
            n_heads,
            a: "a".into(),
            dt_bias: "dt_bias".into(),
        };
        let decay = b.decay("decay", dt, &decay, &[n_heads]).unwrap();
        let delta = DeltaSpec {
            n_heads,
            key_heads,
            k_dim,
            sharing,
            scale: 0.5,
        };
        let operands = [q, k, v, decay, beta, states];
        let y = b.delta("y", LAYER, delta, operands).unwrap();
        let memory = RecurrentMemory {
            conv_row: 0,
            state_row: channels * k_dim,
        };
        let graph = b.finish(&[y]).unwrap();
        check(&graph, dim, dim - n_heads * n_decays..dim, memory);
    }
}
