//! [`Viewers`]: the places of those who watch.
//!
//! Invariant: no more than [`MAX_VIEWERS`] watch at once, of one tenant no more than it may.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::MAX_VIEWERS;
use crate::auth::Tenant;
use crate::error::ApiError;

/// Seconds after which a viewer without a place may try again.
const RETRY_SECONDS: u64 = 10;

/// Who watches. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Viewers(Arc<Mutex<Vec<Tenant>>>);

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct ViewPlace {
    viewers: Viewers,
    tenant: Tenant,
}

impl Viewers {
    /// A place for a tenant, which may have so many.
    ///
    /// # Errors
    /// [`ApiError::busy`].
    pub(crate) fn place(&self, tenant: Tenant, limit: usize) -> Result<ViewPlace, ApiError> {
        let mut watching = self.lock();
        if watching.len() >= MAX_VIEWERS {
            let message = format!("{MAX_VIEWERS} watch already");
            return Err(ApiError::busy(message, RETRY_SECONDS));
        }
        if watching.iter().filter(|other| **other == tenant).count() >= limit {
            let message = format!("{limit} watch already with this key");
            return Err(ApiError::busy(message, RETRY_SECONDS));
        }
        watching.push(tenant);
        Ok(ViewPlace {
            viewers: self.clone(),
            tenant,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Tenant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ViewPlace {
    fn drop(&mut self) {
        let mut watching = self.viewers.lock();
        if let Some(at) = watching.iter().position(|other| *other == self.tenant) {
            watching.swap_remove(at);
        }
    }
}
