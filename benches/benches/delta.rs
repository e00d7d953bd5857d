//! Recurrent layers of the CPU backend: the gated delta rule and the scan of Mamba-2, with
//! states of one size and of every type, for a prompt and for one token. Throughput is tokens.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use std::sync::Arc;

use cellar_benches::Failure;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    CellIdx, LayerIdx,
    layers::{LayerMap, LayerMemory, RecurrentMemory},
    memory::{StateGroup, StateStore},
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::weights::MemoryWeights;
use kv_graph::{
    DeltaSpec, Graph, GraphBuilder, GraphShape, HeadScanSpec, Input, KeySharing, NodeId,
};
use kv_rows::{KvType, RowLayout, StateType};

/// As in Qwen3-Next: a state of two megabytes in each layer.
const HEADS: usize = 32;
const KEY_HEADS: usize = 16;
/// Width of keys and of values, and of the state of one Mamba-2 channel.
const DIM: usize = 128;
const CHANNELS: usize = HEADS * DIM;
/// Layers that take turns: their states do not fit in the caches together.
const LAYERS: usize = 8;

/// The recurrence of every layer.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Mamba2,
    Delta,
    DeltaByKey,
}

impl Kind {
    /// One layer from rows that are as good as any: `x`, whose columns are below 1.
    fn layer(self, b: &mut GraphBuilder, layer: LayerIdx, x: NodeId) -> Result<NodeId, Failure> {
        let mut b = b.scope(layer);
        let states = b.input(Input::States)?;
        let v = b.columns("v", x, 0..CHANNELS)?;
        let narrow = b.columns("narrow", x, 0..HEADS)?;
        let q = b.columns("q", x, 64..64 + KEY_HEADS * DIM)?;
        let k = b.columns("k", x, 128..128 + KEY_HEADS * DIM)?;
        let delta = DeltaSpec {
            n_heads: HEADS,
            key_heads: KEY_HEADS,
            k_dim: DIM,
            sharing: KeySharing::Neighbours,
            scale: 0.1,
        };
        Ok(match self {
            Self::Mamba2 => {
                let scan = HeadScanSpec {
                    n_heads: HEADS,
                    n_groups: KEY_HEADS,
                    d_state: DIM,
                    a: "a".to_owned(),
                    d: "d".to_owned(),
                    dt_bias: "dt_bias".to_owned(),
                };
                b.scan_heads("y", layer, &scan, [v, narrow, q, k, states])?
            }
            Self::Delta => b.delta("y", layer, delta, [q, k, v, narrow, narrow, states])?,
            Self::DeltaByKey => b.delta("y", layer, delta, [q, k, v, v, narrow, states])?,
        })
    }

    fn graph(self, n_tokens: usize) -> Result<Graph, Failure> {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens,
            n_outputs: 0,
        });
        let x = b.input(Input::Embeddings { dim: CHANNELS })?;
        let layers = (0..LAYERS as u32).map(LayerIdx);
        let outputs = layers.map(|layer| self.layer(&mut b, layer, x));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        Ok(b.finish(&outputs)?)
    }
}

fn bench_kind(
    c: &mut Criterion,
    kind: Kind,
    state_type: StateType,
    n_tokens: usize,
) -> Result<(), Failure> {
    let row = RecurrentMemory {
        conv_row: 0,
        state_row: CHANNELS * DIM,
    };
    let map = LayerMap::new(vec![LayerMemory::Recurrent(row); LAYERS]);
    let layout = RowLayout::new(&map, &[], KvType::F32)?.with_states(&map, 2)?;
    let layout = layout.with_state_type(state_type);
    let mut weights = MemoryWeights::new();
    for weight in kind.graph(1)?.weights() {
        let values = vec![-0.5; weight.shape.iter().product()];
        weights.insert_f32(&weight.name, &weight.shape, &values)?;
    }
    let backend = CpuBackend::new(CpuConfig::default())?;
    let weights = backend.load_weights(Arc::new(weights), Default::default())?;
    let graph = kind.graph(n_tokens)?;
    let mut rows = backend.allocate(&layout)?;
    let mut program = backend.compile(&graph, &weights, &layout)?;
    // Keys of a length below 1, decays and learning rates.
    let embeddings: Vec<f32> = (0..n_tokens * CHANNELS)
        .map(|at| 0.01 + (at % 101) as f32 / 2000.0)
        .collect();
    let to_the_other = |from: u32| StateGroup {
        rows: (0..n_tokens as u32).collect(),
        source: Some(CellIdx(from)),
        stores: vec![StateStore {
            n_rows: n_tokens as u32,
            to: CellIdx(1 - from),
        }],
    };
    let groups = [0, 1].map(|from| [to_the_other(from)]);
    let mut outputs = GraphOutputs::default();
    let mut group = c.benchmark_group("delta");
    group.sample_size(20);
    group.throughput(Throughput::Elements((n_tokens * LAYERS) as u64));
    let mut turn = 0;
    let name = match state_type {
        StateType::F32 => format!("{kind:?}, {n_tokens} tokens"),
        other => format!("{kind:?}, {n_tokens} tokens, {other}"),
    };
    group.bench_function(name, |b| {
        b.iter(|| {
            turn = 1 - turn;
            let inputs = GraphInputs {
                embeddings: &embeddings,
                states: &groups[turn],
                ..GraphInputs::default()
            };
            let done = backend.run(&mut program, &mut rows, &inputs, &mut outputs);
            assert!(done.is_ok(), "{done:?}");
        });
    });
    Ok(())
}

fn delta(c: &mut Criterion) {
    for n_tokens in [256, 1] {
        for kind in [Kind::Mamba2, Kind::Delta, Kind::DeltaByKey] {
            for state_type in StateType::ALL {
                bench_kind(c, kind, state_type, n_tokens).expect("the bench is set up");
            }
        }
    }
}

criterion_group!(benches, delta);
criterion_main!(benches);
