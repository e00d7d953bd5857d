//! Planning, committing and visibility: the bookkeeping of every ubatch before it is computed.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use std::hint::black_box;

use cellar_benches::{Failure, commit, memory, next_tokens};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kv_core::Window;
use kv_core::memory::{MemoryInputs, Unified};

/// A memory that holds `n` tokens of each of `n_seqs` sequences, interleaved as they were
/// generated.
fn filled(n_cells: u32, n_seqs: u32, n: u32) -> Result<Unified, Failure> {
    let mut filled = memory(n_cells, n_seqs, Window::Full)?;
    for _ in 0..n {
        let batch = next_tokens(&filled, n_seqs, 1)?;
        commit(&mut filled, &batch, n_seqs, &mut MemoryInputs::default())?;
    }
    Ok(filled)
}

fn benches(c: &mut Criterion) {
    let mut step = |name: &str, memory: Result<Unified, Failure>, n_seqs: u32, n: u32| {
        let memory = memory.expect("the memory is large enough");
        let batch = next_tokens(&memory, n_seqs, n).expect("the batch is valid");
        let mut inputs = MemoryInputs::default();
        c.bench_function(name, |b| {
            b.iter_batched_ref(
                || memory.clone(),
                |memory| commit(black_box(memory), &batch, 512, &mut inputs).is_ok(),
                BatchSize::LargeInput,
            );
        });
    };
    step(
        "step/prompt 512, empty",
        memory(4096, 1, Window::Full),
        1,
        512,
    );
    step("step/1 token, depth 4000", filled(4096, 1, 4000), 1, 1);
    step(
        "step/16 sequences, depth 1000 each",
        filled(20_000, 16, 1000),
        16,
        1,
    );
}

criterion_group!(all, benches);
criterion_main!(all);
