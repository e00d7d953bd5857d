//! Admission: which waiting request gets a sequence, and what of its tokens is there already.
//!
//! Invariant: a request is admitted with the tokens that the memory holds for it after the edit
//! that comes with it.

use kv_core::SeqId;
use kv_core::memory::{Edit, Memory};

use super::room::{Need, Room};
use super::share::{awaits_more, running_sources, still_awaits};
use super::store::{HeldPrefix, StoredWork, stored_work};
use super::view::can_evict;
use crate::data::active::SharedPrefix;
use crate::data::config::SchedulerConfig;
use crate::data::edits::{copy, cut};
use crate::data::ids::{Micros, RequestId};
use crate::data::reuse::{Missed, PrefixUse, Reuse};
use crate::data::state::{Rank, RequestState};
use crate::data::stored::StoreWait;
use crate::data::work::StoredPrefix;
use crate::parts::parked::ParkedSet;
use crate::parts::prefix::{Holder, PrefixCache, Source};
use crate::parts::queue::Queue;
use crate::parts::running::RunningSet;
use crate::parts::store::StoreParts;

/// The result of looking for the next request.
#[derive(Debug)]
pub(crate) enum Admission {
    /// This request gets a sequence.
    Admit(Box<Grant>),
    /// This request has to make room for it.
    Preempt(RequestId),
    /// The store has tokens of it that the memory has no longer.
    Fetch,
    /// Tokens that were fetched for it are restored first.
    Restore(StoredPrefix),
    /// A cached prefix has to make room for it, another than this one.
    Evict { kept: Option<SeqId> },
    /// None can be admitted now.
    Full,
}

/// The sequence of a request, and what it begins with.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) request: RequestState,
    pub(crate) rank: Rank,
    pub(crate) seq: SeqId,
    /// The edit that gives the sequence its first tokens.
    pub(crate) edit: Option<Edit>,
    pub(crate) reuse: Reuse,
    /// The holder of these tokens, and the cells that they are in.
    pub(crate) from: Option<Origin>,
    /// Number of tokens in common with what is cached, or was.
    pub(crate) n_common: usize,
}

/// The origin of the first tokens of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) holder: Holder,
    pub(crate) shared: SharedPrefix,
}

/// The start of a request, were it admitted now.
struct Place {
    /// Its sequence; `None` where none is free.
    seq: Option<SeqId>,
    edit: Option<Edit>,
    /// The sequence that has its first tokens.
    source: Option<SeqId>,
    reuse: Reuse,
    from: Option<Origin>,
    n_common: usize,
}

/// Looks for the request that is admitted next.
#[derive(Debug)]
pub(crate) struct Admitter<'a, M> {
    pub(crate) now: Micros,
    pub(crate) memory: &'a M,
    pub(crate) config: &'a SchedulerConfig,
    pub(crate) room: &'a Room,
    pub(crate) prefix: &'a PrefixCache,
    pub(crate) parked: &'a ParkedSet,
    /// The free sequence that is given next.
    pub(crate) free: Option<SeqId>,
    /// The request that is admitted leaves it; others are marked with the prefix that they wait
    /// for.
    pub(crate) queue: &'a mut Queue,
    /// Those that compute such a prefix stop behind it, and rise.
    pub(crate) running: &'a mut RunningSet,
    pub(crate) store: &'a mut StoreParts,
    /// Steps that were planned.
    pub(crate) n_steps: u64,
    /// Requests that began to wait for a prefix.
    pub(crate) n_waits: u64,
}

impl<M: Memory> Admitter<'_, M> {
    /// The next request that waits, where there is room. One that waits for a prefix that is being
    /// computed is passed over, but its room is kept.
    pub(crate) fn next(&mut self) -> Admission {
        let mut kept = Vec::new();
        for (id, rank) in self.queue.in_order(self.now, self.config.aging) {
            if (self.queue.get(id)).is_some_and(|waiting| waiting.store.is_waiting()) {
                continue;
            }
            if let Some(need) = self.still_awaits(id, rank) {
                kept.push(need);
                continue;
            }
            let running = self.running.as_slice();
            let urgent = running.last().is_some_and(|last| last.rank < rank);
            let Some(waiting) = self.queue.get(id) else {
                return Admission::Full;
            };
            let tenant = waiting.tenant;
            let limits = self.queue.limits(tenant);
            if !limits.may_run(self.running.n_of_tenant(tenant)) {
                continue;
            }
            if running.len() + kept.len() >= self.config.n_slots() && !urgent {
                return Admission::Full;
            }
            let n_tokens = waiting.tokens.len();
            let is_saved = waiting.saved.is_some();
            let is_here = matches!(waiting.store, StoreWait::Here { .. });
            let place = self.place(waiting);
            if self.config.prefix_cache.is_on()
                && !is_saved
                && !is_here
                && self.awaits_more(id, place.reuse.n_tokens)
                && let Some(need) = self.still_awaits(id, rank)
            {
                kept.push(need);
                continue;
            }
            if self.needs_store(id, &place) {
                return Admission::Fetch;
            }
            let shared = place.from.map(|from| from.shared);
            kept.push(Need { n_tokens, shared });
            if !self.takes(&kept, self.running.len()) {
                let victim = self.victim_below(rank, &kept);
                return victim.map_or(Admission::Full, Admission::Preempt);
            }
            match self.stored_work(id, &place) {
                StoredWork::Restore(work) => return Admission::Restore(work),
                StoredWork::Evict => {
                    let kept = place.source;
                    return Admission::Evict { kept };
                }
                StoredWork::Later => return Admission::Full,
                StoredWork::Over => {}
            }
            if self.gives_way(&place) {
                let kept = place.source;
                return Admission::Evict { kept };
            }
            let Some(seq) = place.seq else {
                return if can_evict(self.prefix, self.parked) {
                    Admission::Evict { kept: None }
                } else {
                    Admission::Full
                };
            };
            let Some(request) = self.queue.take(id) else {
                return Admission::Full;
            };
            return Admission::Admit(Box::new(Grant {
                request,
                rank,
                seq,
                edit: place.edit,
                reuse: place.reuse,
                from: place.from,
                n_common: place.n_common,
            }));
        }
        Admission::Full
    }

    /// True if a request that could be admitted needs what a store has of it from now on.
    fn needs_store(&mut self, id: RequestId, place: &Place) -> bool {
        let Some(waiting) = self.queue.get_mut(id) else {
            return false;
        };
        match waiting.store {
            StoreWait::Found(stored) if stored.base(place.reuse.n_tokens).is_some() => {
                waiting.store = StoreWait::Needed(stored);
                true
            }
            _ => false,
        }
    }

    /// True if a cached prefix would lose tokens to the request that takes it over, as no sequence
    /// is free, and another one can go in its place.
    fn gives_way(&self, place: &Place) -> bool {
        let (None, Some(source), Some(Edit::Remove { .. })) = (self.free, place.source, place.edit)
        else {
            return false;
        };
        let n_tokens = self.prefix.n_tokens(source);
        let loses = self.room.is_cut_only_at_ends() || n_tokens > Some(place.reuse.n_tokens);
        loses && (self.prefix.lines().nth(1).is_some() || !self.parked.has_no_sequence())
    }

    /// The work to be done with the tokens that were fetched for a request which could be admitted.
    fn stored_work(&mut self, id: RequestId, place: &Place) -> StoredWork {
        let Some(waiting) = self.queue.get_mut(id) else {
            return StoredWork::Over;
        };
        let StoreWait::Here { stored, n_tries } = waiting.store else {
            return StoredWork::Over;
        };
        if !self.running.as_slice().is_empty() && self.store.is_due_a_step(self.n_steps) {
            return StoredWork::Later;
        }
        let held = HeldPrefix {
            request: id,
            from: place.source.zip(place.from.map(|from| from.holder)),
            n_held: place.reuse.n_tokens,
        };
        let mut work = if n_tries < stored.max_tries() {
            stored_work(self.prefix, self.free, stored, held)
        } else {
            StoredWork::Over
        };
        if std::mem::take(&mut self.store.is_short) && matches!(work, StoredWork::Restore(_)) {
            work = StoredWork::Evict;
        }
        // Where only what it begins with could go, it is computed.
        let mut others = self
            .prefix
            .lines()
            .filter(|line| place.source != Some(line.seq));
        if work == StoredWork::Evict && others.next().is_none() && self.parked.has_no_sequence() {
            work = StoredWork::Over;
        }
        waiting.store = match work {
            StoredWork::Over => StoreWait::No,
            _ => StoreWait::Here {
                stored,
                n_tries: n_tries + 1,
            },
        };
        work
    }

    fn still_awaits(&mut self, id: RequestId, rank: Rank) -> Option<Need> {
        still_awaits(self.queue, self.running, self.room, id, rank)
    }

    fn awaits_more(&mut self, id: RequestId, n_now: usize) -> bool {
        let waits = awaits_more(self.queue, self.running, self.room, id, n_now);
        self.n_waits += u64::from(waits);
        waits
    }

    /// The start of a request: a free sequence with a copy of what is cached or computed, or where
    /// none is free, the cached prefix itself.
    fn place(&self, request: &RequestState) -> Place {
        let free = self.free;
        let nothing = |missed| Place {
            seq: free,
            edit: None,
            source: None,
            reuse: Reuse {
                n_tokens: 0,
                missed,
            },
            from: None,
            n_common: 0,
        };
        let salt = match request.prefix {
            PrefixUse::Within(salt) if self.config.prefix_cache.is_on() => salt,
            _ => return nothing(Some(Missed::Disabled)),
        };
        // What comes back from the host begins behind what is shared.
        let tokens = match request.saved.map(|saved| saved.first) {
            Some(0) => return nothing(None),
            Some(first) => request.tokens.get(..=first).unwrap_or_default(),
            None => &request.tokens,
        };
        let edit = |source: &Source<'_>, n: usize| match (free, source.holder) {
            (Some(to), _) => Some(copy(source.seq, to, n)),
            (None, Holder::Line) => Some(cut(source.seq, n)),
            // It keeps its sequence, and another has to become free.
            (None, Holder::Running) => None,
        };
        let is_refused = |source: &Source<'_>, n| self.memory.check(&edit(source, n)?).err();
        let running = running_sources(self.running, self.parked, request.prefix);
        let lookup = (self.prefix).find(tokens, salt, self.now, running, is_refused);
        let missed = lookup
            .missed
            .map(|missed| missed.with_store(request.store_missed));
        let n_common = lookup.n_common;
        let Some((source, n_tokens)) = lookup.found else {
            return Place {
                n_common,
                ..nothing(missed)
            };
        };
        let own = match source.holder {
            Holder::Line => Some(source.seq),
            Holder::Running => None,
        };
        Place {
            seq: free.or(own),
            edit: edit(&source, n_tokens),
            source: Some(source.seq),
            reuse: Reuse { n_tokens, missed },
            from: Some(Origin {
                holder: source.holder,
                shared: source.shared.cut(n_tokens),
            }),
            n_common,
        }
    }

    /// True if these fit next to the first `n` running requests.
    fn takes(&self, more: &[Need], n: usize) -> bool {
        let running = &self.running.as_slice()[..n];
        self.room.takes(more, running, self.config)
    }

    /// The request of the lowest rank below this one that came last, where preempting those below
    /// makes enough room.
    fn victim_below(&self, rank: Rank, more: &[Need]) -> Option<RequestId> {
        let running = self.running.as_slice();
        let n_kept = running.partition_point(|r| r.rank >= rank);
        let victim = running.get(n_kept..)?.last()?;
        self.takes(more, n_kept).then_some(victim.id())
    }
}
