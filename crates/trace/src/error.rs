//! [`TraceError`]: why a trace is not read or not replayed.

use cellar_scheduler::RequestError;
use kv_core::memory::{MemoryConfigError, Refusal};

/// Why a trace is not read or not replayed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A trace is none that can be read.
    #[error("the trace is wrong at byte {at}: {what}")]
    Wrong {
        /// The place in the file, in bytes.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// A trace that can be read cannot be replayed in this way.
    #[error("the trace cannot be replayed in this way: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// The limits of the trace suit no scheduler.
    #[error(transparent)]
    Scheduler(#[from] RequestError),
    /// There is no memory of this size.
    #[error(transparent)]
    MemorySize(#[from] MemoryConfigError),
    /// The memory refuses what the scheduler planned, which no sound trace leads to.
    #[error(transparent)]
    Memory(#[from] Refusal),
}
