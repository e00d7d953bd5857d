//! Tests of [watchers](super::watch), apart from them as their source is compiled a second time for
//! `tests/stream_orders.rs`.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cellar_scheduler::RequestId;

use super::frame::{EventKind, Frame};
use super::watch::{MAX_EVENTS, WatchHub};

fn record(hub: &WatchHub, n: u64) {
    for request in (0..n).map(RequestId) {
        hub.record(Duration::ZERO, EventKind::FirstToken { request });
    }
}

#[test]
fn a_slow_watcher_sees_the_newest_frame_and_what_was_lost() {
    let hub = Arc::new(WatchHub::default());
    hub.publish(Frame::default());
    let mut watcher = hub.watch(0);
    let first = watcher.next_update_within(Duration::ZERO).unwrap();
    assert_eq!((first.frame.number, first.events.len()), (0, 0));
    assert!(watcher.next_update_within(Duration::ZERO).is_none());
    record(&hub, MAX_EVENTS as u64 + 3);
    assert!(watcher.next_update_within(Duration::ZERO).is_none());
    (0..3).for_each(|_| hub.publish(Frame::default()));
    let second = watcher.next_update_within(Duration::ZERO).unwrap();
    assert_eq!((second.frame.number, second.n_lost), (3, 3));
    assert_eq!(second.events.len(), MAX_EVENTS);
    assert_eq!(second.events[0].number, 3);
    // Another one that knows where it was goes on there.
    let mut again = hub.watch(second.next_event - 1);
    let events = again.next_update_within(Duration::ZERO).unwrap().events;
    assert_eq!(events.len(), 1);
    // A number from elsewhere is as good as the end.
    let mut foreign = hub.watch(u64::MAX);
    let update = foreign.next_update_within(Duration::ZERO).unwrap();
    assert_eq!((update.events.len(), update.n_lost), (0, 0));
}

/// A watcher that is slow looks when the next step has events already.
#[test]
fn events_come_with_a_frame_that_was_made_after_them() {
    let hub = Arc::new(WatchHub::default());
    let mut watcher = hub.watch(0);
    record(&hub, 2);
    hub.publish(Frame::default());
    record(&hub, 3);
    let mut seen = || {
        let update = watcher.next_update_within(Duration::ZERO).unwrap();
        let numbers: Vec<u64> = update.events.iter().map(|event| event.number).collect();
        (numbers, update.next_event, update.n_lost)
    };
    assert_eq!(seen(), (vec![0, 1], 2, 0));
    hub.publish(Frame::default());
    record(&hub, MAX_EVENTS as u64);
    // The three events of this frame were pushed out, and none after it is lost yet.
    assert_eq!(seen(), (vec![], 5, 3));
    // One that begins after the frame does not go back.
    let mut later = hub.watch(9);
    hub.publish(Frame::default());
    let update = later.next_update_within(Duration::ZERO).unwrap();
    assert_eq!(update.events[0].number, 9);
    assert_eq!(update.next_event, MAX_EVENTS as u64 + 5);
}

#[test]
fn an_old_frame_is_not_shown_to_a_new_watcher() {
    let hub = Arc::new(WatchHub::default());
    hub.publish(Frame::default());
    hub.set_stale();
    let mut watcher = hub.watch(0);
    assert!(watcher.next_update_within(Duration::ZERO).is_none());
    hub.publish(Frame::default());
    assert!(watcher.next_update_within(Duration::ZERO).is_some());
    assert!(hub.is_watched());
    drop(watcher);
    assert!(!hub.is_watched());
}

#[test]
fn the_end_of_the_service_ends_watching() {
    let hub = Arc::new(WatchHub::default());
    let mut watcher = hub.watch(0);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(watcher.poll_update(&mut cx).is_pending());
    hub.end();
    assert!(matches!(watcher.poll_update(&mut cx), Poll::Ready(None)));
}
