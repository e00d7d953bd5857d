//! The reference evaluator against examples that were worked by hand.

#![allow(clippy::unwrap_used)] // helpers of tests

use kv_backend::GraphInputs;
use kv_contract::evaluate::{Memory, evaluate};
use kv_core::{
    CellIdx, LayerIdx,
    layers::{LayerMap, LayerMemory, RecurrentMemory},
    memory::{StateGroup, StateStore},
};
use kv_graph::weights::MemoryWeights;
use kv_graph::{ConvSpec, Graph, GraphBuilder, GraphShape, HeadScanSpec, Input, NodeId, ScanSpec};
use kv_rows::{KvType, RowLayout};

const LAYER: LayerIdx = LayerIdx(0);

/// A weight by name.
type Named<'a> = (&'a str, Vec<usize>, &'a [f32]);

/// One recurrent operation that takes a token at a time.
struct WorkedExample {
    graph: Graph,
    weights: MemoryWeights,
    layout: RowLayout,
    memory: Memory,
    n_taken: u32,
}

impl WorkedExample {
    /// `build` makes the operation of embedding rows of `dim` values and the states.
    fn new(
        dim: usize,
        memory: RecurrentMemory,
        weights: &[Named<'_>],
        build: impl FnOnce(&mut GraphBuilder, NodeId, NodeId) -> NodeId,
    ) -> Self {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 1,
            n_outputs: 0,
        });
        let x = b.input(Input::Embeddings { dim }).unwrap();
        let states = b.input(Input::States).unwrap();
        let y = build(&mut b, x, states);
        let map = LayerMap::new(vec![LayerMemory::Recurrent(memory)]);
        let layout = RowLayout::new(&map, &[], KvType::F32).unwrap();
        let mut all = MemoryWeights::new();
        for (name, shape, values) in weights {
            all.insert_f32(name, shape, values).unwrap();
        }
        Self {
            graph: b.finish(&[y]).unwrap(),
            weights: all,
            layout: layout.with_states(&map, 1).unwrap(),
            memory: Memory::default(),
            n_taken: 0,
        }
    }

    fn take(&mut self, embeddings: &[f32]) -> Vec<f64> {
        let states = [StateGroup {
            rows: vec![0],
            source: (self.n_taken > 0).then_some(CellIdx(0)),
            stores: vec![StateStore {
                n_rows: 1,
                to: CellIdx(0),
            }],
        }];
        self.n_taken += 1;
        let inputs = GraphInputs {
            embeddings,
            states: &states,
            ..GraphInputs::default()
        };
        let (weights, layout) = (&self.weights, &self.layout);
        evaluate(&self.graph, weights, layout, &mut self.memory, &inputs).remove(0)
    }
}

fn assert_near(got: &[f64], want: &[f64]) {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-6;
    assert!(
        got.len() == want.len() && got.iter().zip(want).all(near),
        "{got:?}, not {want:?}"
    );
}

#[test]
fn g19_the_worked_convolution() {
    let memory = RecurrentMemory {
        conv_row: 1,
        state_row: 0,
    };
    let conv = ConvSpec {
        width: 2,
        weight: "w".into(),
        further: Vec::new(),
        bias: None,
    };
    let weights = [("w", vec![1, 2], &[0.5, 1.0][..])];
    let mut worked = WorkedExample::new(1, memory, &weights, |b, x, states| {
        b.conv("y", LAYER, &conv, [x, states]).unwrap()
    });
    assert_near(&worked.take(&[2.0]), &[2.0]);
    assert_near(&worked.take(&[4.0]), &[5.0]);
}

#[test]
fn g19_channels_of_a_convolution_are_kept_apart_and_the_bias_is_added() {
    let memory = RecurrentMemory {
        conv_row: 4,
        state_row: 0,
    };
    let conv = ConvSpec {
        width: 3,
        weight: "w".into(),
        further: Vec::new(),
        bias: Some("b".into()),
    };
    let weights = [
        ("w", vec![2, 3], &[1.0, 1.0, 1.0, 0.0, 0.0, 2.0][..]),
        ("b", vec![2], &[0.5, -1.0]),
    ];
    let mut worked = WorkedExample::new(2, memory, &weights, |b, x, states| {
        b.conv("y", LAYER, &conv, [x, states]).unwrap()
    });
    worked.take(&[1.0, 10.0]);
    worked.take(&[2.0, 20.0]);
    assert_near(&worked.take(&[3.0, 30.0]), &[6.5, 59.0]);
}

#[test]
fn g19_the_worked_scan() {
    let memory = RecurrentMemory {
        conv_row: 0,
        state_row: 1,
    };
    let scan = ScanSpec {
        d_state: 1,
        a: "a".into(),
        d: "d".into(),
    };
    let weights = [("a", vec![1, 1], &[-1.0][..]), ("d", vec![1], &[0.0])];
    let mut worked = WorkedExample::new(4, memory, &weights, |b, all, states| {
        let [x, dt, bs, cs] = [0, 1, 2, 3].map(|i| {
            let name = format!("column {i}");
            b.columns(&name, all, i..i + 1).unwrap()
        });
        b.scan("y", LAYER, &scan, [x, dt, bs, cs, states]).unwrap()
    });
    let ln2 = std::f64::consts::LN_2;
    assert_near(&worked.take(&[2.0, 0.0, 1.0, 1.0]), &[2.0 * ln2]);
    // e^-ln 2 = 1/2 of what was there stays.
    assert_near(&worked.take(&[2.0, 0.0, 1.0, 1.0]), &[3.0 * ln2]);
}

#[test]
fn heads_share_decay_and_groups_share_b_and_c() {
    let memory = RecurrentMemory {
        conv_row: 0,
        state_row: 2,
    };
    // Two heads of one channel, a group each, one value of state: one halves it, one forgets it.
    let scan = HeadScanSpec {
        n_heads: 2,
        n_groups: 2,
        d_state: 1,
        a: "a".into(),
        d: "d".into(),
        dt_bias: "dt.b".into(),
    };
    let weights = [
        ("a", vec![2], &[-1.0, -1000.0][..]),
        ("d", vec![2], &[0.0, 10.0]),
        ("dt.b", vec![2], &[0.0, -1.0]),
    ];
    let mut worked = WorkedExample::new(8, memory, &weights, |b, all, states| {
        let [x, dt, bs, cs] = [0, 2, 4, 6].map(|i| {
            let name = format!("columns from {i}");
            b.columns(&name, all, i..i + 2).unwrap()
        });
        let operands = [x, dt, bs, cs, states];
        b.scan_heads("y", LAYER, &scan, operands).unwrap()
    });
    let ln2 = std::f64::consts::LN_2;
    let x = [1.0, 2.0, 0.0, 1.0, 1.0, 3.0, 2.0, 1.0];
    assert_near(&worked.take(&x), &[2.0 * ln2, 6.0 * ln2 + 20.0]);
    assert_near(&worked.take(&x), &[3.0 * ln2, 6.0 * ln2 + 20.0]);
}
