//! [`Queue`]: the requests that wait, and in which order.
//!
//! Invariant: of two requests of one priority and one tenant the one that came first is next, also
//! after it was preempted, and of two tenants the one that had less; and every request that waits
//! rises, so none waits for ever behind others. Knows nothing of memory.

use crate::request::{Micros, Priority, RequestId};
use crate::state::RequestState;
use crate::tenant::Tenants;

/// How urgent a request is: its priority, and what it rose by waiting. Larger goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank(u8);

impl Rank {
    /// After `waited`, of which each `aging` counts as one priority.
    pub(crate) fn of(priority: Priority, waited: u64, aging: Micros) -> Self {
        let risen = waited / aging.0.max(1);
        let highest = Priority::Interactive as u64;
        Self((priority as u64).saturating_add(risen).min(highest) as u8)
    }
}

/// Requests that wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    waiting: Vec<RequestState>,
}

impl Queue {
    pub(crate) fn push(&mut self, request: RequestState) {
        self.waiting.push(request);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &RequestState> {
        self.waiting.iter()
    }

    /// The requests in the order in which they are admitted, and how urgent each is now.
    pub(crate) fn in_order(
        &self,
        now: Micros,
        aging: Micros,
        tenants: &Tenants,
    ) -> Vec<(RequestId, Rank)> {
        let ranked = self.waiting.iter().map(|request| {
            let waited = now.0.saturating_sub(request.waits_since.0);
            (request, Rank::of(request.priority, waited, aging))
        });
        let mut ranked: Vec<(&RequestState, Rank)> = ranked.collect();
        ranked.sort_by_cached_key(|(request, rank)| {
            let counter = tenants.counter(request.tenant);
            (std::cmp::Reverse(*rank), counter, request.arrival)
        });
        let in_order = ranked.into_iter().map(|(request, rank)| (request.id, rank));
        in_order.collect()
    }

    /// The first request that is such.
    pub(crate) fn find(
        &mut self,
        is_such: impl Fn(&RequestState) -> bool,
    ) -> Option<&mut RequestState> {
        self.waiting.iter_mut().find(|request| is_such(request))
    }

    /// Takes a request out.
    pub(crate) fn take(&mut self, id: RequestId) -> Option<RequestState> {
        let at = self.waiting.iter().position(|request| request.id == id)?;
        Some(self.waiting.swap_remove(at))
    }

    /// Takes all requests out, in the order in which they came.
    pub(crate) fn take_all(&mut self) -> Vec<RequestState> {
        let mut all = std::mem::take(&mut self.waiting);
        all.sort_by_key(|request| request.arrival);
        all
    }
}
