//! [`GroupStore`]: a place that keeps groups.

use std::fmt;
use std::sync::Arc;

use crate::error::StoreError;
use crate::frame::SealedPayload;
use crate::key::GroupName;

/// What a store did with a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It keeps it now.
    New,
    /// It had it already.
    Known,
}

/// A place that keeps groups, as far as it has room. It may lose any at any time, and it may be
/// slow: a [`Tier`](crate::Tier) calls it, on a thread of its own.
///
/// What a store returns need not be what was stored: [`Group::open`](crate::Group::open) judges.
pub trait GroupStore: fmt::Debug + Send {
    /// True for each of these groups that is there.
    ///
    /// # Errors
    /// [`StoreError`], where the store does not work.
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError>;

    /// The frames of these groups, as far as they are there. Each counts as used.
    ///
    /// # Errors
    /// [`StoreError`], where the store does not work.
    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError>;

    /// Keeps a group. Others may go for it.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`], [`StoreError::Full`], or where the store does not work. The group
    /// is not there then, and no part of it.
    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError>;

    /// Keeps a group for this handle of the store alone, until it is evicted by its name or the
    /// handle is dropped. Other groups may go for it, and it goes for none.
    ///
    /// # Errors
    /// [`StoreError::Unpinnable`] where the store cannot do that; [`StoreError::Full`], or where
    /// the store does not work. The group is not there then, and no part of it.
    fn pin(&mut self, _name: GroupName, _sealed: &SealedPayload<'_>) -> Result<(), StoreError> {
        Err(StoreError::Unpinnable)
    }

    /// Forgets a group, where it is there.
    ///
    /// # Errors
    /// [`StoreError`], where the store does not work.
    fn evict(&mut self, name: GroupName) -> Result<(), StoreError>;
}
