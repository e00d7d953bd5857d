//! States: what sequences remember, as bytes that another process can go on from.
//!
//! A state holds which tokens lie where ([`Snapshot`]), the rows themselves, recurrent states with
//! their snapshots, the ids of the tokens as far as the caller knows them, and a [`Fingerprint`] of
//! the model that computed it all. `docs/state-format.md` describes the bytes.
//!
//! Saving is one pass over the rows, into anything that takes bytes. Reading has two halves:
//! [`SavedState::parse`] checks every byte and copies no rows; [`Memory::restore`] says which rows
//! are to be written, and [`SavedState::write_rows`] hands them out, converted where rows are
//! stored in another way here. Invariant: whatever the bytes are, parsing ends in a value or an
//! error; it takes memory in proportion to the bytes that are there. Knows neither files nor
//! devices.
//!
//! [`Memory::restore`]: kv_core::memory::Memory::restore
//! [`Snapshot`]: kv_core::memory::Snapshot

mod convert;
mod error;
mod fingerprint;
mod frame;
mod read;
#[cfg(test)]
mod refusals;
mod rows;
#[cfg(test)]
mod same_again;
mod snapshot;
#[cfg(test)]
mod tests;
mod write;
mod xxh64;

use serde::{Deserialize, Serialize};

pub use error::StateError;
pub use fingerprint::{Fingerprint, RopeRun, WeightsId};
pub use read::{SavedRows, SavedState};
pub use rows::{RowEncoding, RowFormat};
pub use write::{StateToSave, check_kv_type, check_state_type, save};

use crate::{BackendError, RowSpan};
use kv_core::ids::{SeqId, TokenId};

/// The version of the format that this library writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// Gives the stored bytes of a span of rows, as [`Backend::read_rows`] does.
///
/// [`Backend::read_rows`]: crate::Backend::read_rows
pub type ReadRows<'f> = dyn FnMut(RowSpan, &mut [u8]) -> Result<(), BackendError> + 'f;

/// Takes the bytes of a span of rows, as [`Backend::write_rows`] does.
///
/// [`Backend::write_rows`]: crate::Backend::write_rows
pub type WriteRows<'f> = dyn FnMut(RowSpan, &[u8]) -> Result<(), BackendError> + 'f;

/// The tokens of a sequence, as far as its owner knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeqTokens {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens that were evaluated, in the order in which they came. Some may be forgotten since.
    pub evaluated: Vec<TokenId>,
    /// Tokens that come next, but were not evaluated yet.
    pub pending: Vec<TokenId>,
}
