//! What is noted of cached prefixes, and of states that go to the host.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::{run, script, simulator, text};
use crate::support::kinds::Kind;
use crate::support::simulator::Simulator;
use cellar_scheduler::{DropReason, Event, Micros, Note};
use kv_core::SeqId;

fn noting(kind: Kind, n_seqs: u32) -> Simulator {
    let mut sim = simulator(kind, n_seqs, 900);
    sim.scheduler = sim.scheduler.with_notes();
    sim
}

/// The sequence of the only cached prefix.
fn only_line(sim: &Simulator) -> SeqId {
    let seqs: Vec<SeqId> = sim.scheduler.cached().map(|line| line.seq).collect();
    let [seq] = seqs[..] else { panic!("{seqs:?}") };
    seq
}

#[test]
fn tokens_are_cached_shared_and_dropped() {
    let mut sim = noting(Kind::Unified, 4);
    let (first, _) = run(&mut sim, script(text(100, 1)));
    let from = only_line(&sim);
    let [Note::Cached { seq, request, .. }] = sim.scheduler.take_notes()[..] else {
        panic!("not cached");
    };
    assert_eq!((seq, request), (from, first));
    let again = sim.submit(script(text(100, 1))).unwrap();
    assert!(sim.step(), "a copy");
    let own = sim.scheduler.running().next().unwrap().seq;
    let shared = Note::Shared {
        request: again,
        seq: own,
        from,
        n_tokens: 99,
    };
    assert_eq!(sim.scheduler.take_notes(), [shared]);
    assert_ne!(own, from);
    sim.cancel(again);
    while sim.step() {}
    sim.scheduler.take_notes();
    let seq = only_line(&sim);
    let line = sim.scheduler.cached().next().unwrap();
    let (n_tokens, n_hits) = (line.tokens.len(), line.n_hits);
    let now = Micros(line.last_used.0 + 77);
    sim.scheduler.handle(now, Event::ClearPrefixes);
    let dropped = Note::Dropped {
        seq,
        n_tokens,
        n_hits,
        idle: Micros(77),
        why: DropReason::Cleared,
    };
    assert_eq!(sim.scheduler.take_notes(), [dropped]);
    sim.drain();
}

/// Without another sequence a request goes on in that of the prefix.
#[test]
fn a_prefix_that_is_taken_over_is_shared_with_itself() {
    let mut sim = noting(Kind::Unified, 1);
    run(&mut sim, script(text(100, 1)));
    sim.scheduler.take_notes();
    let again = sim.submit(script(text(100, 1))).unwrap();
    assert!(sim.step(), "a cut");
    let shared = Note::Shared {
        request: again,
        seq: SeqId(0),
        from: SeqId(0),
        n_tokens: 99,
    };
    // What it had behind the prompt is lost.
    let dropped = Note::Dropped {
        seq: SeqId(0),
        n_tokens: 103,
        n_hits: 0,
        idle: Micros(0),
        why: DropReason::Evicted,
    };
    assert_eq!(sim.scheduler.take_notes(), [dropped, shared]);
    assert_eq!(sim.scheduler.counters().n_evicted, 1);
    assert_eq!(sim.scheduler.cached().count(), 0);
    sim.drain();
}

#[test]
fn a_copy_at_a_checkpoint_is_cached() {
    let mut sim = noting(Kind::Recurrent, 4);
    let (id, _) = run(&mut sim, script(text(100, 1)));
    let [
        Note::Cached {
            request, n_tokens, ..
        },
        _,
    ] = sim.scheduler.take_notes()[..]
    else {
        panic!("not two");
    };
    assert_eq!((request, n_tokens), (id, 99));
    sim.drain();
}
