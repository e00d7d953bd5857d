//! [`Swaps`]: the request whose state is being saved, and the bytes of states that were.
//!
//! Invariant: one state is saved at a time, and its request keeps its sequence until that is
//! reported. Knows no format and no file: the caller has the bytes.

use crate::data::active::Keep;
use crate::data::ids::RequestId;
use crate::data::state::{RequestState, Tier};
use crate::data::work::Swap;

/// A request that leaves the memory, until it is known whether the host has its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwapOut {
    pub(crate) swap: Swap,
    pub(crate) keep: Keep,
}

/// The states on their way between memory and host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Swaps {
    saving: Option<SwapOut>,
    /// There was no room for a state that was to come back.
    is_short: bool,
}

impl Swaps {
    /// The state of a request is being saved.
    pub(crate) fn begin(&mut self, swap_out: SwapOut) {
        self.saving = Some(swap_out);
    }

    /// True if a state is being saved.
    pub(crate) fn is_saving(&self) -> bool {
        self.saving.is_some()
    }

    /// The state of this request is saved, or could not be.
    pub(crate) fn end(&mut self, id: RequestId) -> Option<SwapOut> {
        self.saving.take_if(|saving| saving.swap.request == id)
    }

    /// There was no room for a state that was to come back.
    pub(crate) fn note_shortage(&mut self) {
        self.is_short = true;
    }

    /// Room is made, or no more is needed.
    pub(crate) fn end_shortage(&mut self) {
        self.is_short = false;
    }

    pub(crate) fn is_short(&self) -> bool {
        self.is_short
    }
}

/// Bytes of the saved states of these requests in one tier.
pub(crate) fn saved_bytes<'a>(requests: impl Iterator<Item = &'a RequestState>, tier: Tier) -> u64 {
    let states = requests.filter_map(|request| request.saved);
    let states = states.filter(|state| state.tier == tier);
    states.map(|state| state.n_bytes).sum()
}
