//! [`replay`]: the requests of a trace under another memory or eviction policy.
//!
//! Invariant: the scheduler and the memory are those of a service; only the model is missing. A
//! text goes on with the tokens that it had, and a request comes no earlier than in the trace, and
//! not before the texts have ended that had ended when it came: so the next message of a
//! conversation follows its answer. Drafted tokens are not replayed.

use std::collections::BTreeMap;

use cellar_scheduler::{
    DropReason, Event, Micros, Note, Outcome, PrefixCaching, Progress, RequestId, RowUse,
    Scheduler, SchedulerConfig, Shift, ShiftResult, Step, Swap, SwappedIn, Work,
};
use kv_core::SeqId;
use kv_core::memory::{
    Composite, CompositeSlot, Edit, Memory, MemoryInputs, Plan, Refusal, RestoreInto, Seqs,
    Snapshot,
};
use serde::Serialize;

use super::layout::{MemoryShape, TracedPolicy};
use super::reader::{Trace, TracedText};
use super::record::{TraceEvent, TracedDrop, TracedEnd, TracedWay};
use super::step_cost::{Measured, StepCost};
use crate::error::EngineError;
use crate::serve::{EvictionPolicy, ServiceError};

/// What is different in a replay; the [default](ReplayConfig::default) is as in the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayConfig {
    /// Tokens of the context; `None` as in the trace. [`Trace::n_ctx_within`] gives those of a
    /// budget.
    pub n_ctx: Option<u32>,
    /// Whether prefixes are kept; `None` as in the trace.
    pub prefix_cache: Option<PrefixCaching>,
    /// Which prefix is evicted first; `None` as in the trace.
    pub eviction: Option<EvictionPolicy>,
    /// Bytes of the host for preempted requests; `None` as in the trace.
    pub swap_bytes: Option<u64>,
    /// Bytes of a disk for them, beyond half of the host's; `None` as in the trace.
    pub swap_disk_bytes: Option<u64>,
}

/// What came of the requests of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Tokens of the context.
    pub n_ctx: u32,
    /// Bytes of the memory.
    pub memory_bytes: u64,
    /// The most bytes of rows that were in use at once; `None` for the trace itself.
    pub peak_bytes: Option<u64>,
    /// Requests, each with one prompt.
    pub n_requests: usize,
    /// Of these, those that could not be taken.
    pub n_refused: usize,
    /// Tokens of the prompts that were admitted.
    pub n_prompt: usize,
    /// Of these, those that were there already.
    pub n_reused: usize,
    /// Tokens that steps computed, of prompts and texts.
    pub n_computed: usize,
    /// Of these, those that had been computed before, and were dropped by preemptions.
    pub n_recomputed: usize,
    /// Bytes of preempted requests that went to the host, and came back or were dropped.
    pub n_swapped_bytes: u64,
    /// Of these, bytes that went on to the disk.
    pub n_spilled_bytes: u64,
    /// Prefixes that were dropped for requests.
    pub n_evicted: usize,
    /// Tokens of these.
    pub n_evicted_tokens: usize,
    /// Running requests that had to wait.
    pub n_preemptions: usize,
    /// Steps.
    pub n_steps: usize,
    /// Microseconds from the start to the last step.
    pub micros: u64,
}

impl ReplayReport {
    /// The part of the prompts' tokens that was reused, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.n_reused as f64 / self.n_prompt.max(1) as f64
    }
}

impl Trace {
    /// The longest context whose memory takes at most so many bytes.
    ///
    /// # Errors
    /// [`ServiceError::Trace`] where not even one token fits.
    pub fn n_ctx_within(&self, n_bytes: u64) -> Result<u32, ServiceError> {
        let memory = &self.header.memory;
        memory.largest_n_ctx(n_bytes).ok_or_else(|| {
            let least = memory.with_n_ctx(1).bytes().unwrap_or(u64::MAX);
            super::reader::wrong(
                0,
                &format!(
                    "the memory of this model takes at least {least} bytes, and {n_bytes} are given"
                ),
            )
        })
    }

    /// What the trace itself shows.
    pub fn recorded(&self) -> ReplayReport {
        let memory = &self.header.memory;
        let mut report = ReplayReport {
            n_ctx: memory.config.n_ctx,
            memory_bytes: memory.bytes().unwrap_or(u64::MAX),
            n_requests: self.requests.len(),
            micros: self.micros,
            ..ReplayReport::default()
        };
        let mut lengths = BTreeMap::new();
        for request in &self.requests {
            lengths.insert(request.request.id.0, request.request.prompt.len());
        }
        let mut held: BTreeMap<u64, usize> = BTreeMap::new();
        for event in &self.events {
            match event {
                TraceEvent::Refuse { request } => {
                    report.n_refused += usize::from(lengths.contains_key(request));
                }
                TraceEvent::Admit(admitted) => {
                    // A text of several has no prompt of its own.
                    if let Some(n_prompt) = lengths.get(&admitted.request) {
                        report.n_prompt += n_prompt;
                        report.n_reused += admitted.n_reused;
                    }
                }
                TraceEvent::Resume(admitted) => {
                    let had = held.remove(&admitted.request).unwrap_or(0);
                    report.n_recomputed += had.saturating_sub(admitted.n_reused);
                }
                TraceEvent::Preempt { request, n_tokens } => {
                    report.n_preemptions += 1;
                    held.insert(*request, *n_tokens);
                }
                TraceEvent::Drop {
                    n_tokens,
                    why: TracedDrop::Evicted,
                    ..
                } => {
                    report.n_evicted += 1;
                    report.n_evicted_tokens += n_tokens;
                }
                TraceEvent::Step(step) => {
                    report.n_steps += 1;
                    report.n_computed += step.n_tokens;
                }
                TraceEvent::Swap {
                    way: TracedWay::Out,
                    n_bytes,
                    ..
                } => report.n_swapped_bytes += n_bytes,
                TraceEvent::Swap {
                    way: TracedWay::Disk,
                    n_bytes,
                    ..
                } => report.n_spilled_bytes += n_bytes,
                TraceEvent::Submit(_)
                | TraceEvent::Swap { .. }
                | TraceEvent::Share { .. }
                | TraceEvent::Cache { .. }
                | TraceEvent::Drop { .. }
                | TraceEvent::End { .. }
                | TraceEvent::Stop => {}
            }
        }
        report
    }

    /// Whether tokens were drafted, which a replay does not do.
    pub fn has_drafts(&self) -> bool {
        let mut events = self.events.iter();
        events.any(|event| matches!(event, TraceEvent::Step(step) if step.n_drafted > 0))
    }

    fn step_cost(&self) -> StepCost {
        StepCost::fit(self.events.iter().filter_map(|event| match event {
            TraceEvent::Step(step) => Some(Measured {
                n_tokens: step.n_tokens,
                took: step.took,
            }),
            _ => None,
        }))
    }
}

/// Sends the requests of a trace through a scheduler and a memory.
///
/// # Errors
/// [`ServiceError::Engine`] where there is no memory of this size, or it refuses what the scheduler
/// planned, which no sound trace leads to; [`ServiceError::Refused`] where the
/// limits of the trace suit no scheduler.
pub fn replay(trace: &Trace, config: &ReplayConfig) -> Result<ReplayReport, ServiceError> {
    let shape = match config.n_ctx {
        Some(n_ctx) => trace.header.memory.with_n_ctx(n_ctx),
        None => trace.header.memory.clone(),
    };
    let limits = &trace.header.limits;
    let policy = limits.policy.with(config.prefix_cache, config.eviction);
    let memory = shape
        .memory()
        .map_err(|error| EngineError::from(crate::ConfigError::from(error)))?;
    let limits = limits.scheduler(&shape.config, policy);
    let limits = SchedulerConfig {
        swap_bytes: config.swap_bytes.unwrap_or(limits.swap_bytes),
        swap_disk_bytes: config.swap_disk_bytes.unwrap_or(limits.swap_disk_bytes),
        ..limits
    };
    let scheduler = Scheduler::new(limits, &memory)?
        .with_row_bytes(shape.row_bytes())
        .with_notes();
    let report = ReplayReport {
        n_ctx: shape.config.n_ctx,
        memory_bytes: shape.bytes().unwrap_or(u64::MAX),
        peak_bytes: Some(0),
        n_requests: trace.requests.len(),
        ..ReplayReport::default()
    };
    let mut replay = Replay {
        trace,
        shape,
        memory,
        scheduler,
        cost: trace.step_cost(),
        now: 0,
        is_idle: true,
        n_sent: 0,
        n_ended: 0,
        live: BTreeMap::new(),
        preempted: BTreeMap::new(),
        saved: BTreeMap::new(),
        report,
    };
    replay.run()?;
    Ok(ReplayReport {
        micros: replay.now,
        ..replay.report
    })
}

/// A text that has not ended.
struct LiveReplay<'a> {
    text: &'a TracedText,
    /// How many of its tokens were chosen.
    n_chosen: usize,
    came_at: u64,
    /// Tokens of the prompt that are not counted yet: of the first text of a request alone.
    n_prompt: Option<usize>,
}

struct Replay<'a> {
    trace: &'a Trace,
    shape: MemoryShape,
    memory: Composite,
    scheduler: Scheduler,
    cost: StepCost,
    now: u64,
    /// Nothing runs, and nothing waits but for time to pass.
    is_idle: bool,
    n_sent: usize,
    n_ended: usize,
    live: BTreeMap<RequestId, LiveReplay<'a>>,
    /// Tokens that preempted requests had.
    preempted: BTreeMap<RequestId, usize>,
    /// What was saved of preempted requests, and of which sequences.
    saved: BTreeMap<RequestId, (SeqId, Snapshot)>,
    report: ReplayReport,
}

impl Replay<'_> {
    fn run(&mut self) -> Result<(), ServiceError> {
        loop {
            self.send();
            self.cancel();
            self.is_idle = false;
            let plan = self.scheduler.next(Micros(self.now), &self.memory);
            self.take(plan.outcomes);
            match plan.work {
                Work::Decode { step, planned } => self.decode(&step, planned.plan),
                Work::Edit(edits) => {
                    edits.into_iter().try_for_each(|edit| self.edit(edit))?;
                }
                Work::SwapOut { swap, limit } => self.swap_out(&swap, limit)?,
                Work::SwapIn(swap) => self.swap_in(&swap)?,
                // A trace tells of no sources. A memory that is larger or smaller than the traced
                // one shifts other texts.
                // No request of a trace asks a store.
                Work::Fetch(_) | Work::Restore(_) => {}
                Work::Encode { request, .. } => self.handle(Event::Encoded(request)),
                Work::Shift(shift) => self.shift(shift),
                Work::Idle => {
                    let Some(time) = self.next_time() else {
                        return Ok(());
                    };
                    self.now = self.now.max(time);
                    self.is_idle = true;
                }
            }
        }
    }

    fn edit(&mut self, edit: Edit) -> Result<(), ServiceError> {
        let _no_rows = self.memory.apply(edit).map_err(EngineError::from)?;
        Ok(())
    }

    /// Keeps what the memory holds of a request; its bytes are those of the rows alone.
    fn swap_out(&mut self, swap: &Swap, limit: u64) -> Result<(), ServiceError> {
        swap.before_saving()
            .map_or(Ok(()), |edit| self.edit(edit))?;
        let seq = swap.swapped_seq();
        let snapshot = self.memory.snapshot(Seqs::One(seq));
        let snapshot = snapshot.map_err(EngineError::from)?;
        swap.at_the_end().map_or(Ok(()), |edit| self.edit(edit))?;
        let n_bytes = self.shape.bytes_of(&snapshot);
        let is_saved = n_bytes <= limit;
        let request = swap.request;
        if is_saved {
            self.saved.insert(request, (seq, snapshot));
        }
        let n_bytes = is_saved.then_some(n_bytes);
        self.handle(Event::SwappedOut { request, n_bytes });
        Ok(())
    }

    fn swap_in(&mut self, swap: &Swap) -> Result<(), ServiceError> {
        let request = swap.request;
        let to = swap.swapped_seq();
        let restored = self.saved.get(&request).map(|&(from, ref snapshot)| {
            let into = RestoreInto::One { from, to };
            self.memory.restore(snapshot, into).map(drop)
        });
        let result = match restored {
            Some(Ok(())) => SwappedIn::Restored,
            Some(Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_))) => SwappedIn::NoRoom,
            Some(Err(error)) => return Err(EngineError::from(error).into()),
            None => SwappedIn::Lost,
        };
        if result == SwappedIn::Restored {
            self.saved.remove(&request);
            let edits = swap.after_restoring().into_iter().chain(swap.at_the_end());
            edits.into_iter().try_for_each(|edit| self.edit(edit))?;
        }
        self.handle(Event::SwappedIn { request, result });
        Ok(())
    }

    /// Sends the requests that are due.
    fn send(&mut self) {
        while let Some(next) = self.trace.requests.get(self.n_sent) {
            let is_due = next.at.0 <= self.now;
            // Where nothing runs, nothing more ends.
            if !is_due || (self.n_ended < next.n_ended && !self.is_idle) {
                return;
            }
            self.n_sent += 1;
            self.is_idle = false;
            // Never at the time of what came before, as in a service: which prefix was used last
            // decides which is evicted.
            self.now += 1;
            let request = next.request.clone();
            let texts = std::iter::once(request.id).chain(request.siblings.iter().copied());
            for (number, id) in texts.enumerate() {
                if let Some(text) = self.trace.texts.get(&id) {
                    let live = LiveReplay {
                        text,
                        n_chosen: 0,
                        came_at: self.now,
                        n_prompt: (number == 0).then_some(request.prompt.len()),
                    };
                    self.live.insert(id, live);
                }
            }
            self.handle(Event::Submit(request));
        }
    }

    /// Cancels the texts that were cancelled before their first token, when it is time.
    fn cancel(&mut self) {
        let now = self.now;
        let is_due = |live: &LiveReplay<'_>| live.cancel_time().is_some_and(|time| time <= now);
        let due = self.live.iter().filter(|(_, live)| is_due(live));
        let due: Vec<RequestId> = due.map(|(&id, _)| id).collect();
        for id in due {
            self.handle(Event::Cancel(id));
            self.live.remove(&id);
        }
    }

    /// When something comes, while nothing runs.
    fn next_time(&self) -> Option<u64> {
        let next = self.trace.requests.get(self.n_sent).map(|next| next.at.0);
        let cancels = self.live.values().filter_map(LiveReplay::cancel_time);
        next.into_iter().chain(cancels).min()
    }

    /// Drops tokens of a text that is full.
    fn shift(&mut self, shift: Shift) {
        let [removal, move_down] = shift.edits();
        let mut shifted = self.memory.clone();
        let edited = shifted
            .apply(removal)
            .and_then(|_| shifted.apply(move_down));
        let result = match edited {
            Ok(_) => {
                self.memory = shifted;
                ShiftResult::Done
            }
            Err(Refusal::NoRoom(_)) => ShiftResult::NoRoom,
            Err(_) => ShiftResult::Refused,
        };
        let request = shift.request;
        self.handle(Event::Shifted { request, result });
    }

    fn decode(&mut self, step: &Step, plan: Plan<CompositeSlot>) {
        let mut inputs = MemoryInputs::default();
        let mut ubatches = self.memory.begin_planned(plan);
        while ubatches.next(&mut inputs).is_some() {}
        drop(ubatches);
        let took = self.cost.micros(step.batch.len());
        self.now += took;
        self.report.n_steps += 1;
        self.report.n_computed += step.batch.len();
        let used = self.shape.bytes_used(&self.memory);
        self.report.peak_bytes = self.report.peak_bytes.max(Some(used));
        let live = &mut self.live;
        let rows = step.report(|row| match row.use_of {
            RowUse::Prompt => None,
            RowUse::NextToken | RowUse::AfterDraft(_) => {
                live.get_mut(&row.request).map(LiveReplay::next)
            }
        });
        self.handle(Event::StepDone(rows));
        self.handle(Event::StepTime(Micros(took)));
    }

    fn handle(&mut self, event: Event) {
        let outcomes = self.scheduler.handle(Micros(self.now), event);
        self.take(outcomes);
    }

    fn take(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            match outcome {
                Outcome::Refused { request, .. } => {
                    let refused = self.live.remove(&request);
                    self.report.n_refused +=
                        usize::from(refused.is_some_and(|r| r.n_prompt.is_some()));
                    self.n_ended += 1;
                }
                Outcome::Admitted { request, reuse, .. } => match self.preempted.remove(&request) {
                    Some(had) => {
                        self.report.n_recomputed += had.saturating_sub(reuse.n_tokens);
                    }
                    None => {
                        let live = self.live.get_mut(&request);
                        if let Some(n_prompt) = live.and_then(|live| live.n_prompt.take()) {
                            self.report.n_prompt += n_prompt;
                            self.report.n_reused += reuse.n_tokens;
                        }
                    }
                },
                Outcome::Preempted { request, n_tokens } => {
                    self.report.n_preemptions += 1;
                    self.preempted.insert(request, n_tokens);
                }
                // Wherever it is, it comes back the same.
                Outcome::Spilled { .. } => {}
                Outcome::SwapDropped { request, n_tokens } => {
                    self.saved.remove(&request);
                    self.report.n_recomputed += n_tokens;
                }
                Outcome::Ended { request, .. } => {
                    self.saved.remove(&request);
                    self.live.remove(&request);
                    self.preempted.remove(&request);
                    self.n_ended += 1;
                }
            }
        }
        for note in self.scheduler.take_notes() {
            match note {
                Note::Dropped {
                    n_tokens,
                    why: DropReason::Evicted,
                    ..
                } => {
                    self.report.n_evicted += 1;
                    self.report.n_evicted_tokens += n_tokens;
                }
                Note::SwappedOut { n_bytes, .. } => self.report.n_swapped_bytes += n_bytes,
                Note::Spilled { n_bytes, .. } => self.report.n_spilled_bytes += n_bytes,
                _ => {}
            }
        }
    }
}

impl LiveReplay<'_> {
    /// What becomes of it by the next row.
    fn next(&mut self) -> Progress {
        let token = self.text.tokens.get(self.n_chosen);
        self.n_chosen += 1;
        match (token, self.text.end) {
            (Some(&token), _) => Progress::Token(token),
            (None, Some((_, TracedEnd::Failed))) => Progress::Failed,
            (None, _) => Progress::Ended,
        }
    }

    /// When it is cancelled, where that is before its first token.
    fn cancel_time(&self) -> Option<u64> {
        match self.text.end {
            Some((after, TracedEnd::Cancelled)) if self.text.tokens.is_empty() => {
                Some(self.came_at.saturating_add(after.0))
            }
            _ => None,
        }
    }
}

impl TracedPolicy {
    /// The same with what is chosen.
    fn with(self, caching: Option<PrefixCaching>, eviction: Option<EvictionPolicy>) -> Self {
        let own = match self {
            Self::Lru => EvictionPolicy::Lru,
            Self::Slru => EvictionPolicy::SegmentedLru,
            Self::Value => EvictionPolicy::Value,
            Self::Adaptive | Self::Off => EvictionPolicy::Adaptive,
        };
        let is_off = match caching {
            Some(caching) => caching == PrefixCaching::Off,
            None => self == Self::Off && eviction.is_none(),
        };
        if is_off {
            Self::Off
        } else {
            Self::new(PrefixCaching::On, eviction.unwrap_or(own))
        }
    }
}
