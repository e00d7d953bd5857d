//! What answers are called, and when they were made.
//!
//! Invariant: no two ids of a process are equal but by chance. Knows no answer.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// The id of an answer.
pub(crate) fn random_id(prefix: &str) -> String {
    let half = || RandomState::new().build_hasher().finish();
    format!(
        "{prefix}{:016x}{:08x}",
        half(),
        half() & u64::from(u32::MAX)
    )
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
