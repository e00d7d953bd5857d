//! [`ParkedSet`]: requests that have ended, but may go on later exactly where they were.
//!
//! Invariant: a parked request is in no step. Its cells are free for others like those of a cached
//! prefix, only later: without its sequence it is computed again from its tokens when it goes on.

use kv_core::SeqId;
use kv_core::memory::Memory;

use crate::data::active::ActiveRequest;
use crate::data::ids::RequestId;
use crate::data::state::RequestState;

/// Requests that have ended and may go on.
#[derive(Clone, Debug, Default)]
pub(crate) struct ParkedSet {
    /// Those that have a sequence, in the order in which they were parked.
    seated: Vec<ActiveRequest>,
    /// Those whose sequence others needed.
    unseated: Vec<RequestState>,
}

impl ParkedSet {
    /// Parks a request with its sequence.
    pub(crate) fn push(&mut self, active: ActiveRequest) {
        self.seated.push(active);
    }

    /// Parks a request that has no sequence.
    pub(crate) fn push_unseated(&mut self, request: RequestState) {
        self.unseated.push(request);
    }

    pub(crate) fn contains(&self, id: RequestId) -> bool {
        let mut unseated = self.unseated.iter();
        self.get(id).is_some() || unseated.any(|request| request.id == id)
    }

    /// A request that has its sequence.
    pub(crate) fn get(&self, id: RequestId) -> Option<&ActiveRequest> {
        self.seated.iter().find(|active| active.id() == id)
    }

    /// The requests that have a sequence.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ActiveRequest> {
        self.seated.iter()
    }

    /// True if no parked request has a sequence.
    pub(crate) fn has_no_sequence(&self) -> bool {
        self.seated.is_empty()
    }

    /// Takes a request out that has its sequence.
    pub(crate) fn take(&mut self, id: RequestId) -> Option<ActiveRequest> {
        let at = self.seated.iter().position(|active| active.id() == id)?;
        Some(self.seated.remove(at))
    }

    /// Takes a request out that has none.
    pub(crate) fn take_unseated(&mut self, id: RequestId) -> Option<RequestState> {
        let at = self.unseated.iter().position(|request| request.id == id)?;
        Some(self.unseated.remove(at))
    }

    /// Takes the sequence from the request that was parked first: the request as it was.
    pub(crate) fn unseat_first(&mut self) -> Option<ActiveRequest> {
        let first = (!self.seated.is_empty()).then(|| self.seated.remove(0))?;
        self.unseated.push(first.request.clone());
        Some(first)
    }

    /// Takes the sequence from the request that has this one. Returns whether there is one.
    pub(crate) fn unseat(&mut self, seq: SeqId) -> bool {
        let at = self.seated.iter().position(|active| active.seq == seq);
        let unseated = at.map(|at| self.seated.remove(at).request);
        self.unseated.extend(unseated);
        at.is_some()
    }

    /// Takes the sequences from all requests.
    pub(crate) fn unseat_all(&mut self) -> Vec<SeqId> {
        let seated = std::mem::take(&mut self.seated);
        let seqs = seated.iter().map(|active| active.seq).collect();
        self.unseated
            .extend(seated.into_iter().map(|active| active.request));
        seqs
    }

    /// Forgets all requests. Returns the sequences that they had.
    pub(crate) fn clear(&mut self) -> Vec<SeqId> {
        let seqs = self.unseat_all();
        self.unseated.clear();
        seqs
    }

    /// Takes the memory's word for how many tokens it holds, after a failed step.
    pub(crate) fn recount<M: Memory>(&mut self, memory: &M) {
        for active in &mut self.seated {
            if !active.request.is_shifted {
                let n_held = memory.next_pos(active.seq).as_usize();
                active.n_done = n_held.min(active.request.tokens.len());
            }
        }
    }
}
