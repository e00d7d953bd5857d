//! What a request takes of cached prefixes, and the reason that it gives for the rest.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::fake::{N_VOCAB, rules};
use crate::support::kinds::Kind;
use crate::support::simulator::{Script, Simulator};
use cellar_scheduler::{
    Micros, Missed, PrefixCaching, PrefixUse, Priority, PromptRows, RequestId, Reuse, RowBytes,
    Salt, SchedulerConfig, Tenant,
};
use kv_core::{Pos, TokenId};

pub(crate) fn simulator(kind: Kind, n_seqs: u32, n_cells: u32) -> Simulator {
    let rules = rules(n_seqs);
    let config = SchedulerConfig::new(rules, 64, 4000);
    Simulator::new(kind.memory(n_seqs, n_cells), config)
}

pub(crate) fn text(n: u32, salt: u32) -> Vec<TokenId> {
    let token = |at: u32| TokenId((at * 31 + salt * 17) % N_VOCAB);
    (0..n).map(token).collect()
}

pub(crate) fn script(prompt: Vec<TokenId>) -> Script {
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

/// Runs a request to its end.
pub(crate) fn run(sim: &mut Simulator, script: Script) -> (RequestId, Reuse) {
    sim.now += 1000;
    let id = sim.submit(script).unwrap();
    while sim.end_of(id).is_none() {
        assert!(sim.step());
    }
    (id, sim.reuse_of(id))
}

pub(crate) fn reuse(n_tokens: usize, missed: impl Into<Option<Missed>>) -> Reuse {
    let missed = missed.into();
    Reuse { n_tokens, missed }
}

#[test]
fn a_prompt_that_differs_at_token_700_shares_what_is_before() {
    let mut sim = simulator(Kind::Unified, 4, 3000);
    let (_, first) = run(&mut sim, script(text(900, 1)));
    assert_eq!(first, reuse(0, Missed::NeverSeen));
    let mut other = text(900, 1);
    other[700] = TokenId(999);
    let n_before = sim.scheduler.counters().n_tokens;
    let (_, second) = run(&mut sim, script(other));
    assert_eq!(second, reuse(700, Missed::Differs { at: 700 }));
    let n_computed = sim.scheduler.counters().n_tokens - n_before;
    assert!(n_computed <= 200 + 4, "{n_computed} tokens");
    sim.drain();
}

/// The same prompt again computes one token of it, whatever the memory keeps.
#[test]
fn the_same_prompt_again_computes_one_token() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 6, 600);
        run(&mut sim, script(text(100, 1)));
        let (_, again) = run(&mut sim, script(text(100, 1)));
        assert_eq!(again.n_tokens, 99, "{kind:?}: {again:?}");
        assert_eq!(again.missed, None, "{kind:?}");
        sim.drain();
    }
}

/// Each turn of a conversation computes what is new, and the token that was chosen last.
#[test]
fn a_conversation_computes_what_is_new() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 6, 1200);
        let mut prompt = text(60, 1);
        let mut n_new = 60;
        for turn in 0..10 {
            let n_known = prompt.len();
            prompt.extend(text(40, 100 + turn));
            n_new += 40;
            let (id, reused) = run(&mut sim, script(prompt));
            let tokens = sim.tokens_of(id);
            if turn > 0 {
                assert!(
                    reused.n_tokens + 1 >= n_known,
                    "{kind:?}: {reused:?} of {n_known}"
                );
                assert_eq!(reused.missed, None, "{kind:?}");
            }
            prompt = tokens;
        }
        let counters = sim.scheduler.counters();
        let n_computed = counters.n_prompt_tokens - counters.n_reused_tokens;
        assert!(
            n_computed as f64 <= 1.05 * f64::from(n_new),
            "{kind:?}: {n_computed} tokens of prompts for {n_new} new ones"
        );
        sim.drain();
    }
}

/// Where windows and states can only be copied as they are, the second prompt that parts from a
/// first leaves a copy where it does, and the third finds it.
#[test]
fn a_third_prompt_finds_where_the_second_parted() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 8, 1200);
        let prompt = |own: u32| [text(100, 1), text(40, 1000 + own)].concat();
        run(&mut sim, script(prompt(2)));
        run(&mut sim, script(prompt(3)));
        let (_, third) = run(&mut sim, script(prompt(4)));
        assert!(third.n_tokens >= 100, "{kind:?}: {third:?}");
        sim.drain();
    }
}

/// A prompt that goes on otherwise after a message, finds the copy that was kept at its end.
#[test]
fn a_prompt_that_parts_at_the_end_of_a_message_finds_it() {
    for kind in Kind::ALL {
        let mut sim = simulator(kind, 8, 1200);
        let messages = |last: u32| Script {
            checkpoints: vec![60, 100],
            ..script([text(60, 1), text(40, 500), text(40, last)].concat())
        };
        run(&mut sim, messages(1002));
        let (_, edited) = run(&mut sim, messages(1003));
        assert!(edited.n_tokens >= 100, "{kind:?}: {edited:?}");
        let other = [text(60, 1), text(40, 600)].concat();
        let (_, other) = run(&mut sim, script(other));
        assert!(other.n_tokens >= 60, "{kind:?}: {other:?}");
        sim.drain();
    }
}

/// Cached prefixes have no more bytes than they may, all kinds of rows together.
#[test]
fn the_cache_stays_within_its_bytes() {
    for kind in Kind::ALL {
        for prefix_bytes in [0, 50, 8000] {
            let rules = rules(12);
            let config = SchedulerConfig {
                prefix_bytes: Some(prefix_bytes),
                ..SchedulerConfig::new(rules, 64, 4000)
            };
            let bytes = RowBytes {
                cells: vec![20, 30],
                state: Some(900),
            };
            let mut sim = Simulator::new(kind.memory(12, 1500), config).with_row_bytes(bytes);
            for number in 2..14 {
                run(&mut sim, script(text(40 + 3 * number, number)));
            }
            while sim.step() {}
            let n_cached = sim.scheduler.cached().count();
            assert_eq!(n_cached > 0, prefix_bytes == 8000, "{kind:?}: {n_cached}");
            assert!(sim.scheduler.counters().n_evicted > 0, "{kind:?}");
            sim.drain();
        }
    }
}

#[test]
fn reasons_have_numbers() {
    let mut windowed = simulator(Kind::Sliding, 6, 80);
    run(&mut windowed, script(text(100, 1)));
    let mut other = text(100, 1);
    other[50] = TokenId(999);
    let (_, got) = run(&mut windowed, script(other.clone()));
    // The window of 12 tokens before token 50.
    let (from, common) = (Pos(39), 50);
    assert_eq!(got, reuse(0, Missed::WindowForgotten { from, common }));

    let mut recurrent = simulator(Kind::Recurrent, 6, 600);
    run(&mut recurrent, script(text(100, 1)));
    let (_, got) = run(&mut recurrent, script(other));
    // The snapshot before the last token of the prompt but one.
    let (nearest, common) = (98, 50);
    assert_eq!(got, reuse(0, Missed::StateGone { nearest, common }));
    // One token before the common ones end, where the last prompt parted from the first.
    let mut third = text(100, 1);
    third[51] = TokenId(999);
    let (_, got) = run(&mut recurrent, script(third));
    let (nearest, common) = (50, 51);
    assert_eq!(got, reuse(50, Missed::StateGone { nearest, common }));

    let mut sim = simulator(Kind::Unified, 6, 600);
    let (n_prompt, least) = (5, 8);
    let (_, got) = run(&mut sim, script(text(5, 1)));
    assert_eq!(got, reuse(0, Missed::TooShort { n_prompt, least }));
}

/// Requests of different salts, and one that takes part in nothing, share nothing.
#[test]
fn salts_share_nothing() {
    let mut sim = simulator(Kind::Unified, 6, 600);
    let within = |salt: u64| Script {
        prefix: PrefixUse::Within(Salt(salt)),
        ..script(text(100, 1))
    };
    run(&mut sim, within(1));
    assert_eq!(run(&mut sim, within(2)).1, reuse(0, Missed::NeverSeen));
    assert_eq!(run(&mut sim, within(1)).1, reuse(99, None));
    let off = Script {
        prefix: PrefixUse::Off,
        ..script(text(100, 1))
    };
    assert_eq!(run(&mut sim, off.clone()).1, reuse(0, Missed::Disabled));
    let n_cached = sim.scheduler.cached().count();
    run(&mut sim, off);
    assert_eq!(sim.scheduler.cached().count(), n_cached);
}

/// Two requests that run at the same time share the cells of their common prefix.
#[test]
fn cells_are_shared_while_requests_run() {
    let mut sim = simulator(Kind::Unified, 6, 2000);
    run(&mut sim, script(text(500, 1)));
    let long = |last: u32| {
        let mut prompt = text(500, 1);
        prompt.push(TokenId(last));
        Script {
            max_tokens: 50,
            ..script(prompt)
        }
    };
    for last in 1..4 {
        sim.submit(long(last)).unwrap();
    }
    while sim.scheduler.running().count() < 3 {
        sim.step();
    }
    sim.step();
    assert!(sim.memory.n_used() < 520, "{} cells", sim.memory.n_used());
    sim.drain();
}

/// A pass over many documents does not drop the prefix of a conversation that is used.
#[test]
fn a_pass_over_documents_leaves_what_is_used() {
    let mut sim = simulator(Kind::Unified, 4, 700);
    let mut prompt = text(100, 1);
    run(&mut sim, script(prompt.clone()));
    prompt.extend(text(10, 50));
    let (id, _) = run(&mut sim, script(prompt));
    let mut prompt = sim.tokens_of(id);
    // It is requested again once: a hit.
    prompt.extend(text(10, 51));
    let (id, _) = run(&mut sim, script(prompt));
    for document in 0..32 {
        run(&mut sim, script(text(150, 1000 + document)));
    }
    let mut prompt = sim.tokens_of(id);
    let n_known = prompt.len();
    prompt.extend(text(10, 52));
    let (_, got) = run(&mut sim, script(prompt));
    assert!(sim.scheduler.counters().n_evicted > 20);
    assert!(got.n_tokens >= 100, "{got:?} of {n_known}");
    sim.drain();
}

#[test]
fn what_was_dropped_is_said() {
    let mut sim = simulator(Kind::Unified, 2, 300);
    run(&mut sim, script(text(100, 1)));
    for document in 0..4 {
        run(&mut sim, script(text(200, 1002 + document)));
    }
    let (_, got) = run(&mut sim, script(text(100, 1)));
    let Some(Missed::Evicted { age, common: 100 }) = got.missed else {
        panic!("{got:?}");
    };
    assert!(age >= Micros(3000) && got.n_tokens == 0, "{got:?}");
}

/// Cached prefixes give way to requests: cells, sequences and states.
#[test]
fn cached_prefixes_give_way() {
    for kind in Kind::ALL {
        for n_seqs in [1, 2, 5] {
            let mut sim = simulator(kind, n_seqs, 128);
            for number in 0..12 {
                run(&mut sim, script(text(90, number)));
            }
            assert_eq!(sim.scheduler.counters().n_preemptions, 0, "{kind:?}");
            sim.drain();
        }
    }
}

/// The windows of cached prefixes leave room for whole ubatches: pieces would be of two tokens.
#[test]
fn cached_windows_give_way_to_whole_ubatches() {
    let mut sim = simulator(Kind::Sliding, 12, 400);
    for number in 0..12 {
        run(&mut sim, script(text(100, number)));
    }
    assert!(sim.scheduler.cached().count() > 0);
    assert_eq!(sim.n_ubatches, sim.n_steps);
    sim.drain();
}

#[test]
fn a_scheduler_without_a_cache_keeps_nothing() {
    let rules = rules(4);
    let config = SchedulerConfig {
        prefix_cache: PrefixCaching::Off,
        ..SchedulerConfig::new(rules, 64, 4000)
    };
    let mut sim = Simulator::new(Kind::Unified.memory(4, 500), config);
    run(&mut sim, script(text(100, 1)));
    let (_, again) = run(&mut sim, script(text(100, 1)));
    assert_eq!(again, reuse(0, Missed::Disabled));
    assert_eq!(sim.scheduler.cached().count(), 0);
}
