//! Attention of the CPU backend: one token at depth, a prompt, and many concurrent sequences, each
//! layer after storing its K and V. Throughput is bytes of K and V, each of which must be read at
//! least once.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use std::sync::Arc;

use cellar_benches::{Failure, commit, memory, next_tokens};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_backend::{Backend, RowKind, RowSpan};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    CellIdx, LayerIdx, PartIdx, Pos, PosRange, SeqId, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::{Memory, MemoryInputs, Seqs},
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::weights::MemoryWeights;
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input};
use kv_rows::{KvType, RowLayout};

/// The heads of a model of half a billion parameters: 14 query heads on 2 KV heads.
const SPEC: AttendSpec = AttendSpec {
    n_heads: 14,
    kv_heads: 2,
    k_dim: 64,
    v_dim: 64,
    scale: 0.125,
    soft_cap: None,
    alibi: None,
};

/// Values of a token's query, key and value rows.
const DIM: usize = SPEC.n_heads * SPEC.k_dim + SPEC.kv_heads * (SPEC.k_dim + SPEC.v_dim);

/// The cells of a sequence's tokens.
#[derive(Clone, Copy, PartialEq)]
enum Cells {
    /// In blocks, as the memory gives them to sequences that grow together.
    Blocks,
    /// In a run, as compacting leaves them.
    Runs,
    /// Each apart, as where every second cell is another sequence's.
    Apart,
}

struct Case {
    name: &'static str,
    cells: Cells,
    /// Layers that are attended in turn: many of them do not fit in the caches.
    n_layers: u32,
    n_seqs: u32,
    depth: u32,
    n_new: u32,
}

fn bench_case(c: &mut Criterion, case: &Case, kv_type: KvType) -> Result<(), Failure> {
    let n_own = (case.depth + case.n_new) * case.n_seqs;
    // Room for compacting.
    let n_cells = if case.n_seqs > 1 { 2 * n_own } else { n_own };
    let mut memory = memory(n_cells, case.n_seqs + 1, Window::Full)?;
    let mut inputs = MemoryInputs::default();
    if case.cells == Cells::Apart {
        // One sequence takes all cells and gives every second one back. Another one has its tokens.
        let all = next_tokens(&memory, 1, n_cells)?;
        commit(&mut memory, &all, u32::MAX, &mut inputs)?;
        let _shared = memory.copy(SeqId(0), SeqId(case.n_seqs), PosRange::ALL)?;
        memory.remove(Seqs::One(SeqId(0)), PosRange::ALL)?;
        for pos in (0..n_cells).step_by(2) {
            let one = PosRange::new(Pos(pos), Pos(pos));
            memory.remove(Seqs::One(SeqId(case.n_seqs)), one)?;
        }
    }
    for n in [case.depth, case.n_new] {
        if n == case.n_new && case.cells == Cells::Runs {
            while memory.compact()?.n_cells > 0 {}
        }
        let batch = next_tokens(&memory, case.n_seqs, n)?;
        commit(&mut memory, &batch, u32::MAX, &mut inputs)?;
    }
    let AttendSpec {
        kv_heads,
        k_dim,
        v_dim,
        ..
    } = SPEC;
    let layer = AttentionMemory {
        kv_heads,
        k_dim,
        v_dim,
        window: Window::Full,
    };
    let map = LayerMap::new(vec![LayerMemory::Attention(layer); case.n_layers as usize]);
    let layout = RowLayout::new(&map, &[n_cells as usize], kv_type)?;
    let backend = CpuBackend::new(CpuConfig::default())?;
    let mut rows = backend.allocate(&layout)?;
    // Untouched pages would all be the same zero page.
    for layer in layout.layers() {
        for (kind, shape) in [(RowKind::K, layer.k), (RowKind::V, layer.v)] {
            let span = RowSpan {
                layer: layer.layer,
                kind,
                first: CellIdx(0),
                len: n_cells,
            };
            let bytes = vec![0x11; n_cells as usize * shape.bytes()];
            backend.write_rows(&mut rows, span, &bytes)?;
        }
    }
    let n_rows = (case.n_new * case.n_seqs) as usize;
    let graph = attention(case.n_layers, n_rows)?;
    let weights = backend.load_weights(Arc::new(MemoryWeights::new()), Default::default())?;
    let mut program = backend.compile(&graph, &weights, &layout)?;
    let embeddings = vec![0.5; n_rows * DIM];
    let inputs = GraphInputs {
        embeddings: &embeddings,
        parts: &inputs.parts,
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    let mut group = c.benchmark_group("attend");
    group.throughput(Throughput::Bytes(
        layout.bytes() * u64::from(n_own) / u64::from(n_cells),
    ));
    group.bench_function(format!("{}, {kv_type}", case.name), |b| {
        b.iter(|| {
            let done = backend.run(&mut program, &mut rows, &inputs, &mut outputs);
            done.is_ok()
        });
    });
    Ok(())
}

/// Stores and attends in each layer, with queries, keys and values from the same embedding rows.
fn attention(n_layers: u32, n_tokens: usize) -> Result<Graph, Failure> {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: 0,
    });
    let part = PartIdx(0);
    let x = b.input(Input::Embeddings { dim: DIM })?;
    let cells = b.input(Input::Cells { part })?;
    let window = Window::Full;
    let visibility = b.input(Input::Visibility { part, window })?;
    let mut first = 0;
    let mut next = |name: &str, heads: usize, dim: usize| {
        let columns = first..first + heads * dim;
        first = columns.end;
        let flat = b.columns(&format!("{name}.flat"), x, columns)?;
        b.reshape(name, flat, &[n_tokens, heads, dim])
    };
    let q = next("q", SPEC.n_heads, SPEC.k_dim)?;
    let k = next("k", SPEC.kv_heads, SPEC.k_dim)?;
    let v = next("v", SPEC.kv_heads, SPEC.v_dim)?;
    let mut outputs = Vec::new();
    for layer in (0..n_layers).map(LayerIdx) {
        let stored = b.store_kv(&format!("store-{layer}"), layer, [k, v, cells])?;
        outputs.push(b.attend(
            &format!("kqv-{layer}"),
            layer,
            SPEC,
            [q, stored, visibility],
        )?);
    }
    Ok(b.finish(&outputs)?)
}

fn benches(c: &mut Criterion) {
    let cases = [
        Case {
            name: "1 token at depth 4096",
            n_layers: 1,
            cells: Cells::Blocks,
            n_seqs: 1,
            depth: 4096,
            n_new: 1,
        },
        Case {
            name: "1 token at depth 4096, 48 layers",
            n_layers: 48,
            cells: Cells::Blocks,
            n_seqs: 1,
            depth: 4096,
            n_new: 1,
        },
        Case {
            name: "prompt of 512",
            n_layers: 1,
            cells: Cells::Blocks,
            n_seqs: 1,
            depth: 1,
            n_new: 511,
        },
        Case {
            name: "16 sequences at depth 512",
            n_layers: 1,
            cells: Cells::Blocks,
            n_seqs: 16,
            depth: 512,
            n_new: 1,
        },
        Case {
            name: "16 sequences at depth 512, in runs",
            n_layers: 1,
            cells: Cells::Runs,
            n_seqs: 16,
            depth: 512,
            n_new: 1,
        },
        Case {
            name: "16 sequences at depth 512, each cell apart",
            n_layers: 1,
            cells: Cells::Apart,
            n_seqs: 16,
            depth: 512,
            n_new: 1,
        },
    ];
    for case in &cases {
        for kv_type in KvType::ALL {
            bench_case(c, case, kv_type).expect("the case can be set up");
        }
    }
}

criterion_group!(all, benches);
criterion_main!(all);
