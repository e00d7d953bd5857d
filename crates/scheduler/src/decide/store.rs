//! What a store of prefixes gives to requests that wait: which tokens are fetched, and how they
//! come into the memory.
//!
//! A request that waits for a store has no sequence and no cells: its bytes are fetched while it is
//! in the queue, and restored when it could be admitted, into a cached prefix that it then begins
//! with as with any other. Invariant: a request waits only while its bytes are on their way, and
//! restorations for it are bounded, so it is admitted whatever the store does.

use kv_core::{SeqId, TokenId};

use super::share::running_sources;
use super::view::PartsView;
use crate::data::edits::copy;
use crate::data::ids::RequestId;
use crate::data::reuse::{PrefixUse, n_common};
use crate::data::state::RequestState;
use crate::data::stored::{StoreWait, StoredTokens};
use crate::data::work::StoredPrefix;
use crate::parts::prefix::{Holder, PrefixCache};

/// Requests whose tokens are on their way, or wait to be restored.
const MAX_FETCHES: usize = 8;

/// The request whose tokens are fetched next: that needs them, or will as far as is known.
pub(crate) fn next_fetch<M>(parts: PartsView<'_, M>) -> Option<RequestId> {
    let is_due = |request: &&RequestState| match request.store {
        StoreWait::Needed(_) => true,
        StoreWait::Found(stored) => {
            let n_held = n_held(parts, request.prefix, &request.tokens);
            stored.base(n_held).is_some()
        }
        _ => false,
    };
    let fetching = parts.queue.iter();
    let n_fetching = fetching.filter(|request| request.store.is_fetching());
    if n_fetching.count() >= MAX_FETCHES {
        return None;
    }
    parts.queue.iter().find(is_due).map(|request| request.id)
}

/// Number of the first of these tokens that the memory holds.
pub(crate) fn n_held<M>(parts: PartsView<'_, M>, prefix: PrefixUse, tokens: &[TokenId]) -> usize {
    let PrefixUse::Within(salt) = prefix else {
        return 0;
    };
    let n_cached = if parts.room.is_cut_only_at_ends() {
        parts.prefix.longest_end(tokens, salt)
    } else {
        parts.prefix.longest(tokens, salt)
    };
    let running = running_sources(parts.running, parts.parked, prefix);
    let n_running = running.map(|source| n_common(source.tokens, tokens));
    n_running.max().unwrap_or(0).max(n_cached)
}

/// The way of fetched tokens into the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredWork {
    /// They are restored.
    Restore(StoredPrefix),
    /// A cached prefix has to make room.
    Evict,
    /// Texts that go on come first.
    Later,
    /// There is nothing more to restore, or no room.
    Over,
}

/// The beginning of a request without its store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldPrefix {
    pub(crate) request: RequestId,
    /// The sequence that has it.
    pub(crate) from: Option<(SeqId, Holder)>,
    pub(crate) n_held: usize,
}

/// The way of these tokens into the memory, for a request that begins with what it holds of them.
pub(crate) fn stored_work(
    prefix: &PrefixCache,
    free: Option<SeqId>,
    stored: StoredTokens,
    held: HeldPrefix,
) -> StoredWork {
    let Some(base) = stored.base(held.n_held) else {
        return StoredWork::Over;
    };
    let work = |seq, copy| {
        StoredWork::Restore(StoredPrefix {
            request: held.request,
            seq,
            copy,
            n_held: base,
            n_tokens: stored.n_tokens,
        })
    };
    // A cached prefix that is a part of it becomes longer.
    if let Some((seq, Holder::Line)) = held.from
        && base > 0
        && prefix.n_tokens(seq) == Some(base)
    {
        return work(seq, None);
    }
    match (free, held.from) {
        (Some(to), Some((from, _))) if base > 0 => work(to, Some(copy(from, to, base))),
        (Some(to), _) => work(to, None),
        (None, _) => StoredWork::Evict,
    }
}
