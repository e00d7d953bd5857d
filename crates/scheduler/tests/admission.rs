//! Who is admitted next, what counts for its tenant, and who makes room.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;

use crate::reuse::{script, simulator, text};
use crate::scheduler::long_script;
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use crate::support::simulator::{Script, Simulator};
use cellar_scheduler::{
    Event, Micros, PrefixCaching, PrefixUse, Priority, Progress, PromptRows, Request, RequestId,
    Scheduler, SchedulerConfig, Tenant, TenantId, Work,
};
use kv_core::TokenId;
use kv_core::memory::{Memory, MemoryInputs};

/// A simulator of ample memory with another configuration than the usual.
fn with(change: impl FnOnce(&mut SchedulerConfig)) -> Simulator {
    let mut config = SchedulerConfig::new(rules(8), 64, 4000);
    change(&mut config);
    Simulator::new(Kind::Unified.memory(8, 4000), config)
}

fn running(sim: &Simulator) -> Vec<RequestId> {
    sim.scheduler.running().map(|r| r.id).collect()
}

/// A prompt whose text is one token.
fn short(tenant: u64, n_prompt: u32, salt: u32) -> Script {
    Script {
        max_tokens: 1,
        tenant: Tenant {
            id: TenantId(tenant),
            ..Tenant::default()
        },
        ..script(text(n_prompt, salt))
    }
}

/// The requests in the order in which they end.
fn order_of_ends(sim: &mut Simulator) -> Vec<RequestId> {
    let all: Vec<RequestId> = (0..sim.n_clients()).map(RequestId).collect();
    let mut ended = Vec::new();
    while ended.len() < all.len() {
        assert!(sim.step());
        let new = all.iter().filter(|&&id| sim.end_of(id).is_some());
        let new: Vec<_> = new.copied().filter(|id| !ended.contains(id)).collect();
        ended.extend(new);
    }
    sim.drain();
    ended
}

/// A prompt that nothing cached shortens.
fn submit_without_prefix(sim: &mut Simulator, tenant: u64, n_prompt: u32) {
    let number = sim.n_clients() as u32;
    let off = Script {
        prefix: PrefixUse::Off,
        ..short(tenant, n_prompt, number)
    };
    sim.submit(off).unwrap();
}

#[test]
fn prompts_count_for_their_tenants_when_they_are_admitted() {
    let mut sim = with(|config| config.max_running = 1);
    for (tenant, n_prompt) in [(1, 30), (1, 5), (2, 5), (2, 5)] {
        submit_without_prefix(&mut sim, tenant, n_prompt);
    }
    assert_eq!(order_of_ends(&mut sim), [0, 2, 3, 1].map(RequestId));
}

#[test]
fn texts_count_for_their_tenants_token_by_token() {
    let mut sim = with(|config| config.max_running = 1);
    let of = |tenant| short(tenant, 30, 1).tenant;
    let long = Script {
        tenant: of(1),
        ..long_script(5, 30, &sim.memory)
    };
    sim.submit(long).unwrap();
    for (tenant, n_prompt) in [(1, 5), (2, 30), (2, 30)] {
        submit_without_prefix(&mut sim, tenant, n_prompt);
    }
    // A prompt of 5 and 29 tokens of text are more than 30.
    assert_eq!(order_of_ends(&mut sim), [0, 2, 3, 1].map(RequestId));
}

#[test]
fn reused_tokens_do_not_count() {
    let mut sim = with(|config| config.max_running = 1);
    for script in [
        short(1, 30, 1),
        short(1, 30, 1),
        short(1, 30, 1),
        short(2, 20, 2),
        short(2, 20, 5),
        short(2, 20, 9),
    ] {
        sim.submit(script).unwrap();
    }
    // After 30 tokens and one of the first tenant, the other one had 40.
    let wanted = [0, 3, 4, 1, 2, 5].map(RequestId);
    assert_eq!(order_of_ends(&mut sim), wanted);
}

#[test]
fn a_prompt_counts_once_however_often_it_is_preempted() {
    let mut sim = with(|config| config.preempt_every = NonZeroU32::new(2));
    for salt in [1, 2] {
        let long = Script {
            max_tokens: 20,
            prefix: PrefixUse::Off,
            ..script(text(40, salt))
        };
        sim.submit(long).unwrap();
    }
    sim.drain();
    let counters = sim.scheduler.counters();
    assert!(counters.n_preemptions > 0);
    assert_eq!(
        (counters.n_prompt_tokens, counters.n_reused_tokens),
        (80, 0)
    );
}

#[test]
fn without_a_cache_nobody_waits_for_a_prefix() {
    let mut sim = with(|config| config.prefix_cache = PrefixCaching::Off);
    for _ in 0..2 {
        sim.submit(script(text(100, 1))).unwrap();
    }
    assert!(sim.step());
    assert_eq!(running(&sim).len(), 2);
    assert_eq!(sim.scheduler.counters().n_waits, 0);
    sim.drain();
}

/// Each has room for one more token, also where no headroom is asked for.
#[test]
fn requests_run_together_where_each_can_grow_by_a_token() {
    for (n_cells, n_running) in [(41, 1), (42, 2)] {
        let config = SchedulerConfig {
            headroom: 0,
            ..SchedulerConfig::new(rules(2), 64, 4000)
        };
        let mut sim = Simulator::new(Kind::Unified.memory(2, n_cells), config);
        for salt in [1, 2] {
            let off = Script {
                prefix: PrefixUse::Off,
                ..script(text(20, salt))
            };
            sim.submit(off).unwrap();
        }
        assert!(sim.step());
        assert_eq!(running(&sim).len(), n_running, "{n_cells} cells");
        sim.drain();
    }
}

#[test]
fn of_several_below_the_last_one_makes_room() {
    let mut sim = with(|config| config.max_running = 2);
    let of = |priority, salt| Script {
        priority,
        max_tokens: 20,
        ..script(text(20, salt))
    };
    let first = sim.submit(of(Priority::Batch, 1)).unwrap();
    let second = sim.submit(of(Priority::Batch, 2)).unwrap();
    assert!(sim.step());
    let urgent = sim.submit(of(Priority::Interactive, 3)).unwrap();
    sim.now += 700;
    while !running(&sim).contains(&urgent) {
        assert!(sim.step());
    }
    assert_eq!(running(&sim), [urgent, first]);
    let waiting: Vec<_> = sim.scheduler.waiting().map(|r| (r.id, r.since)).collect();
    assert_eq!(waiting, [(second, Micros(700))]);
    sim.drain();
}

/// Ranks rise by the time that requests wait, whatever the time is.
#[test]
fn a_request_that_comes_late_has_not_risen() {
    let mut sim = with(|config| config.max_running = 1);
    let of = |priority, salt| Script {
        priority,
        ..short(1, 20, salt)
    };
    sim.now = 10 * sim.scheduler.config().aging.0;
    for (priority, salt) in [
        (Priority::Interactive, 1),
        (Priority::Batch, 2),
        (Priority::Normal, 3),
    ] {
        sim.submit(of(priority, salt)).unwrap();
    }
    assert_eq!(order_of_ends(&mut sim), [0, 2, 1].map(RequestId));
}

#[test]
fn a_text_that_was_preempted_shares_its_prompt_no_more() {
    let mut sim = with(|config| config.preempt_every = NonZeroU32::new(3));
    let script = long_script(20, 30, &sim.memory);
    let first = sim.submit_texts(script, 2).unwrap();
    let groups =
        |sim: &Simulator| -> Vec<RequestId> { sim.scheduler.running().map(|r| r.group).collect() };
    while running(&sim).len() < 2 {
        assert!(sim.step());
    }
    assert_eq!(groups(&sim), [first; 2]);
    while sim.scheduler.counters().n_preemptions == 0 || running(&sim).len() < 2 {
        assert!(sim.step());
    }
    assert_eq!(groups(&sim), running(&sim));
    sim.drain();
}

/// A text, and a prompt that does not fit next to it when it has grown.
fn text_and_prompt(prompt_rows: PromptRows, swap_bytes: u64) -> (Simulator, RequestId) {
    let config = SchedulerConfig {
        headroom: 1,
        step_tokens: 9,
        swap_bytes,
        ..SchedulerConfig::new(rules(2), 64, 4000)
    };
    let mut sim = Simulator::new(Kind::Unified.memory(2, 71), config);
    sim.submit(long_script(9, 30, &sim.memory)).unwrap();
    assert!(sim.step());
    let prompt = Script {
        prompt_rows,
        ..long_script(59, 4, &sim.memory)
    };
    let prompt = sim.submit(prompt).unwrap();
    (sim, prompt)
}

/// The rows of the first chunks are gone when it comes back.
#[test]
fn a_prompt_whose_rows_are_all_wanted_is_not_saved() {
    for (prompt_rows, n_saved) in [(PromptRows::Last, 1), (PromptRows::All, 0)] {
        let (mut sim, _) = text_and_prompt(prompt_rows, 10_000);
        while sim.scheduler.counters().n_preemptions == 0 {
            assert!(sim.step());
        }
        assert_eq!(sim.scheduler.counters().n_swapped_out, n_saved);
        sim.drain();
    }
}

/// A chunk of a prompt is halved until it fits next to a text, before anyone is preempted.
#[test]
fn a_step_that_does_not_fit_is_made_smaller() {
    let (mut sim, prompt) = text_and_prompt(PromptRows::Last, 0);
    let mut n_done = vec![0];
    while sim.scheduler.counters().n_preemptions == 0 {
        assert!(sim.step());
        let own = sim.scheduler.running().find(|r| r.id == prompt);
        n_done.extend(own.map(|own| own.n_done));
    }
    let chunks: Vec<usize> = n_done.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(chunks, [8, 8, 8, 8, 8, 8, 4, 1, 0]);
    // 8 and 4; 7, 3 and 1; 6, 3, 1 and 0; and once more, before the prompt makes room.
    assert_eq!(sim.scheduler.counters().n_replanned, 1 + 2 + 3 + 4);
    sim.drain();
}

/// Two texts share what a step has left for drafted tokens.
#[test]
fn drafted_tokens_of_several_texts_fit_one_step() {
    let mut sim = with(|config| config.step_tokens = 6);
    for _ in 0..2 {
        sim.submit(long_script(2, 30, &sim.memory)).unwrap();
    }
    while running(&sim).iter().any(|&id| sim.text_of(id).is_empty()) || running(&sim).len() < 2 {
        assert!(sim.step());
    }
    for request in [0, 1].map(RequestId) {
        let tokens = [1, 2, 3].map(TokenId).to_vec();
        let draft = Event::Draft { request, tokens };
        assert!(sim.scheduler.handle(Micros(0), draft).is_empty());
    }
    assert!(sim.step());
    // One token of each text, and four more: once.
    assert_eq!(sim.scheduler.counters().n_drafted_tokens, 4);
    sim.drain();
    assert_eq!(sim.scheduler.counters().n_drafted_tokens, 4);
}

/// To test that texts stay the same: never the first, and after every so many steps.
#[test]
fn the_last_is_preempted_after_every_so_many_steps() {
    for n_requests in [1, 2, 3] {
        let mut sim = with(|config| config.preempt_every = NonZeroU32::new(3));
        for _ in 0..n_requests {
            sim.submit(long_script(20, 30, &sim.memory)).unwrap();
        }
        let mut at = Vec::new();
        while sim.n_steps < 8 {
            let n_before = sim.scheduler.counters().n_preemptions;
            assert!(sim.step());
            let counters = sim.scheduler.counters();
            if counters.n_preemptions > n_before {
                at.push(counters.n_steps);
                let waiting = sim.scheduler.waiting().map(|r| r.id.0);
                assert_eq!(waiting.collect::<Vec<_>>(), [n_requests - 1]);
            }
        }
        let wanted: &[u64] = if n_requests > 1 { &[3, 6] } else { &[] };
        assert_eq!(at, wanted, "{n_requests}");
        sim.drain();
    }
}

/// The places of those that wait for a prefix are kept, as long as they wait.
#[test]
fn no_later_request_takes_a_place_that_is_kept() {
    let mut sim = simulator(Kind::Unified, 4, 2000);
    let prompt = |last| [text(400, 1), text(9, last)].concat();
    let source = sim.submit(script(prompt(50))).unwrap();
    for last in 51..54 {
        sim.submit(script(prompt(last))).unwrap();
    }
    sim.submit(script(text(30, 7))).unwrap();
    for _ in 0..5 {
        assert!(sim.step());
        assert_eq!(running(&sim), [source]);
    }
    sim.drain();
}

/// A memory may have fewer sequences than requests could run: the next one waits for one of them,
/// and so does a further text of the same prompt.
#[test]
fn where_no_sequence_is_free_the_next_request_waits() {
    let memory = Kind::Unified.memory(1, 900);
    let config = SchedulerConfig::new(rules(4), 64, 4000);
    let mut sim = Simulator::new(memory.clone(), config);
    let ids: Vec<RequestId> = (0..2)
        .map(|salt| sim.submit(script(text(30, salt))).unwrap())
        .collect();
    assert!(sim.step());
    assert_eq!(running(&sim), [ids[0]]);
    sim.drain();

    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    let mut memory = memory;
    let request = Request {
        id: RequestId(1),
        prompt: text(30, 1),
        siblings: vec![RequestId(2)],
        ..Request::default()
    };
    scheduler.handle(Micros(0), Event::Submit(request));
    let mut step = |scheduler: &mut Scheduler, progress| {
        let Work::Decode { step, planned } = scheduler.next(Micros(0), &memory).work else {
            panic!("no step");
        };
        let mut steps = memory.begin_planned(planned.plan);
        while steps.next(&mut MemoryInputs::default()).is_some() {}
        drop(steps);
        let rows = step.report(|_| Some(progress));
        scheduler.handle(Micros(0), Event::StepDone(rows));
        step.texts().collect::<Vec<_>>()
    };
    let token = Progress::Token(TokenId(5));
    assert_eq!(step(&mut scheduler, token), [RequestId(1), RequestId(2)]);
    assert_eq!(step(&mut scheduler, token), [RequestId(1)]);
    assert_eq!(scheduler.n_waiting(), 1);
    assert_eq!(step(&mut scheduler, Progress::Ended), [RequestId(1)]);
    // It takes over what the first has left: its own tokens are there.
    let Work::Edit(edits) = scheduler.next(Micros(0), &memory).work else {
        panic!("the first has its own token behind the prompt");
    };
    for edit in edits {
        let _no_rows = memory.apply(edit).unwrap();
    }
    let running: Vec<_> = scheduler.running().map(|r| (r.id, r.n_done)).collect();
    assert_eq!(running, [(RequestId(2), 30)]);
}
