//! Requests that have ended and go on: where they were, behind more tokens, or computed again.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use cellar_scheduler::{
    End, Event, Micros, Outcome, Progress, Request, RequestId, Retention, Scheduler,
    SchedulerConfig, StepFailure, Work,
};
use kv_core::batch::Batch;
use kv_core::memory::{Composite, Memory, MemoryInputs};
use kv_core::{SeqId, TokenId};

use crate::support::fake::rules;
use crate::support::kinds::Kind;

const N_CELLS: u32 = 40;
const PARKED: RequestId = RequestId(1);

struct World {
    scheduler: Scheduler,
    memory: Composite,
    outcomes: Vec<Outcome>,
}

impl World {
    fn new(n_seqs: u32) -> Self {
        let memory = Kind::Unified.memory(n_seqs, N_CELLS);
        let config = SchedulerConfig::new(rules(n_seqs), 64, N_CELLS);
        Self {
            scheduler: Scheduler::new(config, &memory).unwrap(),
            memory,
            outcomes: Vec::new(),
        }
    }

    fn submit(&mut self, id: RequestId, first: u32, retention: Retention) {
        self.handle(Event::Submit(Request {
            id,
            prompt: (first..first + 12).map(TokenId).collect(),
            retention,
            ..Request::default()
        }));
    }

    fn handle(&mut self, event: Event) {
        let outcomes = self.scheduler.handle(Micros(0), event);
        self.outcomes.extend(outcomes);
    }

    /// Computes a step whose texts make this progress; the tokens of each request. `None` where
    /// there is nothing to do.
    fn step(&mut self, progress: Progress) -> Option<Vec<(RequestId, Vec<u32>)>> {
        loop {
            let plan = self.scheduler.next(Micros(0), &self.memory);
            self.outcomes.extend(plan.outcomes);
            match plan.work {
                Work::Edit(edits) => edits.into_iter().for_each(|edit| {
                    let _no_rows = self.memory.apply(edit).unwrap();
                }),
                Work::Decode { step, planned } => {
                    let mut steps = self.memory.begin_planned(planned.plan);
                    while steps.next(&mut MemoryInputs::default()).is_some() {}
                    let rows = step.report(|_| Some(progress));
                    self.handle(Event::StepDone(rows));
                    let fed = step.feeds.into_iter().map(|feed| {
                        let tokens = feed.tokens.iter().map(|token| token.0);
                        (feed.request, tokens.collect())
                    });
                    return Some(fed.collect());
                }
                Work::Idle => return None,
                work => panic!("{work:?}"),
            }
        }
    }

    fn go(&mut self, token: u32) -> Vec<(RequestId, Vec<u32>)> {
        self.step(Progress::Token(TokenId(token))).unwrap()
    }

    fn resume(&mut self, tokens: &[u32]) {
        let tokens = tokens.iter().copied().map(TokenId).collect();
        let request = PARKED;
        self.handle(Event::Resume { request, tokens });
    }

    fn ends(&mut self) -> Vec<(RequestId, End)> {
        let ends = self.outcomes.drain(..).filter_map(|outcome| match outcome {
            Outcome::Ended { request, end } => Some((request, end)),
            _ => None,
        });
        ends.collect()
    }
}

/// A request with one token of text, parked where it was.
fn parked(n_seqs: u32) -> World {
    let mut world = World::new(n_seqs);
    world.submit(PARKED, 0, Retention::Park);
    world.go(100);
    world.handle(Event::Cancel(PARKED));
    assert_eq!(world.ends(), [(PARKED, End::Cancelled)]);
    assert_eq!(world.step(Progress::Ended), None);
    world
}

#[test]
fn a_cancelled_request_goes_on_where_it_was() {
    let mut world = parked(1);
    let held = world.scheduler.parked(PARKED).unwrap();
    assert_eq!(
        (held.seq, held.n_done, held.tokens.len()),
        (SeqId(0), 12, 13)
    );
    world.resume(&[]);
    assert_eq!(world.go(101), [(PARKED, vec![100])]);
    assert_eq!(world.go(102), [(PARKED, vec![101])]);
    assert_eq!(world.scheduler.counters().n_tokens, 14);
}

#[test]
fn a_text_that_is_complete_goes_on_behind_more_tokens() {
    let mut world = World::new(1);
    world.submit(PARKED, 0, Retention::Park);
    world.step(Progress::Ended).unwrap();
    assert_eq!(world.ends(), [(PARKED, End::Complete)]);
    world.resume(&[200, 201]);
    assert_eq!(world.go(102), [(PARKED, vec![200, 201])]);
    assert_eq!(world.go(103), [(PARKED, vec![102])]);
}

/// Its cells are for others, who share what they have in common with it.
#[test]
fn others_take_its_room_and_it_is_computed_again() {
    let mut world = parked(1);
    world.submit(RequestId(2), 0, Retention::Release);
    let fed = world.go(300);
    assert_eq!(fed, [(RequestId(2), vec![11])], "eleven tokens were there");
    assert!(world.scheduler.parked(PARKED).is_none());
    assert!(world.scheduler.is_parked(PARKED));
    world.resume(&[]);
    assert_eq!(world.go(301), [(RequestId(2), vec![300])], "it waits");
    world.handle(Event::Cancel(RequestId(2)));
    assert_eq!(
        world.go(101),
        [(PARKED, vec![100])],
        "its prompt was shared"
    );
}

#[test]
fn a_request_that_is_released_is_a_cached_prefix() {
    let mut world = parked(2);
    world.handle(Event::Release(PARKED));
    assert!(!world.scheduler.is_parked(PARKED));
    assert_eq!(world.scheduler.cached().count(), 1);
    world.handle(Event::Release(PARKED)); // changes nothing
    world.resume(&[1]);
    assert_eq!(world.ends(), [(PARKED, End::Failed)]);
}

#[test]
fn a_step_that_was_cancelled_is_no_failure() {
    let mut world = World::new(1);
    world.submit(PARKED, 0, Retention::Park);
    for _ in 0..3 {
        let plan = world.scheduler.next(Micros(0), &world.memory);
        assert!(matches!(plan.work, Work::Decode { .. }));
        world.handle(Event::Cancel(PARKED));
        assert_eq!(world.ends(), [], "while its step is computed");
        world.handle(Event::StepFailed(StepFailure::Cancelled));
        world.handle(Event::Cancel(PARKED));
        assert_eq!(world.ends(), [(PARKED, End::Cancelled)]);
        world.resume(&[]);
    }
    assert_eq!(world.go(100)[0].1.len(), 12);
}

#[test]
fn a_restored_request_goes_on_behind_what_the_memory_holds() {
    let mut world = World::new(2);
    let seq = world.scheduler.free_seq(Micros(0), &world.memory).unwrap();
    let tokens: Vec<TokenId> = (0..10).map(TokenId).collect();
    let batch = Batch::prompt(seq, tokens.iter().copied());
    let rules = rules(2);
    let valid = kv_core::batch::validate(&batch, &rules, |_| None).unwrap();
    let plan = world.memory.plan(&valid, 64).unwrap();
    let mut steps = world.memory.begin_planned(plan);
    while steps.next(&mut MemoryInputs::default()).is_some() {}
    drop(steps);
    let request = Request {
        id: PARKED,
        prompt: tokens,
        retention: Retention::Park,
        ..Request::default()
    };
    world
        .scheduler
        .adopt(&world.memory, seq, request.clone())
        .unwrap();
    let twice = world.scheduler.adopt(&world.memory, seq, request);
    assert!(twice.is_err(), "there is one of this number");
    world.resume(&[50]);
    assert_eq!(world.go(51), [(PARKED, vec![50])]);
    assert_eq!(world.memory.next_pos(seq).0, 11);
}

/// A parked request whose tokens were shifted stays as it is when a step of others fails: its
/// positions do not tell how many of its tokens the memory holds.
#[test]
fn a_failed_step_of_others_leaves_a_shifted_request() {
    let mut world = World::new(2);
    let seq = world.scheduler.free_seq(Micros(0), &world.memory).unwrap();
    let batch = Batch::prompt(seq, (0..10).map(TokenId));
    let valid = kv_core::batch::validate(&batch, &rules(2), |_| None).unwrap();
    let plan = world.memory.plan(&valid, 64).unwrap();
    let mut steps = world.memory.begin_planned(plan);
    while steps.next(&mut MemoryInputs::default()).is_some() {}
    drop(steps);
    let longer = Request {
        id: PARKED,
        prompt: (0..14).map(TokenId).collect(),
        retention: Retention::Park,
        ..Request::default()
    };
    world.scheduler.adopt(&world.memory, seq, longer).unwrap();
    world.submit(RequestId(2), 20, Retention::Release);
    let plan = world.scheduler.next(Micros(0), &world.memory);
    assert!(matches!(plan.work, Work::Decode { .. }));
    world.handle(Event::StepFailed(StepFailure::Computation));
    assert_eq!(world.go(100)[0].0, RequestId(2));
    assert_eq!(world.scheduler.parked(PARKED).unwrap().n_done, 10);
    world.resume(&[50]);
    assert!(world.go(51).contains(&(PARKED, vec![50])));
}
