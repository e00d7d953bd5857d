//! What a scheduler takes to plan a step: 64 running requests and 192 cached prefixes in 100,000
//! cells.

#![allow(missing_docs, clippy::expect_used)] // a bench that cannot be set up has nothing to time

use std::hint::black_box;

use cellar_scheduler::{
    Event, Micros, Progress, Request, RequestId, RowBytes, Scheduler, SchedulerConfig, Work,
};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kv_core::batch::BatchRules;
use kv_core::memory::{Composite, Memory, MemoryInputs, Streams, UnifiedConfig};
use kv_core::{Causality, PartIdx, TokenId, Window};

const N_RUNNING: u32 = 64;
const N_CACHED: u32 = 192;
const N_VOCAB: u32 = 50_000;

/// A scheduler and the memory that it plans for.
#[derive(Clone)]
struct SchedulerBench {
    scheduler: Scheduler,
    memory: Composite,
    now: u64,
}

impl SchedulerBench {
    fn new(n_cells: u32) -> Self {
        let n_seqs = N_RUNNING + N_CACHED;
        let memory = Composite::unified(UnifiedConfig {
            part: PartIdx(0),
            n_seqs,
            n_cells,
            streams: Streams::Shared,
            window: Window::Full,
            causality: Causality::Causal,
        });
        let memory = memory.expect("the sizes are possible");
        let rules = BatchRules {
            n_batch: 512,
            n_seqs,
            n_vocab: N_VOCAB,
            n_embd: 8,
        };
        let config = SchedulerConfig {
            max_running: N_RUNNING as usize,
            ..SchedulerConfig::new(rules, 512, n_cells)
        };
        let bytes = RowBytes {
            cells: vec![12_288],
            state: None,
        };
        let scheduler = Scheduler::new(config, &memory).expect("the memory suits it");
        Self {
            scheduler: scheduler.with_row_bytes(bytes),
            memory,
            now: 0,
        }
    }

    /// A prompt that begins like those of the same group.
    fn submit(&mut self, number: u32, n_tokens: u32) {
        let group = number / 8;
        let token = |at: u32| match at {
            0..100 => TokenId((group * 977 + at * 7) % N_VOCAB),
            _ => TokenId((number * 7919 + at * 31) % N_VOCAB),
        };
        let request = Request {
            id: RequestId(u64::from(number)),
            prompt: (0..n_tokens).map(token).collect(),
            ..Request::default()
        };
        let outcomes = self
            .scheduler
            .handle(Micros(self.now), Event::Submit(request));
        assert!(outcomes.is_empty(), "{outcomes:?}");
    }

    /// Carries plans out until each text has a token and nothing waits; texts end with it, or go
    /// on.
    fn run(&mut self, progress: Progress) {
        loop {
            self.now += 1000;
            let decoding = |s: &Scheduler| s.running().all(|r| r.n_done + 1 == r.tokens.len());
            let has_begun = |s: &Scheduler| s.running().all(|r| r.tokens.len() > r.n_prompt);
            let is_done = self.scheduler.n_waiting() == 0
                && decoding(&self.scheduler)
                && has_begun(&self.scheduler);
            match self.scheduler.next(Micros(self.now), &self.memory).work {
                // No bytes are given to it.
                Work::Idle
                | Work::SwapOut { .. }
                | Work::SwapIn(_)
                | Work::Shift(_)
                | Work::Fetch(_)
                | Work::Restore(_)
                | Work::Encode { .. } => return,
                Work::Edit(edits) => {
                    for edit in edits {
                        let edited = self.memory.apply(edit).expect("the plan is right");
                        assert!(edited.row_copies.is_empty());
                    }
                }
                Work::Decode { step, planned } => {
                    let mut steps = self.memory.begin_planned(planned.plan);
                    while steps.next(&mut MemoryInputs::default()).is_some() {}
                    drop(steps);
                    let rows = step.report(|_row| Some(progress));
                    self.scheduler
                        .handle(Micros(self.now), Event::StepDone(rows));
                    if is_done {
                        return;
                    }
                }
            }
        }
    }

    /// The cached prefixes and the running requests.
    fn filled(n_cells: u32) -> Self {
        let mut served = Self::new(n_cells);
        for number in 0..N_CACHED {
            served.submit(number, 520);
            served.run(Progress::Ended);
        }
        for number in 0..N_RUNNING {
            served.submit(1000 + number, 350);
        }
        served.run(Progress::Token(TokenId(7)));
        served
    }
}

fn benches(c: &mut Criterion) {
    let mut next = |name: &str, served: &SchedulerBench| {
        c.bench_function(name, |b| {
            b.iter_batched_ref(
                || served.clone(),
                |served| {
                    let plan = served.scheduler.next(Micros(served.now), &served.memory);
                    black_box(plan)
                },
                BatchSize::LargeInput,
            );
        });
    };
    let served = SchedulerBench::filled(130_000);
    let n_cached = served.scheduler.cached().count();
    let n_running = served.scheduler.running().count();
    eprintln!(
        "{n_running} running, {n_cached} cached, {} cells",
        served.memory.n_used()
    );
    next("next/64 running, 192 cached, 100k cells", &served);

    // One of them ends, and a request comes that begins like a cached prefix.
    let mut admits = served.clone();
    let first = admits.scheduler.running().next().map(|r| r.id);
    admits
        .scheduler
        .handle(Micros(admits.now), Event::Cancel(first.expect("one runs")));
    admits.run(Progress::Token(TokenId(9)));
    admits.submit(5, 400);
    next("next/admits a request", &admits);

    // The cells are full: a prefix makes room.
    let n_used = served.memory.n_used();
    let full = SchedulerBench::filled(n_used + 20);
    next("next/evicts a prefix", &full);
}

criterion_group!(all, benches);
criterion_main!(all);
