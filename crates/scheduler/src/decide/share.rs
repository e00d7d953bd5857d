//! Prefixes of running requests: a request that begins like one that runs shares its cells, and
//! waits where the common part is still being computed.
//!
//! A request waits for one that goes before it: of a higher priority, or of the same and earlier.
//! In one step, its own tokens would come after those of the other, so it loses nothing; and the
//! other is at least as urgent from then on, whatever it rises to by waiting. It never waits behind
//! a lower priority: it takes what is there, and computes the rest first. Where windows or states
//! can only be copied as they are, the other stops after the last common token. Invariant: a
//! request waits only while the other runs and comes closer; when that ends, fails, or is preempted
//! or cancelled, it is decided again. Its room is kept meanwhile, so none that came later takes it.

use std::cmp::Reverse;

use super::room::{Need, Room};
use crate::data::active::ActiveRequest;
use crate::data::ids::RequestId;
use crate::data::reuse::{PrefixUse, n_common};
use crate::data::state::{PrefixWait, Rank, RequestState};
use crate::parts::parked::ParkedSet;
use crate::parts::prefix::{Holder, Source};
use crate::parts::queue::Queue;
use crate::parts::running::RunningSet;

/// So many tokens more are worth waiting for.
pub(crate) const MIN_GAIN: usize = 16;

/// The running and parked requests of this salt, as far as they are computed.
pub(crate) fn running_sources<'a>(
    running: &'a RunningSet,
    parked: &'a ParkedSet,
    within: PrefixUse,
) -> impl Iterator<Item = Source<'a>> {
    let own = running.iter().chain(parked.iter()).filter(move |r| {
        let may_share = r.request.prefix == within && within != PrefixUse::Off;
        may_share && r.n_done > 0 && r.is_exact()
    });
    own.map(|r| Source {
        holder: Holder::Running,
        seq: r.seq,
        tokens: r.held(),
        shared: r.shared,
    })
}

/// The need of a request that waits for a prefix, as long as it does. The request that computes the
/// prefix is at least as urgent as it from then on.
pub(crate) fn still_awaits(
    queue: &mut Queue,
    running: &mut RunningSet,
    room: &Room,
    id: RequestId,
    rank: Rank,
) -> Option<Need> {
    let waiting = queue.get_mut(id)?;
    let wait = waiting.awaited.take()?;
    let source = running.iter().find(|r| {
        let stops = !room.is_cut_only_at_ends() || r.checkpoints.contains(&wait.n_tokens);
        r.request.arrival == wait.arrival && r.n_done < wait.n_tokens && stops
    })?;
    waiting.awaited = Some(wait);
    let need = Need {
        n_tokens: waiting.tokens.len(),
        shared: Some(source.shared.cut(wait.n_tokens)),
    };
    let source = source.id();
    running.raise(source, rank);
    Some(need)
}

/// Lets a request wait that could begin with `n_now` tokens, where a running request is computing
/// many more of its tokens. Returns whether it does.
pub(crate) fn awaits_more(
    queue: &mut Queue,
    running: &mut RunningSet,
    room: &Room,
    id: RequestId,
    n_now: usize,
) -> bool {
    let Some(waiting) = queue.get_mut(id) else {
        return false;
    };
    let most = waiting.tokens.len().saturating_sub(1);
    let is_source = |r: &ActiveRequest| {
        r.n_left() > 1
            && r.is_exact()
            && r.request.prefix == waiting.prefix
            && waiting.prefix != PrefixUse::Off
            && goes_before(&r.request, waiting)
    };
    let sources = (0..).zip(running.iter_mut()).filter(|(_, r)| is_source(r));
    let common = sources.map(|(at, r)| {
        let n = n_common(&r.request.tokens, &waiting.tokens).min(most);
        (n, Reverse(at), r)
    });
    let longest = common.max_by_key(|(n, at, _)| (*n, *at));
    let Some((mut n_tokens, _, source)) = longest else {
        return false;
    };
    if room.is_cut_only_at_ends() {
        // A stop just before serves as well: each costs a copy.
        let stops = source.checkpoints.iter().copied();
        let is_near = |&stop: &usize| stop <= n_tokens && n_tokens - stop < MIN_GAIN;
        let near = stops.filter(|&stop| stop > source.n_done).filter(is_near);
        n_tokens = near.max().unwrap_or(n_tokens);
    }
    if n_tokens <= source.n_done || n_tokens < n_now + MIN_GAIN {
        return false;
    }
    if room.is_cut_only_at_ends() && !source.checkpoints.contains(&n_tokens) {
        source.checkpoints.push(n_tokens);
    }
    waiting.awaited = Some(PrefixWait {
        arrival: source.request.arrival,
        n_tokens,
    });
    true
}

/// True if `other` may wait for `request`.
fn goes_before(request: &RequestState, other: &RequestState) -> bool {
    let order = |r: &RequestState| (Reverse(r.priority), r.arrival);
    order(request) < order(other)
}
