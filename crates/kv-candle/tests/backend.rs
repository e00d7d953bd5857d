//! What the contract suite cannot see from outside: stored bits, empty results, shared weights.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::sync::Arc;

use kv_backend::{Backend, BackendError, RowKind, RowSpan};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_candle::CandleBackend;
use kv_contract::{OneOp, StoreRows};
use kv_core::{
    CellIdx, CellRun, LayerIdx, PartIdx, Pos, PosRange, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::PartInputs,
};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{Activation, AttendSpec, Graph, GraphBuilder, GraphError, GraphShape, Input};
use kv_rows::{KvType, RowLayout};

const LAYER: LayerIdx = LayerIdx(0);

fn layout(n_cells: usize, kv_type: KvType) -> RowLayout {
    let memory = AttentionMemory {
        kv_heads: 1,
        k_dim: 4,
        v_dim: 4,
        window: Window::Full,
    };
    let map = LayerMap::new(vec![LayerMemory::Attention(memory)]);
    RowLayout::new(&map, &[n_cells], kv_type).unwrap()
}

/// One layer of attention with a gate, tied embeddings of 8 tokens, logits of the wanted rows.
fn graph(n_tokens: usize, n_outputs: usize) -> Result<Graph, GraphError> {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs,
    });
    let (tokens, part) = (b.input(Input::Tokens)?, PartIdx(0));
    let x = b.embed("embd", tokens, "tok", [8, 4])?;
    let heads = b.reshape("heads", x, &[n_tokens, 1, 4])?;
    let cells = b.input(Input::Cells { part })?;
    let stored = b.store_kv("stored", LAYER, [heads, heads, cells])?;
    let sees = b.input(Input::Visibility {
        part,
        window: Window::Full,
    })?;
    let spec = AttendSpec {
        n_heads: 1,
        kv_heads: 1,
        k_dim: 4,
        v_dim: 4,
        scale: 0.5,
        soft_cap: None,
        alibi: None,
    };
    let y = b.attend("kqv", LAYER, spec, [heads, stored, sees])?;
    let y = b.gate("gate", Activation::GeluTanh, y, x)?;
    let wanted = b.input(Input::OutputRows)?;
    let y = b.take_rows("rows", y, wanted)?;
    let y = b.rms_norm("norm", y, "gain", 1e-5)?;
    let logits = b.linear("logits", y, "tok", 8)?;
    b.finish(&[logits])
}

fn weights() -> Arc<dyn WeightSource> {
    let mut source = MemoryWeights::new();
    let values: Vec<f32> = (0..32).map(|i| (i as f32 * 0.9).sin()).collect();
    source.insert_f32("tok", &[8, 4], &values).unwrap();
    source
        .insert_f32("gain", &[4], &[1.0, 0.5, 2.0, 1.0])
        .unwrap();
    Arc::new(source)
}

/// Tokens at positions 0, 1, … in cells 2, 3, …
fn part(n: u32) -> PartInputs {
    let runs = vec![CellRun {
        cell: CellIdx(2),
        pos: Pos(0),
        len: n,
    }];
    let limits = (0..n).map(|p| PosRange::new(Pos(0), Pos(p))).collect();
    let groups = vec![VisibleGroup::new((0..n).collect(), runs, limits)];
    PartInputs {
        cells: (2..2 + n).map(CellIdx).collect(),
        visibility: Visibility::new(n, groups),
        ..PartInputs::default()
    }
}

fn run(
    n_outputs: usize,
    edit: impl Fn(&mut PartInputs),
) -> (Result<Vec<f32>, BackendError>, Vec<u8>) {
    let backend = CandleBackend::cpu();
    let layout = layout(6, KvType::F32);
    let mut rows = backend.allocate(&layout).unwrap();
    let weights = backend.load_weights(weights(), Default::default()).unwrap();
    let mut program = backend
        .compile(&graph(3, n_outputs).unwrap(), &weights, &layout)
        .unwrap();
    let mut parts = [part(3)];
    edit(&mut parts[0]);
    let output_rows = [0u32, 1, 2];
    let inputs = GraphInputs {
        tokens: &[7, 0, 3],
        output_rows: &output_rows[..n_outputs],
        parts: &parts,
        states: &[],
        cancel: None,
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    let done = backend.run(&mut program, &mut rows, &inputs, &mut outputs);
    let mut bytes = vec![0; 6 * 16];
    let span = RowSpan {
        layer: LAYER,
        kind: RowKind::V,
        first: CellIdx(0),
        len: 6,
    };
    backend.read_rows(&rows, span, &mut bytes).unwrap();
    (done.map(|()| outputs.first().to_vec()), bytes)
}

#[test]
fn rows_are_stored_without_outputs_and_only_in_their_cells() {
    let (logits, bytes) = run(3, |_| {});
    assert_eq!(logits.unwrap().len(), 24);
    let (none, same_bytes) = run(0, |_| {});
    assert_eq!(none.unwrap().len(), 0);
    assert_eq!(bytes, same_bytes);
    let zero_rows = |range: std::ops::Range<usize>| bytes[range].iter().all(|&b| b == 0);
    assert!(zero_rows(0..32) && zero_rows(80..96) && !zero_rows(32..80));
}

#[test]
fn a_row_that_sees_nothing_leaves_the_others_alone() {
    let whole = run(3, |_| {}).0.unwrap();
    let blinded = run(3, |part| {
        part.visibility.groups[0].limits[1] = PosRange::EMPTY
    })
    .0
    .unwrap();
    assert_eq!(whole[..8], blinded[..8]);
    assert_eq!(blinded[8..16], [0.0; 8]);
    assert!(
        whole[16..]
            .iter()
            .zip(&blinded[16..])
            .all(|(a, b)| (a - b).abs() < 1e-6)
    );
}

#[test]
fn refused_inputs_are_named_and_change_nothing() {
    let refused = |edit: fn(&mut PartInputs)| {
        let (result, bytes) = run(3, edit);
        assert!(bytes.iter().all(|&b| b == 0), "rows changed");
        result.unwrap_err().to_string()
    };
    assert_eq!(
        refused(|p| p.cells[2] = CellIdx(6)),
        "input cells: 6 is not below 6"
    );
    assert_eq!(
        refused(|p| p.cells.truncate(2)),
        "input cells: the graph takes 3 values, got 2"
    );
    let text = refused(|p| p.visibility.groups[0].runs[0].len = 5);
    assert_eq!(
        text,
        "input visibility: group 0: run 2+5@0 does not lie in 6 cells"
    );
}

#[test]
fn stored_bits_are_those_of_the_scalar_codec() {
    // Ties, subnormals, overflow, negative zero: everything that rounding can get wrong.
    let odd = [
        2049.0, 2051.0, 65519.0, 65520.0, -0.0, 5e-8, 2.9e-8, 2.98e-8, 1e-40, -1e30, 0.1,
    ];
    let mut values: Vec<f32> = odd.to_vec();
    values.extend((0..65_525u32).map(|i| f32::from_bits(i << 16 | ((i * 7919) & 0xffff))));
    values.retain(|v| !v.is_nan());
    values.truncate(values.len() / 8 * 8);
    let (k, v) = values.split_at(values.len() / 2);
    let n = k.len() / 4;
    let backend = CandleBackend::cpu();
    // Rows of blocks are the contract suite's.
    for kv_type in KvType::ALL.into_iter().filter(|t| !t.is_quantised()) {
        let mut rows = backend.allocate(&layout(n, kv_type)).unwrap();
        let cells: Vec<CellIdx> = (0..n as u32).rev().map(CellIdx).collect();
        let args = StoreRows {
            layer: LAYER,
            k,
            v,
            cells: &cells,
        };
        let op = OneOp::store(&layout(n, kv_type), &args);
        op.run(&backend, &mut rows).unwrap();
        for (kind, values) in [(RowKind::K, k), (RowKind::V, v)] {
            let mut got = vec![0; kv_type.row_bytes(values.len())];
            let span = RowSpan {
                layer: LAYER,
                kind,
                first: CellIdx(0),
                len: n as u32,
            };
            backend.read_rows(&rows, span, &mut got).unwrap();
            let mut wanted = vec![0; kv_type.row_bytes(4)];
            for (row, got) in values.chunks(4).rev().zip(got.chunks(wanted.len())) {
                kv_type.encode_row(row, &mut wanted);
                assert_eq!(got, wanted, "{kv_type} {row:?}");
            }
        }
    }
}

#[test]
fn more_rows_than_memory_is_an_error() {
    let error = CandleBackend::cpu()
        .allocate(&layout(1 << 50, KvType::F32))
        .unwrap_err();
    assert!(matches!(error, BackendError::OutOfMemory { wanted, .. } if wanted == 1 << 54));
}
