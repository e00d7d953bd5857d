//! Context shift: a text that is full drops tokens in its middle and goes on.
//!
//! The first tokens stay (Xiao et al., arXiv 2309.17453), half of the others go, and the rest moves
//! down. What is left was computed with the tokens that are gone, so no other request shares it,
//! and a preempted request computes it again from the tokens that are left.

use kv_core::memory::{Edit, Memory};
use kv_core::{Pos, SeqId};

use crate::event::{End, Outcome};
use crate::request::{Micros, Overflow, RequestId};
use crate::scheduler::{Keep, Scheduler};
use crate::state::Running;

/// The tokens that a sequence drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift {
    /// The request.
    pub request: RequestId,
    /// Its sequence.
    pub seq: SeqId,
    /// The first token that is dropped. Those before it stay where they are.
    pub first: usize,
    /// The number of dropped tokens. The tokens behind them move down by as many positions.
    pub n_tokens: usize,
}

impl Shift {
    /// The edits that do it, both or neither: the tokens go, then those behind them move down.
    pub fn edits(&self) -> [Edit; 2] {
        let pos = |n: usize| Pos(u32::try_from(n).unwrap_or(u32::MAX));
        let behind = self.first.saturating_add(self.n_tokens);
        Edit::drop_between(self.seq, pos(self.first), pos(behind))
    }
}

/// The result of a [`Shift`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShiftResult {
    /// The tokens are gone, and the others have moved.
    Done,
    /// Tokens that others share need cells of their own to move, and there are none. The memory is
    /// as before.
    NoRoom,
    /// The memory cannot do it. It is as before, or holds nothing of the sequence.
    Refused,
}

impl Running {
    /// True if it is as long as it can be and goes on without some of its tokens.
    fn is_full(&self, capacity: usize) -> bool {
        self.is_decoding() && self.request.tokens.len() > capacity && self.request.can_shift()
    }
}

impl Scheduler {
    /// What is to be done for a text that is full: `None` where none is, `Some(None)` where the
    /// scheduler has done it.
    pub(crate) fn shift<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Option<Shift>> {
        let capacity = self.capacity();
        let running = self.running.iter().find(|r| r.is_full(capacity))?;
        let (request, seq, n_done) = (running.request.id, running.seq, running.n_done);
        let n_keep = match running.request.overflow {
            Overflow::Shift { n_keep } => n_keep.min(n_done),
            Overflow::End => n_done,
        };
        let is_short = std::mem::take(&mut self.shift_is_short);
        if is_short && !self.cache.is_empty() {
            self.evict(now, memory);
            return Some(None);
        }
        let n_tokens = (n_done - n_keep) / 2;
        if is_short || n_tokens == 0 {
            outcomes.extend(self.end(request, End::ContextFull, Keep::Prefix(now)));
            return Some(None);
        }
        Some(Some(Shift {
            request,
            seq,
            first: n_keep,
            n_tokens,
        }))
    }

    /// Takes in what became of a [`Shift`].
    pub(crate) fn shifted(&mut self, id: RequestId, result: ShiftResult) -> Vec<Outcome> {
        let capacity = self.capacity();
        let mut running = self.running.iter_mut();
        let Some(running) = running.find(|r| r.request.id == id && r.is_full(capacity)) else {
            return Vec::new();
        };
        match (result, running.request.overflow) {
            (ShiftResult::NoRoom, _) => self.shift_is_short = true,
            (ShiftResult::Done, Overflow::Shift { n_keep }) => running.drop_tokens(n_keep),
            (ShiftResult::Done, Overflow::End) | (ShiftResult::Refused, _) => {
                return self.end(id, End::ContextFull, Keep::Nothing);
            }
        }
        Vec::new()
    }
}

impl Running {
    /// Half of its tokens behind the first `n_keep` are gone.
    fn drop_tokens(&mut self, n_keep: usize) {
        let first = n_keep.min(self.n_done);
        let end = first + (self.n_done - first) / 2;
        let n_of_prompt = end.min(self.request.n_prompt) - first.min(self.request.n_prompt);
        self.request.tokens.drain(first..end);
        self.request.n_prompt -= n_of_prompt;
        self.request.is_shifted = true;
        self.n_done -= end - first;
        self.trunk = self.trunk.cut(first);
        self.checkpoints.clear();
        self.draft.clear();
    }
}
