//! The requests and cached prefixes of a [`Scheduler`], to look at.

use kv_core::{SeqId, TokenId};

use crate::prefix::{PrefixUse, Salt};
use crate::request::{Micros, Priority, RequestId};
use crate::scheduler::Scheduler;
use crate::tenant::TenantId;

impl Scheduler {
    /// The requests that have a sequence, what goes first first.
    pub fn running(&self) -> impl Iterator<Item = RunningRequest<'_>> {
        self.running.iter().map(|r| RunningRequest {
            id: r.request.id,
            seq: r.seq,
            tokens: &r.request.tokens,
            n_done: r.n_done,
            n_prompt: r.request.n_prompt,
            prefix: r.request.prefix,
            group: r.request.group.unwrap_or(r.request.id),
            tenant: r.request.tenant,
        })
    }

    /// The requests that wait, those that were preempted, too.
    pub fn waiting(&self) -> impl Iterator<Item = WaitingRequest<'_>> {
        self.queue.iter().map(|request| WaitingRequest {
            id: request.id,
            priority: request.priority,
            tokens: &request.tokens,
            since: request.waits_since,
            was_admitted: request.was_admitted,
        })
    }

    /// The cached prefixes.
    pub fn cached(&self) -> impl Iterator<Item = CachedPrefix<'_>> {
        self.cache.lines().map(|line| CachedPrefix {
            seq: line.seq,
            salt: line.salt,
            request: line.request,
            tokens: &line.tokens,
            n_hits: line.n_hits,
            last_used: line.last_used,
        })
    }
}

/// A cached prefix, to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedPrefix<'a> {
    /// Its sequence, which holds exactly its tokens.
    pub seq: SeqId,
    /// Who may share it.
    pub salt: Salt,
    /// The request whose tokens they were.
    pub request: RequestId,
    /// Its tokens.
    pub tokens: &'a [TokenId],
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
    /// Which requests go before it.
    pub priority: Priority,
    /// Its prompt and the tokens chosen since.
    pub tokens: &'a [TokenId],
    /// Since when it waits.
    pub since: Micros,
    /// Whether it ran before, and was preempted.
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
    /// How many of them the memory holds.
    pub n_done: usize,
    /// How many of them are the prompt.
    pub n_prompt: usize,
    /// With whom it shares cached prefixes.
    pub prefix: PrefixUse,
    /// The same for texts that share the cells of their prompt.
    pub group: RequestId,
    /// Whose it is.
    pub tenant: TenantId,
}
