//! Texts that are full and go on, sources that are encoded first, and memories that evict.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use cellar_scheduler::{
    End, Event, Micros, Outcome, Overflow, PrefixUse, Priority, Progress, Request, RequestId,
    Scheduler, SchedulerConfig, Shift, ShiftResult, SourceUse, Work,
};
use kv_core::memory::{Composite, Memory, MemoryInputs};
use kv_core::{Pos, PosRange, SeqId, TokenId};

use crate::support::fake::rules;
use crate::support::kinds::Kind;

const N_CELLS: u32 = 32;

/// Does what the scheduler wants until it wants a step, a shift or a source, or nothing.
fn next(
    scheduler: &mut Scheduler,
    memory: &mut Composite,
) -> (Work<<Composite as Memory>::Slot>, Vec<Outcome>) {
    let mut outcomes = Vec::new();
    loop {
        let plan = scheduler.next(Micros(0), memory);
        outcomes.extend(plan.outcomes);
        match plan.work {
            Work::Edit(edits) => edits.into_iter().for_each(|edit| {
                let _no_rows = memory.apply(edit).unwrap();
            }),
            work => return (work, outcomes),
        }
    }
}

/// Computes a step, whose texts go on with this token.
fn compute(
    scheduler: &mut Scheduler,
    memory: &mut Composite,
    work: Work<<Composite as Memory>::Slot>,
    token: u32,
) -> Vec<Outcome> {
    let Work::Decode { step, planned } = work else {
        panic!("{work:?}");
    };
    let mut steps = memory.begin_planned(planned.plan);
    while steps.next(&mut MemoryInputs::default()).is_some() {}
    let rows = step.report(|_| Some(Progress::Token(TokenId(token))));
    scheduler.handle(Micros(0), Event::StepDone(rows))
}

fn scheduler(n_seqs: u32) -> (Scheduler, Composite) {
    let memory = Kind::Unified.memory(n_seqs, N_CELLS);
    let config = SchedulerConfig::new(rules(n_seqs), 64, N_CELLS);
    (Scheduler::new(config, &memory).unwrap(), memory)
}

fn request(n_prompt: u32, overflow: Overflow) -> Request {
    Request {
        id: RequestId(1),
        prompt: (0..n_prompt).map(TokenId).collect(),
        overflow,
        ..Request::default()
    }
}

fn apply(shift: Shift, memory: &mut Composite) {
    let [removal, move_down] = shift.edits();
    let _no_rows = memory.apply(removal).unwrap();
    let _no_rows = memory.apply(move_down).unwrap();
}

/// Up to the shift of a text that is full.
fn full(overflow: Overflow) -> (Scheduler, Composite, Shift) {
    let (mut scheduler, mut memory) = scheduler(2);
    let shift = until_full(&mut scheduler, &mut memory, overflow);
    (scheduler, memory, shift)
}

fn until_full(scheduler: &mut Scheduler, memory: &mut Composite, overflow: Overflow) -> Shift {
    scheduler.handle(Micros(0), Event::Submit(request(30, overflow)));
    for token in 100.. {
        match next(scheduler, memory).0 {
            Work::Shift(shift) => return shift,
            work => assert_eq!(compute(scheduler, memory, work, token), []),
        }
    }
    unreachable!("a text is full some time");
}

#[test]
fn a_full_text_drops_half_of_what_it_need_not_keep() {
    let (mut scheduler, mut memory, shift) = full(Overflow::Shift { n_keep: 4 });
    assert_eq!((shift.first, shift.n_tokens), (4, 14));
    let waits = scheduler.next(Micros(0), &memory).work;
    assert!(
        matches!(waits, Work::Idle),
        "the shift is not reported: {waits:?}"
    );
    apply(shift, &mut memory);
    let result = ShiftResult::Done;
    let event = Event::Shifted {
        request: RequestId(1),
        result,
    };
    assert_eq!(scheduler.handle(Micros(0), event), []);
    let (work, _) = next(&mut scheduler, &mut memory);
    let Work::Decode { step, .. } = &work else {
        panic!("{work:?}");
    };
    assert_eq!(
        (step.feeds[0].first, step.feeds[0].tokens.len()),
        (Pos(18), 1)
    );
    compute(&mut scheduler, &mut memory, work, 200);
    assert_eq!(
        memory.positions(SeqId(0)),
        Some(PosRange::new(Pos(0), Pos(18)))
    );
    let running = scheduler.running().next().unwrap();
    let tokens: Vec<u32> = running.tokens.iter().map(|token| token.0).collect();
    assert_eq!(tokens[..6], [0, 1, 2, 3, 18, 19]);
    assert_eq!(tokens[16..], [100, 101, 102, 200]);
    assert_eq!((running.n_prompt, running.n_done), (16, 19));
}

/// What is left was computed with tokens that are gone: no other request may have it.
#[test]
fn a_shifted_text_is_never_shared() {
    let (mut scheduler, mut memory, shift) = full(Overflow::Shift { n_keep: 10 });
    apply(shift, &mut memory);
    let result = ShiftResult::Done;
    let request = RequestId(1);
    scheduler.handle(Micros(0), Event::Shifted { request, result });
    let tokens = scheduler.running().next().unwrap().tokens.to_vec();
    let same = |id: u64| Request {
        id: RequestId(id),
        prompt: tokens.clone(),
        ..Request::default()
    };
    scheduler.handle(Micros(0), Event::Cancel(request));
    scheduler.handle(Micros(0), Event::Submit(same(2)));
    let (_, outcomes) = next(&mut scheduler, &mut memory);
    let [Outcome::Admitted { reuse, .. }] = outcomes[..] else {
        panic!("{outcomes:?}");
    };
    assert_eq!(reuse.n_tokens, 0);
    assert_eq!(scheduler.cached().count(), 0);
}

/// A cached prefix with the same tokens does not have what its state has.
#[test]
fn a_shifted_text_is_saved_whole() {
    let mut memory = Kind::Unified.memory(4, 80);
    let config = SchedulerConfig {
        swap_bytes: 1 << 20,
        ..SchedulerConfig::new(rules(4), 64, N_CELLS)
    };
    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    let overflow = Overflow::Shift { n_keep: 10 };
    let shift = until_full(&mut scheduler, &mut memory, overflow);
    apply(shift, &mut memory);
    let result = ShiftResult::Done;
    let request = RequestId(1);
    scheduler.handle(Micros(0), Event::Shifted { request, result });
    let same = Request {
        id: RequestId(2),
        prompt: scheduler.running().next().unwrap().tokens.to_vec(),
        ..Request::default()
    };
    scheduler.handle(Micros(0), Event::Submit(same));
    let (work, _) = next(&mut scheduler, &mut memory);
    compute(&mut scheduler, &mut memory, work, 200);
    scheduler.handle(Micros(0), Event::Cancel(RequestId(2)));
    assert_eq!(scheduler.cached().count(), 1);
    let held = scheduler.running().next().unwrap().n_done;
    let urgent = Request {
        id: RequestId(3),
        priority: Priority::Interactive,
        prompt: (500..530).map(TokenId).collect(),
        ..Request::default()
    };
    scheduler.handle(Micros(0), Event::Submit(urgent));
    let (work, _) = next(&mut scheduler, &mut memory);
    let Work::SwapOut { swap, .. } = work else {
        panic!("{work:?}");
    };
    assert_eq!(
        (swap.request, swap.first, swap.n_tokens),
        (request, 0, held)
    );
}

#[test]
fn a_text_without_room_or_right_to_shift_ends_full() {
    let ended = |result: ShiftResult| {
        let (mut scheduler, mut memory, _) = full(Overflow::Shift { n_keep: 4 });
        let request = RequestId(1);
        let mut outcomes = scheduler.handle(Micros(0), Event::Shifted { request, result });
        outcomes.extend(next(&mut scheduler, &mut memory).1);
        outcomes
    };
    let full_end = [Outcome::Ended {
        request: RequestId(1),
        end: End::ContextFull,
    }];
    assert_eq!(ended(ShiftResult::NoRoom), full_end);
    assert_eq!(ended(ShiftResult::Refused), full_end);
    // Nothing but one token could be dropped.
    let (mut scheduler, mut memory) = scheduler(1);
    let overflow = Overflow::Shift { n_keep: 31 };
    scheduler.handle(Micros(0), Event::Submit(request(32, overflow)));
    let (work, _) = next(&mut scheduler, &mut memory);
    compute(&mut scheduler, &mut memory, work, 1);
    assert_eq!(next(&mut scheduler, &mut memory).1, full_end);
}

/// A cached prefix whose cells are needed to move goes before the text ends.
#[test]
fn cached_prefixes_make_room_for_a_shift() {
    let (mut scheduler, mut memory) = scheduler(3);
    let cached = Request {
        id: RequestId(7),
        ..request(12, Overflow::End)
    };
    scheduler.handle(Micros(0), Event::Submit(cached));
    let (work, _) = next(&mut scheduler, &mut memory);
    compute(&mut scheduler, &mut memory, work, 500);
    scheduler.handle(Micros(0), Event::Cancel(RequestId(7)));
    scheduler.handle(
        Micros(0),
        Event::Submit(request(31, Overflow::Shift { n_keep: 0 })),
    );
    let shift = loop {
        match next(&mut scheduler, &mut memory).0 {
            Work::Shift(shift) => break shift,
            work => drop(compute(&mut scheduler, &mut memory, work, 100)),
        }
    };
    assert_eq!(scheduler.cached().count(), 1);
    let request = shift.request;
    let result = ShiftResult::NoRoom;
    scheduler.handle(Micros(0), Event::Shifted { request, result });
    let (work, outcomes) = next(&mut scheduler, &mut memory);
    assert!(
        matches!(work, Work::Shift(again) if again == shift),
        "{work:?}"
    );
    assert_eq!((outcomes, scheduler.cached().count()), (Vec::new(), 0));
}

#[test]
fn a_source_is_encoded_each_time_a_sequence_is_given() {
    let (mut scheduler, mut memory) = scheduler(1);
    let request = Request {
        source: SourceUse::Encoded,
        prefix: PrefixUse::Off,
        ..request(1, Overflow::End)
    };
    scheduler.handle(Micros(0), Event::Submit(request));
    let (work, _) = next(&mut scheduler, &mut memory);
    assert!(
        matches!(work, Work::Encode { seq: SeqId(0), .. }),
        "{work:?}"
    );
    assert!(matches!(next(&mut scheduler, &mut memory).0, Work::Idle));
    scheduler.handle(Micros(0), Event::Encoded(RequestId(1)));
    let (work, _) = next(&mut scheduler, &mut memory);
    compute(&mut scheduler, &mut memory, work, 5);
    // Fails when it is encoded: the request ends, and nothing of it is left.
    let failed = scheduler.handle(Micros(0), Event::Fail(RequestId(1)));
    let ended = Outcome::Ended {
        request: RequestId(1),
        end: End::Failed,
    };
    assert_eq!(failed, [ended]);
    assert!(matches!(next(&mut scheduler, &mut memory).0, Work::Idle));
    assert_eq!(memory.n_used(), 0);
}
