//! Swapping: what the memory holds of a request that is preempted goes to the host, in place of
//! computing it again.
//!
//! The scheduler decides what goes and when it comes back; the caller has the bytes. Tokens that
//! others have, too, stay where they are: the bytes begin behind them. A disk takes what is beyond
//! half of the host's bytes, so that the other half is free when the next request has to go.
//! Invariant: the bytes on the host are at most
//! [`SchedulerConfig::swap_bytes`](crate::SchedulerConfig::swap_bytes), those on the disk
//! [`SchedulerConfig::swap_disk_bytes`](crate::SchedulerConfig::swap_disk_bytes), and each is given
//! back once. Knows no format and no file.

use kv_core::memory::Memory;

use super::share::running_sources;
use super::view::PartsView;
use crate::data::active::ActiveRequest;
use crate::data::config::SwapRows;
use crate::data::ids::RequestId;
use crate::data::request::SourceUse;
use crate::data::reuse::{PrefixUse, n_common};
use crate::data::state::Tier;
use crate::data::work::Swap;
use crate::parts::prefix::MIN_REUSED;
use crate::parts::swap::saved_bytes;

/// A state that is to be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateToSave {
    pub(crate) swap: Swap,
    /// The most bytes that it may have on the host.
    pub(crate) limit: u64,
}

/// The state of a running request that is to be saved before it is preempted, where the host has
/// room.
pub(crate) fn state_to_save<M: Memory>(
    parts: PartsView<'_, M>,
    id: RequestId,
) -> Option<StateToSave> {
    let n_host = saved_bytes(parts.requests(), Tier::Host);
    let limit = parts.config.swap_bytes.saturating_sub(n_host);
    let active = parts.running.get(id)?;
    let request = &active.request;
    // The prompt of several texts goes on under the name of any of them.
    let is_one = request.siblings.is_empty();
    let is_sound = is_one
        && !request.is_suspect
        && !request.wants_prompt_rows()
        && request.source == SourceUse::None;
    if limit == 0 || !is_sound || request.saved.is_some() {
        return None;
    }
    let n_tokens = active.n_done;
    let n_shared = match parts.free {
        Some(_) => n_held_by_others(parts, active),
        None => 0,
    };
    let (first, part) = if n_shared >= MIN_REUSED {
        (n_shared, parts.free)
    } else {
        (0, None)
    };
    // So few are computed sooner.
    if n_tokens < first + MIN_REUSED {
        return None;
    }
    let least = match parts.config.swap_rows {
        SwapRows::Exact => {
            let row_bytes = parts.prefix.row_bytes();
            parts.room.least_bytes(n_tokens - first, row_bytes)
        }
        // How much smaller is not known here.
        SwapRows::Rounded => 1,
    };
    let swap = Swap {
        request: id,
        seq: active.seq,
        part,
        first,
        n_tokens,
    };
    (least <= limit).then_some(StateToSave { swap, limit })
}

/// Number of the first tokens of a request that others have, too, where a copy of these alone is of
/// use.
fn n_held_by_others<M>(parts: PartsView<'_, M>, active: &ActiveRequest) -> usize {
    if active.request.is_shifted {
        return 0;
    }
    let PrefixUse::Within(salt) = active.request.prefix else {
        return 0;
    };
    if parts.room.is_cut_only_at_ends()
        || parts.room.has_streams()
        || !parts.config.prefix_cache.is_on()
    {
        return 0;
    }
    let held = active.held();
    let lines = parts.prefix.lines().filter(|line| line.salt == salt);
    let lines = lines.map(|line| n_common(&line.tokens, held));
    let others = running_sources(parts.running, parts.parked, active.request.prefix);
    let others = others.filter(|source| source.seq != active.seq);
    let others = others.map(|source| n_common(source.tokens, held));
    lines.chain(others).max().unwrap_or(0)
}

/// The waiting requests whose states go on to the disk, until half of the host's bytes are free:
/// first those that come back last.
pub(crate) fn states_to_spill<M>(parts: PartsView<'_, M>) -> Vec<RequestId> {
    let mut spilled = Vec::new();
    if parts.config.swap_disk_bytes == 0 {
        return spilled;
    }
    let mut n_host = saved_bytes(parts.requests(), Tier::Host);
    let mut n_disk = saved_bytes(parts.requests(), Tier::Disk);
    let order = parts.queue.in_order(parts.now, parts.config.aging);
    for (id, _) in order.into_iter().rev() {
        if n_host <= parts.config.swap_bytes / 2 {
            break;
        }
        let room = parts.config.swap_disk_bytes.saturating_sub(n_disk);
        let Some(state) = parts.queue.get(id).and_then(|waiting| waiting.saved) else {
            continue;
        };
        if state.tier == Tier::Disk || state.n_bytes > room {
            continue;
        }
        n_host -= state.n_bytes;
        n_disk += state.n_bytes;
        spilled.push(id);
    }
    spilled
}
