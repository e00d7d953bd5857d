//! [`Scheduler`]: what happened goes in ([`Scheduler::handle`]), what to compute comes out
//! ([`Scheduler::next`], in `next.rs`).
//!
//! Invariant: every request that is taken ends exactly once, and none ends because memory ran
//! short. Nothing in here reads a clock, starts a thread, waits or draws random numbers: the same
//! events and memories give the same plans. Knows no backend and no text.

use kv_core::memory::{Edit, Memory};
use kv_core::{SeqId, TokenId};

use crate::config::{SchedulerConfig, Waiting};
use crate::draft::{draft_limit, take_tokens};
use crate::event::{End, Event, Outcome, RowReport, StepFailure};
use crate::fork::Fork;
use crate::note::{DropReason, Notes};
use crate::pace::Pace;
use crate::prefix::{
    Cut, EvictionContext, Line, MIN_REUSED, PrefixCache, PrefixUse, RowBytes, Salt,
};
use crate::queue::Queue;
use crate::request::{Micros, PromptLimits, Request, RequestError, RequestId};
use crate::room::Room;
use crate::speculate::SpeculationOff;
use crate::state::{Fed, RequestState, Running};
use crate::swap::Leaving;
use crate::tenant::Tenants;

/// Decides which tokens of which requests each step computes. See the [crate](crate).
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) room: Room,
    pub(crate) queue: Queue,
    pub(crate) tenants: Tenants,
    /// Requests in memory, sorted by priority, then by arrival.
    pub(crate) running: Vec<Running>,
    /// Sequences that no request has and that hold nothing; the last is given next.
    pub(crate) free: Vec<SeqId>,
    /// Sequences that no request has and whose tokens are to be removed.
    pub(crate) dropped: Vec<SeqId>,
    /// Edits that come before the next step.
    pub(crate) edits: Vec<Edit>,
    pub(crate) cache: PrefixCache,
    /// Cached prefixes may have more bytes than they may since the last step.
    pub(crate) budget_is_due: bool,
    /// Texts that wait for a copy of their prompt, until the next step.
    pub(crate) forks: Vec<Fork>,
    /// The step that is being computed: tokens of each request.
    pub(crate) in_flight: Vec<Fed>,
    /// Requests of this step that were cancelled meanwhile: what the memory holds of them is known
    /// after it, and kept.
    pub(crate) cancelled: Vec<Running>,
    /// Sequences that hold rejected tokens, and how many tokens to leave them.
    pub(crate) rejected: Vec<(SeqId, usize)>,
    /// The most tokens that are drafted after a text, or why none are.
    draft_limit: Result<usize, SpeculationOff>,
    /// A step failed: how much of it the memory holds is not known.
    pub(crate) recount: bool,
    /// A request that leaves the memory, while its state is being saved.
    pub(crate) leaving: Option<Leaving>,
    /// There was no room for a state that was to come back.
    pub(crate) swap_is_short: bool,
    /// There was no room to move the tokens of a text that is full.
    pub(crate) shift_is_short: bool,
    /// The source that is being encoded, or the text that is being shifted.
    pub(crate) in_work: Option<RequestId>,
    /// Evictions of the memory in a row before a step.
    pub(crate) n_evicting: u32,
    /// Steps before the last preemption of [`SchedulerConfig::preempt_every`].
    pub(crate) forced_at: u64,
    n_arrived: u64,
    /// Sequences that were begun without tokens of others.
    pub(crate) n_roots: u64,
    pub(crate) counters: Counters,
    pub(crate) notes: Notes,
    pub(crate) pace: Pace,
}

/// What a scheduler has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps that were planned.
    pub n_steps: u64,
    /// Tokens of these steps.
    pub n_tokens: u64,
    /// Preemptions, also those of [`SchedulerConfig::preempt_every`].
    pub n_preemptions: u64,
    /// Tokens that had been computed and were dropped by preemptions.
    pub n_dropped_tokens: u64,
    /// Tokens of the requests that were admitted.
    pub n_prompt_tokens: u64,
    /// Tokens of these that were there already: of cached prefixes, or of requests that run.
    pub n_reused_tokens: u64,
    /// Tokens of these that were of requests that run.
    pub n_shared_tokens: u64,
    /// How often a request waited for a prefix that another one was computing.
    pub n_waits: u64,
    /// Preempted requests whose state went to the host.
    pub n_swapped_out: u64,
    /// Of these, those whose state came back.
    pub n_swapped_in: u64,
    /// Bytes of the states that went to the host.
    pub n_swapped_bytes: u64,
    /// Bytes of these that went on to the disk.
    pub n_spilled_bytes: u64,
    /// Saved states that could not be restored, and were computed again.
    pub n_swap_lost: u64,
    /// Cached prefixes that were dropped for others.
    pub n_evicted: u64,
    /// Tokens that were drafted and computed.
    pub n_drafted_tokens: u64,
    /// How many of these were right.
    pub n_accepted_tokens: u64,
    /// Steps that were planned again, because a larger one did not fit.
    pub n_replanned: u64,
}

impl Scheduler {
    /// A scheduler of an empty memory, all of whose sequences are its own.
    ///
    /// # Errors
    /// [`RequestError`] where a limit is 0, the memory takes whole sequences only, or is not empty.
    pub fn new<M: Memory>(config: SchedulerConfig, memory: &M) -> Result<Self, RequestError> {
        config.check()?;
        if memory.split_policy() == kv_core::batch::SplitPolicy::WholeSequences {
            return Err(RequestError::WholeSequences);
        }
        let seqs = (0..memory.n_seqs()).map(SeqId);
        let held = seqs.clone().map(|seq| memory.n_tokens(seq));
        if let Some(n_tokens) = held.into_iter().find(|&n| n > 0) {
            return Err(RequestError::NotEmpty { n_tokens });
        }
        Ok(Self {
            config,
            room: Room::of(memory),
            queue: Queue::default(),
            tenants: Tenants::default(),
            running: Vec::new(),
            free: seqs.rev().collect(),
            dropped: Vec::new(),
            edits: Vec::new(),
            cache: PrefixCache::default(),
            budget_is_due: false,
            forks: Vec::new(),
            in_flight: Vec::new(),
            cancelled: Vec::new(),
            rejected: Vec::new(),
            draft_limit: draft_limit(&config, memory),
            recount: false,
            leaving: None,
            swap_is_short: false,
            shift_is_short: false,
            in_work: None,
            n_evicting: 0,
            forced_at: 0,
            n_arrived: 0,
            n_roots: 0,
            counters: Counters::default(),
            notes: Notes::default(),
            pace: Pace::default(),
        })
    }

    /// The same for a memory whose rows have these sizes: they decide what cached prefixes are
    /// worth, and how many [`SchedulerConfig::prefix_bytes`] are.
    #[must_use]
    pub fn with_row_bytes(mut self, row_bytes: RowBytes) -> Self {
        self.cache.set_row_bytes(row_bytes);
        self
    }

    /// Bytes of rows that cached prefixes alone have in the memory.
    pub fn cached_bytes<M: Memory>(&self, memory: &M) -> u64 {
        self.cache.n_bytes(memory)
    }

    pub(crate) fn weighing<'a, M: Memory>(&self, memory: &'a M) -> EvictionContext<'a, M> {
        EvictionContext {
            policy: self.config.eviction,
            cut: if self.room.is_cut_only_at_ends() {
                Cut::AtEnds
            } else {
                Cut::Anywhere
            },
            memory,
        }
    }

    /// Its limits.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The most tokens that one request can have, prompt and text together.
    pub fn capacity(&self) -> usize {
        self.room.capacity(self.config.n_ctx)
    }

    /// The most tokens that it computes after a text where they are drafted ([`Event::Draft`]).
    ///
    /// # Errors
    /// [`SpeculationOff`], why the memory takes none.
    pub fn draft_limit(&self) -> Result<usize, SpeculationOff> {
        self.draft_limit
    }

    /// What it has done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Requests that wait.
    pub fn n_waiting(&self) -> usize {
        self.queue.iter().count()
    }

    /// Whether it keeps copies at the checkpoints of requests: where cached prefixes can be cut
    /// anywhere, none are needed.
    pub fn keeps_checkpoints(&self) -> bool {
        self.config.prefix_cache.is_on() && self.room.is_cut_only_at_ends()
    }

    /// What every prompt must comply with, whatever else is computed.
    pub fn prompt_limits(&self) -> PromptLimits {
        PromptLimits {
            n_tokens: self.capacity(),
            n_vocab: self.config.rules.n_vocab,
        }
    }

    /// Takes an event in, at any time, also while a step is being computed. Returns what became of
    /// requests by it.
    pub fn handle(&mut self, now: Micros, event: Event) -> Vec<Outcome> {
        match event {
            Event::Submit(request) => {
                let texts = [&[request.id], request.siblings.as_slice()].concat();
                let Err(why) = self.submit(now, request) else {
                    return Vec::new();
                };
                let refused = texts.into_iter().map(|request| Outcome::Refused {
                    request,
                    why: why.clone(),
                });
                refused.collect()
            }
            Event::ClearPrefixes => {
                self.clear_prefixes(now);
                Vec::new()
            }
            Event::Draft { request, tokens } => {
                self.take_draft(request, tokens);
                Vec::new()
            }
            Event::Cancel(id) => {
                if let Some(outcomes) = self.cancel_sibling(id) {
                    return outcomes;
                }
                if self.in_flight.iter().any(|fed| fed.request == id) {
                    self.cancel_in_flight(id)
                } else {
                    self.end(id, End::Cancelled, Keep::Prefix(now))
                }
            }
            Event::Fail(id) => {
                self.in_work.take_if(|&mut work| work == id);
                self.end(id, End::Failed, Keep::Nothing)
            }
            Event::Encoded(id) => {
                self.in_work.take_if(|&mut work| work == id);
                let mut running = self.running.iter_mut();
                if let Some(running) = running.find(|r| r.request.id == id) {
                    running.awaits_source = false;
                }
                Vec::new()
            }
            Event::Shifted { request, result } => {
                self.in_work.take_if(|&mut work| work == request);
                self.shifted(request, result)
            }
            Event::StepDone(rows) => self.step_done(now, &rows),
            Event::SwappedOut { request, n_bytes } => self.swapped_out(now, request, n_bytes),
            Event::SwappedIn { request, result } => {
                self.swapped_in(request, result);
                Vec::new()
            }
            Event::SpillFailed(request) => {
                self.spill_failed(request);
                Vec::new()
            }
            Event::StepTime(took) => {
                self.pace.learn(took);
                Vec::new()
            }
            Event::StepFailed(failure) => self.step_failed(now, failure),
        }
    }

    /// A step that is being computed adds tokens that are not counted yet.
    fn cancel_in_flight(&mut self, id: RequestId) -> Vec<Outcome> {
        let Some(at) = self.running.iter().position(|r| r.request.id == id) else {
            return Vec::new(); // it was cancelled before
        };
        self.cancelled.push(self.running.remove(at));
        vec![Outcome::Ended {
            request: id,
            end: End::Cancelled,
        }]
    }

    fn submit(&mut self, now: Micros, request: Request) -> Result<(), RequestError> {
        let Request {
            id,
            priority,
            prompt,
            prefix,
            prompt_rows,
            checkpoints,
            siblings,
            tenant,
            overflow,
            source,
        } = request;
        self.prompt_limits().check(&prompt)?;
        let texts = [&[id], siblings.as_slice()].concat();
        for (number, &id) in texts.iter().enumerate() {
            if texts[..number].contains(&id) || self.knows(id) {
                return Err(RequestError::Duplicate { id });
            }
        }
        // Those that were preempted have been taken, and do not count.
        let new = self.queue.iter().filter(|request| !request.was_admitted);
        let waiting = new.fold(Waiting::default(), |sum, request| Waiting {
            n_requests: sum.n_requests + 1,
            n_tokens: sum.n_tokens + request.tokens.len(),
        });
        let n_prompt = prompt.len();
        self.config.check_queue(waiting, n_prompt)?;
        let own = self
            .queue
            .iter()
            .filter(|request| request.tenant == tenant.id);
        let queued = own.filter(|request| !request.was_admitted).count();
        tenant.limits.check_queue(queued)?;
        let (running, queue) = (&self.running, &self.queue);
        self.tenants.enter(tenant, |id| {
            let waits = queue.iter().any(|request| request.tenant == id);
            waits || running.iter().any(|r| r.request.tenant == id)
        });
        self.queue.push(RequestState {
            id,
            priority,
            arrival: self.n_arrived,
            waits_since: now,
            n_prompt,
            prefix,
            prompt_rows,
            checkpoints,
            siblings,
            tenant: tenant.id,
            group: None,
            tokens: prompt,
            was_admitted: false,
            is_suspect: false,
            takes_no_drafts: false,
            swapped: None,
            overflow,
            source,
            is_shifted: false,
            awaited: None,
        });
        self.n_arrived += texts.len() as u64;
        Ok(())
    }

    /// Ends a request with all its texts, wherever it is; nothing where it has ended before.
    pub(crate) fn end(&mut self, id: RequestId, end: End, keep: Keep) -> Vec<Outcome> {
        let running = self.take_running(id, keep).map(|running| running.request);
        let Some(request) = running.or_else(|| self.queue.take(id)) else {
            return Vec::new();
        };
        let ended = request
            .texts()
            .map(|request| Outcome::Ended { request, end });
        ended.collect()
    }

    /// Takes the sequence from a request, and keeps its tokens for others where that helps.
    pub(crate) fn take_running(&mut self, id: RequestId, keep: Keep) -> Option<Running> {
        let at = self.running.iter().position(|r| r.request.id == id)?;
        let taken = self.running.remove(at);
        self.release(&taken, keep);
        Some(taken)
    }

    /// Keeps the tokens of a request that runs no longer for others, or drops them.
    pub(crate) fn release(&mut self, taken: &Running, keep: Keep) {
        self.budget_is_due = true;
        let tokens = taken.held();
        match (keep, taken.request.prefix) {
            (Keep::Prefix(now), PrefixUse::Within(salt))
                if self.config.prefix_cache.is_on()
                    && tokens.len() >= MIN_REUSED
                    && taken.is_exact()
                    && !self.is_cached(tokens, salt) =>
            {
                let line = Line::new(now, taken, taken.seq, salt);
                self.notes.push(line.cached());
                self.cache.insert(line);
                if !self.room.is_cut_only_at_ends() {
                    let covered = self.cache.take_covered(taken.seq, tokens, salt);
                    self.drop_lines(now, covered, DropReason::Covered);
                }
            }
            _ => self.dropped.push(taken.seq),
        }
    }

    fn clear_prefixes(&mut self, now: Micros) {
        let lines = self.cache.clear();
        self.drop_lines(now, lines, DropReason::Cleared);
    }

    /// The sequences of cached prefixes that were taken out are to be removed.
    pub(crate) fn drop_lines(
        &mut self,
        now: Micros,
        lines: impl IntoIterator<Item = Line>,
        why: DropReason,
    ) {
        for line in lines {
            self.dropped.push(line.seq);
            self.notes.push(line.dropped(now, why));
        }
    }

    /// Whether a cached prefix serves for all prompts that begin with these tokens.
    fn is_cached(&self, tokens: &[TokenId], salt: Salt) -> bool {
        if self.room.is_cut_only_at_ends() {
            self.cache.has(tokens, salt)
        } else {
            self.cache.covers(tokens, salt)
        }
    }

    fn step_done(&mut self, now: Micros, rows: &[RowReport]) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        let capacity = self.capacity();
        // States and windows that a request shared with a copy of it are the copy's when it has
        // gone on.
        self.budget_is_due |= self.room.is_cut_only_at_ends();
        for fed in std::mem::take(&mut self.in_flight) {
            let id = fed.request;
            let Some(at) = self.running.iter().position(|r| r.request.id == id) else {
                self.keep_cancelled(now, &fed);
                continue;
            };
            let running = &mut self.running[at];
            running.n_done += fed.n_tokens;
            running.request.is_suspect = false;
            if running.n_left() > 0 {
                continue; // a chunk of its prompt, from which nothing is chosen
            }
            if !running.request.siblings.is_empty() {
                outcomes.extend(self.begin_texts(now, at, rows));
                continue;
            }
            let reports = rows.iter().filter(|row| row.request == id);
            let taken = take_tokens(running, &fed.draft, reports, capacity);
            self.counters.n_accepted_tokens += taken.n_accepted as u64;
            if taken.n_accepted < fed.draft.len() {
                self.rejected.push((running.seq, running.n_done));
            }
            let end = taken.end;
            let keep = Keep::Prefix(now);
            outcomes.extend(end.into_iter().flat_map(|end| self.end(id, end, keep)));
        }
        outcomes
    }

    /// Keeps what a step computed of a request that was cancelled meanwhile.
    fn keep_cancelled(&mut self, now: Micros, fed: &Fed) {
        let mut cancelled = self.cancelled.iter();
        let Some(at) = cancelled.position(|r| r.request.id == fed.request) else {
            return;
        };
        let mut running = self.cancelled.remove(at);
        running.n_done += fed.n_tokens;
        if !fed.draft.is_empty() {
            self.rejected.push((running.seq, running.n_done));
        }
        self.release(&running, Keep::Prefix(now));
    }

    fn step_failed(&mut self, now: Micros, failure: StepFailure) -> Vec<Outcome> {
        let in_flight = std::mem::take(&mut self.in_flight);
        self.pace.forget_step();
        self.recount = true;
        if failure == StepFailure::DeviceLost {
            let running = self.running.iter().flat_map(|r| r.request.texts());
            let waiting = self.queue.take_all();
            let waiting = waiting.iter().flat_map(RequestState::texts);
            let forks = self.forks.drain(..).map(|fork| fork.request.id);
            let all: Vec<RequestId> = running.chain(waiting).chain(forks).collect();
            let seqs = self.running.drain(..).chain(self.cancelled.drain(..));
            self.dropped.extend(seqs.map(|r| r.seq));
            self.clear_prefixes(now);
            let end = End::Failed;
            let ended = all
                .into_iter()
                .map(|request| Outcome::Ended { request, end });
            return ended.collect();
        }
        let is_alone = in_flight.len() == 1;
        let mut failed = None;
        for running in &mut self.running {
            let id = running.request.id;
            if in_flight.iter().any(|fed| fed.request == id) {
                failed = failed.or((is_alone && running.request.is_suspect).then_some(id));
                running.request.is_suspect = true;
            }
        }
        let ended = failed.map(|id| self.end(id, End::Failed, Keep::Nothing));
        ended.unwrap_or_default()
    }
}

/// What becomes of the tokens of a request that gives its sequence back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// They stay for others, from now on.
    Prefix(Micros),
    /// What the memory holds of them is not known, or not wanted.
    Nothing,
}
