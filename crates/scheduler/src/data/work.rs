//! [`StepPlan`]: what a scheduler asks for.
//!
//! Plain data. Decides nothing.

use kv_core::memory::{Edit, PlannedBatch, Seqs};
use kv_core::{Pos, PosRange, SeqId};

use super::event::Outcome;
use super::ids::RequestId;
use super::step::Step;

/// The next work, and what became of requests meanwhile. `S` is the memory's
/// [`Slot`](kv_core::memory::Memory::Slot).
#[derive(Clone, Debug)]
pub struct StepPlan<S> {
    /// The next work.
    pub work: Work<S>,
    /// Requests that were admitted, preempted or ended.
    pub outcomes: Vec<Outcome>,
}

/// The next work for the caller.
#[derive(Clone, Debug)]
pub enum Work<S> {
    /// Nothing, until an event comes.
    Idle,
    /// These edits of the memory, which it does not refuse; then ask again.
    Edit(Vec<Edit>),
    /// Save a state to the host, then report that ([`Event::SwappedOut`](crate::Event::SwappedOut))
    /// before anything else.
    SwapOut {
        /// The state.
        swap: Swap,
        /// The most bytes that it may have there.
        limit: u64,
    },
    /// Restore a state from the host or the disk, then report that
    /// ([`Event::SwappedIn`](crate::Event::SwappedIn)) before anything else.
    SwapIn(Swap),
    /// Begin to fetch what a store has of the prompt of a request, and ask again: the answer
    /// ([`Event::Fetched`](crate::Event::Fetched)) comes at any time.
    Fetch(RequestId),
    /// Restore tokens that were fetched, then report that
    /// ([`Event::Restored`](crate::Event::Restored)) before anything else.
    Restore(StoredPrefix),
    /// Encode the source of a request into its sequence, then report that
    /// ([`Event::Encoded`](crate::Event::Encoded) or [`Event::Fail`](crate::Event::Fail)) before
    /// anything else.
    Encode {
        /// The request.
        request: RequestId,
        /// Its sequence, which holds nothing.
        seq: SeqId,
    },
    /// Drop tokens in the middle of a text that is full, then report that
    /// ([`Event::Shifted`](crate::Event::Shifted)) before anything else.
    Shift(Shift),
    /// Compute this step, then report it.
    Decode {
        /// The tokens that are computed.
        step: Step,
        /// Its batch, validated and planned: nothing else may change the memory before.
        planned: PlannedBatch<S>,
    },
}

/// A state of a request that is saved, or comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The request.
    pub request: RequestId,
    /// Its sequence.
    pub seq: SeqId,
    /// A sequence that holds nothing, where only a part of the tokens is swapped: it has that part
    /// in between. `None` for all of them.
    pub part: Option<SeqId>,
    /// The first token that is swapped.
    pub first: usize,
    /// Tokens of the request when it is complete in the memory.
    pub n_tokens: usize,
}

/// A sequence that gets tokens from a store, to be a cached prefix then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPrefix {
    /// The request whose prompt it is.
    pub request: RequestId,
    /// The sequence.
    pub seq: SeqId,
    /// To be done before: what the memory holds already.
    pub copy: Option<Edit>,
    /// Tokens that the sequence holds then.
    pub n_held: usize,
    /// Tokens that it can hold.
    pub n_tokens: usize,
}

impl Swap {
    /// The sequence whose state is saved or restored.
    pub fn swapped_seq(&self) -> SeqId {
        self.part.unwrap_or(self.seq)
    }

    /// To be done before it is saved.
    pub fn before_saving(&self) -> Option<Edit> {
        let to = self.part?;
        let from = self.seq;
        let range = self.range();
        Some(Edit::Copy { from, to, range })
    }

    /// To be done after it was restored.
    pub fn after_restoring(&self) -> Option<Edit> {
        let (from, to) = (self.part?, self.seq);
        let range = self.range();
        Some(Edit::Copy { from, to, range })
    }

    /// To be done at the end: the sequence in between holds nothing again.
    pub fn at_the_end(&self) -> Option<Edit> {
        Some(Edit::Remove {
            seqs: Seqs::One(self.part?),
            range: PosRange::ALL,
        })
    }

    fn range(&self) -> PosRange {
        PosRange::from(Pos(u32::try_from(self.first).unwrap_or(u32::MAX))..)
    }
}

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
