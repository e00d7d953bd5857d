//! Every order of events, not random ones: three requests that arrive, steps that are computed or
//! fail, requests that are cancelled. Behind each order everything is drained: every request ends,
//! every text is what it is alone, nothing stays in the memory.
//!
//! `CELLAR_EXHAUST_DEPTH` is the number of events, 5 without it.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use cellar_scheduler::{Micros, PrefixUse, Priority, PromptRows, RequestId, Salt, SchedulerConfig};
use kv_core::TokenId;
use kv_core::batch::BatchRules;

use crate::support::fake::N_VOCAB;
use crate::support::kinds::Kind;
use crate::support::simulator::{Script, Simulator};

/// Events in a row, without a wish.
const DEPTH: u32 = 5;

/// Requests of a run.
const N_REQUESTS: usize = 3;

/// Tokens that the memory holds: one request and a part of another one.
const N_CELLS: u32 = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The request of this number arrives.
    Submit(usize),
    /// The one that arrived as this number is cancelled.
    Cancel(u64),
    Step,
    /// A step whose first ubatch fails.
    FailedStep,
}

/// Two requests with a common beginning, one of them urgent, and one apart.
fn script(number: usize) -> Script {
    let (n_common, n_own, priority, max_tokens) = [
        (6, 3, Priority::Normal, 4),
        (6, 2, Priority::Interactive, 5),
        (0, 9, Priority::Batch, 3),
    ][number];
    let common = (0..n_common).map(|at| TokenId(at * 7 % N_VOCAB));
    let own = (0..n_own).map(|at| TokenId((number as u32 * 31 + at) % N_VOCAB));
    Script {
        prompt: common.chain(own).collect(),
        priority,
        prefix: PrefixUse::Within(Salt(1)),
        prompt_rows: PromptRows::Last,
        checkpoints: Vec::new(),
        parting: None,
        tenant: Default::default(),
        max_tokens,
        bad_row: None,
        is_poison: false,
        variant: 0,
    }
}

fn config() -> SchedulerConfig {
    let n_seqs = 4;
    let rules = BatchRules {
        n_batch: 8,
        n_seqs,
        n_vocab: N_VOCAB,
        n_embd: 8,
    };
    SchedulerConfig {
        step_tokens: 5,
        max_running: 2,
        aging: Micros(1000),
        swap_bytes: 1 << 20,
        ..SchedulerConfig::new(rules, 4, 200)
    }
}

/// The events that can come after these.
fn next_events(path: &[Event]) -> Vec<Event> {
    let submitted = |number| path.contains(&Event::Submit(number));
    let n_submitted = (0..N_REQUESTS).filter(|&number| submitted(number)).count();
    let submits = (0..N_REQUESTS).filter(|&number| !submitted(number));
    let cancels = (0..n_submitted as u64).map(Event::Cancel);
    let cancels = cancels.filter(|cancel| !path.contains(cancel));
    // Steps without a request do nothing.
    let steps = [Event::Step, Event::FailedStep].into_iter();
    let steps = steps.filter(|_| n_submitted > 0);
    submits
        .map(Event::Submit)
        .chain(cancels)
        .chain(steps)
        .collect()
}

fn run(kind: Kind, path: &[Event]) {
    let mut sim = Simulator::new(kind.memory(4, N_CELLS), config());
    for event in path {
        sim.now += 100;
        match *event {
            Event::Submit(number) => {
                sim.submit(script(number)).unwrap();
            }
            Event::Cancel(id) => sim.cancel(RequestId(id)),
            Event::Step => {
                sim.step();
            }
            Event::FailedStep => {
                sim.fails_at = Some(0);
                sim.step();
                sim.fails_at = None;
            }
        }
    }
    sim.drain();
}

/// Runs each path of this length, and so each shorter one as the beginning of some. Returns how
/// many there were.
fn run_all(kind: Kind, path: &mut Vec<Event>, depth: u32) -> u64 {
    if depth == 0 {
        let told = TellsPath { kind, path };
        run(kind, path);
        drop(told);
        return 1;
    }
    let mut n_runs = 0;
    for event in next_events(path) {
        path.push(event);
        n_runs += run_all(kind, path, depth - 1);
        path.pop();
    }
    n_runs
}

/// Prints the events of a run that fails.
struct TellsPath<'a> {
    kind: Kind,
    path: &'a [Event],
}

impl Drop for TellsPath<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?}: {:?}", self.kind, self.path);
        }
    }
}

#[test]
fn every_request_ends_with_the_text_that_it_has_alone() {
    let depth = std::env::var("CELLAR_EXHAUST_DEPTH");
    let depth = depth.map_or(DEPTH, |depth| depth.parse().unwrap());
    for kind in Kind::ALL {
        let n_runs = run_all(kind, &mut Vec::new(), depth);
        println!("{kind:?}: {n_runs} orders of {depth} events");
        assert!(n_runs > 100);
    }
}
