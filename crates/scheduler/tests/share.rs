//! Requests that come together and begin alike: who waits for whom, and what each computes.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::fake::N_VOCAB;
use crate::support::kinds::Kind;
use crate::support::simulator::{Script, Simulator};
use cellar_scheduler::{
    Missed, PrefixUse, Priority, PromptRows, RequestId, Reuse, Salt, SchedulerConfig, Tenant,
};
use kv_core::TokenId;
use kv_core::batch::BatchRules;

const CHUNK: u32 = 32;

fn simulator(kind: Kind, n_seqs: u32, n_cells: u32) -> Simulator {
    let rules = BatchRules {
        n_batch: CHUNK,
        n_seqs,
        n_vocab: N_VOCAB,
        n_embd: 8,
    };
    let config = SchedulerConfig {
        headroom: 4,
        ..SchedulerConfig::new(rules, CHUNK, 4000)
    };
    Simulator::new(kind.memory(n_seqs, n_cells), config)
}

fn text(n: u32, number: u32) -> Vec<TokenId> {
    let token = |at: u32| TokenId((at * (7 + number) + at * at * 3 + number) % N_VOCAB);
    (0..n).map(token).collect()
}

/// The first `n` tokens of one text, then `rest` of another.
fn script(n: u32, rest: u32, number: u32) -> Script {
    let prompt = [text(n, 1), text(rest, 100 + number)].concat();
    Script {
        prompt,
        priority: Priority::Normal,
        prefix: PrefixUse::default(),
        prompt_rows: PromptRows::Last,
        checkpoints: Vec::new(),
        parting: None,
        tenant: Tenant::default(),
        max_tokens: 4,
        bad_row: None,
        is_poison: false,
        variant: 0,
    }
}

/// One step, and the edits before it.
fn step(sim: &mut Simulator) {
    let n_before = sim.n_steps;
    while sim.n_steps == n_before {
        sim.now += 1;
        assert!(sim.step());
    }
}

fn running(sim: &Simulator) -> Vec<RequestId> {
    sim.scheduler.running().map(|r| r.id).collect()
}

/// Tokens of prompts that are computed until all requests have ended.
fn n_computed(sim: &mut Simulator, ids: &[RequestId]) -> u64 {
    sim.drain();
    let n_text: usize = ids.iter().map(|&id| sim.text_of(id).len()).sum();
    // The last token of a text of full length is not computed.
    let n_last = ids.iter().filter(|&&id| sim.text_of(id).len() == 4).count();
    sim.scheduler.counters().n_tokens - (n_text - n_last) as u64
}

/// Whatever the memory keeps: a prefix is computed once, and the rest of each prompt.
#[test]
fn prompts_that_come_together_compute_their_prefix_once() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 8, 1600);
        let ids: Vec<RequestId> = (0..6)
            .map(|number| sim.submit(script(200, 10, number)).unwrap())
            .collect();
        let n = n_computed(&mut sim, &ids);
        assert_eq!(n, 200 + 6 * 10, "{kind:?}");
        assert_eq!(sim.scheduler.counters().n_preemptions, 0, "{kind:?}");
        for &id in &ids[1..] {
            assert_eq!(sim.reuse_of(id).n_tokens, 200, "{kind:?}");
        }
    }
}

#[test]
fn equal_prompts_compute_one_token_each() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 8, 1600);
        let ids: Vec<RequestId> = (0..6)
            .map(|_| sim.submit(script(200, 0, 0)).unwrap())
            .collect();
        assert_eq!(n_computed(&mut sim, &ids), 200 + 5, "{kind:?}");
        let whole = Reuse {
            n_tokens: 199,
            missed: None,
        };
        assert!(
            ids[1..].iter().all(|&id| sim.reuse_of(id) == whole),
            "{kind:?}"
        );
        let counters = sim.scheduler.counters();
        assert_eq!(counters.n_waits, 5, "{kind:?}");
        assert_eq!(counters.n_reused_tokens, 5 * 199, "{kind:?}");
    }
}

/// Cells that several have count once, so that all run at the same time.
#[test]
fn the_cells_of_a_common_prefix_have_to_fit_once() {
    let mut sim = simulator(Kind::Unified, 8, 320);
    let long = |number| Script {
        max_tokens: 20,
        ..script(200, 4, number)
    };
    for number in 0..6 {
        sim.submit(long(number)).unwrap();
    }
    while running(&sim).len() < 6 {
        step(&mut sim);
    }
    assert!(sim.memory.n_used() < 240);
    sim.drain();
    assert_eq!(sim.scheduler.counters().n_preemptions, 0);
}

/// A running request is shared as far as it is, also while it decodes.
#[test]
fn a_text_that_goes_on_is_shared() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    let first = Script {
        max_tokens: 50,
        ..script(200, 0, 0)
    };
    sim.submit(first).unwrap();
    (0..8).for_each(|_| step(&mut sim));
    let second = sim.submit(script(150, 9, 2)).unwrap();
    step(&mut sim);
    assert_eq!(running(&sim).len(), 2);
    let at = 150;
    let differs = Reuse {
        n_tokens: at,
        missed: Some(Missed::Differs { at }),
    };
    assert_eq!(sim.reuse_of(second), differs);
    assert_eq!(sim.scheduler.counters().n_shared_tokens, 150);
    assert_eq!(sim.scheduler.counters().n_waits, 0);
    sim.drain();
}

/// What has passed the common tokens cannot be shared where windows or states are behind them.
#[test]
fn windows_and_states_say_why_a_running_text_is_not_shared() {
    for (kind, n_cells) in [
        (Kind::Sliding, 120),
        (Kind::Recurrent, 900),
        (Kind::Hybrid, 900),
    ] {
        let mut sim = simulator(kind, 4, n_cells);
        let first = Script {
            max_tokens: 50,
            ..script(200, 0, 0)
        };
        let first = sim.submit(first).unwrap();
        while sim.text_of(first).is_empty() {
            step(&mut sim);
        }
        let second = sim.submit(script(150, 9, 2)).unwrap();
        step(&mut sim);
        let common = 150;
        let missed = match kind {
            Kind::Sliding => Missed::WindowForgotten {
                from: kv_core::Pos(139),
                common,
            },
            // Of the copy before the end of its prompt; the first kind has a snapshot before that.
            Kind::Recurrent => Missed::StateGone {
                nearest: 198,
                common,
            },
            _ => Missed::StateGone {
                nearest: 199,
                common,
            },
        };
        let reuse = Reuse {
            n_tokens: 0,
            missed: Some(missed),
        };
        assert_eq!(sim.reuse_of(second), reuse, "{kind:?}");
        sim.drain();
    }
}

/// A request that waited takes what is there when the other is cancelled.
#[test]
fn a_cancelled_source_leaves_what_it_has() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 4, 900);
        let source = sim.submit(script(200, 10, 0)).unwrap();
        let waiting = sim.submit(script(200, 10, 1)).unwrap();
        (0..3).for_each(|_| step(&mut sim));
        assert_eq!(running(&sim), [source], "{kind:?}");
        sim.cancel(source);
        step(&mut sim);
        assert_eq!(running(&sim), [waiting], "{kind:?}");
        let n_done = 3 * CHUNK as usize;
        assert_eq!(sim.reuse_of(waiting).n_tokens, n_done, "{kind:?}");
        sim.drain();
    }
}

/// Those that wait for a request that fails begin without it; the next one computes the prefix.
#[test]
fn a_source_that_fails_holds_nobody_up() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 4, 900);
        let poison = Script {
            is_poison: true,
            ..script(100, 10, 0)
        };
        let source = sim.submit(poison).unwrap();
        let ids = [1, 2].map(|number| sim.submit(script(100, 10, number)).unwrap());
        sim.drain();
        assert_eq!(
            sim.end_of(source),
            Some(cellar_scheduler::End::Failed),
            "{kind:?}"
        );
        let reused = ids.map(|id| sim.reuse_of(id).n_tokens);
        assert_eq!(reused, [0, 100], "{kind:?}");
    }
}

/// A source that is preempted comes back, and those that wait for it are as they were.
#[test]
fn a_source_that_is_preempted_is_waited_for_again() {
    for kind in [
        Kind::Unified,
        Kind::Sliding,
        Kind::Interleaved,
        Kind::Recurrent,
    ] {
        let mut sim = simulator(kind, 4, 400);
        let interactive = Script {
            priority: Priority::Interactive,
            ..script(0, 200, 9)
        };
        let ids = [0, 1, 2].map(|number| sim.submit(script(200, 10, number)).unwrap());
        (0..3).for_each(|_| step(&mut sim));
        let urgent = sim.submit(interactive).unwrap();
        step(&mut sim);
        assert!(running(&sim).contains(&urgent), "{kind:?}");
        sim.drain();
        let reused = [ids[1], ids[2]].map(|id| sim.reuse_of(id).n_tokens);
        assert_eq!(reused, [200, 200], "{kind:?}");
        let n_preempted = sim.scheduler.counters().n_preemptions;
        assert!(n_preempted > 0 || !matches!(kind, Kind::Unified));
    }
}

/// A higher priority takes what is there, and computes the rest first.
#[test]
fn a_higher_priority_waits_for_no_lower_one() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    let low = sim
        .submit(Script {
            priority: Priority::Batch,
            ..script(200, 10, 0)
        })
        .unwrap();
    (0..2).for_each(|_| step(&mut sim));
    let high = sim.submit(script(200, 10, 1)).unwrap();
    step(&mut sim);
    assert_eq!(running(&sim), [high, low]);
    assert_eq!(sim.reuse_of(high).n_tokens, 2 * CHUNK as usize);
    // And a lower one waits for a higher that came later.
    let lowest = sim
        .submit(Script {
            priority: Priority::Batch,
            ..script(200, 10, 2)
        })
        .unwrap();
    step(&mut sim);
    assert_eq!(running(&sim), [high, low]);
    sim.drain();
    assert_eq!(sim.reuse_of(lowest).n_tokens, 200);
}

/// One that waits rises, and the one that it waits for rises with it: it does not stop to wait.
#[test]
fn what_is_waited_for_rises_with_those_that_wait() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    let source = sim.submit(script(200, 10, 0)).unwrap();
    let waiting = sim.submit(script(200, 10, 1)).unwrap();
    step(&mut sim);
    sim.now += 2 * sim.scheduler.config().aging.0;
    let urgent = Script {
        priority: Priority::Interactive,
        ..script(0, 100, 7)
    };
    let urgent = sim.submit(urgent).unwrap();
    step(&mut sim);
    assert_eq!(running(&sim), [source, urgent]);
    sim.drain();
    assert_eq!(sim.reuse_of(waiting).n_tokens, 200);
}

#[test]
fn other_salts_neither_wait_nor_share() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    let within = |prefix, number| Script {
        prefix,
        ..script(200, 10, number)
    };
    let prefixes = [
        PrefixUse::Within(Salt(1)),
        PrefixUse::Within(Salt(2)),
        PrefixUse::Off,
        PrefixUse::Off,
    ];
    let ids: Vec<RequestId> = (0..)
        .zip(prefixes)
        .map(|(number, prefix)| sim.submit(within(prefix, number)).unwrap())
        .collect();
    step(&mut sim);
    assert_eq!(running(&sim).len(), 4);
    sim.drain();
    assert!(ids.iter().all(|&id| sim.reuse_of(id).n_tokens == 0));
    assert_eq!(sim.scheduler.counters().n_waits, 0);
}

/// A short common beginning is not worth waiting for.
#[test]
fn few_common_tokens_are_computed_twice() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    sim.submit(script(12, 100, 0)).unwrap();
    sim.submit(script(12, 100, 1)).unwrap();
    step(&mut sim);
    assert_eq!(running(&sim).len(), 2);
    assert_eq!(sim.scheduler.counters().n_waits, 0);
    sim.drain();
    let mut sim = simulator(Kind::Unified, 4, 900);
    (0..2).for_each(|number| {
        sim.submit(script(16, 100, number)).unwrap();
    });
    step(&mut sim);
    assert_eq!(sim.scheduler.counters().n_waits, 1, "16 are enough");
    sim.drain();
}

/// The common tokens may end where a chunk does.
#[test]
fn nobody_waits_longer_than_for_the_common_tokens() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    let ids = [0, 1].map(|number| sim.submit(script(2 * CHUNK, 40, number)).unwrap());
    (0..2).for_each(|_| step(&mut sim));
    assert_eq!(running(&sim), [ids[0]]);
    step(&mut sim);
    assert_eq!(running(&sim), ids);
    sim.drain();
}

/// Of several that run, the one with most common tokens is waited for.
#[test]
fn the_longest_common_beginning_is_waited_for() {
    let mut sim = simulator(Kind::Unified, 4, 1600);
    let short = sim.submit(script(20, 300, 0)).unwrap();
    step(&mut sim);
    let long = sim.submit(script(200, 100, 1)).unwrap();
    step(&mut sim);
    assert_eq!(running(&sim), [short, long]);
    let third = sim.submit(script(200, 10, 2)).unwrap();
    sim.drain();
    assert_eq!(sim.reuse_of(third).n_tokens, 200);
}

/// Where each stop costs a copy, one that is less than 16 tokens before the common end serves.
#[test]
fn a_stop_just_before_the_common_end_serves() {
    for (n_common, n_reused) in [(115, 100), (116, 116)] {
        let mut sim = simulator(Kind::Recurrent, 8, 900);
        let first = Script {
            checkpoints: vec![100],
            ..script(n_common, 90, 0)
        };
        sim.submit(first).unwrap();
        let second = sim.submit(script(n_common, 10, 1)).unwrap();
        sim.drain();
        assert_eq!(sim.reuse_of(second).n_tokens, n_reused, "{n_common}");
        assert_eq!(sim.scheduler.counters().n_waits, 1, "{n_common}");
    }
}

/// Cells can be shared anywhere, so the request that is waited for goes on with whole chunks.
#[test]
fn a_request_stops_for_others_only_where_windows_or_states_need_it() {
    for (kind, n_done) in [(Kind::Unified, 96), (Kind::Recurrent, 70)] {
        let mut sim = simulator(kind, 4, 900);
        (0..2).for_each(|number| {
            sim.submit(script(70, 60, number)).unwrap();
        });
        (0..3).for_each(|_| step(&mut sim));
        let source = sim.scheduler.running().next().unwrap();
        assert_eq!(source.n_done, n_done, "{kind:?}");
        sim.drain();
    }
}

/// The room of those that wait is kept: one that came later does not take it.
#[test]
fn later_requests_take_no_room_of_those_that_wait() {
    let mut sim = simulator(Kind::Unified, 4, 420);
    let source = sim.submit(script(200, 10, 0)).unwrap();
    let waiting = sim.submit(script(200, 50, 1)).unwrap();
    let large = sim.submit(script(0, 150, 2)).unwrap();
    let small = sim.submit(script(0, 100, 3)).unwrap();
    step(&mut sim);
    assert_eq!(
        running(&sim),
        [source],
        "{large} would take the room of {waiting}"
    );
    while !running(&sim).contains(&waiting) {
        assert_eq!(running(&sim), [source]);
        step(&mut sim);
    }
    while sim.end_of(waiting).is_none() {
        assert!(!running(&sim).contains(&small) || running(&sim).contains(&large));
        step(&mut sim);
    }
    sim.drain();
    assert_eq!(sim.reuse_of(waiting).n_tokens, 200);
}

/// Where a place for it is free, one that does not wait goes past those that do.
#[test]
fn others_go_past_those_that_wait() {
    let mut sim = simulator(Kind::Unified, 4, 900);
    let source = sim.submit(script(200, 10, 0)).unwrap();
    let waiting = sim.submit(script(200, 10, 1)).unwrap();
    let other = sim.submit(script(0, 40, 2)).unwrap();
    step(&mut sim);
    assert_eq!(running(&sim), [source, other]);
    sim.drain();
    assert_eq!(sim.reuse_of(waiting).n_tokens, 200);
}
