//! Admission: which waiting request gets a sequence, and what of its tokens is there already.
//!
//! Invariant: a request is admitted with the tokens that the memory holds for it after the edit
//! that comes with it.

use kv_core::memory::{Edit, Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId};

use crate::event::Outcome;
use crate::note::Note;
use crate::prefix::{Holder, Line, MIN_REUSED, Missed, PrefixUse, Reuse, Source, copy};
use crate::queue::Rank;
use crate::request::{Micros, RequestId, SourceUse};
use crate::room::{Need, Trunk, demands};
use crate::scheduler::Scheduler;
use crate::share::MIN_GAIN;
use crate::state::{RequestState, Running};
use crate::swap::Swapped;
use crate::tenant::TenantId;

/// What came of admitting the next request.
pub(crate) enum Admission {
    /// It has a sequence.
    Admitted,
    /// This request has to make room for it.
    Preempt(RequestId),
    /// A cached prefix has to make room for it.
    Evict,
    /// None can be admitted now.
    Full,
}

/// What a request begins with.
struct Place {
    /// Its sequence; `None` where none is free.
    seq: Option<SeqId>,
    n_done: usize,
    edit: Option<Edit>,
    /// Who has these tokens, and in whose cells they are.
    from: Option<(Holder, Trunk)>,
    missed: Option<Missed>,
    /// How many tokens it has in common with what is cached, or was.
    n_common: usize,
}

impl Scheduler {
    /// Gives a sequence to the next request that waits, where there is room. One that waits for a
    /// prefix that is being computed is passed over, but its room is kept.
    pub(crate) fn admit<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        outcomes: &mut Vec<Outcome>,
    ) -> Admission {
        let mut kept = Vec::new();
        let in_order = self.queue.in_order(now, self.config.aging, &self.tenants);
        for (id, rank) in in_order {
            if let Some(need) = self.still_awaits(id, rank) {
                kept.push(need);
                continue;
            }
            let urgent = self.running.last().is_some_and(|last| last.rank < rank);
            let Some(waiting) = self.queue.iter().find(|request| request.id == id) else {
                return Admission::Full;
            };
            if !self.tenant_may_run(waiting.tenant) {
                continue;
            }
            if self.running.len() + kept.len() >= self.n_slots() && !urgent {
                return Admission::Full;
            }
            let n_tokens = waiting.tokens.len();
            let is_swapped = waiting.swapped.is_some();
            let place = self.place(now, waiting, memory);
            if self.config.prefix_cache.is_on()
                && !is_swapped
                && self.awaits_more(id, place.n_done)
                && let Some(need) = self.still_awaits(id, rank)
            {
                kept.push(need);
                continue;
            }
            let trunk = place.from.map(|(_, trunk)| trunk);
            kept.push(Need { n_tokens, trunk });
            if !self.has_room_for(&kept, &self.running) {
                let victim = self.victim_below(rank, &kept);
                return victim.map_or(Admission::Full, Admission::Preempt);
            }
            let Some(seq) = place.seq else {
                return if self.cache.is_empty() {
                    Admission::Full
                } else {
                    Admission::Evict
                };
            };
            let Some(request) = self.queue.take(id) else {
                return Admission::Full;
            };
            let running = self.begin_request(now, request, seq, rank, place);
            outcomes.push(running.admitted(id));
            self.insert_running(running);
            return Admission::Admitted;
        }
        Admission::Full
    }

    /// A request with this sequence, which holds by the next step what it begins with.
    fn begin_request(
        &mut self,
        now: Micros,
        mut request: RequestState,
        seq: SeqId,
        rank: Rank,
        place: Place,
    ) -> Running {
        let Place {
            n_done,
            edit,
            from,
            missed,
            n_common,
            ..
        } = place;
        match edit {
            Some(Edit::Copy { from, .. }) => {
                self.cache.hit(now, from);
                self.note_shared(request.id, seq, from, n_done);
            }
            Some(_) => {
                self.cache.take(seq);
                self.note_shared(request.id, seq, seq, n_done);
            }
            None => {}
        }
        self.free.retain(|&free| free != seq);
        self.edits.extend(edit);
        // What is computed again is what its tokens give.
        request.is_shifted &= request.swapped.is_some();
        let awaits_source = request.source == SourceUse::Encoded && request.swapped.is_none();
        let is_first = !std::mem::replace(&mut request.was_admitted, true);
        let mut checkpoints = Vec::new();
        if is_first {
            self.tenants
                .admit(request.tenant, request.tokens.len() - n_done);
            self.counters.n_prompt_tokens += request.tokens.len() as u64;
            self.counters.n_reused_tokens += n_done as u64;
            if matches!(from, Some((Holder::Running, _))) {
                self.counters.n_shared_tokens += n_done as u64;
            }
            checkpoints = self.checkpoints(&request, n_done, n_common);
        }
        let trunk = match from {
            Some((_, trunk)) => trunk,
            None => self.new_trunk(),
        };
        let n_tokens = n_done;
        Running {
            request,
            seq,
            rank,
            n_done,
            checkpoints,
            trunk,
            reuse: Reuse { n_tokens, missed },
            draft: Vec::new(),
            is_rounded: false,
            awaits_source,
        }
    }

    pub(crate) fn note_shared(&mut self, request: RequestId, seq: SeqId, from: SeqId, n: usize) {
        self.notes.push(Note::Shared {
            request,
            seq,
            from,
            n_tokens: n,
        });
    }

    /// In the order of precedence.
    pub(crate) fn insert_running(&mut self, running: Running) {
        let precedence = running.precedence();
        let is_before = |r: &Running| r.precedence() < precedence;
        let at = self.running.partition_point(is_before);
        self.running.insert(at, running);
    }

    /// What a request begins with: a free sequence with a copy of what is cached or computed, or
    /// where none is free, the cached prefix itself.
    fn place<M: Memory>(&self, now: Micros, request: &RequestState, memory: &M) -> Place {
        let free = self.free.last().copied();
        let nothing = |missed| Place {
            seq: free,
            n_done: 0,
            edit: None,
            from: None,
            missed,
            n_common: 0,
        };
        let salt = match request.prefix {
            PrefixUse::Within(salt) if self.config.prefix_cache.is_on() => salt,
            _ => return nothing(Some(Missed::Disabled)),
        };
        // What comes back from the host begins behind what is shared.
        let tokens = match request.swapped.map(Swapped::first) {
            Some(0) => return nothing(None),
            Some(first) => request.tokens.get(..=first).unwrap_or_default(),
            None => &request.tokens,
        };
        let edit = |source: &Source<'_>, n: usize| match (free, source.holder) {
            (Some(to), _) => Some(copy(source.seq, to, n)),
            (None, Holder::Line) => Some(cut(source.seq, n)),
            // It keeps its sequence, and another has to become free.
            (None, Holder::Running) => None,
        };
        let is_refused = |source: &Source<'_>, n| memory.check(&edit(source, n)?).err();
        let running = self.running_sources(request.prefix);
        let lookup = self.cache.find(tokens, salt, now, running, is_refused);
        let (missed, n_common) = (lookup.missed, lookup.n_common);
        let Some((source, n_tokens)) = lookup.found else {
            return Place {
                n_common,
                ..nothing(missed)
            };
        };
        let own = match source.holder {
            Holder::Line => Some(source.seq),
            Holder::Running => None,
        };
        Place {
            seq: free.or(own),
            n_done: n_tokens,
            edit: edit(&source, n_tokens),
            from: Some((source.holder, source.trunk.cut(n_tokens))),
            missed,
            n_common,
        }
    }

    /// After how many of its tokens copies of a request are to be kept, where windows or states can
    /// only be copied as they are: where its messages end, where it parts from what was computed
    /// before, and one token before the end of its prompt, so that the same prompt finds it again.
    fn checkpoints(&self, request: &RequestState, n_done: usize, n_common: usize) -> Vec<usize> {
        let n_prompt = request.n_prompt;
        if !self.room.is_cut_only_at_ends() || n_prompt <= n_done + 1 {
            return Vec::new();
        }
        let mut checkpoints = vec![n_prompt - 1];
        let is_apart = |a: usize, b: usize| a.abs_diff(b) >= MIN_GAIN;
        // Each costs a copy, so of two that are close the first in this order is kept.
        for place in std::iter::once(n_common).chain(request.checkpoints.iter().rev().copied()) {
            let is_inside = place >= n_done + MIN_GAIN && place < n_prompt;
            if is_inside && checkpoints.iter().all(|&other| is_apart(place, other)) {
                checkpoints.push(place);
            }
        }
        checkpoints
    }

    /// Whether one more text of a tenant may run.
    pub(crate) fn tenant_may_run(&self, tenant: TenantId) -> bool {
        let Some(limit) = self.tenants.limits(tenant).max_running else {
            return true;
        };
        let own = self.running.iter().filter(|r| r.request.tenant == tenant);
        own.count() < limit.get() as usize
    }

    /// Requests that run at once, at most.
    fn n_slots(&self) -> usize {
        self.config.n_step().min(self.config.max_running)
    }

    /// Whether requests can run with these.
    pub(crate) fn has_room_for(&self, more: &[Need], running: &[Running]) -> bool {
        if running.is_empty() {
            return true;
        }
        let of = |r: &Running| Need {
            n_tokens: r.request.tokens.len(),
            trunk: Some(r.trunk),
        };
        let demands = demands(running.iter().map(of).chain(more.iter().copied()));
        let headroom = u64::from(self.config.headroom.max(1));
        demands.len() <= self.n_slots() && self.room.fits(&demands, headroom)
    }

    /// The request of the lowest rank below this one that came last, where preempting those below
    /// makes enough room.
    fn victim_below(&self, rank: Rank, more: &[Need]) -> Option<RequestId> {
        let n_kept = self.running.partition_point(|r| r.rank >= rank);
        let victim = self.running.get(n_kept..)?.last()?;
        let enough = self.has_room_for(more, &self.running[..n_kept]);
        enough.then_some(victim.request.id)
    }

    /// Keeps a copy of a request that is at one of its checkpoints, or where the prompts of
    /// requests that wait for it part from it. Returns whether there is something to do before the
    /// next step.
    pub(crate) fn take_checkpoint<M: Memory>(&mut self, now: Micros, memory: &M) -> bool {
        let is_due = |r: &Running| r.checkpoints.contains(&r.n_done);
        let Some(at) = self.running.iter().position(is_due) else {
            return false;
        };
        let running = &self.running[at];
        let tokens = running.held();
        let PrefixUse::Within(salt) = running.request.prefix else {
            self.running[at].pass_checkpoint();
            return true;
        };
        let is_useless = tokens.len() < MIN_REUSED
            || !running.is_exact()
            || !self.config.prefix_cache.is_on()
            || self.cache.has(tokens, salt);
        let edit = self
            .free
            .last()
            .map(|&to| copy(running.seq, to, tokens.len()));
        if is_useless || edit.is_none_or(|edit| memory.check(&edit).is_err()) {
            let can_evict = !is_useless && edit.is_none() && !self.cache.is_empty();
            if can_evict {
                self.evict(now, memory);
            } else {
                self.running[at].pass_checkpoint();
            }
            return true;
        }
        self.running[at].pass_checkpoint();
        if let Some(to) = self.free.pop() {
            self.edits.extend(edit);
            let line = Line::new(now, &self.running[at], to, salt);
            self.notes.push(line.cached());
            self.cache.insert(line);
            self.budget_is_due = true;
        }
        true
    }
}

/// The edit that leaves the first `n` tokens of a sequence.
pub(crate) fn cut(seq: SeqId, n: usize) -> Edit {
    let from = Pos(u32::try_from(n).unwrap_or(u32::MAX));
    Edit::Remove {
        seqs: Seqs::One(seq),
        range: PosRange::from(from..),
    }
}
