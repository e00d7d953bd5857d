//! Parking: a request of [`Retention::Park`] keeps its sequence when it is cancelled or its text
//! ends, until its caller releases it, and may go on meanwhile.

use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};

use super::Scheduler;
use crate::data::active::{ActiveRequest, Keep};
use crate::data::error::RequestError;
use crate::data::event::{End, Outcome};
use crate::data::ids::{Micros, RequestId};
use crate::data::request::{Request, Retention};
use crate::data::reuse::Reuse;
use crate::data::state::{Rank, RequestState};
use crate::data::view::ParkedRequest;

impl Scheduler {
    /// A parked request, where it has its sequence.
    pub fn parked(&self, id: RequestId) -> Option<ParkedRequest<'_>> {
        self.parked.get(id).map(|active| ParkedRequest {
            seq: active.seq,
            tokens: &active.request.tokens,
            n_done: active.n_done,
        })
    }

    /// True if a request has ended and may go on.
    pub fn is_parked(&self, id: RequestId) -> bool {
        self.parked.contains(id)
    }

    /// True if the memory needs edits before it is as the scheduler has it.
    pub fn has_edits(&self) -> bool {
        self.sequences.has_edits() || self.drafts.has_rejected()
    }

    /// A sequence that holds nothing, for a request that is restored ([`Scheduler::adopt`]);
    /// `None` where there is none before the next edits, or at all.
    pub fn free_seq<M: Memory>(&mut self, now: Micros, memory: &M) -> Option<SeqId> {
        // The tokens of a parked request become a cached prefix first, which keeps the sequence.
        while self.sequences.has_none() && self.parts(now, memory).can_evict() {
            self.evict(now, memory);
        }
        self.sequences.next()
    }

    /// Takes over a request whose tokens were restored into a [free
    /// sequence](Scheduler::free_seq): it is parked, with its prompt computed.
    ///
    /// # Errors
    /// [`RequestError::Duplicate`] where there is a request of this number.
    pub fn adopt<M: Memory>(
        &mut self,
        memory: &M,
        seq: SeqId,
        request: Request,
    ) -> Result<(), RequestError> {
        let id = request.id;
        if self.has_text(id) {
            return Err(RequestError::Duplicate { id });
        }
        let n_held = memory.next_pos(seq).as_usize();
        let mut request = self.queue.arrive(Micros(0), request);
        request.was_admitted = true;
        // Tokens were dropped from it, or share positions: the memory holds something else than
        // its tokens alone would give.
        request.is_shifted = n_held != request.tokens.len();
        let n_dropped = request.tokens.len().saturating_sub(n_held);
        request.tokens.drain(..n_dropped);
        request.tokens.resize(n_held, TokenId::default());
        request.n_prompt = n_held;
        let rank = Rank::of(request.priority, 0, self.config.aging);
        let reuse = Reuse {
            n_tokens: n_held,
            missed: None,
        };
        self.sequences.take(seq);
        let shared = self.prefix.new_root();
        let active = ActiveRequest::new(request, seq, rank, shared, reuse);
        self.parked.push(active);
        Ok(())
    }

    /// Parks a request that ends, where it wants that.
    pub(super) fn park(&mut self, id: RequestId, end: End) -> Option<Outcome> {
        let wants = |request: &RequestState| {
            let is_alone = request.id == id && request.siblings.is_empty();
            is_alone && request.retention == Retention::Park && end != End::Failed
        };
        if self.running.get(id).is_some_and(|r| wants(&r.request)) {
            let mut active = self.running.take(id)?;
            active.draft.clear();
            active.request.saved = None;
            active.checkpoints.clear();
            self.parked.push(active);
        } else {
            self.queue.find(wants)?.saved = None;
            let request = self.queue.take(id)?;
            self.parked.push_unseated(request);
        }
        Some(Outcome::Ended { request: id, end })
    }

    /// Lets a parked request go on, after more tokens.
    pub(super) fn resume(
        &mut self,
        now: Micros,
        id: RequestId,
        tokens: Vec<TokenId>,
    ) -> Vec<Outcome> {
        if let Some(mut active) = self.parked.take(id) {
            active.request.extend(tokens);
            if self.running.len() < self.config.n_slots() {
                self.running.insert(active);
            } else {
                self.release(&active, Keep::Prefix(now));
                self.queue.push(active.request);
            }
        } else if let Some(mut request) = self.parked.take_unseated(id) {
            request.extend(tokens);
            request.waits_since = now;
            self.queue.push(request);
        } else {
            let end = End::Failed;
            return vec![Outcome::Ended { request: id, end }];
        }
        Vec::new()
    }

    /// Forgets a parked request; others may take its tokens from now on.
    pub(super) fn release_parked(&mut self, now: Micros, id: RequestId) {
        if let Some(active) = self.parked.take(id) {
            self.release(&active, Keep::Prefix(now));
        }
        self.parked.take_unseated(id);
    }

    /// Takes the sequence from the request that was parked first: its tokens become a cached
    /// prefix, where others may share them.
    pub(super) fn evict_parked(&mut self, now: Micros) {
        if let Some(active) = self.parked.unseat_first() {
            self.release(&active, Keep::Prefix(now));
        }
    }
}
