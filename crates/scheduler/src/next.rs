//! [`Scheduler::next`]: admission, preemption, and the tokens of a step that fits.
//!
//! Invariant: the first of the running requests, which is the oldest of the highest priority, makes
//! progress in every step, or another request was preempted for it. The memory is only asked.

use kv_core::batch::{PositionRule, validate_with};
use kv_core::memory::{Composite, Edit, Memory, Refusal, Seqs};
use kv_core::{PosRange, SeqId};

use crate::compose::{Composed, MIN_CHUNK, compose, step};
use crate::event::{End, Feed, Outcome, Step, StepPlan, Work};
use crate::queue::Rank;
use crate::request::{Micros, RequestId};
use crate::scheduler::Scheduler;
use crate::state::Running;

/// What came of looking for a step that fits.
enum Found {
    Step(Step),
    /// It fits once this request gives its cells back.
    Preempt(RequestId),
    /// This request cannot be computed, though it has the memory to itself.
    Impossible(RequestId),
}

impl Scheduler {
    /// What to do next with the memory as it is. While a step is being computed, and its report is
    /// not in, nothing.
    ///
    /// Edits come alone: the caller does them, then asks again.
    pub fn next(&mut self, now: Micros, memory: &Composite) -> StepPlan {
        let mut outcomes = Vec::new();
        let work = match self.in_flight.is_empty() {
            true => self.work(now, memory, &mut outcomes),
            false => Work::Idle,
        };
        StepPlan { work, outcomes }
    }

    fn work(&mut self, now: Micros, memory: &Composite, outcomes: &mut Vec<Outcome>) -> Work {
        loop {
            if std::mem::take(&mut self.recount) {
                self.count_done(now, memory, outcomes);
            }
            if !self.dropped.is_empty() {
                return self.remove_dropped();
            }
            if let Some(victim) = self.admit(now, outcomes) {
                self.preempt(now, victim, outcomes);
                continue;
            }
            if let Some(victim) = self.forced_preemption() {
                self.preempt(now, victim, outcomes);
                continue;
            }
            match self.find_step(memory) {
                None => return Work::Idle,
                Some(Found::Step(step)) => return self.begin(step),
                Some(Found::Preempt(victim)) => self.preempt(now, victim, outcomes),
                Some(Found::Impossible(id)) => outcomes.extend(self.end(id, End::Failed)),
            }
        }
    }

    /// Takes the sequences that no request has any more out of the memory.
    fn remove_dropped(&mut self) -> Work {
        let dropped = std::mem::take(&mut self.dropped);
        let remove = |&seq: &SeqId| Edit::Remove {
            seqs: Seqs::One(seq),
            range: PosRange::ALL,
        };
        let edits = dropped.iter().map(remove).collect();
        self.free.extend(dropped.iter().rev());
        Work::Edit(edits)
    }

    /// After a failed step: what the memory holds of each request. One whose last token is there,
    /// but whose row was lost, is computed again.
    fn count_done(&mut self, now: Micros, memory: &Composite, outcomes: &mut Vec<Outcome>) {
        let mut lost = Vec::new();
        for running in &mut self.running {
            let held = memory.positions(running.seq);
            running.n_done = held.map_or(0, |held| held.last.as_usize() + 1);
            if running.n_done >= running.request.tokens.len() {
                running.n_done = running.request.tokens.len();
                lost.push(running.request.id);
            }
        }
        for id in lost {
            self.preempt(now, id, outcomes);
        }
    }

    /// Gives sequences to requests that wait, while there is room. Returns a request of a lower
    /// priority that has to make room for the next.
    fn admit(&mut self, now: Micros, outcomes: &mut Vec<Outcome>) -> Option<RequestId> {
        loop {
            let (id, rank) = self.queue.next(now, self.config.aging)?;
            let waiting = self.queue.iter().find(|request| request.id == id)?;
            let n_tokens = waiting.tokens.len();
            if !self.has_room_for(n_tokens, &self.running) {
                return self.victim_below(rank, n_tokens);
            }
            let seq = self.free.pop()?;
            let mut request = self.queue.take(id)?;
            request.was_admitted = true;
            let running = Running {
                request,
                seq,
                rank,
                n_done: 0,
            };
            let precedence = running.precedence();
            let at = self
                .running
                .partition_point(|r| r.precedence() < precedence);
            self.running.insert(at, running);
            outcomes.push(Outcome::Admitted { request: id, seq });
        }
    }

    /// Whether a request with this many tokens can run beside these.
    fn has_room_for(&self, n_tokens: usize, running: &[Running]) -> bool {
        if running.is_empty() {
            return true;
        }
        let n_slots = self.config.n_step().min(self.config.rules.n_seqs as usize);
        let all = running.iter().map(|r| r.request.tokens.len());
        let all = all.chain(std::iter::once(n_tokens));
        running.len() < n_slots && self.room.fits(all, u64::from(self.config.headroom.max(1)))
    }

    /// The request of the lowest rank below this one that came last, where preempting those below
    /// makes enough room.
    fn victim_below(&self, rank: Rank, n_tokens: usize) -> Option<RequestId> {
        let n_kept = self.running.partition_point(|r| r.rank >= rank);
        let victim = self.running.get(n_kept..)?.last()?;
        let enough = self.has_room_for(n_tokens, &self.running[..n_kept]);
        enough.then_some(victim.request.id)
    }

    /// Takes the sequence from a request, which waits then. Nothing of what was chosen is lost.
    fn preempt(&mut self, now: Micros, id: RequestId, outcomes: &mut Vec<Outcome>) {
        let Some(running) = self.take_running(id) else {
            return;
        };
        self.counters.n_preemptions += 1;
        self.counters.n_dropped_tokens += running.n_done as u64;
        outcomes.push(Outcome::Preempted {
            request: id,
            n_tokens: running.n_done,
        });
        let mut request = running.request;
        request.waits_since = now;
        self.queue.push(request);
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
    fn find_step(&mut self, memory: &Composite) -> Option<Found> {
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
        let mut n = self.config.n_step().saturating_sub(n_decoding);
        loop {
            let Composed { feeds, n_prefill } = compose(candidates, n);
            match self.plan(memory, feeds) {
                Ok(step) => return Some(Found::Step(step)),
                Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => {}
                Err(_) => return Some(Found::Impossible(self.refused(memory, candidates)?)),
            }
            self.counters.n_replanned += 1;
            if n_prefill > n_least {
                n = (n_prefill / 2).max(n_least);
            } else if let Some(victim) = self.running.get(1..).and_then(|r| r.last()) {
                return Some(Found::Preempt(victim.request.id));
            } else {
                return Some(Found::Impossible(first.request.id));
            }
        }
    }

    /// The first request that the memory refuses for another reason than room.
    fn refused(&self, memory: &Composite, candidates: &[Running]) -> Option<RequestId> {
        let is_refused = |alone: &[Running]| match self.plan(memory, compose(alone, 1).feeds) {
            Ok(_) | Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => false,
            Err(_) => true,
        };
        let refused = candidates.chunks(1).find(|alone| is_refused(alone));
        Some(refused.unwrap_or(candidates).first()?.request.id)
    }

    /// The feeds as a step, where the memory has room for it.
    fn plan(&self, memory: &Composite, feeds: Vec<Feed>) -> Result<Step, Refusal> {
        let step = step(feeds);
        let rules = &self.config.rules;
        let positions = |seq| memory.positions(seq);
        let batch = validate_with(&step.batch, rules, PositionRule::Linear, positions)?;
        memory.plan(&batch, self.config.n_ubatch)?;
        Ok(step)
    }

    fn begin(&mut self, step: Step) -> Work {
        let fed = step.feeds.iter().map(|f| (f.request, f.tokens.len()));
        self.in_flight = fed.collect();
        self.counters.n_steps += 1;
        self.counters.n_tokens += step.batch.len() as u64;
        Work::Decode(step)
    }
}
