//! What a step holds, who waits, who is preempted, and what is refused.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;

use crate::support::fake::N_VOCAB;
use crate::support::kinds::Kind;
use crate::support::simulator::{Drafting, Script, Simulator, alone};
use cellar_scheduler::{
    End, Event, Feed, MAX_DRAFT, Micros, Outcome, PrefixUse, Priority, PromptRows, Request,
    RequestError, RequestId, Scheduler, SchedulerConfig, SpeculationOff, StepFailure, Tenant,
    TenantId, TenantLimits, Work,
};
use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::memory::{Composite, Memory};
use kv_core::{Pos, TokenId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

fn rules(n_seqs: u32) -> BatchRules {
    BatchRules {
        n_batch: 32,
        n_seqs,
        n_vocab: N_VOCAB,
        n_embd: 8,
    }
}

fn config(n_seqs: u32) -> SchedulerConfig {
    SchedulerConfig {
        headroom: 1,
        ..SchedulerConfig::new(rules(n_seqs), 32, 1000)
    }
}

fn simulator(n_seqs: u32, n_cells: u32) -> Simulator {
    Simulator::new(Kind::Unified.memory(n_seqs, n_cells), config(n_seqs))
}

fn prompt(n: u32, salt: u32) -> Vec<TokenId> {
    (0..n)
        .map(|at| TokenId((at * 7 + salt) % N_VOCAB))
        .collect()
}

fn script(n_prompt: u32, salt: u32) -> Script {
    Script {
        prompt: prompt(n_prompt, salt),
        priority: Priority::Normal,
        prefix: PrefixUse::Off,
        prompt_rows: PromptRows::Last,
        checkpoints: Vec::new(),
        parting: None,
        tenant: Tenant::default(),
        max_tokens: 20,
        bad_row: None,
        is_poison: false,
        variant: 0,
    }
}

/// A script of exactly `n_tokens` tokens of text, whatever the model makes of its prompt.
pub(crate) fn long_script(n_prompt: u32, n_tokens: usize, memory: &Composite) -> Script {
    let mut scripts = (0..1000).map(|salt| Script {
        max_tokens: n_tokens,
        ..script(n_prompt, salt)
    });
    let is_long = |script: &Script| alone(memory, script, 1000).0.len() == n_tokens;
    scripts.find(is_long).unwrap()
}

/// The feeds of the next step, which is not reported.
fn feeds(scheduler: &mut Scheduler, memory: &Composite) -> Vec<Feed> {
    match scheduler.next(Micros(0), memory).work {
        Work::Decode { step, .. } => step.feeds,
        work => panic!("{work:?}"),
    }
}

fn request(id: u64, n_prompt: u32) -> Request {
    Request {
        id: RequestId(id),
        prompt: prompt(n_prompt, 3),
        prefix: PrefixUse::Off,
        ..Request::default()
    }
}

#[test]
fn texts_go_on_first_and_prompts_take_the_rest_in_chunks() {
    let mut sim = simulator(4, 200);
    let first = sim.submit(long_script(5, 10, &sim.memory)).unwrap();
    assert!(sim.step(), "the prompt of 5");
    let second = sim.submit(script(40, 2)).unwrap();
    let third = sim.submit(script(40, 4)).unwrap();
    let Simulator {
        scheduler, memory, ..
    } = &mut sim;
    let n_tokens: Vec<(RequestId, usize)> = feeds(scheduler, memory)
        .iter()
        .map(|feed| (feed.request, feed.tokens.len()))
        .collect();
    assert_eq!(n_tokens, [(first, 1), (second, 31)]);
    let none = scheduler.next(Micros(0), memory).work;
    assert!(matches!(none, Work::Idle), "a step is being computed");
    assert!(
        scheduler.running().any(|r| r.id == third),
        "and has no tokens yet"
    );
}

#[test]
fn what_can_never_fit_is_refused_with_numbers() {
    let memory = Kind::Unified.memory(4, 50);
    let mut scheduler = Scheduler::new(config(4), &memory).unwrap();
    let mut refusal = |request: Request| {
        let outcomes = scheduler.handle(Micros(0), Event::Submit(request));
        match outcomes.as_slice() {
            [Outcome::Refused { why, .. }] => Some(why.clone()),
            [] => None,
            other => panic!("{other:?}"),
        }
    };
    let too_long = RequestError::TooLong {
        n_prompt: 51,
        limit: 50,
    };
    assert_eq!(refusal(request(1, 51)), Some(too_long));
    assert_eq!(refusal(request(2, 0)), Some(RequestError::EmptyPrompt));
    let mut strange = request(3, 4);
    strange.prompt[2] = TokenId(N_VOCAB);
    let out_of_range = RequestError::TokenOutOfRange {
        at: 2,
        token: TokenId(N_VOCAB),
        n_vocab: N_VOCAB,
    };
    assert_eq!(refusal(strange), Some(out_of_range));
    assert_eq!(refusal(request(4, 50)), None);
    let id = RequestId(4);
    assert_eq!(refusal(request(4, 5)), Some(RequestError::Duplicate { id }));
}

#[test]
fn a_full_queue_is_refused_with_numbers() {
    let memory = Kind::Unified.memory(4, 50);
    let config = SchedulerConfig {
        max_queued: 2,
        max_queued_tokens: 30,
        ..config(4)
    };
    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    let mut submit = |id, n_prompt| {
        let request = request(id, n_prompt);
        scheduler.handle(Micros(0), Event::Submit(request))
    };
    assert_eq!(submit(1, 20), []);
    let why = RequestError::BusyTokens {
        queued: 20,
        n_prompt: 11,
        limit: 30,
    };
    let request = RequestId(2);
    assert_eq!(submit(2, 11), [Outcome::Refused { request, why }]);
    assert_eq!(submit(3, 10), []);
    let (queued, limit) = (2, 2);
    let why = RequestError::Busy { queued, limit };
    let request = RequestId(4);
    assert_eq!(submit(4, 1), [Outcome::Refused { request, why }]);
}

#[test]
fn impossible_limits_and_memories_are_refused() {
    let memory = Kind::Unified.memory(4, 50);
    let zero = SchedulerConfig {
        step_tokens: 0,
        ..config(4)
    };
    let refused = Scheduler::new(zero, &memory).err();
    let name = "step_tokens";
    assert_eq!(refused, Some(RequestError::Zero { name }));
    let mut sim = simulator(4, 50);
    sim.submit(script(9, 1)).unwrap();
    sim.step();
    let refused = Scheduler::new(config(4), &sim.memory).err();
    assert_eq!(refused, Some(RequestError::NotEmpty { n_tokens: 9 }));
}

/// Two texts grow until the cells run short: the younger makes room, and both end with the text
/// that they have alone, which the simulator compares.
#[test]
fn the_youngest_is_preempted_and_goes_on_where_it_was() {
    let mut sim = simulator(2, 64);
    let old = sim.submit(long_script(20, 30, &sim.memory)).unwrap();
    let young = sim.submit(long_script(24, 25, &sim.memory)).unwrap();
    let mut n_before = 0;
    while sim.scheduler.counters().n_preemptions == 0 {
        n_before = sim.text_of(young).len();
        assert!(sim.step());
    }
    assert!(n_before > 0, "it was in the middle of its text");
    let running: Vec<RequestId> = sim.scheduler.running().map(|r| r.id).collect();
    assert_eq!((running, sim.scheduler.n_waiting()), (vec![old], 1));
    sim.drain();
    for id in [old, young] {
        assert_eq!(sim.end_of(id), Some(End::Complete));
    }
    assert_eq!(sim.scheduler.counters().n_preemptions, 1);
}

#[test]
fn the_lowest_priority_is_preempted_first() {
    let mut sim = simulator(3, 90);
    let with = |priority, script: Script| Script { priority, ..script };
    let script = long_script(20, 40, &sim.memory);
    let batch = sim.submit(with(Priority::Batch, script.clone())).unwrap();
    let normal = sim.submit(with(Priority::Normal, script.clone())).unwrap();
    let last = sim.submit(with(Priority::Interactive, script)).unwrap();
    while sim.scheduler.counters().n_preemptions == 0 {
        assert!(sim.step());
    }
    let running: Vec<RequestId> = sim.scheduler.running().map(|r| r.id).collect();
    assert_eq!(
        running,
        [last, normal],
        "{batch} waits, though it came first"
    );
    sim.drain();
}

/// A background request is preempted by an interactive one, though it has begun.
#[test]
fn a_higher_priority_takes_the_place_of_a_lower() {
    let mut sim = simulator(1, 64);
    let low = Script {
        priority: Priority::Batch,
        ..long_script(20, 30, &sim.memory)
    };
    let low = sim.submit(low).unwrap();
    sim.step();
    sim.step();
    let same = Script {
        priority: Priority::Batch,
        ..script(9, 2)
    };
    let same = sim.submit(same).unwrap();
    sim.step();
    assert!(sim.scheduler.running().all(|r| r.id == low), "{same} waits");
    let high = Script {
        priority: Priority::Interactive,
        ..script(9, 3)
    };
    let high = sim.submit(high).unwrap();
    sim.step();
    assert_eq!(sim.scheduler.counters().n_preemptions, 1);
    while sim.end_of(high).is_none() {
        assert!(sim.end_of(low).is_none() && sim.step());
    }
    sim.drain();
}

/// Requests of a high priority that never end to come do not keep one of a low priority waiting
/// for ever.
#[test]
fn a_request_that_waits_rises() {
    let memory = Kind::Unified.memory(1, 64);
    let config = SchedulerConfig {
        aging: Micros(1000),
        ..config(1)
    };
    let mut sim = Simulator::new(memory, config);
    let high = Script {
        priority: Priority::Interactive,
        max_tokens: 3,
        ..script(9, 3)
    };
    sim.submit(high.clone()).unwrap();
    let low = Script {
        priority: Priority::Batch,
        ..script(9, 2)
    };
    let low = sim.submit(low).unwrap();
    while sim.end_of(low).is_none() {
        sim.now += 100;
        assert!(sim.now < 10_000, "it starves");
        if sim.scheduler.n_waiting() < 2 {
            sim.submit(high.clone()).unwrap();
        }
        sim.step();
    }
    assert!(
        sim.now > 2000,
        "it was first though it waited less than two ages"
    );
    sim.drain();
}

#[test]
fn a_request_can_be_cancelled_at_any_moment() {
    let mut sim = simulator(2, 120);
    let in_queue = sim.submit(script(9, 1)).unwrap();
    sim.cancel(in_queue);
    assert_eq!(sim.end_of(in_queue), Some(End::Cancelled));
    let in_prompt = sim.submit(script(50, 2)).unwrap();
    sim.step();
    assert_eq!(sim.memory.n_used(), 32, "a chunk");
    sim.cancel(in_prompt);
    assert_eq!(sim.end_of(in_prompt), Some(End::Cancelled));
    let in_text = sim.submit(long_script(9, 10, &sim.memory)).unwrap();
    while sim.text_of(in_text).len() < 4 {
        sim.step();
    }
    assert!(sim.memory.n_used() < 32, "cells of the other are free");
    sim.cancel(in_text);
    sim.cancel(in_text);
    sim.cancel(RequestId(77));
    assert_eq!(sim.end_of(in_text), Some(End::Cancelled));
    sim.drain();
}

/// A request that is cancelled while its step is computed takes no row, and its cells are freed
/// after the step.
#[test]
fn a_request_can_be_cancelled_while_its_step_is_computed() {
    let mut memory = Kind::Unified.memory(2, 120);
    let mut scheduler = Scheduler::new(config(2), &memory).unwrap();
    scheduler.handle(Micros(0), Event::Submit(request(1, 8)));
    assert_eq!(feeds(&mut scheduler, &memory).len(), 1);
    let request = RequestId(1);
    let end = End::Cancelled;
    let cancelled = scheduler.handle(Micros(0), Event::Cancel(request));
    assert_eq!(cancelled, [Outcome::Ended { request, end }]);
    let during = scheduler.next(Micros(0), &memory).work;
    assert!(matches!(during, Work::Idle), "{during:?}");
    assert_eq!(scheduler.handle(Micros(0), Event::StepDone(Vec::new())), []);
    match scheduler.next(Micros(0), &memory).work {
        Work::Edit(edits) => edits.into_iter().for_each(|edit| {
            assert!(memory.apply(edit).unwrap().row_copies.is_empty());
        }),
        work => panic!("{work:?}"),
    }
    assert!(matches!(
        scheduler.next(Micros(0), &memory).work,
        Work::Idle
    ));
}

#[test]
fn only_the_request_that_fails_alone_ends() {
    let mut sim = simulator(4, 200);
    let good: Vec<RequestId> = (0..2)
        .map(|salt| sim.submit(script(9, salt)).unwrap())
        .collect();
    let poison = Script {
        is_poison: true,
        ..script(9, 5)
    };
    let poison = sim.submit(poison).unwrap();
    let bad_row = Script {
        bad_row: Some(2),
        ..long_script(9, 6, &sim.memory)
    };
    let bad_row = sim.submit(bad_row).unwrap();
    sim.drain();
    assert_eq!(sim.end_of(poison), Some(End::Failed));
    assert_eq!(sim.end_of(bad_row), Some(End::Failed));
    assert_eq!(sim.text_of(bad_row).len(), 2);
    for id in good {
        assert_eq!(sim.end_of(id), Some(End::Complete));
    }
}

#[test]
fn a_transient_failure_ends_no_request() {
    let mut sim = simulator(4, 200);
    let ids: Vec<RequestId> = (0..3)
        .map(|salt| sim.submit(script(40, salt)).unwrap())
        .collect();
    for _ in 0..20 {
        if sim.n_steps.is_multiple_of(6) {
            sim.fails_at = Some(0);
        }
        sim.step();
    }
    sim.fails_at = None;
    sim.drain();
    for id in ids {
        assert_eq!(sim.end_of(id), Some(End::Complete));
    }
}

#[test]
fn a_lost_device_ends_everything_once() {
    let memory = Kind::Unified.memory(1, 120);
    let mut scheduler = Scheduler::new(config(1), &memory).unwrap();
    for id in 1..4 {
        scheduler.handle(Micros(0), Event::Submit(request(id, 8)));
    }
    assert_eq!(feeds(&mut scheduler, &memory).len(), 1);
    let lost = Event::StepFailed(StepFailure::DeviceLost);
    let outcomes = scheduler.handle(Micros(0), lost);
    let ended = (1..4).map(|id| Outcome::Ended {
        request: RequestId(id),
        end: End::Failed,
    });
    assert_eq!(outcomes, ended.collect::<Vec<_>>());
    assert_eq!(scheduler.n_waiting() + scheduler.running().count(), 0);
}

/// Requests for four times the cells that there are: all end, and few tokens are computed twice.
#[test]
fn four_times_the_memory_costs_few_tokens() {
    let computed = |n_cells: u32, headroom: u32| {
        let config = SchedulerConfig {
            headroom,
            ..config(64)
        };
        let mut sim = Simulator::new(Kind::Unified.memory(64, n_cells), config);
        for salt in 0..64 {
            let script = long_script(30 + salt % 7, 60, &sim.memory);
            sim.submit(script).unwrap();
        }
        sim.drain();
        sim.scheduler.counters()
    };
    let headroom = SchedulerConfig::new(rules(64), 32, 1000).headroom;
    let ample = computed(64 * 100, headroom);
    let short = computed(64 * 92 / 4, headroom);
    assert_eq!(ample.n_preemptions, 0);
    assert!(short.n_preemptions > 0);
    let factor = ample.n_tokens as f64 / short.n_tokens as f64;
    assert!(factor > 0.8, "{short:?} instead of {ample:?}");
}

/// Four texts of a prompt of 40 tokens take its 40 cells once, and each is what it is alone.
#[test]
fn several_texts_of_a_prompt_compute_it_once_and_share_its_cells() {
    let mut sim = simulator(4, 64);
    let first = sim.submit_texts(script(40, 2), 4).unwrap();
    let mut n_fed = 0;
    while sim.scheduler.counters().n_tokens < 44 {
        assert!(sim.step());
        n_fed = sim.scheduler.counters().n_tokens;
    }
    // All forks have one token of their own, of 44 computed ones.
    assert_eq!(n_fed, 44);
    assert!(sim.memory.n_used() <= 44, "{}", sim.memory.n_used());
    assert_eq!(sim.scheduler.running().count(), 4);
    for number in 1..4 {
        let reuse = sim.reuse_of(RequestId(first.0 + number));
        assert_eq!((reuse.n_tokens, reuse.missed), (40, None));
    }
    sim.drain();
    let texts: Vec<_> = (0..4)
        .map(|n| sim.text_of(RequestId(first.0 + n)).to_vec())
        .collect();
    assert!(texts[1..].iter().all(|text| *text != texts[0]), "{texts:?}");
}

#[test]
fn a_cancelled_first_text_hands_the_prompt_to_the_next() {
    let mut sim = simulator(4, 200);
    let first = sim.submit_texts(script(100, 2), 3).unwrap();
    assert!(sim.step(), "a chunk");
    sim.cancel(first);
    sim.cancel(RequestId(first.0 + 2));
    assert_eq!(sim.end_of(first), Some(End::Cancelled));
    let running: Vec<RequestId> = sim.scheduler.running().map(|r| r.id).collect();
    assert_eq!(running, [RequestId(first.0 + 1)]);
    sim.drain();
    // Nothing of the prompt was computed again.
    let n_text = sim.text_of(RequestId(first.0 + 1)).len() as u64;
    assert!(sim.scheduler.counters().n_tokens <= 100 + n_text);
}

/// A text that waits for the copy of its prompt, as its tenant may not run another one.
#[test]
fn a_text_that_waits_for_its_copy_can_be_cancelled() {
    let mut sim = simulator(8, 2000);
    let own = Script {
        tenant: tenant(1, 1, Some(1)),
        ..script(20, 3)
    };
    let first = sim.submit_texts(own, 3).unwrap();
    while sim.text_of(first).is_empty() {
        assert!(sim.step());
    }
    let [second, third] = [1, 2].map(|number| RequestId(first.0 + number));
    sim.cancel(second);
    assert_eq!(sim.end_of(second), Some(End::Cancelled));
    sim.drain();
    // The row of the prompt gave the first token of each.
    let [second, third] = [second, third].map(|id| sim.text_of(id).len());
    assert!(second == 1 && third > 1, "{second} and {third}");
}

#[test]
fn a_refused_request_is_refused_for_all_its_texts() {
    let mut sim = simulator(4, 200);
    let limit = sim.scheduler.capacity();
    let n_prompt = limit as u32 + 1;
    let refused = sim.submit_texts(script(n_prompt, 2), 3).unwrap_err();
    let n_prompt = limit + 1;
    assert_eq!(refused, RequestError::TooLong { n_prompt, limit });
    sim.drain();
    let twice = Request {
        siblings: vec![RequestId(900), RequestId(900)],
        ..request(800, 4)
    };
    let outcomes = sim.scheduler.handle(Micros(0), Event::Submit(twice));
    assert_eq!(outcomes.len(), 3, "{outcomes:?}");
}

/// Tokens that are drafted right make steps fewer, and wrong ones cost no token.
#[test]
fn drafted_tokens_save_steps_where_they_are_right() {
    let n_steps = |n_right: Option<u32>, kind: Kind| {
        let memory = kind.memory(3, 400);
        let script = long_script(20, 40, &memory);
        let mut sim = Simulator::new(memory, config(3));
        let limit = sim.scheduler.draft_limit();
        if let Some(n_right) = n_right {
            let rng = ChaCha8Rng::seed_from_u64(1);
            sim = sim.with_drafting(Drafting { rng, n_right });
        }
        sim.submit(script.clone()).unwrap();
        sim.submit(script).unwrap();
        sim.drain();
        let counters = sim.scheduler.counters();
        (sim.n_steps, counters, limit)
    };
    let (plain, counters, _) = n_steps(None, Kind::Unified);
    assert!((40..=42).contains(&plain), "{plain} steps");
    assert_eq!(counters.n_drafted_tokens, 0);
    let (right, counters, _) = n_steps(Some(8), Kind::Unified);
    assert!(right <= 20, "{right} steps");
    // But those behind the end of a text.
    let (n_accepted, n_drafted) = (counters.n_accepted_tokens, counters.n_drafted_tokens);
    assert!(
        n_accepted * 10 >= n_drafted * 7,
        "{n_accepted} of {n_drafted}"
    );
    let (wrong, counters, _) = n_steps(Some(0), Kind::Unified);
    assert_eq!((wrong, counters.n_accepted_tokens), (plain, 0));
    assert!(counters.n_drafted_tokens > 50);
    // Windows as well, and states with snapshots, so many tokens at once.
    assert!(n_steps(Some(8), Kind::Interleaved).0 <= 20);
    let (some, _, limit) = n_steps(Some(8), Kind::Snapshots);
    assert_eq!(limit, Ok(3));
    assert!((14..=24).contains(&some), "{some} steps");
    // Without snapshots nothing is drafted, and there is a reason.
    let (plain, ..) = n_steps(None, Kind::Hybrid);
    let (none, counters, limit) = n_steps(Some(8), Kind::Hybrid);
    assert_eq!((none, counters.n_drafted_tokens), (plain, 0));
    assert_eq!(limit, Err(SpeculationOff::NothingTakenBack));
}

#[test]
fn windows_take_no_drafts_where_steps_are_computed_in_pieces() {
    let config = SchedulerConfig {
        n_ubatch: 8,
        ..config(2)
    };
    let limit = |kind: Kind| {
        let scheduler = Scheduler::new(config, &kind.memory(2, 100)).unwrap();
        scheduler.draft_limit()
    };
    assert_eq!(limit(Kind::Unified), Ok(MAX_DRAFT));
    let off = SpeculationOff::StepsInPieces {
        step_tokens: 32,
        n_ubatch: 8,
    };
    assert_eq!(limit(Kind::Sliding), Err(off));
    assert_eq!(
        off.to_string(),
        "a step of 32 tokens is computed in pieces of 8, and a sliding window may forget in between \
         what a text goes back to"
    );
}

/// Drafted tokens come last: after texts, and after prompts.
#[test]
fn drafted_tokens_take_what_a_step_has_left() {
    let memory = Kind::Unified.memory(3, 200);
    let mut sim = Simulator::new(memory, config(3));
    let first = sim.submit(script(4, 1)).unwrap();
    sim.step();
    let draft = |n: u32| Event::Draft {
        request: first,
        tokens: prompt(n, 9),
    };
    let second = request(7, 30);
    sim.scheduler.handle(Micros(0), Event::Submit(second));
    sim.scheduler.handle(Micros(0), draft(20));
    let fed = feeds(&mut sim.scheduler, &sim.memory);
    let sizes: Vec<(usize, usize)> = fed.iter().map(|f| (f.tokens.len(), f.n_draft)).collect();
    assert_eq!(sizes, [(2, 1), (30, 0)]);
}

/// A window takes the drafted tokens of two texts in pieces alone, and may forget in between what a
/// text goes back to: the step has none.
#[test]
fn drafted_tokens_that_part_a_step_are_left_out() {
    let memory = Kind::Sliding.memory(2, 120);
    let script = long_script(30, 20, &memory);
    let mut sim = Simulator::new(memory, config(2));
    let ids = [(); 2].map(|()| sim.submit(script.clone()).unwrap());
    while ids.iter().any(|&id| sim.scheduler.draft_room(id) == 0) {
        assert!(sim.step());
    }
    let mut batch = Batch::new();
    for running in sim.scheduler.running() {
        let tokens = [&running.tokens[running.n_done..], &prompt(8, 9)].concat();
        for (pos, token) in (running.n_done as u32..).zip(tokens) {
            let entry = batch.push_token(token).in_sequence(running.seq);
            entry.at(Pos(pos)).with_output();
        }
    }
    let valid = validate(&batch, &rules(2), |seq| sim.memory.positions(seq)).unwrap();
    assert_eq!(valid.n_pieces(32), 1);
    assert!(sim.memory.plan(&valid, 32).unwrap().len() > 1);
    for request in ids {
        let tokens = prompt(8, 9);
        sim.scheduler
            .handle(Micros(0), Event::Draft { request, tokens });
    }
    let n_before = sim.scheduler.counters().n_replanned;
    let fed = feeds(&mut sim.scheduler, &sim.memory);
    let sizes: Vec<(usize, usize)> = fed.iter().map(|f| (f.tokens.len(), f.n_draft)).collect();
    assert_eq!(sizes, [(1, 0), (1, 0)]);
    assert!(sim.scheduler.counters().n_replanned > n_before);
}

fn tenant(id: u64, weight: u32, max_running: Option<u32>) -> Tenant {
    Tenant {
        id: TenantId(id),
        limits: TenantLimits {
            weight: NonZeroU32::new(weight).unwrap(),
            max_running: max_running.and_then(NonZeroU32::new),
            max_queued: None,
        },
    }
}

/// While two tenants want more than they get, tokens are computed for them by their weights.
#[test]
fn tenants_get_tokens_by_their_weights() {
    let config = SchedulerConfig {
        max_running: 4,
        ..config(8)
    };
    let mut sim = Simulator::new(Kind::Unified.memory(8, 2000), config);
    for number in 0..240 {
        let id = u64::from(number % 2);
        let script = Script {
            tenant: tenant(id, 1 + 2 * (number % 2), None),
            ..script(30, number)
        };
        sim.submit(script).unwrap();
    }
    let mut n_tokens = [0, 0];
    for _ in 0..400 {
        sim.step();
        for (own, number) in n_tokens.iter_mut().zip(0..) {
            let own_clients = (0..240).filter(|n| n % 2 == number);
            *own = own_clients.map(|n| sim.text_of(RequestId(n)).len()).sum();
        }
    }
    let [light, heavy] = n_tokens.map(|n| n as f64);
    assert!(
        (2.5..3.5).contains(&(heavy / light)),
        "{light} and {heavy} tokens for weights of 1 and 3"
    );
    sim.drain();
}

/// One request of a tenant, next to fifty of another that keeps to its limit, takes about as long
/// as alone.
#[test]
fn a_tenant_with_one_request_does_not_wait_for_one_with_fifty() {
    let steps = |n_others: u32| {
        let mut sim = simulator(16, 4000);
        for number in 0..n_others {
            let script = Script {
                tenant: tenant(1, 1, Some(8)),
                ..script(200, number)
            };
            sim.submit(script).unwrap();
        }
        for _ in 0..20 * u32::from(n_others > 0) {
            sim.step();
        }
        let own = Script {
            tenant: tenant(2, 1, None),
            ..script(90, 77)
        };
        let (before, id) = (sim.n_steps, sim.submit(own).unwrap());
        while sim.text_of(id).is_empty() {
            sim.step();
        }
        let n_steps = sim.n_steps - before;
        sim.drain();
        n_steps
    };
    let (alone, together) = (steps(0), steps(50));
    assert!(
        together <= 2 * alone + 1,
        "{together} steps, and {alone} alone"
    );
}

#[test]
fn a_tenant_has_no_more_requests_than_it_may() {
    let mut sim = simulator(8, 2000);
    let own = |number: u32| {
        let limits = TenantLimits {
            max_queued: NonZeroU32::new(3),
            ..tenant(1, 1, Some(2)).limits
        };
        Script {
            tenant: Tenant {
                id: TenantId(1),
                limits,
            },
            ..script(20, number)
        }
    };
    for number in 0..3 {
        sim.submit(own(number)).unwrap();
    }
    let (queued, limit) = (3, 3);
    let refused = sim.submit(own(3));
    assert_eq!(refused, Err(RequestError::TenantBusy { queued, limit }));
    // Others are not concerned.
    sim.submit(script(20, 4)).unwrap();
    while sim.scheduler.running().count() < 3 {
        assert!(sim.step());
    }
    // A text for each of three siblings does not fit the limit at once.
    sim.submit_texts(own(5), 3).unwrap();
    sim.drain();
}
