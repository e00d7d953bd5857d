//! What is computed together: fewer launches, the same values, and nothing where others read it
//! too.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_backend::{Backend, RowKind, RowSpan};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_contract::{Random, block_weight};
use kv_core::{
    CellIdx, CellRun, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::{BatchVisibility, PartInputs},
};
use kv_gpu::{Device, GpuBackend, Precision};
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::MemoryWeights;
use kv_graph::{Activation, AttendSpec, Graph, GraphBuilder, GraphShape, Input, NodeId};
use kv_rows::{KvType, RowLayout};

use crate::devices::backends;
use crate::support::{compare, graph};

/// The launches and other steps of a graph.
fn n_steps(graph: &Graph, weights: &MemoryWeights, precision: Precision) -> usize {
    let backend = backends(precision).swap_remove(0);
    let source = Arc::new(weights.clone());
    let weights = backend.load_weights(source, Default::default()).unwrap();
    let program = backend.compile(graph, &weights, &RowLayout::default());
    program.unwrap().n_steps()
}

/// Norms, sums and gates that products of `n` tokens read, rows of `dim` values.
fn block(b: &mut GraphBuilder, x: NodeId) -> Vec<NodeId> {
    let normed = b.rms_norm("normed", x, "gain", 1e-6).unwrap();
    let gate = b.linear("gate", normed, "gate.w", 64).unwrap();
    let up = b.linear("up", normed, "up.w", 64).unwrap();
    let gated = b.gate("gated", Activation::Silu, gate, up).unwrap();
    let down = b.linear("down", gated, "down.w", 320).unwrap();
    let sum = b.add("sum", x, down).unwrap();
    let again = b.rms_norm("again", sum, "gain", 1e-6).unwrap();
    let hidden = b.linear("hidden", again, "up.w", 64).unwrap();
    let hidden = b.activate("active", Activation::GeluTanh, hidden).unwrap();
    vec![b.linear("out", hidden, "down.w", 320).unwrap(), sum]
}

#[test]
fn products_read_what_norms_and_gates_have_quantized() {
    let mut weights = MemoryWeights::new();
    for (name, shape) in [
        ("gate.w", [64, 320]),
        ("up.w", [64, 320]),
        ("down.w", [320, 64]),
    ] {
        weights.insert(block_weight(name, &shape, BlockFormat::Q8_0));
    }
    let mut random = Random::new(9);
    weights
        .insert_f32("gain", &[320], &random.values(320))
        .unwrap();
    for n_tokens in [1, 5, 9] {
        let graph = graph(n_tokens, 320, block);
        let x = random.values(n_tokens * 320);
        compare(&graph, &weights, &x, [1e-5, 3e-2]);
        // norm, gate and up, gate, down, sum with norm, up, activation, down
        assert_eq!(n_steps(&graph, &weights, Precision::Precise), 8);
        // The same; with more tokens, gate and up by themselves and four values turned to halves.
        let fast = if n_tokens > 8 { 8 + 1 + 4 } else { 8 };
        assert_eq!(n_steps(&graph, &weights, Precision::Fast), fast);
    }
}

#[test]
fn rows_that_are_no_whole_blocks_are_quantized_by_themselves() {
    let graph = graph(2, 96, |b, x| {
        let heads = b.reshape("heads", x, &[2, 4, 24]).unwrap();
        let normed = b.rms_norm("normed", heads, "gain", 1e-6).unwrap();
        let flat = b.reshape("flat", normed, &[2, 96]).unwrap();
        vec![b.linear("y", flat, "w", 7).unwrap()]
    });
    let mut weights = MemoryWeights::new();
    weights.insert(block_weight("w", &[7, 96], BlockFormat::Q4_0));
    weights.insert_f32("gain", &[24], &[1.0; 24]).unwrap();
    let x = Random::new(10).values(2 * 96);
    compare(&graph, &weights, &x, [1e-5, 3e-2]);
    assert_eq!(n_steps(&graph, &weights, Precision::Fast), 3);
}

/// The result of three tokens that attend over each other: rows of 192 values.
fn found(b: &mut GraphBuilder) -> NodeId {
    let spec = AttendSpec {
        n_heads: 4,
        kv_heads: 2,
        k_dim: 32,
        v_dim: 48,
        scale: 0.2,
        soft_cap: None,
        alibi: None,
    };
    let x = b.input(Input::Embeddings { dim: 192 }).unwrap();
    let [q, k, v] = [("q", 4, 32), ("k", 2, 32), ("v", 2, 48)].map(|(name, n, dim)| {
        let flat = b.columns(&format!("{name}.flat"), x, 0..n * dim);
        b.reshape(name, flat.unwrap(), &[3, n, dim]).unwrap()
    });
    let found = b.attend_batch("found", spec, [q, k, v], Window::Full);
    b.reshape("found.flat", found.unwrap(), &[3, 192]).unwrap()
}

/// The result of a graph of three tokens, and its number of steps.
fn run_three(graph: &Graph, weights: &MemoryWeights, x: &[f32]) -> (Vec<f32>, usize) {
    let backend = backends(Precision::Fast).swap_remove(0);
    let source = Arc::new(weights.clone());
    let loaded = backend.load_weights(source, Default::default()).unwrap();
    let layout = RowLayout::default();
    let mut program = backend.compile(graph, &loaded, &layout).unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let run = CellRun {
        cell: CellIdx(0),
        pos: Pos(0),
        len: 3,
    };
    let all = vec![PosRange::new(Pos(0), Pos(2)); 3];
    let group = VisibleGroup::new(vec![0, 1, 2], vec![run], all);
    let inputs = GraphInputs {
        embeddings: x,
        batch: &[BatchVisibility {
            window: Window::Full,
            visibility: Visibility::new(3, vec![group]),
        }],
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    backend
        .run(&mut program, &mut rows, &inputs, &mut outputs)
        .unwrap();
    (outputs.values.swap_remove(0), program.n_steps())
}

#[test]
fn products_read_what_attention_has_quantized() {
    let mut weights = MemoryWeights::new();
    weights.insert(block_weight("w", &[24, 192], BlockFormat::Q8_0));
    let graph = |nodes: fn(&mut GraphBuilder) -> NodeId| {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let y = nodes(&mut b);
        b.finish(&[y]).unwrap()
    };
    let x = Random::new(12).values(3 * 192);
    let (found_alone, n_alone) = run_three(&graph(found), &weights, &x);
    let both = graph(|b| {
        let found = found(b);
        b.linear("y", found, "w", 24).unwrap()
    });
    let (y, n_both) = run_three(&both, &weights, &x);
    // One launch more: the merge has written blocks of int8 for it.
    assert_eq!(n_both, n_alone + 1);
    let product = graph(|b| {
        let x = b.input(Input::Embeddings { dim: 192 }).unwrap();
        b.linear("y", x, "w", 24).unwrap()
    });
    let (wanted, n_apart) = run_three(&product, &weights, &found_alone);
    assert_eq!(n_apart, 2);
    assert_eq!(y, wanted);
    assert!(y.iter().any(|&y| y != 0.0));
}

/// Rows for one layer of two heads, 48 values of K and 160 of V each.
fn layout(kv_type: KvType) -> RowLayout {
    let memory = LayerMemory::Attention(AttentionMemory {
        kv_heads: 2,
        k_dim: 48,
        v_dim: 160,
        window: Window::Full,
    });
    let map = LayerMap::new(vec![memory]);
    RowLayout::new(&map, &[8], kv_type).unwrap()
}

/// The outputs of a graph besides its stored keys and values.
#[derive(Clone, Copy)]
enum GraphOutput {
    Queries,
    QueriesAndKeys,
}

/// Queries and keys are rotated, keys and values stored.
fn stored(given: GraphOutput, style: RopeStyle) -> Graph {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens: 3,
        n_outputs: 3,
    });
    let dim = 3 * 48 + 2 * 48 + 2 * 160;
    let x = b.input(Input::Embeddings { dim }).unwrap();
    let positions = b.input(Input::Positions).unwrap();
    let cells = b.input(Input::Cells { part: PartIdx(0) }).unwrap();
    let rope = RopeSpec {
        style,
        n_rot: 32,
        base: 10_000.0,
        scaling: RopeScaling::None,
        factors: None,
    };
    let mut first = 0;
    let mut heads = |b: &mut GraphBuilder, name: &str, n: usize, dim: usize| {
        let columns = b.columns(name, x, first..first + n * dim).unwrap();
        first += n * dim;
        b.reshape(&format!("{name}.heads"), columns, &[3, n, dim])
            .unwrap()
    };
    let (q, k) = (heads(&mut b, "q", 3, 48), heads(&mut b, "k", 2, 48));
    let v = heads(&mut b, "v", 2, 160);
    let q = b.rope("q.rope", q, positions, &rope).unwrap();
    let k = b.rope("k.rope", k, positions, &rope).unwrap();
    b.store_kv("store", LayerIdx(0), [k, v, cells]).unwrap();
    let outputs = match given {
        GraphOutput::Queries => vec![q],
        GraphOutput::QueriesAndKeys => vec![q, k],
    };
    b.finish(&outputs).unwrap()
}

/// Runs a graph; the queries, the stored bytes and the number of steps.
fn run_stored<D: Device>(
    backend: &GpuBackend<D>,
    graph: &Graph,
    kv_type: KvType,
) -> (Vec<f32>, Vec<u8>, usize) {
    let layout = layout(kv_type);
    let source = Arc::new(MemoryWeights::new());
    let weights = backend.load_weights(source, Default::default()).unwrap();
    let mut program = backend.compile(graph, &weights, &layout).unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let parts = [PartInputs {
        cells: vec![CellIdx(6), CellIdx(0), CellIdx(3)],
        ..PartInputs::default()
    }];
    let inputs = GraphInputs {
        embeddings: &Random::new(11).values(3 * 560),
        positions: &[5, 900, 0],
        parts: &parts,
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    backend
        .run(&mut program, &mut rows, &inputs, &mut outputs)
        .unwrap();
    let mut bytes = Vec::new();
    for (kind, len) in [(RowKind::K, 96), (RowKind::V, 320)] {
        let mut part = vec![0; kv_type.row_bytes(len) * 8];
        let span = RowSpan {
            layer: LayerIdx(0),
            kind,
            first: CellIdx(0),
            len: 8,
        };
        backend.read_rows(&rows, span, &mut part).unwrap();
        bytes.extend(part);
    }
    (outputs.values.swap_remove(0), bytes, program.n_steps())
}

#[test]
fn rotated_keys_are_stored_at_once() {
    for style in [RopeStyle::Neox, RopeStyle::Norm] {
        let (fused, apart) = (
            stored(GraphOutput::Queries, style),
            stored(GraphOutput::QueriesAndKeys, style),
        );
        for kv_type in KvType::ALL {
            for backend in &backends(Precision::Fast) {
                let (q, bytes, n) = run_stored(backend, &fused, kv_type);
                let (wanted_q, wanted, n_apart) = run_stored(backend, &apart, kv_type);
                // Columns three times, and both at once, or one after the other.
                assert_eq!((n, n_apart), (4, 5), "{kv_type}");
                assert_eq!(q, wanted_q, "{kv_type}");
                assert!(
                    bytes == wanted,
                    "{kv_type}, {style:?}: other bytes are stored"
                );
                assert!(bytes.iter().any(|&byte| byte != 0));
            }
        }
    }
}
