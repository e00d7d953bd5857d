//! Which states of preempted requests go on to the disk, and which comes back first.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::fake::{N_VOCAB, rules};
use crate::support::kinds::Kind;
use crate::support::simulator::{Disk, Script, Simulator};
use kv_core::TokenId;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use scheduler::{
    Micros, PrefixUse, Priority, PromptRows, RequestId, RowBytes, SchedulerConfig, Tenant,
};

/// Four requests whose texts do not fit together, with so many bytes on the host and the disk. A token has
/// 10 bytes, a state 7 more.
fn simulator(swap_bytes: u64, swap_disk_bytes: u64, n_bad: u32) -> Simulator {
    let rules = rules(4);
    let config = SchedulerConfig {
        headroom: 1,
        swap_bytes,
        swap_disk_bytes,
        ..SchedulerConfig::new(rules, 64, 4000)
    };
    let row_bytes = RowBytes {
        cells: vec![10],
        state: None,
    };
    let memory = Kind::Unified.memory(4, 170);
    assert_eq!(memory.parts().len(), 1);
    let mut sim = Simulator::new(memory, config).with_row_bytes(row_bytes);
    sim.disk = Some(Disk {
        rng: ChaCha8Rng::seed_from_u64(1),
        n_bad,
        n_fast: 8,
    });
    for number in 0..4 {
        let prompt = (0..40).map(|at| TokenId((at * (7 + number) + number) % N_VOCAB));
        sim.submit(Script {
            prompt: prompt.collect(),
            priority: Priority::Normal,
            prefix: PrefixUse::Off,
            prompt_rows: PromptRows::Last,
            checkpoints: Vec::new(),
            tenant: Tenant::default(),
            max_tokens: 100,
            bad_row: None,
            is_poison: false,
            variant: u64::from(number),
        })
        .unwrap();
    }
    sim
}

/// Steps until so many requests wait in the middle.
fn until_waiting(sim: &mut Simulator, n: usize) {
    let n_waiting = |sim: &Simulator| {
        let waiting = sim.scheduler.waiting();
        waiting.filter(|request| request.was_admitted).count()
    };
    while n_waiting(sim) < n {
        assert!(sim.step());
    }
}

#[test]
fn the_state_that_comes_back_last_goes_on_to_the_disk() {
    // Two states of about 430 bytes are more than half, and the first of them goes.
    let mut sim = simulator(1500, 10_000, 0);
    until_waiting(&mut sim, 1);
    assert_eq!(sim.scheduler.spilled_bytes(), 0);
    until_waiting(&mut sim, 2);
    let on_host = sim.scheduler.swapped_bytes();
    assert!(sim.scheduler.spilled_bytes() > 0 && on_host > 0 && on_host <= 750);
    // The youngest went first and comes back last; the other one is on the host.
    let waiting: Vec<RequestId> = sim.scheduler.waiting().map(|r| r.id).collect();
    assert_eq!(waiting, [RequestId(3), RequestId(2)]);
    assert_eq!(sim.scheduler.next_from_disk(Micros(sim.now)), None);
    sim.cancel(RequestId(2));
    let next = sim.scheduler.next_from_disk(Micros(sim.now));
    assert_eq!(next, Some(RequestId(3)));
    sim.drain();
    let counters = sim.scheduler.counters();
    assert_eq!((counters.n_dropped_tokens, counters.n_swap_lost), (0, 0));
}

#[test]
fn a_disk_takes_no_more_than_it_may() {
    let mut sim = simulator(1500, 300, 0);
    until_waiting(&mut sim, 2);
    assert_eq!(sim.scheduler.spilled_bytes(), 0);
    assert!(sim.scheduler.swapped_bytes() > 750);
    sim.drain();
}

#[test]
fn what_a_disk_does_not_take_stays_on_the_host() {
    let mut sim = simulator(1500, 10_000, 8);
    until_waiting(&mut sim, 2);
    assert!(sim.scheduler.counters().n_spilled_bytes > 0);
    assert!(sim.step());
    assert_eq!(sim.scheduler.spilled_bytes(), 0);
    assert!(sim.scheduler.swapped_bytes() > 750);
    sim.drain();
    assert_eq!(sim.scheduler.counters().n_swap_lost, 0);
}
