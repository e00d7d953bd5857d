//! [`Replica`]: one service of a replay, with its scheduler, its memory and its clock.
//!
//! Invariant: the scheduler and the memory are those of a service; only the model is missing. Knows
//! no other replica, and not which requests come.

use std::collections::BTreeMap;

use cellar_scheduler::{
    DropReason, Event, Micros, Note, Outcome, PrefixUse, Progress, RequestId, RowUse, Scheduler,
    SchedulerConfig, Shift, ShiftResult, Step, Swap, SwappedIn, Work,
};
use kv_core::memory::{
    Composite, CompositeSlot, Edit, Memory, MemoryInputs, Plan, Refusal, RestoreInto, Seqs,
    Snapshot,
};
use kv_core::{SeqId, TokenId};

use crate::error::TraceError;
use crate::layout::MemoryShape;
use crate::reader::{Trace, TracedRequest, TracedText};
use crate::record::TracedEnd;
use crate::replay::{ReplayConfig, ReplayReport};
use crate::step_cost::StepCost;

/// One service of a replay.
pub(crate) struct Replica<'a> {
    shape: MemoryShape,
    memory: Composite,
    scheduler: Scheduler,
    cost: StepCost,
    now: u64,
    /// Nothing runs, and nothing waits but for time to pass.
    is_idle: bool,
    /// When texts ended that ended since the times were last taken.
    end_times: Vec<u64>,
    /// Prompt tokens that requests in the queue are expected to compute.
    n_queued: usize,
    live: BTreeMap<RequestId, LiveReplay<'a>>,
    /// Texts that ended since they were last taken.
    ended: Vec<EndedText<'a>>,
    /// Tokens that preempted requests had.
    preempted: BTreeMap<RequestId, usize>,
    /// What was saved of preempted requests, and of which sequences.
    saved: BTreeMap<RequestId, (SeqId, Snapshot)>,
    report: ReplayReport,
}

/// A text that has not ended.
struct LiveReplay<'a> {
    text: &'a TracedText,
    request: &'a TracedRequest,
    /// How many of its tokens were chosen.
    n_chosen: usize,
    came_at: u64,
    /// What is counted when it is admitted: of the first text of a request alone.
    prompt: Option<QueuedPrompt>,
}

/// A prompt that is not counted yet.
#[derive(Clone, Copy)]
struct QueuedPrompt {
    n_tokens: usize,
    /// Tokens of it that the shared tier has.
    n_stored: usize,
    /// Tokens of it that are expected to be computed.
    n_expected: usize,
}

/// A text that ended, with what its cells hold.
pub(crate) struct EndedText<'a> {
    pub(crate) request: &'a TracedRequest,
    /// The tokens that were chosen for it.
    pub(crate) chosen: &'a [TokenId],
}

impl<'a> Replica<'a> {
    /// An idle service with an empty memory.
    pub(crate) fn new(trace: &Trace, config: &ReplayConfig) -> Result<Self, TraceError> {
        let shape = match config.n_ctx {
            Some(n_ctx) => trace.header.memory.with_n_ctx((n_ctx / trace.unit).max(1)),
            None => trace.header.memory.clone(),
        };
        let limits = &trace.header.limits;
        let policy = limits.policy.with(config.prefix_cache, config.eviction);
        let memory = shape.memory()?;
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
            ..ReplayReport::default()
        };
        Ok(Self {
            shape,
            memory,
            scheduler,
            cost: trace.step_cost(),
            now: 0,
            is_idle: true,
            end_times: Vec::new(),
            n_queued: 0,
            live: BTreeMap::new(),
            ended: Vec::new(),
            preempted: BTreeMap::new(),
            saved: BTreeMap::new(),
            report,
        })
    }

    /// The time that its last step ended.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    /// Whether it has nothing to do before something comes.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// Prompt tokens that it has computed, or will as far as is known.
    pub(crate) fn work(&self) -> usize {
        self.report.n_prompt_computed() + self.n_queued
    }

    /// Number of the first of these tokens that it has.
    pub(crate) fn n_held(&self, prefix: PrefixUse, tokens: &[TokenId]) -> usize {
        self.scheduler.n_held(&self.memory, prefix, tokens)
    }

    /// When texts ended, or were refused, since the call before.
    pub(crate) fn take_end_times(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.end_times)
    }

    /// The texts that ended since the call before.
    pub(crate) fn take_ended(&mut self) -> Vec<EndedText<'a>> {
        std::mem::take(&mut self.ended)
    }

    /// What came of its requests until now.
    pub(crate) fn report(&self) -> ReplayReport {
        ReplayReport {
            micros: self.now,
            ..self.report
        }
    }

    /// A request comes at a time, of whose prompt a shared tier has the first tokens.
    pub(crate) fn submit(
        &mut self,
        time: u64,
        traced: &'a TracedRequest,
        texts: &'a BTreeMap<RequestId, TracedText>,
        n_stored: usize,
    ) {
        // Never at the time of what came before, as in a service: which prefix was used last
        // decides which is evicted.
        self.now = self.now.max(time) + 1;
        self.is_idle = false;
        self.report.n_requests += 1;
        let request = traced.request.clone();
        let n_tokens = request.prompt.len();
        let n_held = self.n_held(request.prefix, &request.prompt).max(n_stored);
        let prompt = QueuedPrompt {
            n_tokens,
            n_stored,
            n_expected: n_tokens.saturating_sub(n_held),
        };
        let ids = std::iter::once(request.id).chain(request.siblings.iter().copied());
        for (number, id) in ids.enumerate() {
            if let Some(text) = texts.get(&id) {
                let live = LiveReplay {
                    text,
                    request: traced,
                    n_chosen: 0,
                    came_at: self.now,
                    prompt: (number == 0).then_some(prompt),
                };
                self.n_queued += live.prompt.map_or(0, |prompt| prompt.n_expected);
                self.live.insert(id, live);
            }
        }
        self.handle(Event::Submit(request));
    }

    /// Time has passed while nothing ran.
    pub(crate) fn wake(&mut self, time: u64) {
        self.now = self.now.max(time);
        self.is_idle = self.is_idle && self.live.is_empty();
    }

    /// Cancels the texts that were cancelled before their first token, when it is time.
    pub(crate) fn cancel(&mut self) {
        let now = self.now;
        let is_due = |live: &LiveReplay<'_>| live.cancel_time().is_some_and(|time| time <= now);
        let due = self.live.iter().filter(|(_, live)| is_due(live));
        let due: Vec<RequestId> = due.map(|(&id, _)| id).collect();
        for id in due {
            self.handle(Event::Cancel(id));
            self.forget(id);
        }
    }

    /// When something is cancelled, while nothing runs.
    pub(crate) fn next_cancel(&self) -> Option<u64> {
        self.live.values().filter_map(LiveReplay::cancel_time).min()
    }

    /// Does what the scheduler plans next.
    pub(crate) fn step(&mut self) -> Result<(), TraceError> {
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
            // No request of a trace asks a store.
            Work::Fetch(_) | Work::Restore(_) => {}
            // A trace tells of no sources.
            Work::Encode { request, .. } => self.handle(Event::Encoded(request)),
            // A memory that is larger or smaller than the traced one shifts other texts.
            Work::Shift(shift) => self.shift(shift),
            Work::Idle => self.is_idle = true,
        }
        Ok(())
    }

    fn edit(&mut self, edit: Edit) -> Result<(), TraceError> {
        let _no_rows = self.memory.apply(edit)?;
        Ok(())
    }

    /// Keeps what the memory holds of a request; its bytes are those of the rows alone.
    fn swap_out(&mut self, swap: &Swap, limit: u64) -> Result<(), TraceError> {
        swap.before_saving()
            .map_or(Ok(()), |edit| self.edit(edit))?;
        let seq = swap.swapped_seq();
        let snapshot = self.memory.snapshot(Seqs::One(seq))?;
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

    fn swap_in(&mut self, swap: &Swap) -> Result<(), TraceError> {
        let request = swap.request;
        let to = swap.swapped_seq();
        let restored = self.saved.get(&request).map(|&(from, ref snapshot)| {
            let into = RestoreInto::One { from, to };
            self.memory.restore(snapshot, into).map(drop)
        });
        let result = match restored {
            Some(Ok(())) => SwappedIn::Restored,
            Some(Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_))) => SwappedIn::NoRoom,
            Some(Err(error)) => return Err(error.into()),
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

    /// A text is over: its prompt is not computed any more.
    fn forget(&mut self, id: RequestId) -> Option<LiveReplay<'a>> {
        let live = self.live.remove(&id)?;
        self.n_queued -= live.prompt.map_or(0, |prompt| prompt.n_expected);
        Some(live)
    }

    fn take(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            match outcome {
                Outcome::Refused { request, .. } => {
                    let refused = self.live.get(&request);
                    let is_first = refused.is_some_and(|live| live.prompt.is_some());
                    self.report.n_refused += usize::from(is_first);
                    self.forget(request);
                    self.end_times.push(self.now);
                }
                Outcome::Admitted { request, reuse, .. } => match self.preempted.remove(&request) {
                    Some(had) => {
                        self.report.n_recomputed += had.saturating_sub(reuse.n_tokens);
                    }
                    None => {
                        let live = self.live.get_mut(&request);
                        if let Some(prompt) = live.and_then(|live| live.prompt.take()) {
                            self.n_queued -= prompt.n_expected;
                            self.report.n_prompt += prompt.n_tokens;
                            self.report.n_reused += reuse.n_tokens;
                            let n_stored = prompt.n_stored;
                            self.report.n_fetched += n_stored.saturating_sub(reuse.n_tokens);
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
                    self.preempted.remove(&request);
                    if let Some(live) = self.forget(request) {
                        self.ended.push(live.ended());
                    }
                    self.end_times.push(self.now);
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

impl<'a> LiveReplay<'a> {
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

    /// The text with the tokens that its cells hold.
    fn ended(&self) -> EndedText<'a> {
        let tokens = &self.text.tokens;
        EndedText {
            request: self.request,
            chosen: tokens.get(..self.n_chosen).unwrap_or(tokens),
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
