//! [`StoredState`]: the saved state of one preempted request, in memory or as the groups of a tier.
//!
//! Invariant: groups that are joined have exactly its bytes. Knows no job of a tier.

use std::sync::Arc;

use cellar_prefix_store::{Group, GroupName, JobId, MAX_PAYLOAD, ReservedBytes};
use kv_core::SeqId;

/// A saved state of a preempted request.
#[derive(Debug)]
pub(super) struct StoredState {
    /// Tells it from every other state of this store. A state has one job at a time.
    pub(super) job: JobId,
    pub(super) seq: SeqId,
    pub(super) n_bytes: u64,
    pub(super) bytes: Option<StateBytes>,
    /// The bytes of the host's tier that these are.
    pub(super) reserved: Option<ReservedBytes>,
    pub(super) pin: Pin,
}

/// The way of a state to a tier and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pin {
    None,
    BeingWritten,
    Complete,
    BeingRead,
    Unreadable,
}

/// The bytes of a state in memory.
#[derive(Clone, Debug)]
pub(super) enum StateBytes {
    Saved(Arc<Vec<u8>>),
    Read(Group),
}

/// A state in memory.
#[derive(Debug)]
pub(super) struct HeldState {
    /// The sequence that it was saved of.
    pub(super) seq: SeqId,
    pub(super) bytes: StateBytes,
}

/// The bytes of a state that was saved.
#[derive(Debug)]
pub(super) struct SavedBytes {
    pub(super) bytes: Vec<u8>,
    pub(super) reserved: Option<ReservedBytes>,
}

impl StateBytes {
    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Saved(bytes) => bytes,
            Self::Read(group) => group.payload(),
        }
    }
}

impl StoredState {
    /// The groups that it is pinned as.
    pub(super) fn names(&self) -> Vec<GroupName> {
        let n_pieces = self.n_bytes.div_ceil(MAX_PAYLOAD).max(1);
        let name = |piece: u64| {
            let mut name = [0; 32];
            let numbers = [self.job.0.to_be_bytes(), piece.to_be_bytes()].concat();
            name.iter_mut()
                .zip(numbers)
                .for_each(|(to, from)| *to = from);
            GroupName(name)
        };
        (0..n_pieces).map(name).collect()
    }

    /// Its bytes, where these groups are all of them.
    pub(super) fn joined(&self, mut groups: Vec<Group>) -> Option<StateBytes> {
        let n_bytes = groups.iter().map(|group| group.payload().len() as u64);
        if n_bytes.sum::<u64>() != self.n_bytes {
            return None;
        }
        if groups.len() == 1 {
            return groups.pop().map(StateBytes::Read);
        }
        let payloads: Vec<&[u8]> = groups.iter().map(Group::payload).collect();
        Some(StateBytes::Saved(Arc::new(payloads.concat())))
    }
}
