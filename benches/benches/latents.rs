//! Attention over latents of the CPU backend: one token at depth, for one head and for many.
//! Throughput is bytes of latents, each row of which has to be read once for all heads.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use std::sync::Arc;

use cellar_benches::{Failure, commit, memory, next_tokens};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_backend::{Backend, RowKind, RowSpan};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    CellIdx, LayerIdx, PartIdx, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::MemoryInputs,
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::weights::MemoryWeights;
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input};
use kv_rows::{KvType, RowLayout};

/// As in DeepSeek V2 and V3: latents of 512 values and a key of 64 that all heads share.
const RANK: usize = 512;
const WIDTH: usize = RANK + 64;
const DEPTH: u32 = 8192;

/// One token that is stored, and attends with so many heads.
fn graph(n_heads: usize) -> Result<Graph, Failure> {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens: 1,
        n_outputs: 0,
    });
    let (part, window, layer) = (PartIdx(0), Window::Full, LayerIdx(0));
    let dim = (n_heads + 1) * WIDTH;
    let x = b.input(Input::Embeddings { dim })?;
    let cells = b.input(Input::Cells { part })?;
    let visibility = b.input(Input::Visibility { part, window })?;
    let q = b.columns("q.flat", x, 0..n_heads * WIDTH)?;
    let q = b.reshape("q", q, &[1, n_heads, WIDTH])?;
    let row = b.columns("row.flat", x, n_heads * WIDTH..dim)?;
    let row = b.reshape("row", row, &[1, 1, WIDTH])?;
    let stored = b.store_k("store", layer, [row, cells])?;
    let spec = AttendSpec {
        n_heads,
        kv_heads: 1,
        k_dim: WIDTH,
        v_dim: RANK,
        scale: 0.07,
        soft_cap: None,
        alibi: None,
    };
    let y = b.attend("kqv", layer, spec, [q, stored, visibility])?;
    Ok(b.finish(&[y])?)
}

fn bench_heads(c: &mut Criterion, n_heads: usize, kv_type: KvType) -> Result<(), Failure> {
    let mut memory = memory(DEPTH, 1, Window::Full)?;
    let mut inputs = MemoryInputs::default();
    for n in [DEPTH - 1, 1] {
        let batch = next_tokens(&memory, 1, n)?;
        commit(&mut memory, &batch, u32::MAX, &mut inputs)?;
    }
    let latent = LayerMemory::Latent(AttentionMemory {
        kv_heads: 1,
        k_dim: WIDTH,
        v_dim: RANK,
        window: Window::Full,
    });
    let layout = RowLayout::new(&LayerMap::new(vec![latent]), &[DEPTH as usize], kv_type)?;
    let backend = CpuBackend::new(CpuConfig::default())?;
    let mut rows = backend.allocate(&layout)?;
    // Untouched pages would all be the same zero page.
    for layer in layout.layers() {
        let span = RowSpan {
            layer: layer.layer,
            kind: RowKind::K,
            first: CellIdx(0),
            len: DEPTH,
        };
        let bytes = vec![0x11; DEPTH as usize * layer.k.bytes()];
        backend.write_rows(&mut rows, span, &bytes)?;
    }
    let weights = backend.load_weights(Arc::new(MemoryWeights::new()), Default::default())?;
    let mut program = backend.compile(&graph(n_heads)?, &weights, &layout)?;
    let embeddings = vec![0.5; (n_heads + 1) * WIDTH];
    let inputs = GraphInputs {
        embeddings: &embeddings,
        parts: &inputs.parts,
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    let mut group = c.benchmark_group("latents");
    group.throughput(Throughput::Bytes(layout.bytes()));
    group.bench_function(format!("{n_heads} heads, {kv_type}"), |b| {
        b.iter(|| {
            let done = backend.run(&mut program, &mut rows, &inputs, &mut outputs);
            assert!(done.is_ok(), "{done:?}");
        });
    });
    Ok(())
}

fn latents(c: &mut Criterion) {
    for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
        for n_heads in [1, 16, 128] {
            bench_heads(c, n_heads, kv_type).expect("the bench is set up");
        }
    }
}

criterion_group!(benches, latents);
criterion_main!(benches);
