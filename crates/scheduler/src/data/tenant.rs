//! [`Tenant`]: whose request it is, and what that tenant gets.
//!
//! Plain data. What was computed for each tenant is in `parts/tenants.rs`.

use std::num::NonZeroU32;

use super::error::RequestError;
use super::ids::TenantId;

/// The share of a tenant next to others, and its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantLimits {
    /// Its share next to that of others who want more than they get.
    pub weight: NonZeroU32,
    /// Texts of it that run at once, at most; `None` for as many as run at all.
    pub max_running: Option<NonZeroU32>,
    /// Requests of it that may wait; `None` for as many as may wait at all.
    pub max_queued: Option<NonZeroU32>,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            weight: NonZeroU32::MIN,
            max_running: None,
            max_queued: None,
        }
    }
}

impl TenantLimits {
    /// Checks that a request of the tenant may wait with so many others of it.
    ///
    /// # Errors
    /// [`RequestError::TenantBusy`], with the numbers.
    pub fn check_queue(&self, queued: usize) -> Result<(), RequestError> {
        match self.max_queued.map(|limit| limit.get() as usize) {
            Some(limit) if queued >= limit => Err(RequestError::TenantBusy { queued, limit }),
            _ => Ok(()),
        }
    }

    /// True if one more text of the tenant may run next to so many.
    pub(crate) fn may_run(&self, n_running: usize) -> bool {
        let limit = self.max_running.map(|limit| limit.get() as usize);
        limit.is_none_or(|limit| n_running < limit)
    }
}

/// A tenant, with the limits that it has from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tenant {
    /// The tenant.
    pub id: TenantId,
    /// Its share and limits.
    pub limits: TenantLimits,
}
