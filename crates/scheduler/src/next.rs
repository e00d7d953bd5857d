//! [`Scheduler::next`]: admission, preemption, and the tokens of a step that fits.
//!
//! Invariant: the first of the running requests, which is the oldest of the highest priority, makes
//! progress in every step, or another request was preempted for it. The memory is only asked.

use kv_core::batch::{PositionRule, validate_with};
use kv_core::memory::{Edit, Memory, PlannedBatch, Refusal, Seqs};
use kv_core::{PosRange, SeqId};

use crate::admit::Admission;
use crate::compose::{Composed, MIN_CHUNK, StepLimits, compose, step};
use crate::event::{End, Outcome, Step, StepPlan, Work};
use crate::note::DropReason;
use crate::prefix::Line;
use crate::request::{Micros, RequestId};
use crate::scheduler::{Keep, Scheduler};
use crate::state::{Fed, Running};
use crate::swap::Swapped;

/// Rounds of evictions before a step, after which it is planned without more of them.
const MAX_EVICTING: u32 = 16;

/// What came of looking for a step that fits.
enum Candidate<S> {
    Step(PlannedStep<S>),
    /// It fits once the memory has evicted tokens.
    Edit(Vec<Edit>),
    /// It may fit, or fit in whole ubatches, once a cached prefix is dropped.
    Evict,
    /// It fits once this request gives its cells back.
    Preempt(RequestId),
    /// This request cannot be computed, though it has the memory to itself.
    Impossible(RequestId),
}

/// A step that the memory has room for.
struct PlannedStep<S> {
    step: Step,
    planned: PlannedBatch<S>,
}

impl<S> PlannedStep<S> {
    /// Whether windows or states have so little room that ubatches are smaller than they could be.
    fn is_in_pieces(&self, n_ubatch: u32) -> bool {
        self.planned.plan.len() > self.step.batch.len().div_ceil(n_ubatch as usize)
    }
}

impl Scheduler {
    /// What to do next with the memory as it is. While a step is being computed, and its report is
    /// not in, nothing.
    ///
    /// Edits come alone: the caller does them, then asks again.
    pub fn next<M: Memory>(&mut self, now: Micros, memory: &M) -> StepPlan<M::Slot> {
        let mut outcomes = Vec::new();
        let is_free = self.in_flight.is_empty() && self.leaving.is_none() && self.in_work.is_none();
        let work = if is_free {
            self.work(now, memory, &mut outcomes)
        } else {
            Work::Idle
        };
        StepPlan { work, outcomes }
    }

    /// The phases of a plan, in their order. A phase that changes what those before it looked at
    /// begins again from the first.
    ///
    /// 1. Rejected drafts leave the memory: nothing may be computed behind them.
    /// 2. After a failed step, what the memory holds is counted again.
    /// 3. Edits go out alone: all later phases look at a memory that agrees with the requests.
    /// 4. Cached prefixes keep their budget, before requests are given more cells.
    /// 5. Texts of one prompt are given copies of it, before the prompt's sequence goes on.
    /// 6. A text that is full drops tokens, or ends: it cannot be in a step.
    /// 7. A request that waits is admitted, as long as there is room.
    /// 8. Copies are kept at checkpoints, before a step goes past them.
    /// 9. A request is preempted, for tests.
    /// 10. A saved state comes back, or a source is encoded: their requests cannot be in a step
    ///     before.
    /// 11. A step is composed that fits; cached prefixes, then running requests make room for it.
    fn work<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        outcomes: &mut Vec<Outcome>,
    ) -> Work<M::Slot> {
        loop {
            self.take_rejected(now, memory, outcomes);
            if std::mem::take(&mut self.recount) {
                self.count_done(now, memory, outcomes);
            }
            if !self.dropped.is_empty() || !self.edits.is_empty() {
                return self.take_edits();
            }
            self.note_moved(memory);
            if self.keep_budget(now, memory) || self.fork(now, memory, outcomes) {
                continue;
            }
            match self.shift(now, memory, outcomes) {
                None => {}
                Some(None) => continue,
                Some(Some(shift)) => {
                    self.in_work = Some(shift.request);
                    return Work::Shift(shift);
                }
            }
            match self.admit(now, memory, outcomes) {
                Admission::Full => {}
                Admission::Admitted => continue,
                Admission::Preempt(victim) => {
                    let keep = Keep::Prefix(now);
                    match self.preempt_for_room(now, victim, keep, outcomes) {
                        Some(work) => return work,
                        None => continue,
                    }
                }
                Admission::Evict => {
                    self.evict(now, memory);
                    continue;
                }
            }
            if self.take_checkpoint(now, memory) {
                continue;
            }
            if let Some(victim) = self.forced_preemption() {
                let keep = Keep::Prefix(now);
                match self.preempt_for_room(now, victim, keep, outcomes) {
                    Some(work) => return work,
                    None => continue,
                }
            }
            match self.swap_in(now, memory, outcomes) {
                None => {}
                Some(None) => continue,
                Some(Some(work)) => return work,
            }
            if let Some(running) = self.running.iter().find(|r| r.awaits_source) {
                let (request, seq) = (running.request.id, running.seq);
                self.in_work = Some(request);
                return Work::Encode { request, seq };
            }
            match self.find_step(memory) {
                None => return Work::Idle,
                Some(Candidate::Step(step)) => return self.begin(step),
                Some(Candidate::Edit(edits)) => {
                    self.n_evicting += 1;
                    return Work::Edit(edits);
                }
                Some(Candidate::Evict) => self.evict(now, memory),
                // Its cells are needed: nothing of it is kept.
                Some(Candidate::Preempt(victim)) => {
                    let keep = Keep::Nothing;
                    if let Some(work) = self.preempt_for_room(now, victim, keep, outcomes) {
                        return work;
                    }
                }
                Some(Candidate::Impossible(id)) => {
                    outcomes.extend(self.end(id, End::Failed, Keep::Nothing));
                }
            }
        }
    }

    /// Notes of which requests the memory has moved or evicted tokens: others must not have them.
    fn note_moved<M: Memory>(&mut self, memory: &M) {
        for running in &mut self.running {
            running.request.is_shifted |= memory.next_pos(running.seq).as_usize() != running.n_done;
        }
    }

    pub(crate) fn evict<M: Memory>(&mut self, now: Micros, memory: &M) {
        let weighing = self.weighing(memory);
        let evicted = self.cache.evict(now, weighing);
        self.drop_evicted(now, evicted);
    }

    fn drop_evicted(&mut self, now: Micros, evicted: Option<Line>) {
        self.counters.n_evicted += u64::from(evicted.is_some());
        self.drop_lines(now, evicted, DropReason::Evicted);
    }

    /// Evicts a prefix where all together have more bytes than they may. Returns whether it did.
    fn keep_budget<M: Memory>(&mut self, now: Micros, memory: &M) -> bool {
        let Some(limit) = self.config.prefix_bytes else {
            return false;
        };
        let is_due = std::mem::take(&mut self.budget_is_due);
        if !is_due || self.cache.n_bytes(memory) <= limit {
            return false;
        }
        self.budget_is_due = true;
        let weighing = self.weighing(memory);
        // It would push all others out first.
        match self.cache.evict_larger(now, limit, weighing) {
            Some(larger) => self.drop_evicted(now, Some(larger)),
            None => self.evict(now, memory),
        }
        true
    }

    /// What is to be done to the memory before the next step: copies, then the sequences
    /// that no request has any more are removed.
    fn take_edits<S>(&mut self) -> Work<S> {
        let mut edits = std::mem::take(&mut self.edits);
        let dropped = std::mem::take(&mut self.dropped);
        let remove = |&seq: &SeqId| Edit::Remove {
            seqs: Seqs::One(seq),
            range: PosRange::ALL,
        };
        edits.extend(dropped.iter().map(remove));
        self.free.extend(dropped.iter().rev());
        Work::Edit(edits)
    }

    /// After a failed step: what the memory holds of each request. One whose last token is there,
    /// but whose row was lost, is computed again, and one of whose drafted tokens some are left.
    fn count_done<M: Memory>(&mut self, now: Micros, memory: &M, outcomes: &mut Vec<Outcome>) {
        let mut lost = Vec::new();
        let broken = self.cache.take_broken(memory);
        self.drop_lines(now, broken, DropReason::Broken);
        let is_endless = self.room.is_endless();
        for mut running in std::mem::take(&mut self.cancelled) {
            running.n_done = memory.next_pos(running.seq).as_usize();
            // Positions of an evicting memory do not tell how many of its tokens were computed.
            let is_known = !is_endless && running.n_done <= running.request.tokens.len();
            let keep = if is_known {
                Keep::Prefix(now)
            } else {
                Keep::Nothing
            };
            self.release(&running, keep);
        }
        for running in &mut self.running {
            if is_endless {
                lost.push((running.request.id, Keep::Nothing));
                continue;
            }
            let n_before = running.n_done;
            running.n_done = memory.next_pos(running.seq).as_usize();
            let n_tokens = running.request.tokens.len();
            if running.n_done > n_before && running.request.wants_prompt_rows() {
                // The rows of the first ubatches were lost with the step.
                lost.push((running.request.id, Keep::Nothing));
            } else if running.n_done >= n_tokens {
                let keep = if running.n_done > n_tokens {
                    Keep::Nothing
                } else {
                    Keep::Prefix(now)
                };
                running.n_done = n_tokens;
                lost.push((running.request.id, keep));
            }
        }
        for (id, keep) in lost {
            outcomes.extend(self.preempt(now, id, keep));
        }
    }

    /// Takes the sequence from a request, which waits then. Nothing of what was chosen is lost.
    pub(crate) fn preempt(&mut self, now: Micros, id: RequestId, keep: Keep) -> Option<Outcome> {
        let running = self.take_running(id, keep)?;
        self.counters.n_preemptions += 1;
        let mut request = running.request;
        let is_swapped = |swapped: Swapped| swapped.is_all_of(running.n_done);
        let n_tokens = if request.swapped.is_some_and(is_swapped) {
            0
        } else {
            running.n_done
        };
        self.counters.n_dropped_tokens += n_tokens as u64;
        request.waits_since = now;
        request.group = None;
        self.queue.push(request);
        Some(Outcome::Preempted {
            request: id,
            n_tokens,
        })
    }

    /// The running request that came last, after every so many steps; never the first.
    fn forced_preemption(&mut self) -> Option<RequestId> {
        let every = u64::from(self.config.preempt_every?.get());
        let is_due = self.counters.n_steps >= self.forced_at + every;
        let victim = self.running.get(1..)?.last().filter(|_| is_due)?;
        self.forced_at = self.counters.n_steps;
        Some(victim.request.id)
    }

    /// The largest step that fits: of all running requests, or after a failure of one alone.
    fn find_step<M: Memory>(&mut self, memory: &M) -> Option<Candidate<M::Slot>> {
        let suspect = self.running.iter().position(|r| r.request.is_suspect);
        let candidates = match suspect {
            Some(at) => &self.running[at..=at],
            None => self.running.as_slice(),
        };
        let first = candidates.first()?;
        let n_decoding = candidates.iter().filter(|r| r.is_decoding()).count();
        let n_least = match self.running.len() {
            _ if first.is_decoding() => 0,
            1 => 1,
            _ => first.n_left().min(MIN_CHUNK),
        };
        let most = self.config.n_step().saturating_sub(n_decoding);
        let prompts = candidates.iter().filter(|r| !r.is_decoding());
        let most = match self.config.step_time {
            Some(time) if n_decoding > 0 && n_decoding < candidates.len() => {
                self.pace.n_prefill(time, n_decoding, most, prompts)
            }
            _ => most,
        };
        let order = self.prefill_order(candidates);
        let mut limits = StepLimits {
            n_prefill: most,
            n_both: most,
        };
        loop {
            let Composed {
                feeds,
                n_prefill,
                n_draft,
            } = compose(candidates, &order, limits);
            let has_cached = !self.cache.is_empty();
            let step = step(feeds);
            if self.n_evicting < MAX_EVICTING {
                let edits = memory.edits_before(&step.batch);
                if !edits.is_empty() {
                    return Some(Candidate::Edit(edits));
                }
            }
            let n_ubatch = self.config.n_ubatch;
            match self.plan(memory, step) {
                Ok(planned) if !planned.is_in_pieces(n_ubatch) || (n_draft == 0 && !has_cached) => {
                    return Some(Candidate::Step(planned));
                }
                // Nothing has to make room for tokens that may be wrong. In pieces, a window may
                // forget what a text goes back to.
                _ if n_draft > 0 => {
                    self.counters.n_replanned += 1;
                    limits.n_both = 0;
                    continue;
                }
                // Cached prefixes make room for whole ubatches, too: pieces may be of one token.
                Ok(_) | Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => {}
                Err(_) => return Some(Candidate::Impossible(self.refused(memory, candidates)?)),
            }
            self.counters.n_replanned += 1;
            if has_cached {
                return Some(Candidate::Evict);
            }
            if n_prefill > n_least {
                limits = StepLimits::prefill((n_prefill / 2).max(n_least));
            } else if let Some(victim) = self.running.get(1..).and_then(|r| r.last()) {
                return Some(Candidate::Preempt(victim.request.id));
            } else {
                return Some(Candidate::Impossible(first.request.id));
            }
        }
    }

    /// In which order the prompts of requests get tokens of a step, by their numbers: by priority,
    /// then by what was computed for their tenants.
    fn prefill_order(&self, candidates: &[Running]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by_cached_key(|&at| {
            let running = &candidates[at];
            let counter = self.tenants.counter(running.request.tenant);
            (std::cmp::Reverse(running.rank), counter, at)
        });
        order
    }

    /// The first request that the memory refuses for another reason than room.
    fn refused<M: Memory>(&self, memory: &M, candidates: &[Running]) -> Option<RequestId> {
        let first = |alone: &[Running]| step(compose(alone, &[0], StepLimits::prefill(1)).feeds);
        let is_refused = |alone: &[Running]| match self.plan(memory, first(alone)) {
            Ok(_) | Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => false,
            Err(_) => true,
        };
        let refused = candidates.chunks(1).find(|alone| is_refused(alone));
        Some(refused.unwrap_or(candidates).first()?.request.id)
    }

    /// A step with slots, where the memory has room for it.
    fn plan<M: Memory>(&self, memory: &M, step: Step) -> Result<PlannedStep<M::Slot>, Refusal> {
        let rules = &self.config.rules;
        let positions = |seq| memory.positions(seq);
        let batch = validate_with(&step.batch, rules, PositionRule::Linear, positions)?;
        let plan = memory.plan(&batch, self.config.n_ubatch)?;
        let planned = PlannedBatch { batch, plan };
        Ok(PlannedStep { step, planned })
    }

    fn begin<S>(&mut self, planned: PlannedStep<S>) -> Work<S> {
        let PlannedStep { step, planned } = planned;
        self.n_evicting = 0;
        let fed = step.feeds.iter().map(|feed| {
            let n_tokens = feed.tokens.len() - feed.n_draft;
            Fed {
                request: feed.request,
                n_tokens,
                draft: feed.tokens[n_tokens..].to_vec(),
            }
        });
        self.in_flight = fed.collect();
        // Prompts have counted when they were admitted, and what is computed again does not count.
        for feed in &step.feeds {
            let mut running = self.running.iter();
            let running = running.find(|r| r.request.id == feed.request && r.has_begun());
            if let Some(running) = running {
                let tenant = running.request.tenant;
                self.tenants.charge(tenant, feed.tokens.len());
            }
        }
        self.pace.begin(&step.feeds);
        self.running.iter_mut().for_each(|r| r.draft.clear());
        let n_drafted: usize = step.feeds.iter().map(|feed| feed.n_draft).sum();
        self.counters.n_drafted_tokens += n_drafted as u64;
        self.counters.n_steps += 1;
        self.counters.n_tokens += step.batch.len() as u64;
        Work::Decode { step, planned }
    }
}
