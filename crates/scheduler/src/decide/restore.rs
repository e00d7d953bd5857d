//! Saved states that come back: when, and which is needed next.
//!
//! Tokens that others have, too, are in the memory before; where they have gone by then, they alone
//! are computed again. Invariant: a state comes back as soon as its request has the tokens before
//! it, or is given up when no cached prefix can make room.

use super::view::PartsView;
use crate::data::active::ActiveRequest;
use crate::data::ids::RequestId;
use crate::data::state::{SavedState, Tier};
use crate::data::work::Swap;
use crate::parts::swap::saved_bytes;

/// The way back for a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restoration {
    SwapIn(Swap),
    /// A cached prefix has to make room.
    Evict,
    /// There is no room: its request is computed as any other is, token by token.
    GiveUp(RequestId),
}

/// The way back for the first saved state that is due.
pub(crate) fn restoration<M>(parts: PartsView<'_, M>) -> Option<Restoration> {
    let is_due = |r: &&ActiveRequest| r.request.saved.is_some_and(|s| s.first == r.n_done);
    let active = parts.running.iter().find(is_due)?;
    let SavedState {
        first, n_tokens, ..
    } = active.request.saved?;
    if !parts.swaps.is_short() && (first == 0 || parts.free.is_some()) {
        return Some(Restoration::SwapIn(Swap {
            request: active.id(),
            seq: active.seq,
            part: parts.free.filter(|_| first > 0),
            first,
            n_tokens,
        }));
    }
    Some(if parts.can_evict() {
        Restoration::Evict
    } else {
        Restoration::GiveUp(active.id())
    })
}

/// The request whose state comes back next, where that is on the disk.
pub(crate) fn next_from_disk<M>(parts: PartsView<'_, M>) -> Option<RequestId> {
    if parts.config.swap_disk_bytes == 0 || saved_bytes(parts.requests(), Tier::Disk) == 0 {
        return None;
    }
    let next = parts
        .running
        .requests()
        .find(|request| request.saved.is_some());
    let next = next.or_else(|| {
        let order = parts.queue.in_order(parts.now, parts.config.aging);
        let mut order = order.into_iter().filter_map(|(id, _)| parts.queue.get(id));
        order.find(|request| request.saved.is_some())
    })?;
    let is_spilled = next.saved.is_some_and(|saved| saved.tier == Tier::Disk);
    is_spilled.then_some(next.id)
}
