//! [`Job`]: what a tier is to do, and [`Outcome`]: what became of it. Plain data.

use std::sync::Arc;
use std::time::Instant;

use crate::error::StoreError;
use crate::frame::Group;
use crate::key::GroupName;

/// The number of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// What a tier is to do.
#[derive(Clone, Debug)]
pub enum Job {
    /// Count how many of these groups, from the first on, are there.
    Probe {
        /// Its number, different from those of all jobs under way.
        id: JobId,
        /// The groups of a prefix, in order.
        names: Vec<GroupName>,
        /// The time from which no request waits for it.
        deadline: Instant,
    },
    /// Tell which of these groups are there.
    Find {
        /// Its number, different from those of all jobs under way.
        id: JobId,
        /// The groups, in any order.
        names: Vec<GroupName>,
        /// The time from which no request waits for it.
        deadline: Instant,
    },
    /// Fetch these groups, up to the first that is not there.
    Get {
        /// Its number, different from those of all jobs under way.
        id: JobId,
        /// The groups of a prefix, in order.
        names: Vec<GroupName>,
        /// The time from which no request waits for it.
        deadline: Instant,
    },
    /// Keep a group. One that waits to be written already is not written twice.
    Put {
        /// Its name.
        name: GroupName,
        /// Its bytes.
        payload: Arc<[u8]>,
    },
    /// Keep bytes as groups of one handle of the store ([`GroupStore::pin`]), however many wait.
    /// Nothing is kept where the job alone has the bytes when its turn comes: they are not needed
    /// any more.
    ///
    /// [`GroupStore::pin`]: crate::GroupStore::pin
    Pin {
        /// Its number, different from those of all jobs under way.
        id: JobId,
        /// The names of the groups, each of which gets as many of the bytes; none that is there.
        names: Vec<GroupName>,
        /// The bytes.
        payload: Arc<Vec<u8>>,
    },
    /// Forget groups, after all that was to be written before.
    Evict {
        /// Their names.
        names: Vec<GroupName>,
    },
}

/// What became of a job.
#[derive(Debug)]
pub enum Outcome {
    /// So many groups, from the first on, are there.
    Probed {
        /// The job.
        id: JobId,
        /// How many.
        n_found: usize,
    },
    /// The groups that are there.
    Found {
        /// The job.
        id: JobId,
        /// True for each that is, in the order of the job.
        is_there: Vec<bool>,
    },
    /// The groups that are there; fewer than were asked for is no error.
    Got {
        /// The job.
        id: JobId,
        /// From the first on.
        groups: Vec<Group>,
    },
    /// All groups are kept.
    Pinned {
        /// The job.
        id: JobId,
    },
    /// The job failed: the tokens are computed.
    Failed {
        /// The job.
        id: JobId,
        /// Why.
        error: StoreError,
    },
}

impl Outcome {
    /// The job that it is of.
    pub fn id(&self) -> JobId {
        match self {
            Self::Probed { id, .. }
            | Self::Found { id, .. }
            | Self::Got { id, .. }
            | Self::Pinned { id }
            | Self::Failed { id, .. } => *id,
        }
    }
}

/// Too much waits to be written, or the tier ends: the job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;
