//! [`Recorder`]: when the service's thread hands frames over, which events it keeps, and what it
//! traces.
//!
//! Invariant: without watchers and a trace it costs a comparison a step. Decides nothing about
//! requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cellar_scheduler::{Micros, Outcome, Request, RowReport, Scheduler, Step};
use cellar_trace::TraceWriter;
use kv_backend::Backend;
use kv_core::memory::Memory;

use super::blocks::BlockTable;
use super::config::ExcerptLen;
use super::frame::{EventKind, ExpertFrame, Frame};
use super::text::LiveText;
use super::watch::{FRAME_TIME, WatchHub};
use crate::decode::Engine;

/// Tells watchers what the service's thread does.
#[derive(Debug)]
pub(crate) struct Recorder {
    hub: Arc<WatchHub>,
    excerpts: ExcerptLen,
    trace: Option<TraceWriter>,
    blocks: Option<BlockTable>,
    /// When the last frame was handed over.
    last_frame: Instant,
    /// Something has happened since.
    is_stale: bool,
}

impl Recorder {
    pub(crate) fn new(hub: Arc<WatchHub>, excerpts: ExcerptLen) -> Self {
        Self {
            hub,
            excerpts,
            trace: None,
            blocks: None,
            last_frame: Instant::now(),
            is_stale: true,
        }
    }

    /// The same with a trace, to which it writes.
    pub(crate) fn with_trace(mut self, trace: Option<TraceWriter>) -> Self {
        self.trace = trace;
        self
    }

    /// The same with blocks, of which it tells.
    pub(crate) fn with_blocks(mut self, blocks: Option<BlockTable>) -> Self {
        self.blocks = blocks;
        self
    }

    /// What watchers look at.
    pub(crate) fn hub(&self) -> &Arc<WatchHub> {
        &self.hub
    }

    /// Tells which blocks the scheduler's sequences hold between two steps.
    pub(crate) fn update_blocks(&mut self, scheduler: &Scheduler) {
        if let Some(blocks) = &mut self.blocks {
            blocks.update(scheduler);
        }
    }

    /// Something changes.
    pub(crate) fn set_stale(&mut self) {
        if !self.is_stale {
            self.is_stale = true;
            self.hub.set_stale();
        }
    }

    pub(crate) fn record(&mut self, now: Micros, kind: EventKind) {
        if let Some(trace) = &mut self.trace {
            write(trace, now, kind);
        }
        self.hub.record(Duration::from_micros(now.0), kind);
    }

    /// A request goes to the scheduler.
    pub(crate) fn submit(&mut self, now: Micros, request: &Request) {
        if let Some(trace) = &mut self.trace {
            trace.submit(now, request);
        }
        let kind = EventKind::Submitted {
            request: request.id,
            n_texts: 1 + request.siblings.len(),
            n_prompt: request.prompt.len(),
        };
        self.record(now, kind);
    }

    /// A step was computed in this time.
    pub(crate) fn step(&mut self, now: Micros, step: &Step, rows: &[RowReport], took: Micros) {
        if let Some(trace) = &mut self.trace {
            trace.step(now, step, rows, took);
        }
    }

    /// Nothing more happens.
    pub(crate) fn stop(&mut self, now: Micros) {
        if let Some(trace) = &mut self.trace {
            trace.stop(now);
        }
    }

    /// Whether a frame is due between two steps.
    pub(crate) fn is_due(&self) -> bool {
        self.is_stale && self.hub.is_watched() && self.last_frame.elapsed() >= FRAME_TIME
    }

    /// How long a thread with nothing to do may wait before a frame is due; `None` where none is.
    pub(crate) fn idle_time(&self) -> Option<Duration> {
        let is_stale = self.is_stale;
        is_stale.then(|| FRAME_TIME.saturating_sub(self.last_frame.elapsed()))
    }

    /// Hands a frame over.
    pub(crate) fn publish<B: Backend, M: Memory + Clone>(
        &mut self,
        now: Micros,
        engine: &Engine<B, M>,
        scheduler: &Scheduler,
    ) {
        self.last_frame = Instant::now();
        self.is_stale = false;
        let frame = Frame::new(now, engine.memory(), scheduler, self.excerpts);
        let experts = ExpertFrame::of(engine.backend());
        self.hub.publish(Frame { experts, ..frame });
    }
}

/// Writes an event that is not written otherwise.
fn write(trace: &mut TraceWriter, now: Micros, kind: EventKind) {
    match kind {
        EventKind::Refused { request } => trace.refused(now, request),
        EventKind::Admitted {
            request,
            seq,
            reuse,
        } => trace.admitted(now, request, seq, &reuse),
        EventKind::Resumed {
            request,
            seq,
            reuse,
        } => trace.resumed(now, request, seq, &reuse),
        EventKind::Preempted { request, n_tokens } => trace.preempted(now, request, n_tokens),
        EventKind::Cache(note) => trace.cache(now, note),
        EventKind::Ended { request, end, .. } => trace.ended(now, request, end),
        EventKind::Submitted { .. } | EventKind::FirstToken { .. } => {}
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.hub.end();
    }
}

/// An outcome as an event. `live` is the text before it.
pub(super) fn event_of(outcome: &Outcome, live: Option<&LiveText>) -> Option<EventKind> {
    Some(match *outcome {
        Outcome::Refused { request, .. } => EventKind::Refused { request },
        Outcome::Admitted {
            request,
            seq,
            reuse,
        } => {
            if live.is_none_or(LiveText::was_admitted) {
                EventKind::Resumed {
                    request,
                    seq,
                    reuse,
                }
            } else {
                EventKind::Admitted {
                    request,
                    seq,
                    reuse,
                }
            }
        }
        Outcome::Preempted { request, n_tokens } => EventKind::Preempted { request, n_tokens },
        Outcome::Ended { request, end } => EventKind::Ended {
            request,
            end,
            n_tokens: live.map_or(0, |live| live.completion.tokens().len()),
        },
        // That its state went to the host or the disk was an event.
        Outcome::Spilled { .. } | Outcome::SwapDropped { .. } => return None,
    })
}
