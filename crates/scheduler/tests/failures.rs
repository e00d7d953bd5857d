//! What a request goes on with after a step that failed, of which the memory holds some ubatches.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::text;
use crate::support::fake::{N_VOCAB, rules};
use crate::support::kinds::Kind;
use cellar_scheduler::{
    End, Event, Feed, Micros, Outcome, PrefixUse, Progress, PromptRows, Request, RequestId,
    Retention, Salt, Scheduler, SchedulerConfig, Step, StepFailure, Work,
};
use kv_core::TokenId;
use kv_core::memory::{Composite, CompositeSlot, Memory, MemoryInputs, PlannedBatch, RowsWritten};

const N_UBATCH: u32 = 16;
const ID: RequestId = RequestId(1);

fn request(prefix: PrefixUse, prompt_rows: PromptRows) -> Request {
    Request {
        id: ID,
        prompt: text(30, 1),
        prefix,
        prompt_rows,
        ..Request::default()
    }
}

/// A request of 30 tokens that is in no step yet.
fn submitted(prefix: PrefixUse, prompt_rows: PromptRows) -> (Scheduler, Composite) {
    let memory = Kind::Unified.memory(4, 200);
    let config = SchedulerConfig {
        step_tokens: 64,
        ..SchedulerConfig::new(rules(4), N_UBATCH, 1000)
    };
    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    let request = request(prefix, prompt_rows);
    assert!(
        scheduler
            .handle(Micros(0), Event::Submit(request))
            .is_empty()
    );
    (scheduler, memory)
}

/// Plans until there is a step: its feeds, and what became of requests before.
fn next(scheduler: &mut Scheduler, memory: &mut Composite) -> (Vec<Feed>, Vec<Outcome>) {
    let mut outcomes = Vec::new();
    loop {
        let plan = scheduler.next(Micros(0), memory);
        outcomes.extend(plan.outcomes);
        match plan.work {
            Work::Decode { step, .. } => return (step.feeds, outcomes),
            Work::Edit(edits) => edits.into_iter().for_each(|edit| {
                assert!(memory.apply(edit).unwrap().row_shifts.is_empty());
            }),
            other => panic!("{other:?}"),
        }
    }
}

/// The memory takes so many ubatches of a step.
fn hold(n_ubatches: usize, planned: PlannedBatch<CompositeSlot>, memory: &mut Composite) {
    let mut steps = memory.begin_planned(planned.plan);
    let mut inputs = MemoryInputs::default();
    for _ in 0..=n_ubatches {
        if steps.next(&mut inputs).is_none() {
            break;
        }
    }
    if steps.n_done() > n_ubatches {
        steps.undo_last(RowsWritten::No);
    }
}

/// The next step fails when the memory holds so many of its ubatches.
fn fail_after(n_ubatches: usize, scheduler: &mut Scheduler, memory: &mut Composite) {
    let Work::Decode { planned, .. } = scheduler.next(Micros(0), memory).work else {
        panic!("no step");
    };
    hold(n_ubatches, planned, memory);
    let failed = Event::StepFailed(StepFailure::Computation);
    assert!(scheduler.handle(Micros(0), failed).is_empty());
}

/// The next step is computed, and each text goes on with its token.
fn compute(
    scheduler: &mut Scheduler,
    memory: &mut Composite,
    token: impl Fn(RequestId) -> TokenId,
) {
    let Work::Decode { step, planned } = scheduler.next(Micros(0), memory).work else {
        panic!("no step");
    };
    let mut steps = memory.begin_planned(planned.plan);
    let mut inputs = MemoryInputs::default();
    while steps.next(&mut inputs).is_some() {}
    let rows = step.report(|row| Some(Progress::Token(token(row.request))));
    assert!(
        scheduler
            .handle(Micros(0), Event::StepDone(rows))
            .is_empty()
    );
}

/// The place and the number of the tokens of the only request.
fn only(feeds: &[Feed]) -> (u32, usize) {
    let [feed] = feeds else { panic!("{feeds:?}") };
    (feed.first.0, feed.tokens.len())
}

#[test]
fn a_prompt_goes_on_behind_what_the_memory_holds() {
    let (mut scheduler, mut memory) = submitted(PrefixUse::Off, PromptRows::Last);
    fail_after(1, &mut scheduler, &mut memory);
    let (feeds, outcomes) = next(&mut scheduler, &mut memory);
    assert_eq!((only(&feeds), outcomes), ((16, 14), Vec::new()));
}

#[test]
fn a_prompt_whose_rows_were_lost_is_computed_again() {
    let (mut scheduler, mut memory) = submitted(PrefixUse::Off, PromptRows::All);
    fail_after(1, &mut scheduler, &mut memory);
    let (feeds, outcomes) = next(&mut scheduler, &mut memory);
    assert_eq!(only(&feeds), (0, 30));
    let preempted = Outcome::Preempted {
        request: ID,
        n_tokens: 16,
    };
    assert_eq!(outcomes[0], preempted);
    assert_eq!(memory.n_used(), 0);
    assert_eq!(scheduler.counters().n_dropped_tokens, 16);
}

#[test]
fn a_prompt_of_which_no_row_was_lost_stays() {
    let (mut scheduler, mut memory) = submitted(PrefixUse::Off, PromptRows::All);
    fail_after(0, &mut scheduler, &mut memory);
    let (feeds, outcomes) = next(&mut scheduler, &mut memory);
    assert_eq!((only(&feeds), outcomes), ((0, 30), Vec::new()));
}

/// Whether drafted tokens are right is not known: nothing of the text is kept for others.
#[test]
fn a_text_with_drafted_tokens_in_the_memory_is_computed_again() {
    let (mut scheduler, mut memory) = submitted(PrefixUse::default(), PromptRows::Last);
    compute(&mut scheduler, &mut memory, |_| TokenId(5));
    let draft = Event::Draft {
        request: ID,
        tokens: [6, 7].map(TokenId).to_vec(),
    };
    scheduler.handle(Micros(0), draft);
    fail_after(1, &mut scheduler, &mut memory);
    assert_eq!(memory.n_used(), 33);
    let (feeds, outcomes) = next(&mut scheduler, &mut memory);
    assert_eq!(only(&feeds), (0, 31));
    let preempted = Outcome::Preempted {
        request: ID,
        n_tokens: 31,
    };
    assert_eq!(outcomes[0], preempted);
    assert_eq!(scheduler.cached().count(), 0);
}

#[test]
fn a_last_token_whose_row_was_lost_is_computed_again() {
    for (prefix, n_tokens) in [(PrefixUse::Off, 0), (PrefixUse::default(), 29)] {
        let (mut scheduler, mut memory) = submitted(prefix, PromptRows::Last);
        fail_after(2, &mut scheduler, &mut memory);
        let (feeds, outcomes) = next(&mut scheduler, &mut memory);
        assert_eq!(only(&feeds), (n_tokens as u32, 30 - n_tokens));
        let [
            Outcome::Preempted { n_tokens: 30, .. },
            Outcome::Admitted { reuse, .. },
        ] = outcomes[..]
        else {
            panic!("{outcomes:?}");
        };
        assert_eq!(reuse.n_tokens, n_tokens, "{prefix:?}");
    }
}

/// A token that the model does not have cannot be computed: its request ends, and others do not.
#[test]
fn what_the_memory_refuses_for_another_reason_than_room_ends_alone() {
    for strange in [1, 2] {
        let (mut scheduler, mut memory) = submitted(PrefixUse::Off, PromptRows::Last);
        let second = Request {
            id: RequestId(2),
            ..request(PrefixUse::Off, PromptRows::Last)
        };
        assert!(
            scheduler
                .handle(Micros(0), Event::Submit(second))
                .is_empty()
        );
        compute(&mut scheduler, &mut memory, |request| {
            if request.0 == strange {
                TokenId(N_VOCAB)
            } else {
                TokenId(5)
            }
        });
        let (feeds, outcomes) = next(&mut scheduler, &mut memory);
        let ended = Outcome::Ended {
            request: RequestId(strange),
            end: End::Failed,
        };
        assert_eq!(outcomes, [ended]);
        let other = RequestId(3 - strange);
        assert_eq!((only(&feeds), feeds[0].request), ((30, 1), other));
    }
}

/// A client that gives up while its prompt is computed asks again: what was computed is not lost.
#[test]
fn what_was_computed_of_a_cancelled_request_is_reused() {
    let salt = PrefixUse::Within(Salt::default());
    for kind in [Kind::Unified, Kind::Recurrent, Kind::Hybrid] {
        for (n_ubatches, n_kept) in [(0, Some(0)), (1, Some(16)), (2, None)] {
            let mut memory = kind.memory(4, 200);
            let config = SchedulerConfig {
                step_tokens: 64,
                ..SchedulerConfig::new(rules(4), N_UBATCH, 1000)
            };
            let mut scheduler = Scheduler::new(config, &memory).unwrap();
            let first = request(salt, PromptRows::Last);
            scheduler.handle(Micros(0), Event::Submit(first.clone()));
            let Work::Decode { step, planned } = scheduler.next(Micros(0), &memory).work else {
                panic!("no step");
            };
            hold(n_ubatches, planned, &mut memory);
            let cancelled = scheduler.handle(Micros(0), Event::Cancel(ID));
            let end = End::Cancelled;
            assert_eq!(cancelled, [Outcome::Ended { request: ID, end }]);
            let ended = match n_kept {
                Some(_) => Event::StepFailed(StepFailure::Computation),
                None => Event::StepDone(Vec::new()),
            };
            assert_eq!(scheduler.handle(Micros(0), ended), []);
            let again = Request {
                id: RequestId(2),
                prompt: [first.prompt, text(5, 2)].concat(),
                ..request(salt, PromptRows::Last)
            };
            scheduler.handle(Micros(0), Event::Submit(again));
            let (feeds, _) = next(&mut scheduler, &mut memory);
            let n_fed = step.feeds[0].tokens.len() as u32;
            assert_eq!(only(&feeds).0, n_kept.unwrap_or(n_fed), "{kind:?}");
        }
    }
}

/// A text of 31 tokens, the last of which is in a step with two drafted tokens. The memory may be
/// another one than the scheduler was made for.
fn drafted(mut memory: Composite, retention: Retention) -> (Scheduler, Composite, Step) {
    let config = SchedulerConfig {
        step_tokens: 64,
        ..SchedulerConfig::new(rules(4), N_UBATCH, 1000)
    };
    let mut scheduler = Scheduler::new(config, &Kind::Unified.memory(4, 200)).unwrap();
    let request = Request {
        retention,
        ..request(PrefixUse::default(), PromptRows::Last)
    };
    scheduler.handle(Micros(0), Event::Submit(request));
    compute(&mut scheduler, &mut memory, |_| TokenId(5));
    let draft = Event::Draft {
        request: ID,
        tokens: [6, 7].map(TokenId).to_vec(),
    };
    scheduler.handle(Micros(0), draft);
    let Work::Decode { step, planned } = scheduler.next(Micros(0), &memory).work else {
        panic!("no step");
    };
    assert_eq!((step.feeds[0].tokens.len(), step.feeds[0].n_draft), (3, 2));
    hold(usize::MAX - 1, planned, &mut memory);
    (scheduler, memory, step)
}

/// Nothing is drafted for a text while its step is computed.
#[test]
fn a_text_in_a_step_takes_no_drafts() {
    let memory = Kind::Unified.memory(4, 200);
    let (mut scheduler, _, step) = drafted(memory, Retention::Release);
    assert_eq!(scheduler.draft_room(ID), 0);
    let rows = step.report(|_| Some(Progress::Token(TokenId(9))));
    scheduler.handle(Micros(0), Event::StepDone(rows));
    assert!(scheduler.draft_room(ID) > 0);
}

/// Of the rows after drafted tokens the last is not used: its token is computed again. Without any
/// row, a text has failed.
#[test]
fn a_row_that_is_not_reported_is_computed_again() {
    let memory = Kind::Unified.memory(4, 200);
    let (mut scheduler, mut memory, step) = drafted(memory, Retention::Release);
    let mut chosen = [6, 7].map(TokenId).into_iter();
    let rows = step.report(|_| chosen.next().map(Progress::Token));
    assert_eq!(rows.len(), 2);
    assert_eq!(scheduler.handle(Micros(0), Event::StepDone(rows)), []);
    let (feeds, _) = next(&mut scheduler, &mut memory);
    assert_eq!(
        (only(&feeds), &feeds[0].tokens[..]),
        ((32, 1), &[TokenId(7)][..])
    );

    let (mut scheduler, _) = submitted(PrefixUse::Off, PromptRows::Last);
    let memory = Kind::Unified.memory(4, 200);
    assert!(matches!(
        scheduler.next(Micros(0), &memory).work,
        Work::Decode { .. }
    ));
    let ended = scheduler.handle(Micros(0), Event::StepDone(Vec::new()));
    let end = End::Failed;
    assert_eq!(ended, [Outcome::Ended { request: ID, end }]);
}

/// What is kept of a text that is cancelled during its step ends before its drafted tokens.
#[test]
fn drafted_tokens_of_a_cancelled_text_leave_the_memory() {
    let memory = Kind::Unified.memory(4, 200);
    let (mut scheduler, mut memory, _) = drafted(memory, Retention::Release);
    let end = End::Cancelled;
    let ended = [Outcome::Ended { request: ID, end }];
    assert_eq!(scheduler.handle(Micros(0), Event::Cancel(ID)), ended);
    assert_eq!(
        scheduler.handle(Micros(0), Event::Cancel(ID)),
        [],
        "it has ended"
    );
    scheduler.handle(Micros(0), Event::StepDone(Vec::new()));
    assert_eq!(memory.n_used(), 33);
    let Work::Edit(edits) = scheduler.next(Micros(0), &memory).work else {
        panic!("no edits");
    };
    for edit in edits {
        let _no_rows = memory.apply(edit).unwrap();
    }
    assert_eq!(memory.n_used(), 31);
    let cached: Vec<usize> = scheduler.cached().map(|line| line.tokens.len()).collect();
    assert_eq!(cached, [31]);
}

/// A memory that promised to go back and cannot: the whole sequence goes, and the text is computed
/// again, without drafts from then on.
#[test]
fn a_memory_that_does_not_go_back_costs_the_sequence() {
    let refusing = || Kind::Hybrid.memory(4, 200);
    let (mut scheduler, mut memory, step) = drafted(refusing(), Retention::Release);
    let rows = step.report(|_| Some(Progress::Token(TokenId(9))));
    assert_eq!(scheduler.handle(Micros(0), Event::StepDone(rows)), []);
    let (feeds, outcomes) = next(&mut scheduler, &mut memory);
    assert_eq!(only(&feeds), (0, 32));
    let preempted = Outcome::Preempted {
        request: ID,
        n_tokens: 31,
    };
    assert_eq!(outcomes[0], preempted);
    assert_eq!((memory.n_used(), scheduler.cached().count()), (0, 0));
    scheduler.handle(Micros(0), Event::StepFailed(StepFailure::Cancelled));
    assert_eq!(scheduler.draft_room(ID), 0);

    // One that was cancelled: nothing of it is cached.
    let (mut scheduler, memory, _) = drafted(refusing(), Retention::Release);
    scheduler.handle(Micros(0), Event::Cancel(ID));
    scheduler.handle(Micros(0), Event::StepDone(Vec::new()));
    emptied(&mut scheduler, memory);

    // One that is parked: it has no sequence any more.
    let (mut scheduler, memory, step) = drafted(refusing(), Retention::Park);
    let rows = step.report(|_| Some(Progress::Ended));
    scheduler.handle(Micros(0), Event::StepDone(rows));
    assert!(scheduler.parked(ID).is_some());
    emptied(&mut scheduler, memory);
    assert!(scheduler.parked(ID).is_none() && scheduler.is_parked(ID));
}

/// The next edits leave nothing in the memory, and nothing is cached.
fn emptied(scheduler: &mut Scheduler, mut memory: Composite) {
    assert_eq!(memory.n_used(), 33);
    let Work::Edit(edits) = scheduler.next(Micros(0), &memory).work else {
        panic!("no edits");
    };
    for edit in edits {
        let _no_rows = memory.apply(edit).unwrap();
    }
    assert_eq!((memory.n_used(), scheduler.cached().count()), (0, 0));
}
