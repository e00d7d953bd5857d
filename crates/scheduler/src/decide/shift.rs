//! Context shift: a text that is full drops tokens in its middle and goes on.
//!
//! The first tokens stay (Xiao et al., arXiv 2309.17453), half of the others go, and the rest moves
//! down. What is left was computed with the tokens that are gone, so no other request shares it,
//! and a preempted request computes it again from the tokens that are left.

use super::view::PartsView;
use crate::data::ids::RequestId;
use crate::data::request::Overflow;
use crate::data::work::Shift;

/// The way on for a text that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FullText {
    /// A cached prefix has to make room.
    Evict,
    /// It ends.
    End(RequestId),
    /// It drops these tokens.
    Shift(Shift),
}

/// The way on for the first text that is full.
pub(crate) fn full_text<M>(parts: PartsView<'_, M>) -> Option<FullText> {
    let capacity = parts.capacity();
    let mut running = parts.running.iter();
    let full = running.find(|active| active.is_full(capacity))?;
    let n_done = full.n_done;
    let n_keep = match full.request.overflow {
        Overflow::Shift { n_keep } => n_keep.min(n_done),
        Overflow::End => n_done,
    };
    let is_short = parts.running.shift_is_short();
    if is_short && parts.can_evict() {
        return Some(FullText::Evict);
    }
    let n_tokens = (n_done - n_keep) / 2;
    if is_short || n_tokens == 0 {
        return Some(FullText::End(full.id()));
    }
    Some(FullText::Shift(Shift {
        request: full.id(),
        seq: full.seq,
        first: n_keep,
        n_tokens,
    }))
}
