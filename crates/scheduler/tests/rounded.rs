//! Who has the tokens of a request that was preempted: nobody else, where they came back rounded,
//! and nobody of another salt.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::{run, script, text};
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use crate::support::simulator::{Script, Simulator};
use cellar_scheduler::{
    Note, PrefixUse, Priority, RequestId, RowBytes, Salt, SchedulerConfig, SwapRows,
};

fn simulator(kind: Kind, swap_rows: SwapRows) -> Simulator {
    let config = SchedulerConfig {
        swap_bytes: 100_000,
        swap_rows,
        ..SchedulerConfig::new(rules(6), 64, 4000)
    };
    let row_bytes = RowBytes {
        cells: vec![10],
        state: None,
    };
    let mut sim = Simulator::new(kind.memory(6, 500), config).with_row_bytes(row_bytes);
    sim.scheduler = sim.scheduler.with_notes();
    sim
}

/// An urgent request comes for which all others have to make room.
fn submit_urgent(sim: &mut Simulator) {
    let urgent = Script {
        priority: Priority::Interactive,
        prefix: PrefixUse::Off,
        ..script(text(400, 9))
    };
    sim.submit(urgent).unwrap();
}

/// A request that was preempted in the middle of its prompt, and whose state has come back.
fn restored(sim: &mut Simulator) -> RequestId {
    let id = sim.submit(script(text(200, 1))).unwrap();
    while sim.scheduler.running().all(|r| r.n_done == 0) {
        assert!(sim.step());
    }
    submit_urgent(sim);
    while sim.scheduler.counters().n_swapped_in == 0 {
        assert!(sim.step());
    }
    let running: Vec<(RequestId, usize)> =
        sim.scheduler.running().map(|r| (r.id, r.n_done)).collect();
    assert_eq!(running, [(id, 64)]);
    id
}

/// A prompt that begins with the tokens of a request shares them, also those that are computed
/// next, but not where the first of them came back rounded: then all of it is computed.
#[test]
fn nobody_shares_or_awaits_rounded_tokens() {
    for kind in [Kind::Unified, Kind::Hybrid] {
        for (swap_rows, n_waits, n_shared) in [(SwapRows::Exact, 1, 200), (SwapRows::Rounded, 0, 0)]
        {
            let mut sim = simulator(kind, swap_rows);
            restored(&mut sim);
            let second = [text(200, 1), text(10, 5)].concat();
            let second = sim.submit(script(second)).unwrap();
            sim.drain();
            let n_reused = sim.reuse_of(second).n_tokens;
            assert_eq!(n_reused, n_shared, "{kind:?} {swap_rows:?}");
            let counters = sim.scheduler.counters();
            assert_eq!(counters.n_waits, n_waits, "{kind:?} {swap_rows:?}");
        }
    }
}

/// What a request leaves at its end is what a prompt would compute.
#[test]
fn rounded_tokens_are_not_cached() {
    for kind in [Kind::Unified, Kind::Hybrid] {
        for (swap_rows, is_cached) in [(SwapRows::Exact, true), (SwapRows::Rounded, false)] {
            let mut sim = simulator(kind, swap_rows);
            let id = restored(&mut sim);
            while sim.end_of(id).is_none() {
                assert!(sim.step());
            }
            let notes = sim.scheduler.take_notes();
            let is_own =
                |note: &Note| matches!(note, Note::Cached { request, .. } if *request == id);
            assert_eq!(
                notes.iter().any(is_own),
                is_cached,
                "{kind:?} {swap_rows:?}"
            );
            sim.drain();
        }
    }
}

/// Tokens that a cached prefix has, too, are not saved; but those of another salt are not found
/// again.
#[test]
fn tokens_that_only_another_salt_has_are_saved() {
    for (salt, n_left_out) in [(0, 150), (1, 0)] {
        let mut sim = simulator(Kind::Unified, SwapRows::Exact);
        run(&mut sim, script(text(150, 1)));
        let victim = Script {
            prefix: PrefixUse::Within(Salt(salt)),
            ..script([text(150, 1), text(60, 5)].concat())
        };
        let victim = sim.submit(victim).unwrap();
        while sim.scheduler.running().all(|r| r.n_done < 200) {
            assert!(sim.step());
        }
        let n_done = sim.scheduler.running().next().unwrap().n_done;
        submit_urgent(&mut sim);
        while sim.scheduler.counters().n_swapped_out == 0 {
            assert!(sim.step());
        }
        let notes = sim.scheduler.take_notes();
        let saved = notes.iter().find_map(|note| match note {
            Note::SwappedOut {
                request, n_tokens, ..
            } => Some((*request, *n_tokens)),
            _ => None,
        });
        assert_eq!(saved, Some((victim, n_done - n_left_out)), "{salt}");
        sim.drain();
    }
}
