//! What a decode step pays before anything is computed: planning, committing, and the visibility
//! runs that attention reads.
//!
//! Sixteen sequences share one memory. "Contiguous" sequences were prefilled one after the other,
//! "interleaved" ones were decoded together from their first token on. Every number is the time of
//! a step of 16 tokens, one of each sequence; `inputs` times the attention inputs alone.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use std::time::{Duration, Instant};

use cellar_benches::{Failure, memory, next_tokens};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::{Memory, MemoryInputs, Unified};
use kv_core::{SeqId, TokenId, Window};

const N_SEQS: u32 = 16;
/// Cells that stay free for the steps that are timed.
const SPARE_CELLS: u32 = 8192;
/// Steps between two clones of the filled memory.
const STEPS_PER_CLONE: u64 = 64;

/// The order in which the sequences came into the memory.
#[derive(Clone, Copy)]
enum Layout {
    Contiguous,
    Interleaved,
}

/// The part of each step that is timed.
#[derive(Clone, Copy)]
enum TimedPart {
    Inputs,
    WholeStep,
}

/// A memory that is full but for the spare cells.
fn filled(n_cells: u32, layout: Layout) -> Result<Unified, Failure> {
    let mut filled = memory(n_cells, N_SEQS, Window::Full)?;
    let n_each = (n_cells - SPARE_CELLS) / N_SEQS;
    match layout {
        Layout::Contiguous => {
            for seq in (0..N_SEQS).map(SeqId) {
                let batch = prompt(&filled, seq, n_each)?;
                commit(&mut filled, &batch)?;
            }
        }
        Layout::Interleaved => {
            for _ in 0..n_each {
                let batch = next_tokens(&filled, N_SEQS, 1)?;
                commit(&mut filled, &batch)?;
            }
        }
    }
    Ok(filled)
}

fn prompt(memory: &Unified, seq: SeqId, n_tokens: u32) -> Result<ValidBatch, Failure> {
    let batch = Batch::prompt(seq, (0..n_tokens).map(|_| TokenId(1)));
    let rules = BatchRules {
        n_batch: n_tokens,
        n_seqs: N_SEQS,
        n_vocab: 2,
        n_embd: 1,
    };
    Ok(validate(&batch, &rules, |seq| memory.positions(seq))?)
}

/// Takes a batch into the memory as one ubatch, without inputs.
fn commit(memory: &mut Unified, batch: &ValidBatch) -> Result<(), Failure> {
    for planned in &memory.plan(batch, u32::MAX)? {
        memory.commit(planned);
    }
    Ok(())
}

/// The time of `n_steps` steps of one token of each sequence.
fn time_steps(filled: &Unified, n_steps: u64, timed: TimedPart) -> Result<Duration, Failure> {
    let mut total = Duration::ZERO;
    let mut inputs = MemoryInputs::default();
    let mut n_left = n_steps;
    while n_left > 0 {
        let mut memory = filled.clone();
        let n_now = n_left.min(STEPS_PER_CLONE);
        // The first step fills the buffers.
        for number in 0..=n_now {
            let batch = next_tokens(&memory, N_SEQS, 1)?;
            let started = Instant::now();
            for planned in &memory.plan(&batch, N_SEQS)? {
                memory.commit(planned);
                let committed = Instant::now();
                memory.inputs(planned, &mut inputs);
                let since = match timed {
                    TimedPart::Inputs => committed,
                    TimedPart::WholeStep => started,
                };
                if number > 0 {
                    total += since.elapsed();
                }
            }
        }
        n_left -= n_now;
    }
    Ok(total)
}

fn benches(c: &mut Criterion) {
    for (cells, n_cells) in [("64k", 1 << 16), ("1M", 1 << 20)] {
        let layouts = [
            ("contiguous", Layout::Contiguous),
            ("interleaved", Layout::Interleaved),
        ];
        for (name, layout) in layouts {
            let filled = filled(n_cells, layout).expect("the memory is large enough");
            for (what, timed) in [
                ("inputs", TimedPart::Inputs),
                ("step", TimedPart::WholeStep),
            ] {
                c.bench_function(
                    &format!("{what}/16 sequences, {cells} cells, {name}"),
                    |b| {
                        b.iter_custom(|n| time_steps(&filled, n, timed).expect("the steps fit"));
                    },
                );
            }
        }
    }
}

criterion_group! {
    name = all;
    config = Criterion::default().sample_size(20);
    targets = benches
}
criterion_main!(all);
