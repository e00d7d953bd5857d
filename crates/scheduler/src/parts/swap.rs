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

#[cfg(test)]
mod tests {
    use kv_core::SeqId;

    use super::*;
    use crate::data::ids::Micros;
    use crate::data::request::Request;
    use crate::data::state::SavedState;

    #[test]
    fn a_state_is_saved_until_its_own_request_reports_it() {
        let swap = Swap {
            request: RequestId(4),
            seq: SeqId(0),
            part: None,
            first: 0,
            n_tokens: 9,
        };
        let keep = Keep::Nothing;
        let mut swaps = Swaps::default();
        swaps.begin(SwapOut { swap, keep });
        assert!(swaps.end(RequestId(5)).is_none() && swaps.is_saving());
        assert!(swaps.end(RequestId(4)).is_some() && !swaps.is_saving());
    }

    #[test]
    fn bytes_count_in_the_tier_where_they_are() {
        let states = [(Tier::Host, 3), (Tier::Disk, 5), (Tier::Host, 11)];
        let requests = states.map(|(tier, n_bytes)| RequestState {
            saved: Some(SavedState {
                first: 0,
                n_tokens: 1,
                n_bytes,
                tier,
            }),
            ..RequestState::new(Micros(0), 0, Request::default())
        });
        let bytes = [Tier::Host, Tier::Disk].map(|tier| saved_bytes(requests.iter(), tier));
        assert_eq!(bytes, [14, 5]);
    }
}
