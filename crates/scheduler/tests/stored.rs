//! Tests of a scheduler next to a store of prefixes, event by event.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::{reuse, run, script, simulator, text};
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use cellar_scheduler::{
    End, Event, Micros, Missed, Note, Outcome, Progress, Request, RequestId, Retention, Reuse,
    Scheduler, SchedulerConfig, StepPlan, StoredCuts, StoredPrefix, StoredRows, StoredTokens, Work,
};
use kv_core::batch::{Batch, validate};
use kv_core::memory::{Composite, CompositeSlot, Edit, Memory, MemoryInputs};
use kv_core::{Pos, PosRange, SeqId};

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

/// What a store has of the prompts of eight requests is on its way or here; the ninth waits for its
/// turn, though all that is needed is known.
#[test]
fn the_ninth_request_waits_until_one_fetch_is_over() {
    let memory = Kind::Unified.memory(12, 2000);
    let config = SchedulerConfig::new(rules(12), 64, 4000);
    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    let ids = (1..=9).map(RequestId);
    for request in ids.clone() {
        let prompt = text(60, request.0 as u32);
        let submitted = Request {
            id: request,
            prompt,
            ..Request::default()
        };
        scheduler.handle(NOW, Event::Submit(submitted));
        scheduler.handle(NOW, Event::Asked(request));
        let result = Ok(stored(48));
        scheduler.handle(NOW, Event::Probed { request, result });
    }
    for id in ids.take(8) {
        let work = scheduler.next(NOW, &memory).work;
        assert!(
            matches!(work, Work::Fetch(fetched) if fetched == id),
            "{work:?}"
        );
    }
    assert!(is_idle(&mut scheduler, &memory));
    scheduler.handle(NOW, fetched(Err(Missed::TierMiss)));
    let work = scheduler.next(NOW, &memory).work;
    assert!(matches!(work, Work::Fetch(RequestId(9))), "{work:?}");
    assert_eq!(scheduler.n_waiting(), 9);
    assert_eq!(
        admitted(&mut scheduler, &memory),
        reuse(0, Missed::TierMiss)
    );
}

/// The plan behind the edits that are due.
fn after_edits(scheduler: &mut Scheduler, memory: &mut Composite) -> StepPlan<CompositeSlot> {
    loop {
        let plan = scheduler.next(NOW, &*memory);
        let Work::Edit(edits) = plan.work else {
            return plan;
        };
        assert_eq!(plan.outcomes, []);
        for edit in edits {
            let _no_rows = memory.apply(edit).unwrap();
        }
    }
}

/// The request has what its store has of it, and it is to be restored.
fn restoring(scheduler: &mut Scheduler, memory: &mut Composite) -> StoredPrefix {
    let work = after_edits(scheduler, memory).work;
    let Work::Restore(prefix) = work else {
        panic!("{work:?}");
    };
    prefix
}

fn fetch(scheduler: &mut Scheduler, memory: &Composite) {
    scheduler.handle(NOW, probed(Ok(stored(48))));
    let work = scheduler.next(NOW, memory).work;
    assert!(matches!(work, Work::Fetch(ID)), "{work:?}");
    scheduler.handle(NOW, fetched(Ok(stored(48))));
}

/// A store whose groups never come into the memory is given up after some tries.
#[test]
fn a_request_is_admitted_though_nothing_is_ever_restored() {
    let (mut scheduler, mut memory) = waiting();
    fetch(&mut scheduler, &memory);
    let mut n_tries = 0;
    while let Work::Restore(_) = after_edits(&mut scheduler, &mut memory).work {
        n_tries += 1;
        assert!(n_tries < 1000);
        let (n_tokens, result) = (0, StoredRows::Written);
        scheduler.handle(NOW, Event::Restored { n_tokens, result });
    }
    assert!(n_tries > 1);
    let running: Vec<_> = scheduler.running().map(|r| (r.id, r.n_done)).collect();
    assert_eq!(running, [(ID, 0)]);
}

/// Where the memory has no room for what was fetched, and nothing can go, it is computed.
#[test]
fn a_prompt_is_computed_where_its_stored_tokens_have_no_room() {
    let (mut scheduler, mut memory) = waiting();
    fetch(&mut scheduler, &memory);
    restoring(&mut scheduler, &mut memory);
    let (n_tokens, result) = (0, StoredRows::NoRoom);
    scheduler.handle(NOW, Event::Restored { n_tokens, result });
    let plan = after_edits(&mut scheduler, &mut memory);
    let [Outcome::Admitted { reuse, .. }] = plan.outcomes[..] else {
        panic!("{:?}", plan.outcomes);
    };
    assert_eq!(reuse.n_tokens, 0);
}

/// A parked request gives its sequence up for what was fetched.
#[test]
fn a_parked_request_makes_room_for_stored_tokens() {
    const PARKED: RequestId = RequestId(2);
    let (mut scheduler, mut memory) = waiting();
    let request = Request {
        id: PARKED,
        prompt: text(20, 7),
        retention: Retention::Park,
        ..Request::default()
    };
    compute(&mut scheduler, &mut memory, request);
    assert!(scheduler.parked(PARKED).is_some());
    fetch(&mut scheduler, &memory);
    restoring(&mut scheduler, &mut memory);
    let (n_tokens, result) = (0, StoredRows::NoRoom);
    scheduler.handle(NOW, Event::Restored { n_tokens, result });
    restoring(&mut scheduler, &mut memory);
    assert!(scheduler.parked(PARKED).is_none());
    assert!(scheduler.is_parked(PARKED), "it goes on later");
}

/// Computes a request, whose text is empty.
fn compute(scheduler: &mut Scheduler, memory: &mut Composite, request: Request) {
    scheduler.handle(NOW, Event::Submit(request));
    let Work::Decode { step, planned } = scheduler.next(NOW, &*memory).work else {
        panic!("no step");
    };
    let mut steps = memory.begin_planned(planned.plan);
    while steps.next(&mut MemoryInputs::default()).is_some() {}
    drop(steps);
    let rows = step.report(|_| Some(Progress::Ended));
    scheduler.handle(NOW, Event::StepDone(rows));
}

/// What the memory holds of a prompt is kept up to where a stored group begins: a copy of so much
/// where a cached prefix goes on otherwise, nothing where that is nothing.
#[test]
fn stored_tokens_go_behind_whole_groups_of_what_is_cached() {
    let copied = |n_held: u32| Edit::Copy {
        from: SeqId(0),
        to: SeqId(1),
        range: PosRange::from(Pos(0)..Pos(n_held)),
    };
    for (n_common, n_held) in [(40, 32), (10, 0)] {
        let (mut scheduler, mut memory) = waiting();
        let prompt = [&text(60, 1)[..n_common], &text(9, 5)[..]].concat();
        let request = Request {
            id: RequestId(2),
            prompt,
            ..Request::default()
        };
        compute(&mut scheduler, &mut memory, request);
        fetch(&mut scheduler, &memory);
        let wanted = StoredPrefix {
            request: ID,
            seq: SeqId(1),
            copy: (n_held > 0).then(|| copied(n_held)),
            n_held: n_held as usize,
            n_tokens: 48,
        };
        assert_eq!(restoring(&mut scheduler, &mut memory), wanted);
    }
}

/// Nothing is fetched where the memory has computed as much of the prompt for another request.
#[test]
fn stored_tokens_are_not_fetched_that_the_memory_holds_by_now() {
    let (mut scheduler, mut memory) = waiting();
    let request = Request {
        id: RequestId(2),
        prompt: text(60, 1),
        ..Request::default()
    };
    compute(&mut scheduler, &mut memory, request);
    scheduler.handle(NOW, probed(Ok(stored(48))));
    assert_eq!(admitted(&mut scheduler, &memory).n_tokens, 59);
}
