//! Prefixes that a memory holds again, and a new scheduler takes over.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::{run, script, simulator, text};
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use crate::support::simulator::Simulator;
use cellar_scheduler::{
    Event, Micros, Note, Outcome, PrefixCaching, Request, RequestId, RestoredPrefix, Reuse,
    Scheduler, SchedulerConfig, Work,
};
use kv_core::SeqId;
use kv_core::memory::{Edit, Memory, Seqs};

/// A memory with the prefixes of two requests, the second of which was used again.
fn cached() -> (Simulator, Vec<RestoredPrefix>) {
    let mut sim = simulator(Kind::Unified, 4, 900);
    for salt in [1, 2, 2] {
        run(&mut sim, script(text(100, salt)));
    }
    while sim.step() {}
    let lines = sim.scheduler.cached().map(|line| RestoredPrefix {
        seq: line.seq,
        tokens: line.tokens.to_vec(),
        salt: line.salt,
        request: line.request,
        n_hits: line.n_hits,
    });
    let lines: Vec<_> = lines.collect();
    (sim, lines)
}

/// A new scheduler for such a memory.
fn scheduler(prefix_cache: PrefixCaching) -> Scheduler {
    with(SchedulerConfig {
        prefix_cache,
        ..SchedulerConfig::new(rules(4), 64, 4000)
    })
}

fn with(config: SchedulerConfig) -> Scheduler {
    let empty = Kind::Unified.memory(4, 900);
    Scheduler::new(config, &empty).unwrap().with_notes()
}

/// The sequences that the next edits remove.
fn removed(scheduler: &mut Scheduler, sim: &Simulator) -> Vec<SeqId> {
    let Work::Edit(edits) = scheduler.next(Micros(0), &sim.memory).work else {
        panic!("nothing is removed");
    };
    let seq = |edit| match edit {
        Edit::Remove {
            seqs: Seqs::One(seq),
            ..
        } => seq,
        other => panic!("{other:?}"),
    };
    edits.into_iter().map(seq).collect()
}

#[test]
fn restored_prefixes_are_as_they_were_and_are_found() {
    let (sim, lines) = cached();
    assert!(lines.len() > 1 && lines.iter().any(|line| line.n_hits > 0));
    let mut scheduler = scheduler(PrefixCaching::On);
    assert_eq!(
        scheduler.restore_prefixes(&sim.memory, lines.clone()),
        lines.len()
    );
    let mut noted = scheduler.take_notes().into_iter();
    for (order, line) in (0..).zip(&lines) {
        let found = scheduler.cached().find(|found| found.seq == line.seq);
        let found = found.unwrap();
        assert_eq!((found.tokens, found.salt), (&line.tokens[..], line.salt));
        assert_eq!((found.request, found.n_hits), (line.request, line.n_hits));
        assert_eq!(found.last_used, Micros(order));
        let note = Note::Cached {
            seq: line.seq,
            request: line.request,
            n_tokens: line.tokens.len(),
        };
        assert_eq!(noted.next(), Some(note));
    }
    let request = Request {
        id: RequestId(70),
        prompt: text(100, 1),
        ..Request::default()
    };
    scheduler.handle(Micros(9), Event::Submit(request));
    let outcomes = scheduler.next(Micros(9), &sim.memory).outcomes;
    let [Outcome::Admitted { reuse, seq, .. }] = outcomes[..] else {
        panic!("{outcomes:?}");
    };
    let missed = None;
    let n_tokens = 99;
    assert_eq!(reuse, Reuse { n_tokens, missed });
    assert!(lines.iter().all(|line| line.seq != seq), "{seq} is in use");
}

#[test]
fn what_the_memory_does_not_hold_so_is_removed() {
    let (sim, mut lines) = cached();
    lines[0].tokens.pop();
    let broken = lines[0].seq;
    let twice = lines[1].clone();
    lines.push(twice);
    let mut scheduler = scheduler(PrefixCaching::On);
    let n_restored = scheduler.restore_prefixes(&sim.memory, lines.clone());
    assert_eq!(n_restored, lines.len() - 2);
    assert_eq!(removed(&mut scheduler, &sim), [broken]);
}

#[test]
fn where_prefixes_are_not_cached_all_are_removed() {
    let (mut sim, lines) = cached();
    let mut scheduler = scheduler(PrefixCaching::Off);
    assert_eq!(scheduler.restore_prefixes(&sim.memory, lines.clone()), 0);
    assert_eq!(scheduler.cached().count(), 0);
    for seq in removed(&mut scheduler, &sim) {
        let edit = Edit::Remove {
            seqs: Seqs::One(seq),
            range: kv_core::PosRange::ALL,
        };
        assert!(sim.memory.apply(edit).unwrap().row_copies.is_empty());
    }
    assert_eq!(sim.memory.n_used(), 0);
}

#[test]
fn restored_prefixes_have_no_more_bytes_than_they_may() {
    let (sim, lines) = cached();
    let mut scheduler = with(SchedulerConfig {
        prefix_bytes: Some(150),
        ..SchedulerConfig::new(rules(4), 64, 4000)
    });
    scheduler.restore_prefixes(&sim.memory, lines.clone());
    assert!(scheduler.cached_bytes(&sim.memory) > 150);
    // A token has one byte where nothing else is known.
    assert_eq!(removed(&mut scheduler, &sim).len(), lines.len() - 1);
    assert_eq!(scheduler.cached().count(), 1);
}
