//! A store of cached prefixes over memory, disk and other machines.
//!
//! A prefix is stored in groups of [`GROUP_TOKENS`] tokens, and smaller ones behind the last whole
//! one. [`GroupNamer`] names a group by a keyed
//! hash of its tokens, of all tokens before it, and of all that its bytes depend on ([`Identity`]).
//! So the same prefix has the same names in every process with the same [`StoreKey`], and a group
//! that is found under its name is the right one. Its bytes are sealed in a frame ([`Group`]): what
//! is damaged, cut off, forged, of another version or of another name is refused before anybody
//! parses it.
//!
//! A [`GroupStore`] keeps groups somewhere: [`HostStore`] in memory, [`DirectoryStore`] in files,
//! and, with the feature `tier`, `remote` on other machines. A [`Tier`] runs one on threads of its
//! own: jobs go in, results come out, and nobody who submits a job waits. [`Rates`] learns how fast
//! a tier is, and [`FetchEstimate::choose`] decides whether a fetch is faster than computing.
//!
//! A tier also keeps bytes that are no prefix: those of a request that has to wait. They are pinned
//! ([`Job::Pin`]): sealed in the same frames, but only this process finds them, they go for no
//! others, and end with it.
//!
//! [`EvictionDuel`] chooses which cached prefix is evicted from the cells of a memory.
//!
//! Invariant: whatever a store does, a group that comes out of a tier is what went in under its
//! name. Knows no engine: what is in a group is bytes to it.

mod counts;
mod directory;
mod duel;
mod error;
mod frame;
mod host;
mod job;
mod key;
mod ledger;
mod rates;
#[cfg(feature = "tier")]
pub mod remote;
mod store;
mod sync;
mod tier;

pub use counts::TierCounts;
pub use directory::{DirectoryConfig, DirectoryStore, Disk, SystemDisk};
pub use duel::{Candidate, Eviction, EvictionDuel, EvictionRule};
pub use error::StoreError;
pub use frame::{FrameFault, Group, MAX_PAYLOAD, SealedPayload};
pub use host::{HostStore, ReservedBytes};
pub use job::{Busy, Job, JobId, Outcome};
pub use key::{
    GROUP_TOKENS, GroupKind, GroupName, GroupNamer, Identity, MIN_SECRET, StoreKey, TAIL_TOKENS,
};
pub use ledger::Ledger;
pub use rates::{FetchChoice, FetchEstimate, Rates};
pub use store::{GroupStore, Kept};
pub use tier::{Tier, TierConfig};
