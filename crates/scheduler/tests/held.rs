//! Requests that are held, as what their next tokens need is not there: others go on.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::text;
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use cellar_scheduler::{
    Event, Micros, PrefixUse, Request, RequestId, Scheduler, SchedulerConfig, StepFailure, Work,
};
use kv_core::memory::Composite;

const FIRST: RequestId = RequestId(1);
const SECOND: RequestId = RequestId(2);
/// Another text of the first request.
const SIBLING: RequestId = RequestId(3);

/// The requests in the next step, which is put off; `None` where there is nothing to do.
fn next(scheduler: &mut Scheduler, memory: &Composite) -> Option<Vec<RequestId>> {
    match scheduler.next(Micros(0), memory).work {
        Work::Idle => None,
        Work::Decode { step, .. } => {
            let put_off = Event::StepFailed(StepFailure::PutOff);
            assert!(scheduler.handle(Micros(0), put_off).is_empty());
            Some(step.feeds.iter().map(|feed| feed.request).collect())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn others_go_on_until_any_of_its_texts_is_ready() {
    let memory = Kind::Unified.memory(4, 200);
    let config = SchedulerConfig {
        step_tokens: 64,
        ..SchedulerConfig::new(rules(4), 16, 1000)
    };
    let mut scheduler = Scheduler::new(config, &memory).unwrap();
    let requests = [(FIRST, vec![SIBLING]), (SECOND, Vec::new())];
    for (number, (id, siblings)) in (1..).zip(requests) {
        let request = Request {
            id,
            siblings,
            prompt: text(30, number),
            prefix: PrefixUse::Off,
            ..Request::default()
        };
        assert!(
            scheduler
                .handle(Micros(0), Event::Submit(request))
                .is_empty()
        );
    }
    let handle = |scheduler: &mut Scheduler, event| {
        scheduler.handle(Micros(0), event);
    };
    assert_eq!(next(&mut scheduler, &memory).unwrap(), [FIRST, SECOND]);
    handle(&mut scheduler, Event::Hold(FIRST));
    assert_eq!(next(&mut scheduler, &memory).unwrap(), [SECOND]);
    handle(&mut scheduler, Event::Hold(SECOND));
    assert!(next(&mut scheduler, &memory).is_none());
    handle(&mut scheduler, Event::Ready(SECOND));
    // The text whose number the request had is gone; another one has its place.
    handle(&mut scheduler, Event::Cancel(FIRST));
    assert_eq!(next(&mut scheduler, &memory).unwrap(), [SECOND]);
    handle(&mut scheduler, Event::Ready(SIBLING));
    assert_eq!(next(&mut scheduler, &memory).unwrap(), [SIBLING, SECOND]);
    let counters = scheduler.counters();
    let counted = [
        counters.n_steps,
        counters.n_tokens,
        counters.n_drafted_tokens,
    ];
    assert_eq!(counted, [0; 3]);
}
