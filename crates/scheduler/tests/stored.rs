//! Tests of a scheduler next to a store of prefixes, event by event.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::{reuse, run, script, simulator, text};
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use cellar_scheduler::{
    End, Event, Micros, Missed, Note, Outcome, Request, RequestId, Reuse, Scheduler,
    SchedulerConfig, StoredCuts, StoredPrefix, StoredRows, StoredTokens, Work,
};
use kv_core::SeqId;
use kv_core::batch::{Batch, validate};
use kv_core::memory::{Composite, Memory, MemoryInputs};

const ID: RequestId = RequestId(1);
const NOW: Micros = Micros(5);

fn stored(n_tokens: usize) -> StoredTokens {
    StoredTokens {
        first: 0,
        n_tokens,
        cuts: StoredCuts::Groups,
    }
}

/// A scheduler with a request of 60 tokens that waits for its store.
fn waiting() -> (Scheduler, Composite) {
    let memory = Kind::Unified.memory(4, 900);
    let config = SchedulerConfig::new(rules(4), 64, 4000);
    let mut scheduler = Scheduler::new(config, &memory).unwrap().with_notes();
    let request = Request {
        id: ID,
        prompt: text(60, 1),
        ..Request::default()
    };
    scheduler.handle(NOW, Event::Submit(request));
    scheduler.handle(NOW, Event::Asked(ID));
    (scheduler, memory)
}

fn probed(result: Result<StoredTokens, Missed>) -> Event {
    let request = ID;
    Event::Probed { request, result }
}

fn fetched(result: Result<StoredTokens, Missed>) -> Event {
    let request = ID;
    Event::Fetched { request, result }
}

/// The reuse of the request, which is admitted next.
fn admitted(scheduler: &mut Scheduler, memory: &Composite) -> Reuse {
    let plan = scheduler.next(NOW, memory);
    assert!(!matches!(plan.work, Work::Idle));
    match plan.outcomes[..] {
        [
            Outcome::Admitted {
                request: ID, reuse, ..
            },
        ] => reuse,
        ref other => panic!("{other:?}"),
    }
}

fn is_idle(scheduler: &mut Scheduler, memory: &Composite) -> bool {
    matches!(scheduler.next(NOW, memory).work, Work::Idle)
}

#[test]
fn a_request_waits_for_its_answer_and_says_why_it_got_nothing() {
    let slow = Missed::TierSlow {
        needed: Micros(3),
        would_take: Micros(9),
    };
    for missed in [Missed::TierMiss, Missed::TierDown, slow] {
        let (mut scheduler, memory) = waiting();
        assert!(is_idle(&mut scheduler, &memory));
        scheduler.handle(NOW, probed(Err(missed)));
        assert_eq!(admitted(&mut scheduler, &memory), reuse(0, missed));
        // Found, but it does not come.
        let (mut scheduler, memory) = waiting();
        scheduler.handle(NOW, probed(Ok(stored(48))));
        let work = scheduler.next(NOW, &memory).work;
        assert!(matches!(work, Work::Fetch(ID)), "{work:?}");
        assert!(is_idle(&mut scheduler, &memory));
        scheduler.handle(NOW, fetched(Err(missed)));
        assert_eq!(admitted(&mut scheduler, &memory), reuse(0, missed));
    }
}

/// Another one is not held up, and has all the room.
#[test]
fn others_pass_a_request_that_waits() {
    let (mut scheduler, memory) = waiting();
    let other = Request {
        id: RequestId(2),
        prompt: text(20, 2),
        ..Request::default()
    };
    scheduler.handle(NOW, Event::Submit(other));
    let plan = scheduler.next(NOW, &memory);
    let Work::Decode { step, .. } = plan.work else {
        panic!("{:?}", plan.work);
    };
    assert_eq!(step.texts().collect::<Vec<_>>(), [RequestId(2)]);
}

#[test]
fn a_request_that_is_cancelled_waits_for_nothing() {
    let (mut scheduler, memory) = waiting();
    let ended = scheduler.handle(NOW, Event::Cancel(ID));
    let end = End::Cancelled;
    assert_eq!(ended, [Outcome::Ended { request: ID, end }]);
    for event in [
        probed(Ok(stored(48))),
        fetched(Ok(stored(48))),
        Event::Asked(ID),
    ] {
        assert!(scheduler.handle(NOW, event).is_empty());
        assert!(is_idle(&mut scheduler, &memory));
    }
}

/// Fetched tokens are restored into a cached prefix, a few at a time, and what they cannot give is
/// computed.
#[test]
fn fetched_tokens_are_restored_and_found() {
    let (mut scheduler, mut memory) = waiting();
    scheduler.handle(NOW, probed(Ok(stored(48))));
    let _fetch = scheduler.next(NOW, &memory);
    scheduler.handle(NOW, fetched(Ok(stored(48))));
    let mut n_before = 0;
    let mut restore = |scheduler: &mut Scheduler, n_held: usize, result| {
        let work = scheduler.next(NOW, &memory).work;
        let Work::Restore(prefix) = work else {
            panic!("{work:?}");
        };
        let wanted = StoredPrefix {
            request: ID,
            seq: SeqId(0),
            copy: None,
            n_held: n_before,
            n_tokens: 48,
        };
        assert_eq!(prefix, wanted);
        // The rows do not matter here.
        let positions = n_before..n_held;
        let tokens = text(60, 1);
        let batch = Batch::prompt(SeqId(0), tokens[positions].iter().copied());
        commit(&mut memory, &batch);
        n_before = n_held;
        let n_tokens = n_held;
        scheduler.handle(NOW, Event::Restored { n_tokens, result });
    };
    restore(&mut scheduler, 32, StoredRows::Written);
    restore(&mut scheduler, 32, StoredRows::Failed);
    let cached = scheduler.cached_in(SeqId(0)).unwrap();
    assert_eq!(cached.tokens, &text(60, 1)[..32]);
    let notes = scheduler.take_notes();
    assert!(matches!(notes[..], [Note::Cached { n_tokens: 32, .. }, ..]));
    assert_eq!(admitted(&mut scheduler, &memory).n_tokens, 32);
    assert_eq!(scheduler.counters().n_restored_tokens, 32);
}

fn commit(memory: &mut Composite, batch: &Batch) {
    if batch.is_empty() {
        return;
    }
    let batch = validate(batch, &rules(4), |seq| memory.positions(seq)).unwrap();
    let mut steps = memory.begin(&batch, 64).unwrap();
    while steps.next(&mut MemoryInputs::default()).is_some() {}
}

/// A request that takes a cached prefix over, as no sequence is free, lets another one go first:
/// what it would cut off stays. Where there is no other, that is an eviction.
#[test]
fn a_prefix_that_is_cut_counts_as_evicted() {
    let parted = |n: usize| [&text(100, 1)[..n], &text(40, 9)[..]].concat();
    let mut sim = simulator(Kind::Unified, 2, 900);
    for salt in [1, 2] {
        run(&mut sim, script(text(100, salt)));
    }
    assert_eq!(sim.scheduler.counters().n_evicted, 0);
    let (_, parting) = run(&mut sim, script(parted(60)));
    assert_eq!(parting.n_tokens, 60);
    assert_eq!(sim.scheduler.counters().n_evicted, 1);
    let (_, again) = run(&mut sim, script(text(100, 1)));
    assert!(again.n_tokens >= 60, "{again:?}");
    let mut sim = simulator(Kind::Unified, 1, 900);
    sim.scheduler = sim.scheduler.with_notes();
    run(&mut sim, script(text(100, 1)));
    let (_, parting) = run(&mut sim, script(parted(60)));
    assert_eq!(parting.n_tokens, 60);
    assert_eq!(sim.scheduler.counters().n_evicted, 1);
    let mut notes = sim.scheduler.take_notes().into_iter();
    assert!(notes.any(|note| matches!(note, Note::Dropped { .. })));
    // What goes on where it ends loses nothing.
    let mut sim = simulator(Kind::Unified, 1, 900);
    let (first, _) = run(&mut sim, script(text(100, 1)));
    let mut longer = sim.tokens_of(first);
    longer.extend(text(20, 5));
    run(&mut sim, script(longer));
    assert_eq!(sim.scheduler.counters().n_evicted, 0);
}
