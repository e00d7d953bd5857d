//! How many bytes a second GEMV, attention and copies read and write, on any device.
//!
//! Runs of two lengths are timed, and the difference is what counts: uploads, downloads and waits
//! are in both.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Instant;

use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_contract::{Random, block_weight};
use kv_core::{
    CellIdx, CellRun, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::PartInputs,
};
use kv_gpu::{Device, GpuBackend, Region};
use kv_graph::weights::{MemoryWeights, Weight};
use kv_graph::{AttendSpec, Attention, Graph, GraphBuilder, GraphShape, Input};
use kv_rows::{KvType, RowLayout};

/// Runs that are not timed: kernels are compiled, and launches recorded.
const N_WARM_RUNS: usize = 3;
/// Runs of which the median counts.
const N_RUNS: usize = 21;

/// Bytes that were moved in a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// Bytes that were read and written.
    pub(crate) bytes: f64,
    /// Seconds that took.
    pub(crate) seconds: f64,
}

impl Rate {
    /// 10^9 bytes a second.
    pub(crate) fn gigabytes(self) -> f64 {
        self.bytes / self.seconds / 1e9
    }
}

fn median_seconds(n_runs: usize, mut run: impl FnMut()) -> f64 {
    let mut seconds: Vec<f64> = (0..n_runs)
        .map(|_| {
            let started = Instant::now();
            run();
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[n_runs / 2]
}

/// Copies of `len` bytes on the device.
pub(crate) fn copies<D: Device>(device: &D, len: usize) -> Rate {
    let [from, to] = [(); 2].map(|()| device.allocate(len, "a measurement").unwrap());
    let [from, to] = [&from, &to].map(|buffer| Region { buffer, at: 0 });
    let copy = || {
        device.copy(from, to, len).unwrap();
        device.wait().unwrap();
    };
    median_seconds(N_WARM_RUNS, copy);
    Rate {
        bytes: 2.0 * len as f64,
        seconds: median_seconds(N_RUNS, copy),
    }
}

/// A graph with all that it runs on.
struct TimedGraph<'a> {
    graph: &'a Graph,
    weights: &'a MemoryWeights,
    layout: &'a RowLayout,
    inputs: GraphInputs<'a>,
}

impl TimedGraph<'_> {
    /// Seconds of a run.
    fn seconds<D: Device>(&self, backend: &GpuBackend<D>) -> f64 {
        let weights = Arc::new(self.weights.clone());
        let weights = backend.load_weights(weights, Default::default()).unwrap();
        let mut program = backend.compile(self.graph, &weights, self.layout).unwrap();
        let mut rows = backend.allocate(self.layout).unwrap();
        let mut outputs = GraphOutputs::default();
        let mut run = || {
            backend
                .run(&mut program, &mut rows, &self.inputs, &mut outputs)
                .unwrap();
        };
        median_seconds(N_WARM_RUNS, &mut run);
        let seconds = median_seconds(N_RUNS, run);
        assert!(outputs.first().iter().all(|y| y.is_finite()));
        assert!(outputs.first().iter().any(|&y| y != 0.0));
        seconds
    }
}

/// Square matrices, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    /// Rows and columns of each.
    pub(crate) width: usize,
    /// Number of matrices; together they are larger than all caches.
    pub(crate) n: usize,
}

/// Products of one token with matrices of a format, each with the result of the one before.
pub(crate) fn gemv<D: Device>(
    backend: &GpuBackend<D>,
    format: BlockFormat,
    matrices: Matrices,
) -> Rate {
    let Matrices { width, n } = matrices;
    let matrix = block_weight("w", &[width, width], format);
    let n_bytes = matrix.bytes().len();
    let seconds = |n: usize| {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        });
        let (mut y, mut weights) = (
            b.input(Input::Embeddings { dim: width }).unwrap(),
            MemoryWeights::new(),
        );
        for at in 0..n {
            let name = format!("w{at}");
            y = b.linear(&format!("y{at}"), y, &name, width).unwrap();
            let bytes = matrix.bytes().clone();
            weights.insert(Weight::new(name, vec![width; 2], format, bytes).unwrap());
        }
        // So small that no product of products overflows.
        let x: Vec<f32> = Random::new(1).values(width);
        let x: Vec<f32> = x.iter().map(|x| x * 1e-20).collect();
        TimedGraph {
            graph: &b.finish(&[y]).unwrap(),
            weights: &weights,
            layout: &RowLayout::default(),
            inputs: GraphInputs {
                embeddings: &x,
                ..GraphInputs::default()
            },
        }
        .seconds(backend)
    };
    Rate {
        bytes: (n * n_bytes) as f64,
        seconds: seconds(2 * n) - seconds(n),
    }
}

/// Sequences that attend over as many tokens each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequences {
    /// Number of sequences, of one token each in the batch.
    pub(crate) n: usize,
    /// Tokens of each.
    pub(crate) depth: usize,
    /// Layers.
    pub(crate) n_layers: usize,
}

/// Heads of a model of 7B.
const SPEC: AttendSpec = AttendSpec {
    n_heads: 32,
    kv_heads: 8,
    k_dim: 128,
    v_dim: 128,
    scale: 0.088,
    soft_cap: None,
    alibi: None,
};

fn attention_graph(n_rows: usize, n_layers: usize) -> Graph {
    let part = PartIdx(0);
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens: n_rows,
        n_outputs: n_rows,
    });
    let dim = SPEC.n_heads * SPEC.k_dim;
    let x = b.input(Input::Embeddings { dim }).unwrap();
    let q = b.reshape("q", x, &[n_rows, SPEC.n_heads, SPEC.k_dim]);
    let kv = b.columns("kv.flat", x, 0..SPEC.kv_heads * SPEC.k_dim);
    let shape = [n_rows, SPEC.kv_heads, SPEC.k_dim];
    let kv = b.reshape("kv", kv.unwrap(), &shape).unwrap();
    let cells = b.input(Input::Cells { part }).unwrap();
    let window = Window::Full;
    let seen = b.input(Input::Visibility { part, window }).unwrap();
    let (q, mut sum) = (q.unwrap(), x);
    for layer in 0..n_layers {
        let at = LayerIdx(layer as u32);
        let store = b.store_kv(&format!("store{layer}"), at, [kv, kv, cells]);
        let attention = Attention {
            spec: SPEC,
            sinks: None,
        };
        let operands = [q, store.unwrap(), seen];
        let y = b.attend(&format!("y{layer}"), at, attention, operands);
        sum = b.add(&format!("sum{layer}"), sum, y.unwrap()).unwrap();
    }
    b.finish(&[sum]).unwrap()
}

/// Attention of one token of each sequence.
pub(crate) fn attention<D: Device>(
    backend: &GpuBackend<D>,
    kv_type: KvType,
    sequences: Sequences,
) -> Rate {
    let Sequences { n, depth, n_layers } = sequences;
    let memory = AttentionMemory {
        kv_heads: SPEC.kv_heads,
        k_dim: SPEC.k_dim,
        v_dim: SPEC.v_dim,
        window: Window::Full,
    };
    let group = |row: usize| {
        let run = CellRun {
            cell: CellIdx((row * depth) as u32),
            pos: Pos(0),
            len: depth as u32,
        };
        let all = PosRange::new(Pos(0), Pos(depth as u32 - 1));
        VisibleGroup::new(vec![row as u32], vec![run], vec![all])
    };
    let last = |row: usize| CellIdx(((row + 1) * depth - 1) as u32);
    let parts = [PartInputs {
        cells: (0..n).map(last).collect(),
        visibility: Visibility::new(n as u32, (0..n).map(group).collect()),
        ..PartInputs::default()
    }];
    let x = Random::new(2).values(n * SPEC.n_heads * SPEC.k_dim);
    let seconds = |n_layers: usize| {
        let map = LayerMap::new(vec![LayerMemory::Attention(memory); n_layers]);
        let layout = RowLayout::new(&map, &[n * depth], kv_type).unwrap();
        TimedGraph {
            graph: &attention_graph(n, n_layers),
            weights: &MemoryWeights::new(),
            layout: &layout,
            inputs: GraphInputs {
                embeddings: &x,
                parts: &parts,
                ..GraphInputs::default()
            },
        }
        .seconds(backend)
    };
    let values = SPEC.kv_heads * (SPEC.k_dim + SPEC.v_dim);
    let row_bytes = kv_type.row_bytes(values);
    Rate {
        bytes: (n_layers * n * depth * row_bytes) as f64,
        seconds: seconds(2 * n_layers) - seconds(n_layers),
    }
}
