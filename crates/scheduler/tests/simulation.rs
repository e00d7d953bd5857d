//! Random runs over every kind of memory, without weights: arrivals, cancellations, failures,
//! memory from ample to just enough for one request. After each step everything is recounted, and
//! every text must be what it is alone.
//!
//! `CELLAR_SIM_STEPS` sets the number of steps, `CELLAR_SIM_SEED` the first seed.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::fake::N_VOCAB;
use crate::support::holds::Holds;
use crate::support::kinds::Kind;
use crate::support::simulator::{Cost, Disk, Drafting, Script, Simulator, below};
use crate::support::store::Store;
use cellar_scheduler::{
    Counters, EvictionPolicy, Micros, PrefixCaching, PrefixUse, Priority, PromptRows, RequestError,
    RequestId, RowBytes, Salt, SchedulerConfig, SwapRows, Tenant, TenantId, TenantLimits,
};
use kv_core::TokenId;
use kv_core::batch::BatchRules;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Prints what is needed to repeat a run that failed.
struct Repeat {
    kind: Kind,
    seed: u64,
}

impl Drop for Repeat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { kind, seed } = self;
            eprintln!("{kind:?}: repeat with CELLAR_SIM_SEED={seed} CELLAR_SIM_STEPS=1");
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

fn config(rng: &mut ChaCha8Rng, n_seqs: u32) -> SchedulerConfig {
    let n_ubatch = 1 + below(rng, 24);
    let rules = BatchRules {
        n_batch: 4 + below(rng, 40),
        n_seqs,
        n_vocab: N_VOCAB,
        n_embd: 8,
    };
    SchedulerConfig {
        step_tokens: 1 + below(rng, 40),
        max_running: (1 + n_ubatch % n_seqs) as usize,
        max_queued: 1 + below(rng, 12) as usize,
        max_queued_tokens: 20 + below(rng, 400) as usize,
        aging: Micros(1 + u64::from(below(rng, 3000))),
        headroom: below(rng, 20),
        prefix_cache: match below(rng, 5) {
            0 => PrefixCaching::Off,
            _ => PrefixCaching::On,
        },
        eviction: [
            EvictionPolicy::Value,
            EvictionPolicy::SegmentedLru,
            EvictionPolicy::Lru,
            EvictionPolicy::Adaptive,
        ][below(rng, 4) as usize],
        prefix_bytes: match below(rng, 3) {
            0 => Some(u64::from(below(rng, 3000))),
            _ => None,
        },
        swap_bytes: match below(rng, 3) {
            0 => 0,
            1 => u64::from(below(rng, 2000)),
            _ => 1 << 30,
        },
        swap_disk_bytes: match below(rng, 3) {
            0 => 0,
            1 => u64::from(below(rng, 4000)),
            _ => 1 << 30,
        },
        swap_rows: match below(rng, 4) {
            0 => SwapRows::Rounded,
            _ => SwapRows::Exact,
        },
        step_time: match below(rng, 3) {
            0 => None,
            _ => Some(Micros(u64::from(below(rng, 3000)))),
        },
        preempt_every: std::num::NonZeroU32::new(match below(rng, 3) {
            0 => [1, 3, 17][below(rng, 3) as usize],
            _ => 0,
        }),
        ..SchedulerConfig::new(rules, n_ubatch, 200)
    }
}

/// Three tenants with limits of their own, and one without.
fn tenant(number: u32) -> Tenant {
    let limit = |n: u32| std::num::NonZeroU32::new(n);
    Tenant {
        id: TenantId(number.into()),
        limits: TenantLimits {
            weight: limit(1 + number).unwrap(),
            max_running: limit(number),
            max_queued: limit(3 * number),
        },
    }
}

fn script(rng: &mut ChaCha8Rng, capacity: u32) -> Script {
    let longest = capacity.min(120);
    let n_prompt = match below(rng, 8) {
        0 => 1 + below(rng, longest + 10),
        1 => longest - below(rng, 3).min(longest - 1),
        _ => 1 + below(rng, (longest / 3).max(1)),
    };
    let token = |_| TokenId(below(&mut *rng, N_VOCAB));
    let mut prompt: Vec<TokenId> = (0..n_prompt).map(token).collect();
    // Most begin with a part of one of three texts.
    let n_common = below(rng, n_prompt + 1) as usize;
    if let Some(text) = below(rng, 4).checked_sub(1) {
        let common = (0..n_common as u32).map(|at| TokenId((text * 99 + at * 7) % N_VOCAB));
        prompt.splice(..n_common, common);
    }
    let prompt_rows = match below(rng, 8) {
        0 => PromptRows::All,
        _ => PromptRows::Last,
    };
    Script {
        prompt,
        prefix: match below(rng, 6) {
            _ if prompt_rows == PromptRows::All => PrefixUse::Off,
            0 => PrefixUse::Off,
            salt => PrefixUse::Within(Salt(u64::from(salt / 3))),
        },
        prompt_rows,
        checkpoints: (0..below(rng, 4))
            .map(|_| below(rng, n_prompt + 10) as usize)
            .collect(),
        parting: None,
        tenant: tenant(below(rng, 4)),
        priority: [Priority::Batch, Priority::Normal, Priority::Interactive]
            [below(rng, 3) as usize],
        max_tokens: 1 + below(rng, 60) as usize,
        bad_row: (below(rng, 30) == 0).then(|| below(rng, 8) as usize),
        is_poison: below(rng, 40) == 0,
        variant: 0,
    }
}

/// The next of several requests that come at once: the same prompt, or one that parts from it.
fn alter(rng: &mut ChaCha8Rng, script: &mut Script) {
    let n_prompt = script.prompt.len() as u32;
    match below(rng, 3) {
        0 => {}
        1 => script.prompt[below(rng, n_prompt) as usize] = TokenId(below(rng, N_VOCAB)),
        _ => script.prompt.truncate(1 + below(rng, n_prompt) as usize),
    }
    if below(rng, 6) == 0 {
        script.priority = [Priority::Batch, Priority::Interactive][below(rng, 2) as usize];
    }
    script.max_tokens = 1 + below(rng, 60) as usize;
    script.is_poison = false;
}

fn submit(sim: &mut Simulator, script: Script, n_texts: u64) {
    let capacity = sim.scheduler.capacity();
    let n_prompt = script.prompt.len();
    let is_right = match sim.submit_texts(script, n_texts).err() {
        Some(RequestError::TooLong { limit, .. }) => n_prompt > limit,
        Some(RequestError::Busy { queued, limit }) => queued >= limit,
        Some(RequestError::BusyTokens { queued, limit, .. }) => queued + n_prompt > limit,
        Some(RequestError::TenantBusy { queued, limit }) => queued >= limit,
        Some(_) => false,
        None => n_prompt <= capacity,
    };
    assert!(is_right, "{n_prompt} tokens");
}

/// The store of prefixes of a run, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tiers {
    None,
    One,
}

/// One run of some hundred steps. Returns what the scheduler did.
fn run(kind: Kind, seed: u64, tiers: Tiers) -> Counters {
    let _repeat = Repeat { kind, seed };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let n_seqs = 1 + below(&mut rng, 8);
    let n_cells = 16 + below(&mut rng, 240);
    let mut config = config(&mut rng, n_seqs);
    if tiers == Tiers::One {
        config.prefix_cache = PrefixCaching::On;
    }
    if seed.is_multiple_of(3) {
        // States of most requests go to the disk.
        config.preempt_every = std::num::NonZeroU32::new(1 + below(&mut rng, 4));
        config.swap_bytes = 100 + u64::from(below(&mut rng, 1600));
        config.swap_disk_bytes = config.swap_disk_bytes.max(1000);
    }
    let row_bytes = RowBytes {
        cells: vec![1 + u64::from(below(&mut rng, 30)), 5],
        state: Some(u64::from(below(&mut rng, 500))),
    };
    let mut sim = Simulator::new(kind.memory(n_seqs, n_cells), config).with_row_bytes(row_bytes);
    let n_right = [8, 7, 4, 0][below(&mut rng, 4) as usize];
    if below(&mut rng, 3) > 0 {
        let rng = ChaCha8Rng::seed_from_u64(seed);
        sim = sim.with_drafting(Drafting { rng, n_right });
    }
    if below(&mut rng, 2) > 0 {
        sim.cost = Some(Cost {
            step: f64::from(below(&mut rng, 500)),
            token: f64::from(1 + below(&mut rng, 100)),
            depth: f64::from(below(&mut rng, 3)),
            noise: f64::from(below(&mut rng, 10)),
            rng: ChaCha8Rng::seed_from_u64(seed),
            measured: Vec::new(),
        });
    }
    if below(&mut rng, 4) == 0 {
        sim.saves_before_failure = Some(below(&mut rng, 4));
    }
    if tiers == Tiers::None && seed.is_multiple_of(2) {
        sim.holds = Some(Holds::new(ChaCha8Rng::seed_from_u64(seed)));
    }
    if sim.scheduler.config().swap_disk_bytes > 0 {
        sim.disk = Some(Disk {
            n_bad: [0, 1, 2, 4][below(&mut rng, 4) as usize],
            n_fast: [1, 4, 8][below(&mut rng, 3) as usize],
            rng: ChaCha8Rng::seed_from_u64(seed),
        });
    }
    if tiers == Tiers::One {
        let n_bad = [0, 1, 0, 4][seed as usize % 4];
        sim = sim.with_store(Store::new(ChaCha8Rng::seed_from_u64(seed), n_bad));
    }
    let capacity = sim.scheduler.capacity() as u32;
    let n_events = 50 + below(&mut rng, 150);
    let load = 2 + below(&mut rng, 12);
    for _ in 0..n_events {
        sim.now += u64::from(below(&mut rng, 500));
        match below(&mut rng, load) {
            0 => {
                let mut script = script(&mut rng, capacity);
                if below(&mut rng, 3) == 0 && sim.n_clients() > 0 {
                    // The next turn of a conversation.
                    let n = sim.n_clients() as u32;
                    let before = RequestId(u64::from(below(&mut rng, n)));
                    let mut prompt = sim.tokens_of(before);
                    prompt.extend(script.prompt.iter().take(5));
                    prompt.truncate(capacity as usize);
                    script.prompt = prompt;
                }
                let n = [1, 1, 1, 2, 3, 9][below(&mut rng, 6) as usize];
                let n_alike = match below(&mut rng, 3) {
                    0 => 2 + below(&mut rng, 5),
                    _ => 1,
                };
                for _ in 0..n_alike {
                    submit(&mut sim, script.clone(), n);
                    alter(&mut rng, &mut script);
                }
            }
            1 if below(&mut rng, 4) == 0 && sim.n_clients() > 0 => {
                let n = sim.n_clients() as u32;
                sim.cancel(RequestId(u64::from(below(&mut rng, n))));
            }
            2 if below(&mut rng, 6) == 0 => sim.fails_at = Some(below(&mut rng, 2) as usize),
            _ => {
                sim.step();
            }
        }
    }
    sim.drain();
    sim.scheduler.counters()
}

#[test]
fn texts_in_any_company_are_what_they_are_alone() {
    let (n_steps, first) = (
        setting("CELLAR_SIM_STEPS", 20_000),
        setting("CELLAR_SIM_SEED", 1),
    );
    let (mut done, mut seed) = (0, first);
    let (mut n_waits, mut n_shared) = ([0; Kind::ALL.len()], [0; Kind::ALL.len()]);
    let mut n_swapped = [0; Kind::ALL.len()];
    let (mut n_spilled, mut n_lost) = ([0; Kind::ALL.len()], 0);
    while done < n_steps {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let counters = run(kind, seed, Tiers::None);
            done += counters.n_steps;
            n_waits[number] += counters.n_waits;
            n_shared[number] += counters.n_shared_tokens;
            assert!(counters.n_swapped_in <= counters.n_swapped_out);
            n_swapped[number] += counters.n_swapped_in;
            n_spilled[number] += counters.n_spilled_bytes;
            n_lost += counters.n_swap_lost;
        }
        seed += 1;
    }
    eprintln!("waits: {n_waits:?}, shared tokens: {n_shared:?}, swapped: {n_swapped:?}");
    eprintln!("bytes to the disk: {n_spilled:?}, lost states: {n_lost}");
    assert!(
        !n_swapped.contains(&0) || n_steps < 20_000,
        "a kind of memory is never swapped"
    );
    assert!(
        (n_spilled.iter().sum::<u64>() > 0 && n_lost > 0) || n_steps < 20_000,
        "nothing goes to the disk, or no state is ever lost"
    );
    let sums = [n_waits.iter().sum(), n_shared.iter().sum::<u64>()];
    assert!(
        !sums.contains(&0) || n_steps < 20_000,
        "nothing waits, or shares"
    );
}

/// The same next to a store of prefixes that is late, loses groups, or is down: every wait ends,
/// and texts do not change.
#[test]
fn texts_are_the_same_next_to_a_store() {
    let n_steps = setting("CELLAR_SIM_STEPS", 20_000) / 2;
    let (mut done, mut seed) = (0, setting("CELLAR_SIM_SEED", 1));
    let mut n_restored = [0; Kind::ALL.len()];
    while done < n_steps {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let counters = run(kind, seed, Tiers::One);
            done += counters.n_steps;
            n_restored[number] += counters.n_restored_tokens;
        }
        seed += 1;
    }
    eprintln!("tokens of the store: {n_restored:?}");
    assert!(
        n_restored.iter().sum::<u64>() > 0 || n_steps < 10_000,
        "nothing is restored from the store"
    );
}
