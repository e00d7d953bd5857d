//! Attention of the CPU backend: one token at depth, a prompt, and many concurrent sequences.
//! Throughput is bytes of K and V, each of which must be read at least once.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use cellar_benches::{Failure, commit, memory, next_tokens};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_core::backend::{Attend, Backend, RowKind, RowSpan};
use kv_core::graph::AttendSpec;
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory, RowLayout};
use kv_core::memory::MemoryInputs;
use kv_core::{CellIdx, KvType, LayerIdx, Window};
use kv_cpu::{CpuBackend, CpuConfig};

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

struct Case {
    name: &'static str,
    /// Layers that are attended in turn: many of them do not fit in the caches.
    n_layers: u32,
    n_seqs: u32,
    depth: u32,
    n_new: u32,
}

fn bench_case(c: &mut Criterion, case: &Case, kv_type: KvType) -> Result<(), Failure> {
    let n_cells = (case.depth + case.n_new) * case.n_seqs;
    let mut memory = memory(n_cells, case.n_seqs, Window::Full)?;
    let mut inputs = MemoryInputs::default();
    for n in [case.depth, case.n_new] {
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
    let q = vec![0.5; n_rows * SPEC.n_heads * k_dim];
    let mut out = vec![0.0; n_rows * SPEC.n_heads * v_dim];
    let mut group = c.benchmark_group("attend");
    group.throughput(Throughput::Bytes(layout.bytes() as u64));
    group.bench_function(format!("{}, {kv_type}", case.name), |b| {
        let visibility = &inputs.parts[0].visibility;
        let args = |layer| Attend {
            layer: LayerIdx(layer),
            spec: SPEC,
            q: &q,
            visibility,
            positions: &[],
            sinks: None,
        };
        b.iter(|| (0..case.n_layers).all(|l| backend.attend(&rows, args(l), &mut out).is_ok()));
    });
    Ok(())
}

fn benches(c: &mut Criterion) {
    let cases = [
        Case {
            name: "1 token at depth 4096",
            n_layers: 1,
            n_seqs: 1,
            depth: 4096,
            n_new: 1,
        },
        Case {
            name: "1 token at depth 4096, 48 layers",
            n_layers: 48,
            n_seqs: 1,
            depth: 4096,
            n_new: 1,
        },
        Case {
            name: "prompt of 512",
            n_layers: 1,
            n_seqs: 1,
            depth: 1,
            n_new: 511,
        },
        Case {
            name: "16 sequences at depth 512",
            n_layers: 1,
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
