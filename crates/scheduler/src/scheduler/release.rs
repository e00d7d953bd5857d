//! The ways in which a request gives its sequence back, and cached prefixes theirs.
//!
//! Invariant: a sequence that is given back is cached, or its tokens are removed by the next edits.

use kv_core::SeqId;
use kv_core::memory::Memory;

use super::Scheduler;
use crate::data::active::{ActiveRequest, Keep};
use crate::data::event::{End, Outcome};
use crate::data::ids::{Micros, RequestId};
use crate::data::note::DropReason;
use crate::data::reuse::PrefixUse;
use crate::data::work::Work;
use crate::decide::save::{StateToSave, state_to_save};
use crate::parts::prefix::MIN_REUSED;
use crate::parts::prefix::evict::EvictionContext;
use crate::parts::prefix::line::CachedLine;
use crate::parts::prefix::tree::Cut;
use crate::parts::swap::SwapOut;

impl Scheduler {
    /// Ends a request with all its texts, wherever it is; nothing where it has ended before.
    pub(super) fn end(&mut self, id: RequestId, end: End, keep: Keep) -> Vec<Outcome> {
        if let Some(outcome) = self.park(id, end) {
            return vec![outcome];
        }
        let running = self.take_running(id, keep).map(|active| active.request);
        let Some(request) = running.or_else(|| self.queue.take(id)) else {
            return Vec::new();
        };
        let ended = request
            .texts()
            .map(|request| Outcome::Ended { request, end });
        ended.collect()
    }

    /// Takes the sequence from a request, which waits then. Nothing of what was chosen is lost.
    pub(super) fn preempt(&mut self, now: Micros, id: RequestId, keep: Keep) -> Option<Outcome> {
        let active = self.take_running(id, keep)?;
        self.counters.n_preemptions += 1;
        let mut request = active.request;
        let is_saved = |n_done| request.saved.is_some_and(|saved| saved.n_tokens == n_done);
        let n_tokens = if is_saved(active.n_done) {
            0
        } else {
            active.n_done
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

    /// Preempts a request to make room, or returns its state, which is to be saved before, where
    /// the host has room.
    pub(super) fn preempt_for_room<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        id: RequestId,
        keep: Keep,
    ) -> Preemption<M::Slot> {
        match state_to_save(self.parts(now, memory), id) {
            Some(StateToSave { swap, limit }) => {
                self.swaps.begin(SwapOut { swap, keep });
                Preemption::SwapOut(Work::SwapOut { swap, limit })
            }
            None => Preemption::Done(self.preempt(now, id, keep)),
        }
    }

    /// Takes the sequence from a request, and keeps its tokens for others where that helps.
    pub(super) fn take_running(&mut self, id: RequestId, keep: Keep) -> Option<ActiveRequest> {
        let active = self.running.take(id)?;
        self.release(&active, keep);
        Some(active)
    }

    /// Keeps the tokens of a request that runs no longer for others, or drops them.
    pub(super) fn release(&mut self, active: &ActiveRequest, keep: Keep) {
        self.prefix.check_budget();
        let tokens = active.held();
        let is_cut_only_at_ends = self.room.is_cut_only_at_ends();
        let (Keep::Prefix(now), PrefixUse::Within(salt)) = (keep, active.request.prefix) else {
            self.sequences.drop_tokens(active.seq);
            return;
        };
        // A cached prefix may serve for all prompts that begin with these tokens.
        let is_cached = if is_cut_only_at_ends {
            self.prefix.has(tokens, salt)
        } else {
            self.prefix.covers(tokens, salt)
        };
        let is_useful = self.config.prefix_cache.is_on() && tokens.len() >= MIN_REUSED;
        if !is_useful || !active.is_exact() || is_cached {
            self.sequences.drop_tokens(active.seq);
            return;
        }
        let line = CachedLine::new(now, active, active.seq, salt);
        self.notes.push(line.cached());
        self.prefix.insert(line);
        if !is_cut_only_at_ends {
            let covered = self.prefix.take_covered(active.seq, tokens, salt);
            self.drop_lines(now, covered, DropReason::Covered);
        }
    }

    /// Evicts the cached prefix that is worth least, or where there is none, takes the sequence
    /// from the request that was parked first.
    pub(super) fn evict<M: Memory>(&mut self, now: Micros, memory: &M) {
        self.evict_but(now, memory, None);
    }

    /// The same for all but one cached prefix.
    pub(super) fn evict_but<M: Memory>(&mut self, now: Micros, memory: &M, kept: Option<SeqId>) {
        let context = EvictionContext {
            kept,
            ..self.eviction(memory)
        };
        match self.prefix.evict(now, context) {
            None => self.evict_parked(now),
            evicted => self.drop_evicted(now, evicted),
        }
    }

    pub(super) fn eviction<'a, M>(&self, memory: &'a M) -> EvictionContext<'a, M> {
        EvictionContext {
            policy: self.config.eviction,
            cut: self.cut(),
            memory,
            kept: None,
        }
    }

    /// The places where cached prefixes can be cut.
    pub(super) fn cut(&self) -> Cut {
        if self.room.is_cut_only_at_ends() {
            Cut::AtEnds
        } else {
            Cut::Anywhere
        }
    }

    /// A request takes a cached prefix over, as no sequence is free, and keeps so many of its
    /// tokens. Where others are lost, that is an eviction.
    pub(super) fn take_over(&mut self, now: Micros, seq: SeqId, n_tokens: usize) {
        let Some(line) = self.prefix.take(seq) else {
            return;
        };
        if line.tokens.len() > n_tokens || self.room.is_cut_only_at_ends() {
            self.store.evicted(&line);
            self.counters.n_evicted += 1;
            self.notes.push(line.dropped(now, DropReason::Evicted));
        }
    }

    pub(super) fn drop_evicted(&mut self, now: Micros, evicted: Option<CachedLine>) {
        evicted.iter().for_each(|line| self.store.evicted(line));
        self.counters.n_evicted += u64::from(evicted.is_some());
        self.drop_lines(now, evicted, DropReason::Evicted);
    }

    pub(super) fn clear_prefixes(&mut self, now: Micros) {
        for seq in self.parked.unseat_all() {
            self.sequences.drop_tokens(seq);
        }
        let lines = self.prefix.clear();
        self.drop_lines(now, lines, DropReason::Cleared);
    }

    /// The sequences of cached prefixes that were taken out are to be removed.
    pub(super) fn drop_lines(
        &mut self,
        now: Micros,
        lines: impl IntoIterator<Item = CachedLine>,
        why: DropReason,
    ) {
        for line in lines {
            self.sequences.drop_tokens(line.seq);
            self.notes.push(line.dropped(now, why));
        }
    }
}

/// The result of preempting a request to make room.
pub(super) enum Preemption<S> {
    Done(Option<Outcome>),
    /// Its state is saved first.
    SwapOut(Work<S>),
}
