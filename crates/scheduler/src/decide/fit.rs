//! The largest step that fits: it is composed, checked against the memory, and composed again,
//! smaller.
//!
//! Invariant: the first of the running requests that are not held, which is the oldest of the
//! highest priority of them, makes progress in every step, or another request is preempted for it,
//! or it waits for one before it that is held. The memory is only asked.

use std::cmp::Reverse;

use kv_core::batch::{PositionRule, validate_with};
use kv_core::memory::{Edit, Memory, PlannedBatch, Refusal};

use super::compose::{Composition, StepLimits, compose, step};
use super::view::PartsView;
use crate::data::active::ActiveRequest;
use crate::data::ids::RequestId;
use crate::data::step::Step;
use crate::parts::pace::{MIN_CHUNK, Pace};

/// Rounds of evictions of the memory before a step, after which it is planned without more of them.
const MAX_EVICTING: u32 = 16;

/// The result of looking for a step that fits.
pub(crate) enum Candidate<S> {
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
pub(crate) struct PlannedStep<S> {
    pub(crate) step: Step,
    pub(crate) planned: PlannedBatch<S>,
}

impl<S> PlannedStep<S> {
    /// True if windows or states have so little room that ubatches are smaller than they could be.
    fn is_in_pieces(&self, n_ubatch: u32) -> bool {
        self.planned.plan.len() > self.planned.batch.n_pieces(n_ubatch)
    }
}

/// A search for the largest step that fits.
#[derive(Debug)]
pub(crate) struct StepSearch<'a, M> {
    parts: PartsView<'a, M>,
    pace: &'a Pace,
    /// Evictions of the memory in a row before this step.
    n_evicting: u32,
    /// Steps that were composed again, because a larger one did not fit.
    pub(crate) n_replanned: u64,
}

impl<'a, M: Memory> StepSearch<'a, M> {
    pub(crate) fn new(parts: PartsView<'a, M>, pace: &'a Pace, n_evicting: u32) -> Self {
        Self {
            parts,
            pace,
            n_evicting,
            n_replanned: 0,
        }
    }

    /// The largest step that fits: of all running requests that are not held, or after a failure of
    /// one alone.
    pub(crate) fn find(&mut self) -> Option<Candidate<M::Slot>> {
        let config = self.parts.config;
        let running = self.parts.running.as_slice();
        let ready: Vec<&ActiveRequest> = running.iter().filter(|r| !r.is_held).collect();
        let suspect = ready.iter().position(|r| r.request.is_suspect);
        let candidates = match suspect {
            Some(at) => &ready[at..=at],
            None => &ready[..],
        };
        let first = *candidates.first()?;
        let n_least = match running.len() {
            _ if first.is_decoding() => 0,
            1 => 1,
            _ => first.n_left().min(MIN_CHUNK),
        };
        let order = self.prefill_order(candidates);
        let n_most = self.n_prefill(candidates);
        let mut limits = StepLimits {
            n_prefill: n_most,
            n_both: n_most,
        };
        loop {
            let Composition {
                feeds,
                n_prefill,
                n_draft,
            } = compose(candidates, &order, limits);
            let has_cached = self.parts.can_evict();
            let step = step(feeds);
            if self.n_evicting < MAX_EVICTING {
                let edits = self.parts.memory.edits_before(&step.batch);
                if !edits.is_empty() {
                    return Some(Candidate::Edit(edits));
                }
            }
            match self.plan(step) {
                Ok(planned)
                    if !planned.is_in_pieces(config.n_ubatch) || (n_draft == 0 && !has_cached) =>
                {
                    return Some(Candidate::Step(planned));
                }
                // Nothing has to make room for tokens that may be wrong. In pieces, a window may
                // forget what a text goes back to.
                _ if n_draft > 0 => {
                    self.n_replanned += 1;
                    limits.n_both = 0;
                    continue;
                }
                // Cached prefixes make room for whole ubatches, too: pieces may be of one token.
                Ok(_) | Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => {}
                Err(_) => return Some(Candidate::Impossible(self.refused(candidates)?)),
            }
            self.n_replanned += 1;
            if has_cached {
                return Some(Candidate::Evict);
            }
            if n_prefill > n_least {
                limits = StepLimits::prefill((n_prefill / 2).max(n_least));
            } else if let Some(victim) = self.parts.running.last_of_several() {
                if victim == first.id() && ready.len() < running.len() {
                    return None; // until those before it are not held any more
                }
                return Some(Candidate::Preempt(victim));
            } else {
                return Some(Candidate::Impossible(first.id()));
            }
        }
    }

    /// The most tokens of prompts that a step may have.
    fn n_prefill(&self, candidates: &[&ActiveRequest]) -> usize {
        let n_decoding = candidates.iter().filter(|r| r.is_decoding()).count();
        let most = self.parts.config.n_step().saturating_sub(n_decoding);
        let prompts = candidates.iter().copied().filter(|r| !r.is_decoding());
        match self.parts.config.step_time {
            Some(time) if n_decoding > 0 && n_decoding < candidates.len() => {
                self.pace.n_prefill(time, n_decoding, most, prompts)
            }
            _ => most,
        }
    }

    /// The order in which the prompts of requests get tokens of a step, by their numbers: by
    /// priority, then by what was computed for their tenants.
    fn prefill_order(&self, candidates: &[&ActiveRequest]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by_cached_key(|&at| {
            let active = candidates[at];
            let counter = self.parts.queue.counter(active.request.tenant);
            (Reverse(active.rank), counter, at)
        });
        order
    }

    /// The first request that the memory refuses for another reason than room.
    fn refused(&self, candidates: &[&ActiveRequest]) -> Option<RequestId> {
        let first =
            |alone: &[&ActiveRequest]| step(compose(alone, &[0], StepLimits::prefill(1)).feeds);
        let is_refused = |alone: &[&ActiveRequest]| match self.plan(first(alone)) {
            Ok(_) | Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => false,
            Err(_) => true,
        };
        let refused = candidates.chunks(1).find(|alone| is_refused(alone));
        Some(refused.unwrap_or(candidates).first()?.id())
    }

    /// A step with slots, where the memory has room for it.
    fn plan(&self, step: Step) -> Result<PlannedStep<M::Slot>, Refusal> {
        let PartsView { memory, config, .. } = self.parts;
        let positions = |seq| memory.positions(seq);
        let batch = validate_with(&step.batch, &config.rules, PositionRule::Linear, positions)?;
        let plan = memory.plan(&batch, config.n_ubatch)?;
        let planned = PlannedBatch { batch, plan };
        Ok(PlannedStep { step, planned })
    }
}
