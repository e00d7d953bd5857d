//! The requests and cached prefixes of a scheduler, to look at, and [`RestoredPrefix`].
//!
//! Plain data.

use std::sync::Arc;

use kv_core::{SeqId, TokenId};

use super::ids::{Micros, RequestId, Salt, TenantId};
use super::request::Priority;
use super::reuse::PrefixUse;

/// A cached prefix, to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedPrefix<'a> {
    /// Its sequence, which holds exactly its tokens.
    pub seq: SeqId,
    /// The salt of the requests that may share it.
    pub salt: Salt,
    /// The request whose tokens they were.
    pub request: RequestId,
    /// Its tokens.
    pub tokens: &'a [TokenId],
    /// Number of them that were the prompt of the request.
    pub n_prompt: usize,
    /// Requests that it was used for.
    pub n_hits: u32,
    /// When it was used last, or else kept.
    pub last_used: Micros,
}

/// A request that waits, to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingRequest<'a> {
    /// The request.
    pub id: RequestId,
    /// Its urgency.
    pub priority: Priority,
    /// Its prompt and the tokens chosen since.
    pub tokens: &'a [TokenId],
    /// Since when it waits.
    pub since: Micros,
    /// True if it ran before, and was preempted.
    pub was_admitted: bool,
}

/// A request that has a sequence, to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningRequest<'a> {
    /// The request.
    pub id: RequestId,
    /// Its sequence.
    pub seq: SeqId,
    /// Its prompt and the tokens chosen since.
    pub tokens: &'a [TokenId],
    /// Number of them that the memory holds.
    pub n_done: usize,
    /// Number of them that are the prompt.
    pub n_prompt: usize,
    /// With whom it shares cached prefixes.
    pub prefix: PrefixUse,
    /// The same for texts that share the cells of their prompt.
    pub group: RequestId,
    /// The tenant whose request it is.
    pub tenant: TenantId,
}

/// A parked request that has a sequence, to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkedRequest<'a> {
    /// Its sequence.
    pub seq: SeqId,
    /// Its tokens.
    pub tokens: &'a [TokenId],
    /// Number of them that the memory holds, the first ones.
    pub n_done: usize,
}

/// A cached prefix that was evicted, and is in the memory until the next edits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictedPrefix {
    /// The sequence that holds its tokens.
    pub seq: SeqId,
    /// Its tokens.
    pub tokens: Arc<[TokenId]>,
    /// Number of them that were the prompt of a request.
    pub n_prompt: usize,
    /// The salt of the requests that may share it.
    pub salt: Salt,
}

/// A cached prefix that a memory holds again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredPrefix {
    /// The sequence that holds exactly its tokens.
    pub seq: SeqId,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// The salt of the requests that may share it.
    pub salt: Salt,
    /// Under which number it is shown.
    pub request: RequestId,
    /// Requests that it was used for.
    pub n_hits: u32,
}
