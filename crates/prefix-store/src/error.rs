//! [`StoreError`]: why a store or a tier cannot do what it is asked.

use std::io;
use std::path::PathBuf;

use crate::frame::FrameFault;
use crate::key::{GroupName, MIN_SECRET};

/// Why a store or a tier cannot do what it is asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be reached; it is asked again after a while.
    #[error("the store cannot be reached: {reason}")]
    Unreachable {
        /// What failed.
        reason: String,
    },
    /// The store did not answer in time.
    #[error("the store did not answer in time")]
    TimedOut,
    /// There is no room.
    #[error("the store is full")]
    Full,
    /// A store that keeps no groups for one process alone.
    #[error("this store keeps no groups for one process alone: a directory does")]
    Unpinnable,
    /// A group that is not what was stored.
    #[error("the group {name} is refused: {fault}")]
    Refused {
        /// The name that was asked for.
        name: GroupName,
        /// What is wrong with it.
        fault: FrameFault,
    },
    /// A group that is larger than any may be.
    #[error("a group of {n_bytes} bytes is larger than the {max} bytes that one may have")]
    TooLarge {
        /// Its bytes.
        n_bytes: u64,
        /// The most that one may have.
        max: u64,
    },
    /// A secret that protects nothing.
    #[error("a key of {n_bytes} bytes is too short: {MIN_SECRET} random bytes are needed")]
    ShortKey {
        /// Its bytes.
        n_bytes: usize,
    },
    /// A file or directory that others could have written or can read.
    #[error("'{}' is refused: {reason}", .path.display())]
    Unsafe {
        /// The file or directory.
        path: PathBuf,
        /// Why it is not safe, and what to do.
        reason: &'static str,
    },
    /// The address of a store that cannot be.
    #[error("the store '{url}' cannot be used: {reason}")]
    Url {
        /// The address, without its password.
        url: String,
        /// Why not.
        reason: String,
    },
    /// The system refused something else.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
}

impl StoreError {
    /// The error of a system call; a full disk is [`StoreError::Full`].
    pub(crate) fn system(what: impl Into<String>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            io::ErrorKind::TimedOut => Self::TimedOut,
            _ => Self::System {
                what: what.into(),
                source,
            },
        }
    }

    /// True if the store itself does not work, so that it is left alone for a while.
    pub fn is_down(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. } | Self::TimedOut | Self::System { .. }
        )
    }
}
