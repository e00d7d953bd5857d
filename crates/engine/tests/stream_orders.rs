//! Streams of texts and watchers of a service in all orders of their threads that locks allow, by
//! loom, up to so many preemptions.
//!
//! Their own source is compiled here once more, with loom's locks and counters in the place of the
//! standard library's. `LOOM_MAX_PREEMPTIONS=4` tries more. No time passes in these models: a
//! reader that is not woken waits for ever, which loom calls a deadlock.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use kv_backend::CancelFlag;
use loom::thread::{self, Thread};
use thread_orders::in_all_orders;

use frame::{EventKind, Frame};
use pieces::TokenPiece;
use stream::{StepGuests, TextSender, TextStream, Usage};
use watch::{Update, WatchHub, Watcher};

// Their neighbours, by the names that they use.
mod completion {
    pub(crate) use cellar_engine::FinishReason;
}
mod logprobs {
    pub(crate) use cellar_engine::TokenLogprobs;
}
mod timings {
    pub(crate) use cellar_engine::{Pace, Timings};
}
#[path = "../src/session/pieces.rs"]
#[allow(dead_code, unreachable_pub)] // what the rest of a session asks of them
mod pieces;
#[path = "../src/session/stream.rs"]
#[allow(dead_code, unreachable_pub)]
mod stream;
#[path = "../src/session/watch.rs"]
#[allow(dead_code, unreachable_pub)]
mod watch;

mod error {
    pub(crate) use cellar_engine::session::ServiceError;
}
mod frame {
    pub(crate) use cellar_engine::session::{EventKind, Frame, ServiceEvent};
}
/// Loom's, by the names of the module that both use.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use thread_orders::Condvar;
}

const FOR_EVER: Duration = Duration::from_secs(3600);

/// Wakes a thread that is parked, as an executor wakes a task.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls until something is ready, asleep in between.
fn wait_for<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        if let Poll::Ready(ready) = poll(&mut Context::from_waker(&waker)) {
            return ready;
        }
        thread::park();
    }
}

/// A text of two pieces and its end, as a service sends it.
fn send(sender: &TextSender) {
    for text in ["Once", " upon"] {
        let piece = TokenPiece {
            token: None,
            text: text.to_owned(),
            logprobs: None,
        };
        sender.push(vec![piece], Usage::default());
    }
    let end = completion::FinishReason::Length;
    sender.end(Ok((Vec::new(), end, Usage::default())));
}

fn stream() -> (TextSender, TextStream) {
    TextSender::new(cellar_scheduler::RequestId(0), &Arc::default(), None)
}

#[test]
fn a_reader_that_waits_gets_the_text_and_one_end() {
    in_all_orders(4, || {
        let (sender, stream) = stream();
        let service = thread::spawn(move || send(&sender));
        let finished = stream.finish().unwrap();
        assert_eq!(finished.text, "Once upon");
        assert_eq!(finished.finish, completion::FinishReason::Length);
        service.join().unwrap();
    });
}

#[test]
fn a_task_that_polls_is_woken_for_each_piece() {
    in_all_orders(3, || {
        let (sender, mut stream) = stream();
        let service = thread::spawn(move || send(&sender));
        let mut text = String::new();
        while let Some(piece) = wait_for(|cx| stream.poll_piece(cx)).unwrap() {
            assert!(!piece.is_empty());
            text.push_str(&piece);
        }
        assert_eq!(text, "Once upon");
        service.join().unwrap();
    });
}

#[test]
fn a_reader_learns_that_the_service_has_gone() {
    in_all_orders(4, || {
        let (sender, mut stream) = stream();
        let service = thread::spawn(move || drop(sender));
        let failed = stream.next_piece().unwrap_err();
        assert!(matches!(failed, error::ServiceError::Stopped));
        assert!(matches!(stream.next_piece(), Ok(None)));
        service.join().unwrap();
    });
}

/// Of two texts of a step, whose readers leave at any moment.
#[test]
fn a_step_is_cancelled_only_when_all_its_texts_have_no_reader() {
    in_all_orders(3, || {
        let [first, second] = [0, 1].map(cellar_scheduler::RequestId);
        let guests = Arc::<StepGuests>::default();
        let (sender, stream) = TextSender::new(first, &guests, None);
        let (_kept_sender, kept) = TextSender::new(second, &guests, None);
        let reader = thread::spawn(move || drop(stream));
        let step: &CancelFlag = guests.enter([first, second].into_iter());
        // The second one's reader is there: the step goes on, wherever the first leaves.
        assert!(!step.is_cancelled());
        reader.join().unwrap();
        assert!(!step.is_cancelled());
        assert!(sender.is_cancelled() && sender.is_dropped());
        // The next step has the second alone.
        let step = guests.enter([second].into_iter());
        drop(kept);
        assert!(step.is_cancelled());
    });
}

/// A service that does two things, and shows them where somebody watches, or when it is idle.
fn serve(hub: &WatchHub) {
    for request in [0, 1].map(cellar_scheduler::RequestId) {
        hub.set_stale();
        hub.record(Duration::ZERO, EventKind::FirstToken { request });
        if hub.is_watched() {
            hub.publish(Frame::default());
        }
    }
    hub.publish(Frame::default());
    hub.end();
}

/// The events that a watcher sees until the service ends, by their numbers.
fn events_of(mut next: impl FnMut() -> Option<Update>) -> Vec<u64> {
    let (mut seen, mut n_lost, mut last) = (Vec::new(), 0, None);
    while let Some(update) = next() {
        // No frame twice, and none that is older.
        assert!(last < Some(update.frame.number));
        last = Some(update.frame.number);
        n_lost += update.n_lost;
        seen.extend(update.events.iter().map(|event| event.number));
    }
    assert_eq!(n_lost, 0);
    assert!(last.is_some());
    seen
}

fn watch_a_service(next: fn(&mut Watcher) -> Option<Update>) {
    let hub = Arc::<WatchHub>::default();
    let served = Arc::clone(&hub);
    let service = thread::spawn(move || serve(&served));
    let mut watcher = hub.watch(0);
    assert_eq!(events_of(|| next(&mut watcher)), [0, 1]);
    service.join().unwrap();
    drop(watcher);
    assert!(!hub.is_watched());
}

#[test]
fn a_watcher_that_waits_sees_each_event_once() {
    in_all_orders(3, || {
        watch_a_service(|watcher| watcher.next_update_within(FOR_EVER));
    });
}

#[test]
fn a_watcher_that_polls_sees_each_event_once() {
    in_all_orders(3, || {
        watch_a_service(|watcher| wait_for(|cx| watcher.poll_update(cx)));
    });
}
