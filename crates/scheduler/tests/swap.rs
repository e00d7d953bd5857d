//! Which states of preempted requests go on to the disk, and which comes back first.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;

use crate::reuse::{run, script, text};
use crate::support::fake::{N_VOCAB, rules};
use crate::support::kinds::Kind;
use crate::support::simulator::{Disk, Script, Simulator, alone};
use cellar_scheduler::{
    Event, Micros, Note, Outcome, PrefixUse, Priority, Progress, PromptRows, Request, RequestId,
    RowBytes, Scheduler, SchedulerConfig, Swap, SwapRows, Tenant, Work,
};
use kv_core::memory::{Composite, Edit, Memory, MemoryInputs, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Four requests whose texts do not fit together, with so many bytes on the host and the disk. A
/// token has 10 bytes, a state 7 more.
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
            parting: None,
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

#[test]
fn a_part_is_in_a_sequence_of_its_own_in_between() {
    let swap = Swap {
        request: RequestId(1),
        seq: SeqId(2),
        part: Some(SeqId(3)),
        first: 50,
        n_tokens: 80,
    };
    let copy = |from, to| Edit::Copy {
        from: SeqId(from),
        to: SeqId(to),
        range: PosRange::from(Pos(50)..),
    };
    let remove = Edit::Remove {
        seqs: Seqs::One(SeqId(3)),
        range: PosRange::ALL,
    };
    assert_eq!(swap.swapped_seq(), SeqId(3));
    assert_eq!(swap.before_saving(), Some(copy(2, 3)));
    assert_eq!(swap.after_restoring(), Some(copy(3, 2)));
    assert_eq!(swap.at_the_end(), Some(remove));
    let whole = Swap { part: None, ..swap };
    let edits = [
        whole.before_saving(),
        whole.after_restoring(),
        whole.at_the_end(),
    ];
    assert_eq!(
        (whole.swapped_seq(), edits),
        (SeqId(2), [const { None }; 3])
    );
}

/// Two texts that share 100 tokens, and do not fit together to their ends.
fn sharing(swap_rows: SwapRows) -> (Simulator, [RequestId; 2]) {
    sharing_in(Kind::Unified.memory(4, 170), swap_rows)
}

/// The same in this memory.
fn sharing_in(memory: Composite, swap_rows: SwapRows) -> (Simulator, [RequestId; 2]) {
    let config = SchedulerConfig {
        headroom: 1,
        swap_bytes: 10_000,
        swap_rows,
        ..SchedulerConfig::new(rules(4), 64, 4000)
    };
    let row_bytes = RowBytes {
        cells: vec![10],
        state: None,
    };
    let prompts = (0..1000).map(|salt| [text(100, 1), text(10, 40 + salt)].concat());
    let scripts = prompts.map(|prompt| Script {
        max_tokens: 50,
        ..script(prompt)
    });
    let long = scripts.filter(|script| alone(&memory, script, 4000).0.len() == 50);
    let long: Vec<Script> = long.take(2).collect();
    let mut sim = Simulator::new(memory, config).with_row_bytes(row_bytes);
    sim.scheduler = sim.scheduler.with_notes();
    let ids = [0, 1].map(|number: usize| sim.submit(long[number].clone()).unwrap());
    (sim, ids)
}

/// A state that was swapped out rounded is not what a prompt would compute: it is not cached.
#[test]
fn only_what_came_back_to_the_bit_is_cached() {
    for (swap_rows, is_cached) in [(SwapRows::Exact, true), (SwapRows::Rounded, false)] {
        let (mut sim, ids) = sharing(swap_rows);
        while sim.scheduler.counters().n_swapped_in == 0 {
            assert!(sim.step());
        }
        sim.scheduler.take_notes();
        while ids.iter().any(|&id| sim.end_of(id).is_none()) {
            assert!(sim.step());
        }
        let notes = sim.scheduler.take_notes();
        let is_own =
            |note: &Note| matches!(note, Note::Cached { request, .. } if *request == ids[1]);
        assert_eq!(notes.iter().any(is_own), is_cached, "{notes:?}");
        sim.drain();
    }
}

/// The younger makes room: the bytes on the host are of its own tokens.
#[test]
fn tokens_that_others_have_are_not_saved() {
    let (mut sim, ids) = sharing(SwapRows::Exact);
    until_waiting(&mut sim, 1);
    let waiting = sim.scheduler.waiting().next().unwrap();
    assert_eq!(waiting.id, ids[1]);
    let n_own = waiting.tokens.len() - 1 - 100;
    let n_bytes = 7 + 10 * n_own as u64;
    let out = Note::SwappedOut {
        request: ids[1],
        n_tokens: n_own,
        n_bytes,
    };
    assert_eq!(sim.scheduler.take_notes().last(), Some(&out));
    assert_eq!(sim.scheduler.swapped_bytes(), n_bytes);
    sim.drain();
    let back = Note::SwappedIn {
        request: ids[1],
        n_tokens: n_own,
        n_bytes,
    };
    assert!(sim.scheduler.take_notes().contains(&back));
    let counters = sim.scheduler.counters();
    assert_eq!((counters.n_swapped_out, counters.n_swapped_in), (1, 1));
    assert_eq!(counters.n_swapped_bytes, n_bytes);
    assert_eq!(counters.n_dropped_tokens, 0);
}

/// The bytes of the first state that goes, and those that the disk has with two of them.
fn sizes() -> (u64, u64) {
    let mut sim = simulator(1500, 10_000, 0);
    until_waiting(&mut sim, 1);
    let n_first = sim.scheduler.swapped_bytes();
    until_waiting(&mut sim, 2);
    (n_first, sim.scheduler.spilled_bytes())
}

#[test]
fn a_state_goes_to_the_disk_where_more_than_half_of_the_host_is_taken() {
    let (n_bytes, _) = sizes();
    for (swap_bytes, n_spilled) in [(2 * n_bytes, 0), (2 * n_bytes - 1, n_bytes)] {
        let mut sim = simulator(swap_bytes, 10_000, 0);
        until_waiting(&mut sim, 1);
        assert_eq!(sim.scheduler.spilled_bytes(), n_spilled, "{swap_bytes}");
        sim.drain();
    }
}

#[test]
fn a_disk_may_be_full_to_the_last_byte() {
    let (_, n_bytes) = sizes();
    for (disk_bytes, n_spilled) in [(n_bytes, n_bytes), (n_bytes - 1, 0)] {
        let mut sim = simulator(1500, disk_bytes, 0);
        until_waiting(&mut sim, 2);
        assert_eq!(sim.scheduler.spilled_bytes(), n_spilled, "{disk_bytes}");
        sim.drain();
    }
}

/// A file that is damaged costs its tokens, once.
#[test]
fn what_is_lost_on_the_disk_is_computed_again() {
    let mut sim = simulator(1500, 10_000, 0);
    sim.scheduler = sim.scheduler.with_notes();
    until_waiting(&mut sim, 2);
    let n_bytes = sim.scheduler.spilled_bytes();
    assert_eq!(sim.scheduler.counters().n_spilled_bytes, n_bytes);
    let notes = sim.scheduler.take_notes();
    let Some(&Note::Spilled { n_tokens, .. }) = notes.last() else {
        panic!("{notes:?}");
    };
    assert_eq!(n_bytes, 7 + 10 * n_tokens as u64);
    assert!(sim.step(), "the file is complete");
    sim.disk.as_mut().unwrap().n_bad = 8;
    while sim.scheduler.counters().n_swap_lost == 0 {
        assert!(sim.step());
    }
    let counters = sim.scheduler.counters();
    assert_eq!(counters.n_swap_lost, 1);
    assert_eq!(counters.n_dropped_tokens, n_tokens as u64);
    sim.disk.as_mut().unwrap().n_bad = 0;
    sim.drain();
}

/// Bytes that begin behind a shared prefix need a sequence of their own on the way back: a cached
/// prefix makes room where none is free.
#[test]
fn a_part_comes_back_where_a_cached_prefix_has_the_last_sequence() {
    let (mut sim, ids) = sharing_in(Kind::Unified.memory(3, 170), SwapRows::Exact);
    until_waiting(&mut sim, 1);
    // Another text has a sequence now, and its prefix keeps it.
    let other = Script {
        max_tokens: 1,
        ..script(text(9, 7))
    };
    run(&mut sim, other);
    assert_eq!(sim.scheduler.cached().count(), 1);
    sim.cancel(ids[0]);
    sim.drain();
    let counters = sim.scheduler.counters();
    assert_eq!((counters.n_swapped_out, counters.n_swapped_in), (1, 1));
    assert_eq!(counters.n_dropped_tokens, 0);
    assert!(counters.n_evicted > 0);
}

/// While the bytes of a request are being saved, nothing else is done.
#[test]
fn nothing_is_planned_while_a_state_is_saved() {
    let mut memory = Kind::Unified.memory(4, 170);
    let config = SchedulerConfig {
        swap_bytes: 10_000,
        preempt_every: NonZeroU32::new(1),
        ..SchedulerConfig::new(rules(4), 64, 4000)
    };
    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    for salt in 1..=2 {
        let request = Request {
            id: RequestId(salt),
            prompt: text(30, salt as u32),
            ..Request::default()
        };
        scheduler.handle(Micros(0), Event::Submit(request));
    }
    let Work::Decode { step, planned } = scheduler.next(Micros(0), &memory).work else {
        panic!("no step");
    };
    let mut steps = memory.begin_planned(planned.plan);
    while steps.next(&mut MemoryInputs::default()).is_some() {}
    drop(steps);
    let rows = step.report(|_| Some(Progress::Token(TokenId(5))));
    scheduler.handle(Micros(0), Event::StepDone(rows));
    let work = scheduler.next(Micros(0), &memory).work;
    let Work::SwapOut { swap, .. } = work else {
        panic!("{work:?}");
    };
    assert_eq!(swap.request, RequestId(2));
    for _ in 0..2 {
        let plan = scheduler.next(Micros(0), &memory);
        assert!(matches!(plan.work, Work::Idle) && plan.outcomes.is_empty());
    }
    let (request, n_bytes) = (swap.request, Some(100));
    let outcomes = scheduler.handle(Micros(0), Event::SwappedOut { request, n_bytes });
    assert!(
        matches!(outcomes[..], [Outcome::Preempted { .. }]),
        "{outcomes:?}"
    );
    assert_eq!(scheduler.swapped_bytes(), 100);
}
