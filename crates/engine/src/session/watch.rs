//! [`Watcher`]: looks at a service while it runs: the newest [`Frame`], and the events before it.
//!
//! The service's thread hands over a frame at most every [`FRAME_TIME`], and only while there are
//! watchers or when it becomes idle. Invariants: it never waits for a watcher. One that is slow
//! misses frames, and of events those that more than [`MAX_EVENTS`] newer ones have pushed out.
//! Events come with a frame that was made after them, never with an earlier one, so what they
//! report is in its memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::frame::{EventKind, Frame, ServiceEvent};
use super::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard};

/// The least time between two frames.
pub const FRAME_TIME: Duration = Duration::from_millis(100);

/// Events that are kept for watchers.
pub const MAX_EVENTS: usize = 1024;

/// Between the thread of a service and those that watch it.
#[derive(Debug, Default)]
pub(crate) struct WatchHub {
    n_watchers: AtomicUsize,
    /// Nothing has happened since the last frame.
    is_current: AtomicBool,
    state: Mutex<HubState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HubState {
    events: VecDeque<ServiceEvent>,
    n_events: u64,
    frame: Option<Arc<Frame>>,
    n_frames: u64,
    /// Events before the frame.
    n_events_before: u64,
    next_watcher: u64,
    /// Of watchers that found nothing.
    wakers: BTreeMap<u64, Waker>,
    has_ended: bool,
}

impl WatchHub {
    fn lock(&self) -> MutexGuard<'_, HubState> {
        // A watcher that panicked changed nothing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there are watchers.
    pub(crate) fn is_watched(&self) -> bool {
        self.n_watchers.load(Ordering::Relaxed) > 0
    }

    /// Something changes after the last frame.
    pub(crate) fn set_stale(&self) {
        self.is_current.store(false, Ordering::Release);
    }

    /// Keeps an event. Watchers see it with the next frame that is published.
    pub(crate) fn record(&self, at: Duration, kind: EventKind) {
        let mut state = self.lock();
        let number = state.n_events;
        state.n_events += 1;
        if state.events.len() == MAX_EVENTS {
            state.events.pop_front();
        }
        state.events.push_back(ServiceEvent { number, at, kind });
    }

    /// Hands a frame over, in place of the one before.
    pub(crate) fn publish(&self, frame: Frame) {
        let mut state = self.lock();
        let number = state.n_frames;
        state.n_frames += 1;
        state.n_events_before = state.n_events;
        state.frame = Some(Arc::new(Frame { number, ..frame }));
        self.is_current.store(true, Ordering::Release);
        self.wake(state);
    }

    /// The service has ended.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.has_ended = true;
        self.wake(state);
    }

    fn wake(&self, mut state: MutexGuard<'_, HubState>) {
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.changed.notify_all();
        wakers.into_values().for_each(Waker::wake);
    }

    /// A watcher that sees events from number `first_event` on, as far as they are kept.
    pub(crate) fn watch(self: &Arc<Self>, first_event: u64) -> Watcher {
        let mut state = self.lock();
        let id = state.next_watcher;
        state.next_watcher += 1;
        // A frame that is not of this moment is not shown: another one comes.
        let next_frame = if self.is_current.load(Ordering::Acquire) {
            state.n_frames.saturating_sub(1)
        } else {
            state.n_frames
        };
        let next_event = first_event.min(state.n_events);
        self.n_watchers.fetch_add(1, Ordering::Relaxed);
        drop(state);
        Watcher {
            hub: Arc::clone(self),
            id,
            next_frame,
            next_event,
        }
    }

    /// Events so far.
    pub(crate) fn n_events(&self) -> u64 {
        self.lock().n_events
    }
}

/// What is new for a watcher.
#[derive(Clone, Debug)]
pub struct Update {
    /// The newest frame.
    pub frame: Arc<Frame>,
    /// The events since the update before and up to the frame, in their order.
    pub events: Vec<ServiceEvent>,
    /// Events that are not kept any more, before these.
    pub n_lost: u64,
    /// The number of the next event: a watcher that begins there misses nothing.
    pub next_event: u64,
}

/// Looks at a service while it runs. Dropping it costs the service nothing more.
#[derive(Debug)]
pub struct Watcher {
    hub: Arc<WatchHub>,
    id: u64,
    next_frame: u64,
    next_event: u64,
}

impl Watcher {
    /// The newest frame where the watcher has not seen it; `Ready(None)` when the service has
    /// ended. Where there is none, the task of `cx` is woken when one comes.
    pub fn poll_update(&mut self, cx: &mut Context<'_>) -> Poll<Option<Update>> {
        let hub = Arc::clone(&self.hub);
        let mut state = hub.lock();
        match self.take(&state) {
            Some(update) => Poll::Ready(Some(update)),
            None if state.has_ended => Poll::Ready(None),
            None => {
                state.wakers.insert(self.id, cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits for the next update, at most so long; `None` where none came, or the service has
    /// ended.
    pub fn next_update_within(&mut self, time: Duration) -> Option<Update> {
        let started = Instant::now();
        let hub = Arc::clone(&self.hub);
        let mut state = hub.lock();
        loop {
            let update = self.take(&state);
            let left = time.saturating_sub(started.elapsed());
            if update.is_some() || state.has_ended || left.is_zero() {
                return update;
            }
            let waited = hub.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn take(&mut self, state: &HubState) -> Option<Update> {
        let frame = state.frame.as_ref()?;
        if frame.number < self.next_frame {
            return None;
        }
        // A watcher may begin with an event after the frame.
        let (from, to) = (self.next_event, state.n_events_before.max(self.next_event));
        let first = state.n_events - state.events.len() as u64;
        let new = state.events.iter();
        let new = new.filter(|event| (from..to).contains(&event.number));
        let update = Update {
            frame: Arc::clone(frame),
            events: new.cloned().collect(),
            n_lost: first.min(to).saturating_sub(from),
            next_event: to,
        };
        self.next_frame = frame.number + 1;
        self.next_event = to;
        Some(update)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.hub.n_watchers.fetch_sub(1, Ordering::Relaxed);
        self.hub.lock().wakers.remove(&self.id);
    }
}
