//! [`Scheduler::next`]: the phases of a plan.
//!
//! Invariant: a phase that changes what those before it looked at begins again from the first. The
//! memory is only asked.

use kv_core::memory::{Edit, Memory};

use super::Scheduler;
use super::release::Preemption;
use crate::data::active::{ActiveRequest, Keep, PendingFeed};
use crate::data::config::EvictionPolicy;
use crate::data::edits::cut;
use crate::data::event::{End, Outcome};
use crate::data::ids::{Micros, RequestId};
use crate::data::note::{DropReason, Note};
use crate::data::request::SourceUse;
use crate::data::reuse::{PrefixUse, Reuse};
use crate::data::state::Fork;
use crate::data::stored::StoreWait;
use crate::data::work::{StepPlan, Work};
use crate::decide::admit::{Admission, Admitter, Grant};
use crate::decide::checkpoint::{CheckpointWork, checkpoint_work, checkpoints_of};
use crate::decide::fit::{Candidate, PlannedStep, StepSearch};
use crate::decide::fork::{ForkStart, fork_start};
use crate::decide::restore::{Restoration, restoration};
use crate::decide::shift::{FullText, full_text};
use crate::decide::store::next_fetch;
use crate::parts::drafts::RejectedDraft;
use crate::parts::prefix::Holder;
use crate::parts::prefix::line::CachedLine;

/// The memory that is planned for, and what became of requests meanwhile.
struct Planning<'a, M> {
    now: Micros,
    memory: &'a M,
    outcomes: Vec<Outcome>,
}

/// The result of a phase.
enum Phase<S> {
    /// The next phase is due.
    Over,
    /// All phases are due again, from the first.
    Again,
    /// This is to be done before anything else.
    Work(Work<S>),
}

impl Scheduler {
    /// The next work for the memory as it is. While a step is being computed, and its report is not
    /// in, that is none.
    ///
    /// Edits come alone: the caller does them, then asks again.
    pub fn next<M: Memory>(&mut self, now: Micros, memory: &M) -> StepPlan<M::Slot> {
        let mut planning = Planning {
            now,
            memory,
            outcomes: Vec::new(),
        };
        let is_free = !self.running.has_step()
            && !self.swaps.is_saving()
            && self.in_work.is_none()
            && self.store.restoring.is_none();
        let work = if is_free {
            self.plan(&mut planning)
        } else {
            Work::Idle
        };
        let outcomes = planning.outcomes;
        StepPlan { work, outcomes }
    }

    /// The phases of a plan, in their order.
    fn plan<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Work<M::Slot> {
        let phases = [
            // Nothing may be computed behind drafted tokens that were not chosen.
            Self::take_back_drafts,
            // After a failed step, all that follows needs to know what the memory holds.
            Self::count_again,
            // All later phases look at a memory that agrees with the requests.
            Self::edit,
            // Tokens that the memory moved or evicted are not shared from here on.
            Self::note_moved,
            // Cached prefixes keep their budget before requests are given more cells.
            Self::keep_budget,
            // Texts of one prompt are given copies of it before the prompt's sequence goes on.
            Self::fork,
            // A text that is full cannot be in a step: it drops tokens, or ends.
            Self::shift,
            // What a store has is fetched while requests wait.
            Self::fetch,
            // As many requests as have room go into the step.
            Self::admit,
            // Copies are kept at checkpoints before a step goes past them.
            Self::keep_checkpoint,
            // For tests.
            Self::force_preemption,
            // A request whose state comes back cannot be in a step before.
            Self::restore,
            // Nor one whose source is to be encoded.
            Self::encode,
            // The rest: cached prefixes, then running requests make room for it.
            Self::step,
        ];
        loop {
            let mut is_over = true;
            for phase in phases {
                match phase(self, planning) {
                    Phase::Over => {}
                    Phase::Again => {
                        is_over = false;
                        break;
                    }
                    Phase::Work(work) => return work,
                }
            }
            if is_over {
                return Work::Idle;
            }
        }
    }

    /// Takes tokens that were not chosen out of the memory. Where it refuses, all of the sequence
    /// goes, and its request waits and is computed again.
    fn take_back_drafts<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        for RejectedDraft { seq, n_tokens } in self.drafts.take_rejected() {
            if self.sequences.is_dropped(seq) {
                continue;
            }
            let edit = cut(seq, n_tokens);
            if planning.memory.check(&edit).is_ok() {
                self.sequences.edit(edit);
                continue;
            }
            let broken = self.prefix.take(seq);
            self.drop_lines(planning.now, broken, DropReason::Broken);
            let active = self.running.iter_mut().find(|r| r.seq == seq);
            if let Some(active) = active {
                active.request.takes_no_drafts = true;
                let id = active.id();
                let preempted = self.preempt(planning.now, id, Keep::Nothing);
                planning.outcomes.extend(preempted);
            } else if self.parked.unseat(seq) {
                self.sequences.drop_tokens(seq);
            }
        }
        Phase::Over
    }

    /// After a failed step: what the memory holds of each request. One whose last token is there,
    /// but whose row was lost, is computed again, and one of whose drafted tokens some are left.
    fn count_again<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        if !std::mem::take(&mut self.recount) {
            return Phase::Over;
        }
        let (now, memory) = (planning.now, planning.memory);
        let broken = self.prefix.take_broken(memory);
        self.drop_lines(now, broken, DropReason::Broken);
        self.parked.recount(memory);
        let is_endless = self.room.is_endless();
        for mut active in self.running.take_all_cancelled() {
            active.n_done = memory.next_pos(active.seq).as_usize();
            // Positions of an evicting memory do not tell how many of its tokens were computed.
            let is_known = !is_endless && active.n_done <= active.request.tokens.len();
            let keep = if is_known {
                Keep::Prefix(now)
            } else {
                Keep::Nothing
            };
            self.release(&active, keep);
        }
        let mut lost = Vec::new();
        for active in self.running.iter_mut() {
            if is_endless {
                lost.push((active.id(), Keep::Nothing));
                continue;
            }
            let n_before = active.n_done;
            active.n_done = memory.next_pos(active.seq).as_usize();
            let n_tokens = active.request.tokens.len();
            if active.n_done > n_before && active.request.wants_prompt_rows() {
                // The rows of the first ubatches were lost with the step.
                lost.push((active.id(), Keep::Nothing));
            } else if active.n_done >= n_tokens {
                let keep = if active.n_done > n_tokens {
                    Keep::Nothing
                } else {
                    Keep::Prefix(now)
                };
                active.n_done = n_tokens;
                lost.push((active.id(), keep));
            }
        }
        for (id, keep) in lost {
            let preempted = self.preempt(now, id, keep);
            planning.outcomes.extend(preempted);
        }
        Phase::Over
    }

    /// The edits that are due go out alone.
    fn edit<M: Memory>(&mut self, _: &mut Planning<'_, M>) -> Phase<M::Slot> {
        match self.sequences.take_edits() {
            Some(edits) => Phase::Work(Work::Edit(edits)),
            None => Phase::Over,
        }
    }

    /// Notes of which requests the memory has moved or evicted tokens: others must not have them.
    fn note_moved<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        for active in self.running.iter_mut() {
            let n_held = planning.memory.next_pos(active.seq).as_usize();
            active.request.is_shifted |= n_held != active.n_done;
        }
        Phase::Over
    }

    /// Evicts a prefix where all together have more bytes than they may.
    fn keep_budget<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let Some(limit) = self.config.prefix_bytes else {
            return Phase::Over;
        };
        let now = planning.now;
        let context = self.eviction(planning.memory);
        let evicted = self.prefix.keep_budget(now, limit, context);
        if evicted.is_none() {
            return Phase::Over;
        }
        self.drop_evicted(now, evicted);
        Phase::Again
    }

    /// Gives the next text that waits for its copy a sequence with it, or else lets it wait.
    fn fork<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let Some(start) = fork_start(self.parts(planning.now, planning.memory)) else {
            return Phase::Over;
        };
        if let ForkStart::Evict = start {
            self.evict(planning.now, planning.memory);
            return Phase::Again;
        }
        let Some(Fork {
            mut request,
            from,
            rank,
        }) = self.running.take_fork()
        else {
            return Phase::Over;
        };
        if let ForkStart::Copy { seq, edit, shared } = start {
            let reuse = Reuse {
                n_tokens: request.n_prompt,
                missed: None,
            };
            self.sequences.take(seq);
            self.sequences.edit(edit);
            self.notes.push(Note::Shared {
                request: request.id,
                seq,
                from,
                n_tokens: reuse.n_tokens,
            });
            let active = ActiveRequest::new(request, seq, rank, shared, reuse);
            planning.outcomes.push(active.admitted(active.id()));
            self.running.insert(active);
        } else {
            request.group = None;
            request.waits_since = planning.now;
            self.queue.push(request);
        }
        Phase::Again
    }

    /// Lets a text that is full drop tokens, or ends it.
    fn shift<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let now = planning.now;
        let Some(full) = full_text(self.parts(now, planning.memory)) else {
            return Phase::Over;
        };
        self.running.end_short_shift();
        match full {
            FullText::Evict => self.evict(now, planning.memory),
            FullText::End(id) => {
                let ended = self.end(id, End::ContextFull, Keep::Prefix(now));
                planning.outcomes.extend(ended);
            }
            FullText::Shift(shift) => {
                self.in_work = Some(shift.request);
                return Phase::Work(Work::Shift(shift));
            }
        }
        Phase::Again
    }

    /// Gives a sequence to the next request that waits, where there is room.
    fn admit<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let mut admitter = Admitter {
            now: planning.now,
            memory: planning.memory,
            config: &self.config,
            room: &self.room,
            prefix: &self.prefix,
            parked: &self.parked,
            free: self.sequences.next(),
            queue: &mut self.queue,
            running: &mut self.running,
            store: &mut self.store,
            n_steps: self.counters.n_steps,
            n_waits: 0,
        };
        let admission = admitter.next();
        self.counters.n_waits += admitter.n_waits;
        match admission {
            Admission::Full => Phase::Over,
            Admission::Admit(grant) => {
                self.begin_request(planning, *grant);
                Phase::Again
            }
            Admission::Preempt(victim) => {
                let keep = Keep::Prefix(planning.now);
                self.preempt_victim(planning, victim, keep)
            }
            Admission::Fetch => Phase::Again,
            Admission::Restore(prefix) => Phase::Work(self.begin_restoring(planning.now, prefix)),
            Admission::Evict { kept } => {
                self.evict_but(planning.now, planning.memory, kept);
                Phase::Again
            }
        }
    }

    /// Lets a store begin to fetch what it has of a request that waits.
    fn fetch<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let next = next_fetch(self.parts(planning.now, planning.memory));
        match next.and_then(|id| self.queue.get_mut(id)) {
            Some(waiting) => {
                waiting.store = StoreWait::Fetching;
                Phase::Work(Work::Fetch(waiting.id))
            }
            None => Phase::Over,
        }
    }

    /// A request gets its sequence, which holds by the next step what it begins with.
    fn begin_request<M>(&mut self, planning: &mut Planning<'_, M>, grant: Grant) {
        let Grant {
            mut request,
            rank,
            seq,
            edit,
            reuse,
            from,
            n_common,
        } = grant;
        let id = request.id;
        if let PrefixUse::Within(salt) = request.prefix
            && !request.was_admitted
            && self.config.eviction == EvictionPolicy::Adaptive
        {
            let cut = self.cut();
            (self.prefix).judge(&request.tokens, salt, reuse.n_tokens, cut);
        }
        let source = match edit {
            Some(Edit::Copy { from, .. }) => {
                self.prefix.hit(planning.now, from);
                Some(from)
            }
            Some(_) => {
                self.take_over(planning.now, seq, reuse.n_tokens);
                Some(seq)
            }
            None => None,
        };
        if let Some(from) = source {
            self.notes.push(Note::Shared {
                request: id,
                seq,
                from,
                n_tokens: reuse.n_tokens,
            });
        }
        self.sequences.take(seq);
        edit.into_iter().for_each(|edit| self.sequences.edit(edit));
        // What is computed again is what its tokens give.
        request.is_shifted &= request.saved.is_some();
        let awaits_source = request.source == SourceUse::Encoded && request.saved.is_none();
        let is_first = !std::mem::replace(&mut request.was_admitted, true);
        let mut checkpoints = Vec::new();
        if is_first {
            let (n_tokens, n_reused) = (request.tokens.len(), reuse.n_tokens);
            self.queue.admit(request.tenant, n_tokens - n_reused);
            self.counters.n_prompt_tokens += n_tokens as u64;
            self.counters.n_reused_tokens += n_reused as u64;
            if from.is_some_and(|from| from.holder == Holder::Running) {
                self.counters.n_shared_tokens += n_reused as u64;
            }
            checkpoints = checkpoints_of(&request, n_reused, n_common, &self.room);
        }
        let shared = match from {
            Some(from) => from.shared,
            None => self.prefix.new_root(),
        };
        let active = ActiveRequest {
            checkpoints,
            awaits_source,
            ..ActiveRequest::new(request, seq, rank, shared, reuse)
        };
        planning.outcomes.push(active.admitted(id));
        self.running.insert(active);
    }

    /// Preempts a request to make room.
    fn preempt_victim<M: Memory>(
        &mut self,
        planning: &mut Planning<'_, M>,
        victim: RequestId,
        keep: Keep,
    ) -> Phase<M::Slot> {
        match self.preempt_for_room(planning.now, planning.memory, victim, keep) {
            Preemption::SwapOut(work) => Phase::Work(work),
            Preemption::Done(outcome) => {
                planning.outcomes.extend(outcome);
                Phase::Again
            }
        }
    }

    /// Keeps a copy of a request that is at one of its checkpoints.
    fn keep_checkpoint<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let (now, memory) = (planning.now, planning.memory);
        let Some(work) = checkpoint_work(self.parts(now, memory)) else {
            return Phase::Over;
        };
        let (CheckpointWork::Pass(id) | CheckpointWork::Keep { request: id, .. }) = work else {
            self.evict(now, memory);
            return Phase::Again;
        };
        let Some(active) = self.running.get_mut(id) else {
            return Phase::Over;
        };
        active.pass_checkpoint();
        if let CheckpointWork::Keep {
            seq, edit, salt, ..
        } = work
        {
            let line = CachedLine::new(now, active, seq, salt);
            self.sequences.take(seq);
            self.sequences.edit(edit);
            self.notes.push(line.cached());
            self.prefix.insert(line);
            self.prefix.check_budget();
        }
        Phase::Again
    }

    /// Preempts the running request that came last, after every so many steps; never the first.
    fn force_preemption<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let Some(every) = self.config.preempt_every else {
            return Phase::Over;
        };
        let is_due = self.counters.n_steps >= self.forced_at + u64::from(every.get());
        match self.running.last_of_several() {
            Some(victim) if is_due => {
                self.forced_at = self.counters.n_steps;
                self.preempt_victim(planning, victim, Keep::Prefix(planning.now))
            }
            _ => Phase::Over,
        }
    }

    /// Lets the saved state of a request come back, or gives it up.
    fn restore<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let Some(due) = restoration(self.parts(planning.now, planning.memory)) else {
            return Phase::Over;
        };
        self.swaps.end_shortage();
        match due {
            Restoration::SwapIn(swap) => return Phase::Work(Work::SwapIn(swap)),
            Restoration::Evict => self.evict(planning.now, planning.memory),
            Restoration::GiveUp(request) => {
                let active = self.running.get_mut(request);
                if let Some(saved) = active.and_then(|active| active.request.saved.take()) {
                    let n_tokens = saved.n_saved();
                    self.counters.n_dropped_tokens += n_tokens as u64;
                    let dropped = Outcome::SwapDropped { request, n_tokens };
                    planning.outcomes.push(dropped);
                }
            }
        }
        Phase::Again
    }

    /// Lets the source of a request be encoded.
    fn encode<M: Memory>(&mut self, _: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let Some(active) = self.running.iter().find(|active| active.awaits_source) else {
            return Phase::Over;
        };
        let (request, seq) = (active.id(), active.seq);
        self.in_work = Some(request);
        Phase::Work(Work::Encode { request, seq })
    }

    /// The largest step that fits.
    fn step<M: Memory>(&mut self, planning: &mut Planning<'_, M>) -> Phase<M::Slot> {
        let (now, memory) = (planning.now, planning.memory);
        let parts = self.parts(now, memory);
        let mut search = StepSearch::new(parts, &self.pace, self.n_evicting);
        let candidate = search.find();
        let n_replanned = search.n_replanned;
        self.counters.n_replanned += n_replanned;
        match candidate {
            None => return Phase::Over,
            Some(Candidate::Step(planned)) => return Phase::Work(self.begin_step(planned)),
            Some(Candidate::Edit(edits)) => {
                self.n_evicting += 1;
                return Phase::Work(Work::Edit(edits));
            }
            Some(Candidate::Evict) => self.evict(now, memory),
            Some(Candidate::Preempt(victim)) => {
                // Its cells are needed: nothing of it is kept.
                return self.preempt_victim(planning, victim, Keep::Nothing);
            }
            Some(Candidate::Impossible(id)) => {
                let ended = self.end(id, End::Failed, Keep::Nothing);
                planning.outcomes.extend(ended);
            }
        }
        Phase::Again
    }

    fn begin_step<S>(&mut self, planned: PlannedStep<S>) -> Work<S> {
        let PlannedStep { step, planned } = planned;
        self.n_evicting = 0;
        // Prompts have counted when they were admitted, and what is computed again does not count.
        for feed in &step.feeds {
            let active = self.running.get(feed.request);
            if let Some(active) = active.filter(|active| active.has_begun()) {
                self.queue.charge(active.request.tenant, feed.tokens.len());
            }
        }
        self.running.begin_step(&step.feeds);
        self.pace.begin(&step.feeds);
        let n_drafted: usize = step.feeds.iter().map(|feed| feed.n_draft).sum();
        self.counters.n_drafted_tokens += n_drafted as u64;
        self.counters.n_steps += 1;
        self.counters.n_tokens += step.batch.len() as u64;
        Work::Decode { step, planned }
    }

    /// Takes back what [`Self::begin_step`] has counted: the step is put off.
    pub(super) fn uncount_step(&mut self, feeds: &[PendingFeed]) {
        for feed in feeds {
            let n_tokens = feed.n_tokens + feed.draft.len();
            let active = self.running.get(feed.request);
            if let Some(active) = active.filter(|active| active.has_begun()) {
                self.queue.uncharge(active.request.tenant, n_tokens);
            }
            self.counters.n_drafted_tokens -= feed.draft.len() as u64;
            self.counters.n_tokens -= n_tokens as u64;
        }
        self.counters.n_steps -= 1;
    }
}
