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

use crate::prefix::{Holder, PrefixUse, Source, n_common};
use crate::queue::Rank;
use crate::request::RequestId;
use crate::room::{Need, Trunk};
use crate::scheduler::Scheduler;
use crate::state::{RequestState, Running};

/// So many tokens more are worth waiting for.
pub(crate) const MIN_GAIN: usize = 16;

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Awaited {
    /// The arrival of the request that computes it.
    arrival: u64,
    /// How many of its tokens.
    n_tokens: usize,
}

impl Scheduler {
    /// The running requests of this salt, as far as they are computed.
    pub(crate) fn running_sources(&self, within: PrefixUse) -> impl Iterator<Item = Source<'_>> {
        let own = self.running.iter().filter(move |r| {
            let may_share = r.request.prefix == within && within != PrefixUse::Off;
            may_share && r.n_done > 0 && r.is_exact()
        });
        own.map(|r| Source {
            holder: Holder::Running,
            seq: r.seq,
            tokens: r.held(),
            trunk: r.trunk,
        })
    }

    /// What a request needs that waits for a prefix, as long as it does.
    pub(crate) fn still_awaits(&mut self, id: RequestId, rank: Rank) -> Option<Need> {
        let waiting = self.queue.find(|request| request.id == id)?;
        let Awaited { arrival, n_tokens } = waiting.awaited.take()?;
        let n_own = waiting.tokens.len();
        let at = self.running.iter().position(|r| {
            let stops = !self.room.is_cut_only_at_ends() || r.checkpoints.contains(&n_tokens);
            r.request.arrival == arrival && r.n_done < n_tokens && stops
        })?;
        waiting.awaited = Some(Awaited { arrival, n_tokens });
        let need = Need {
            n_tokens: n_own,
            trunk: Some(self.running[at].trunk.cut(n_tokens)),
        };
        if self.running[at].rank < rank {
            let mut running = self.running.remove(at);
            running.rank = rank;
            self.insert_running(running);
        }
        Some(need)
    }

    /// Lets a request wait that could begin with `n_now` tokens, where a running request is
    /// computing many more of its tokens. Returns whether it does.
    pub(crate) fn awaits_more(&mut self, id: RequestId, n_now: usize) -> bool {
        let Some(waiting) = self.queue.find(|request| request.id == id) else {
            return false;
        };
        let most = waiting.tokens.len().saturating_sub(1);
        let is_source = |r: &Running| {
            r.n_left() > 1
                && r.is_exact()
                && r.request.prefix == waiting.prefix
                && waiting.prefix != PrefixUse::Off
                && goes_before(&r.request, waiting)
        };
        let sources = (0..).zip(&self.running).filter(|(_, r)| is_source(r));
        let common = sources.map(|(at, r)| {
            let n = n_common(&r.request.tokens, &waiting.tokens).min(most);
            (n, Reverse(at))
        });
        let Some((mut n_tokens, Reverse(at))) = common.max() else {
            return false;
        };
        let source: &mut Running = &mut self.running[at];
        if self.room.is_cut_only_at_ends() {
            // A stop just before serves as well: each costs a copy.
            let stops = source.checkpoints.iter().copied();
            let is_near = |&stop: &usize| stop <= n_tokens && n_tokens - stop < MIN_GAIN;
            let near = stops.filter(|&stop| stop > source.n_done).filter(is_near);
            n_tokens = near.max().unwrap_or(n_tokens);
        }
        if n_tokens <= source.n_done || n_tokens < n_now + MIN_GAIN {
            return false;
        }
        if self.room.is_cut_only_at_ends() && !source.checkpoints.contains(&n_tokens) {
            source.checkpoints.push(n_tokens);
        }
        waiting.awaited = Some(Awaited {
            arrival: source.request.arrival,
            n_tokens,
        });
        self.counters.n_waits += 1;
        true
    }

    /// The trunk of a sequence that begins with nothing of others.
    pub(crate) fn new_trunk(&mut self) -> Trunk {
        self.n_roots += 1;
        Trunk::new(self.n_roots)
    }
}

/// Whether `other` may wait for `request`.
fn goes_before(request: &RequestState, other: &RequestState) -> bool {
    let order = |r: &RequestState| (Reverse(r.priority), r.arrival);
    order(request) < order(other)
}
