//! Matmul of the CPU backend by weight format: GEMV (one token, bound by memory bandwidth) and GEMM
//! (128 tokens, bound by arithmetic). Throughput is bytes of weights for GEMV, multiply-adds for
//! GEMM. Activations are quantized as each format needs it, as for models of more than 8 MiB.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use cellar_benches::{linear_graph, load, random_matrix};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_cpu::activations::ActivationKind;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig};
use kv_rows::RowLayout;

/// A feed-forward matrix of a model of half a billion parameters.
const SHAPE: [usize; 2] = [4864, 1024];

fn bench(c: &mut Criterion, group: &str, n_tokens: usize) {
    let config = CpuConfig {
        activations: ActivationChoice::Always(ActivationKind::Int8),
        ..CpuConfig::default()
    };
    let backend = CpuBackend::new(config).expect("a CPU");
    let layout = RowLayout::default();
    let graph = linear_graph(n_tokens, SHAPE).expect("the sizes fit");
    let mut rows = backend.allocate(&layout).expect("nothing to allocate");
    let x = vec![0.25; n_tokens * SHAPE[1]];
    let mut group = c.benchmark_group(group);
    for format in BlockFormat::ALL {
        let weight = random_matrix("w", SHAPE, format).expect("whole blocks");
        group.throughput(match n_tokens {
            1 => Throughput::Bytes(weight.bytes().len() as u64),
            n => Throughput::Elements((n * SHAPE[0] * SHAPE[1]) as u64),
        });
        let weights = load(&backend, weight).expect("weights in memory");
        let mut program = backend
            .compile(&graph, &weights, &layout)
            .expect("a known operation");
        let mut outputs = GraphOutputs::default();
        group.bench_function(BenchmarkId::from_parameter(format), |b| {
            let inputs = GraphInputs {
                embeddings: &x,
                ..GraphInputs::default()
            };
            b.iter(|| {
                backend
                    .run(&mut program, &mut rows, &inputs, &mut outputs)
                    .is_ok()
            });
        });
    }
}

fn gemv(c: &mut Criterion) {
    bench(c, "linear/GEMV", 1);
}

fn gemm(c: &mut Criterion) {
    bench(c, "linear/GEMM, 128 tokens", 128);
}

criterion_group!(all, gemv, gemm);
criterion_main!(all);
