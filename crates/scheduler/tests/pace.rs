//! Chunks of prompts are so small that texts go on in time, whatever tokens cost.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::fake::N_VOCAB;
use crate::support::kinds::Kind;
use crate::support::simulator::{Cost, Script, Simulator, alone};
use cellar_scheduler::{Micros, PrefixUse, Priority, PromptRows, SchedulerConfig, Tenant};
use kv_core::TokenId;
use kv_core::batch::BatchRules;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

const UBATCH: u32 = 512;

fn simulator(step_ms: Option<u64>, cost: Cost) -> Simulator {
    let rules = BatchRules {
        n_batch: UBATCH,
        n_seqs: 8,
        n_vocab: N_VOCAB,
        n_embd: 8,
    };
    let config = SchedulerConfig {
        step_time: step_ms.map(|ms| Micros(1000 * ms)),
        ..SchedulerConfig::new(rules, UBATCH, 20_000)
    };
    let mut sim = Simulator::new(Kind::Unified.memory(8, 20_000), config);
    sim.cost = Some(cost);
    sim
}

fn cost(step_ms: f64, token_ms: f64, depth_ms: f64, noise: f64) -> Cost {
    Cost {
        step: 1000.0 * step_ms,
        token: 1000.0 * token_ms,
        depth: 1000.0 * depth_ms,
        noise,
        rng: ChaCha8Rng::seed_from_u64(7),
        measured: Vec::new(),
    }
}

fn script(n_prompt: u32, number: u32) -> Script {
    Script {
        prompt: (0..n_prompt)
            .map(|at| TokenId((at * 7 + at * at + number * 31) % N_VOCAB))
            .collect(),
        priority: Priority::Normal,
        prefix: PrefixUse::Off,
        prompt_rows: PromptRows::Last,
        checkpoints: Vec::new(),
        parting: None,
        tenant: Tenant::default(),
        max_tokens: 300,
        bad_row: None,
        is_poison: false,
        variant: 0,
    }
}

/// A long text is read while a prompt of 8,000 tokens comes, then one of 300. Returns the steps
/// from then on that have texts and tokens of prompts, and the sum of these tokens.
fn serve(mut sim: Simulator) -> Vec<(usize, usize, u64)> {
    let mut readers = (0..1000).map(|number| script(20, number));
    let is_long = |s: &Script| alone(&sim.memory, s, 20_000).0.len() == 300;
    let reader = readers.find(is_long).unwrap();
    let reader = sim.submit(reader).unwrap();
    while sim.text_of(reader).len() < 3 {
        assert!(sim.step());
    }
    let n_before = sim.cost.as_ref().unwrap().measured.len();
    sim.submit(script(8_000, 1)).unwrap();
    sim.submit(script(300, 2)).unwrap();
    sim.drain();
    let cost = sim.cost.take().unwrap();
    let steps = cost.measured.into_iter().skip(n_before);
    steps
        .filter(|&(texts, other, _)| texts > 0 && other > 0)
        .collect()
}

#[test]
fn steps_with_texts_take_about_as_long_as_they_may() {
    for (step, token, depth) in [
        (20.0, 4.0, 0.0),
        (20.0, 2.0, 0.002),
        (5.0, 0.1, 0.000_1),
        (60.0, 1.0, 0.000_5),
    ] {
        let steps = serve(simulator(Some(200), cost(step, token, depth, 0.2)));
        let case = (step, token, depth);
        let mut times: Vec<u64> = steps.iter().map(|&(.., time)| time / 1000).collect();
        let n_long = times.iter().filter(|&&time| time > 300).count();
        assert!(n_long <= 2, "{case:?}: {times:?}");
        assert!(times.iter().all(|&time| time < 600), "{case:?}: {times:?}");
        times.sort_unstable();
        // And the prompt gets the time that is there, but in steps that have all of it.
        let median = times[times.len() / 2];
        let is_whole = steps.iter().filter(|(_, n, _)| *n > 500).count() * 2 > steps.len();
        assert!(is_whole || median >= 120, "{case:?}: {times:?}");
    }
}

/// Where a text alone takes more than all of the time, a prompt gets as much time as the text, and
/// two prompts twice as much; but no more than twice the time of a step.
#[test]
fn prompts_get_their_share_however_slow_texts_are() {
    let steps = serve(simulator(Some(100), cost(80.0, 1.0, 0.0, 0.0)));
    let n: usize = steps.iter().map(|&(_, n, _)| n).sum();
    assert!(n / steps.len() >= 70, "{n} tokens in {} steps", steps.len());
    assert!(steps.iter().all(|&(.., time)| time <= 250_000));
    let steps = serve(simulator(Some(100), cost(500.0, 1.0, 0.0, 0.0)));
    let most = steps.iter().map(|&(_, n, _)| n).max();
    assert!((195..=201).contains(&most.unwrap()), "{most:?}");
}

/// One request in prefill and many in decode: prefill gets at least a quarter of the time.
#[test]
fn a_prompt_goes_on_beside_many_texts() {
    let mut sim = simulator(Some(100), cost(150.0, 1.0, 0.0, 0.0));
    let mut readers = (0..10_000).map(|number| script(20, number));
    let is_long = |s: &Script| alone(&sim.memory, s, 20_000).0.len() == 300;
    let long: Vec<Script> = readers.by_ref().filter(is_long).take(6).collect();
    for reader in long {
        sim.submit(reader).unwrap();
    }
    while sim.cost.as_ref().unwrap().measured.len() < 10 {
        assert!(sim.step());
    }
    let n_before = sim.cost.as_ref().unwrap().measured.len();
    sim.submit(script(2_000, 1)).unwrap();
    sim.drain();
    let cost = sim.cost.take().unwrap();
    let steps = cost.measured.into_iter().skip(n_before);
    let mixed: Vec<_> = steps.filter(|&(texts, n, _)| texts == 6 && n > 0).collect();
    let n: usize = mixed.iter().map(|&(_, n, _)| n).sum();
    assert!(mixed.len() > 10 && n / mixed.len() >= 20, "{mixed:?}");
    assert!(mixed.iter().all(|&(.., time)| time <= 200_000), "{mixed:?}");
}

/// A step without decode rows has whole chunks.
#[test]
fn without_a_limit_and_without_readers_chunks_are_whole() {
    let steps = serve(simulator(None, cost(20.0, 4.0, 0.0, 0.0)));
    assert!(steps.iter().any(|&(_, n, _)| n == UBATCH as usize - 1));
    let mut sim = simulator(Some(50), cost(20.0, 4.0, 0.0, 0.0));
    sim.submit(script(4_096, 1)).unwrap();
    for _ in 0..8 {
        assert!(sim.step());
    }
    let measured = &sim.cost.as_ref().unwrap().measured;
    assert!(measured.iter().all(|&(_, n, _)| n == UBATCH as usize));
    sim.drain();
}

/// Prompts that fit a step together are in one.
#[test]
fn short_prompts_share_the_time_of_a_step() {
    let mut sim = simulator(Some(200), cost(20.0, 1.0, 0.0, 0.0));
    let mut readers = (0..1000).map(|number| script(20, number));
    let is_long = |s: &Script| alone(&sim.memory, s, 20_000).0.len() == 300;
    let reader = readers.find(is_long).unwrap();
    sim.submit(reader).unwrap();
    let first = sim.submit(script(300, 1)).unwrap();
    while sim.text_of(first).is_empty() {
        assert!(sim.step());
    }
    for number in 2..4 {
        sim.submit(script(40, number)).unwrap();
    }
    let n_before = sim.n_steps;
    while sim.n_steps == n_before {
        assert!(sim.step());
    }
    let last = sim.cost.as_ref().unwrap().measured.last();
    assert_eq!(last.map(|&(_, n, _)| n), Some(80));
    sim.drain();
}
