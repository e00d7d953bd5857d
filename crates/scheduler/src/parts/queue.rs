//! [`Queue`]: the requests that wait, in which order, and what each tenant had.
//!
//! Invariant: of two requests of one priority and one tenant the one that came first is next, also
//! after it was preempted, and of two tenants the one that had less; and every request that waits
//! rises, so none waits for ever behind others. Knows nothing of memory.

use std::cmp::Reverse;

use super::tenants::Tenants;
use crate::data::config::{SchedulerConfig, Waiting};
use crate::data::error::RequestError;
use crate::data::ids::{Micros, RequestId, TenantId};
use crate::data::request::Request;
use crate::data::state::{Rank, RequestState};
use crate::data::tenant::TenantLimits;

/// The requests that wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    waiting: Vec<RequestState>,
    tenants: Tenants,
    n_arrived: u64,
}

impl Queue {
    /// Takes a request that comes, where its limits and those of its tenant let it wait.
    /// `is_running` is whether texts of a tenant run.
    ///
    /// # Errors
    /// [`RequestError`], with the numbers; nothing has changed then.
    pub(crate) fn submit(
        &mut self,
        now: Micros,
        request: Request,
        config: &SchedulerConfig,
        is_running: impl Fn(TenantId) -> bool,
    ) -> Result<(), RequestError> {
        // Those that were preempted have been taken, and do not count.
        let new = || self.waiting.iter().filter(|request| !request.was_admitted);
        let load = new().fold(Waiting::default(), |sum, request| Waiting {
            n_requests: sum.n_requests + 1,
            n_tokens: sum.n_tokens + request.tokens.len(),
        });
        config.check_queue(load, request.prompt.len())?;
        let tenant = request.tenant;
        let queued = new().filter(|other| other.tenant == tenant.id).count();
        tenant.limits.check_queue(queued)?;
        let waiting = &self.waiting;
        self.tenants.enter(tenant, |id| {
            let waits = waiting.iter().any(|request| request.tenant == id);
            waits || is_running(id)
        });
        let request = self.arrive(now, request);
        self.push(request);
        Ok(())
    }

    /// The state of a request that comes now.
    pub(crate) fn arrive(&mut self, now: Micros, request: Request) -> RequestState {
        let arrival = self.n_arrived;
        self.n_arrived += 1 + request.siblings.len() as u64;
        RequestState::new(now, arrival, request)
    }

    /// Takes a request back that was preempted.
    pub(crate) fn push(&mut self, request: RequestState) {
        self.waiting.push(request);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &RequestState> {
        self.waiting.iter()
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&RequestState> {
        self.iter().find(|request| request.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut RequestState> {
        self.find(|request| request.id == id)
    }

    /// The requests in the order in which they are admitted, with the rank of each now.
    pub(crate) fn in_order(&self, now: Micros, aging: Micros) -> Vec<(RequestId, Rank)> {
        let ranked = self.waiting.iter().map(|request| {
            let waited = now.0.saturating_sub(request.waits_since.0);
            (request, Rank::of(request.priority, waited, aging))
        });
        let mut ranked: Vec<(&RequestState, Rank)> = ranked.collect();
        ranked.sort_by_cached_key(|(request, rank)| {
            let counter = self.tenants.counter(request.tenant);
            (Reverse(*rank), counter, request.arrival)
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

    /// The limits of a tenant.
    pub(crate) fn limits(&self, tenant: TenantId) -> TenantLimits {
        self.tenants.limits(tenant)
    }

    /// The tokens that were computed for a tenant, divided by its weight.
    pub(crate) fn counter(&self, tenant: TenantId) -> u64 {
        self.tenants.counter(tenant)
    }

    /// A request of a tenant goes first, and so many of its tokens are to be computed.
    pub(crate) fn admit(&mut self, tenant: TenantId, n_tokens: usize) {
        self.tenants.admit(tenant, n_tokens);
    }

    /// So many tokens are computed for a tenant.
    pub(crate) fn charge(&mut self, tenant: TenantId, n_tokens: usize) {
        self.tenants.charge(tenant, n_tokens);
    }

    /// So many tokens that were charged are not computed yet.
    pub(crate) fn uncharge(&mut self, tenant: TenantId, n_tokens: usize) {
        self.tenants.uncharge(tenant, n_tokens);
    }
}
