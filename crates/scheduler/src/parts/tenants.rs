//! [`Tenants`]: how much was computed for each tenant.
//!
//! Each tenant has a virtual token counter, as in VTC (fair queueing by tokens): the prompt of a
//! request counts when it is admitted, without what was reused, and the text token by token, both
//! divided by the tenant's weight. The tenant with the lowest counter goes first. One that comes
//! back after a pause counts from where the last one was that went first, so that it saves nothing
//! up. Invariant: counters never go back. Knows nothing of queues and of memory.

use std::collections::BTreeMap;

use crate::data::ids::TenantId;
use crate::data::tenant::{Tenant, TenantLimits};

/// So much counts a token for a weight of 1.
const PER_TOKEN: u64 = 1 << 20;

/// So many tenants are remembered while nothing of theirs runs or waits.
const MAX_IDLE: usize = 1024;

/// The accounts of all tenants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tenants {
    accounts: BTreeMap<TenantId, Account>,
    /// The highest counter of a tenant that went first.
    floor: u64,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    limits: TenantLimits,
    counter: u64,
}

impl Account {
    /// The part of the counter for so many tokens.
    fn price(&self, n_tokens: usize) -> u64 {
        let tokens = (n_tokens as u64).saturating_mul(PER_TOKEN);
        tokens / u64::from(self.limits.weight.get())
    }
}

impl Tenants {
    /// A request of a tenant comes; `is_active` is whether others of a tenant run or wait.
    pub(crate) fn enter(&mut self, tenant: Tenant, is_active: impl Fn(TenantId) -> bool) {
        let Tenant { id, limits } = tenant;
        let floor = self.floor;
        if self.accounts.len() >= MAX_IDLE {
            // All below the floor would come back at it.
            let is_ahead = |account: &Account| account.counter > floor;
            self.accounts
                .retain(|&id, account| is_ahead(account) || is_active(id));
        }
        let account = self.accounts.entry(id).or_insert(Account {
            limits,
            counter: floor,
        });
        account.limits = limits;
        if !is_active(id) {
            account.counter = account.counter.max(floor);
        }
    }

    /// A request of a tenant goes first, and so many of its tokens are to be computed.
    pub(crate) fn admit(&mut self, id: TenantId, n_tokens: usize) {
        if let Some(account) = self.accounts.get(&id) {
            self.floor = self.floor.max(account.counter);
        }
        self.charge(id, n_tokens);
    }

    /// So many tokens are computed for a tenant.
    pub(crate) fn charge(&mut self, id: TenantId, n_tokens: usize) {
        if let Some(account) = self.accounts.get_mut(&id) {
            account.counter = account.counter.saturating_add(account.price(n_tokens));
        }
    }

    /// So many tokens that were charged are not computed yet.
    pub(crate) fn uncharge(&mut self, id: TenantId, n_tokens: usize) {
        if let Some(account) = self.accounts.get_mut(&id) {
            account.counter = account.counter.saturating_sub(account.price(n_tokens));
        }
    }

    /// The tokens that were computed for a tenant, divided by its weight.
    pub(crate) fn counter(&self, id: TenantId) -> u64 {
        self.accounts.get(&id).map_or(0, |account| account.counter)
    }

    /// The limits of a tenant.
    pub(crate) fn limits(&self, id: TenantId) -> TenantLimits {
        let account = self.accounts.get(&id);
        account.map_or_else(TenantLimits::default, |account| account.limits)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn tenant(id: u64, weight: u32) -> Tenant {
        Tenant {
            id: TenantId(id),
            limits: TenantLimits {
                weight: NonZeroU32::new(weight).unwrap(),
                ..TenantLimits::default()
            },
        }
    }

    #[test]
    fn tokens_count_by_weight_and_a_pause_saves_nothing_up() {
        let mut tenants = Tenants::default();
        tenants.enter(tenant(1, 1), |_| false);
        tenants.enter(tenant(2, 4), |_| false);
        tenants.charge(TenantId(1), 10);
        tenants.charge(TenantId(2), 40);
        let counter = |tenants: &Tenants, id| tenants.counter(TenantId(id));
        assert_eq!(counter(&tenants, 1), 10 * PER_TOKEN);
        assert_eq!(counter(&tenants, 2), counter(&tenants, 1));
        tenants.admit(TenantId(1), 5);
        // One that comes begins where the last one was that went first.
        tenants.enter(tenant(3, 1), |_| false);
        assert_eq!(counter(&tenants, 3), 10 * PER_TOKEN);
        // One that went on stays where it is.
        tenants.enter(tenant(1, 1), |_| true);
        assert_eq!(counter(&tenants, 1), 15 * PER_TOKEN);
    }

    #[test]
    fn idle_tenants_are_forgotten() {
        let mut tenants = Tenants::default();
        for id in 0..3000 {
            tenants.enter(tenant(id, 1), |_| false);
            assert!(tenants.accounts.len() <= MAX_IDLE);
        }
    }

    #[test]
    fn those_that_are_active_or_ahead_are_remembered() {
        let mut tenants = Tenants::default();
        let (active, ahead) = (TenantId(5000), TenantId(5001));
        tenants.enter(tenant(active.0, 7), |_| true);
        tenants.enter(tenant(ahead.0, 1), |_| false);
        tenants.charge(ahead, 10);
        for id in 0..3000 {
            tenants.enter(tenant(id, 1), |id| id == active);
        }
        assert_eq!(tenants.limits(active).weight.get(), 7);
        assert_eq!(tenants.counter(ahead), 10 * PER_TOKEN);
        assert_eq!(tenants.counter(TenantId(0)), 0, "it is not known");
    }

    #[test]
    fn who_comes_back_begins_no_lower_than_the_last_that_went_first() {
        let mut tenants = Tenants::default();
        for id in 1..=3 {
            tenants.enter(tenant(id, 1), |_| false);
        }
        tenants.charge(TenantId(1), 10);
        tenants.admit(TenantId(1), 0);
        tenants.charge(TenantId(3), 30);
        let mut after = |id, is_active: bool| {
            tenants.enter(tenant(id, 4), |_| is_active);
            let weight = tenants.limits(TenantId(id)).weight.get();
            (tenants.counter(TenantId(id)) / PER_TOKEN, weight)
        };
        assert_eq!(after(2, true), (0, 4), "it has not paused");
        assert_eq!(after(2, false), (10, 4));
        assert_eq!(after(3, false), (30, 4));
    }

    #[test]
    fn what_is_put_off_costs_nothing() {
        let mut tenants = Tenants::default();
        tenants.enter(tenant(1, 4), |_| false);
        tenants.charge(TenantId(1), 40);
        tenants.charge(TenantId(1), 7);
        tenants.uncharge(TenantId(1), 7);
        assert_eq!(tenants.counter(TenantId(1)), 10 * PER_TOKEN);
    }
}
