//! Checkpoints: where copies of a request are kept for others while it runs.
//!
//! Invariant: where cached prefixes can be cut anywhere, a request has no checkpoints but those at
//! which others wait for it.

use kv_core::SeqId;
use kv_core::memory::{Edit, Memory};

use super::room::Room;
use super::share::MIN_GAIN;
use super::view::PartsView;
use crate::data::active::ActiveRequest;
use crate::data::edits::copy;
use crate::data::ids::{RequestId, Salt};
use crate::data::reuse::PrefixUse;
use crate::data::state::RequestState;
use crate::parts::prefix::MIN_REUSED;

/// The work at the checkpoint where a request is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CheckpointWork {
    /// None: it goes on.
    Pass(RequestId),
    /// A cached prefix has to make room.
    Evict,
    /// A copy is kept in this sequence, and the request goes on.
    Keep {
        request: RequestId,
        seq: SeqId,
        edit: Edit,
        salt: Salt,
    },
}

/// The work at the checkpoint where the first request is that is at one of its own, or where the
/// prompts of requests that wait for it part from it.
pub(crate) fn checkpoint_work<M: Memory>(parts: PartsView<'_, M>) -> Option<CheckpointWork> {
    let is_due = |r: &&ActiveRequest| r.checkpoints.contains(&r.n_done);
    let active = parts.running.iter().find(is_due)?;
    let request = active.id();
    let tokens = active.held();
    let PrefixUse::Within(salt) = active.request.prefix else {
        return Some(CheckpointWork::Pass(request));
    };
    let is_useless = tokens.len() < MIN_REUSED
        || !active.is_exact()
        || !parts.config.prefix_cache.is_on()
        || parts.prefix.has(tokens, salt);
    if is_useless {
        return Some(CheckpointWork::Pass(request));
    }
    let Some(seq) = parts.free else {
        return Some(if parts.can_evict() {
            CheckpointWork::Evict
        } else {
            CheckpointWork::Pass(request)
        });
    };
    let edit = copy(active.seq, seq, tokens.len());
    if parts.memory.check(&edit).is_err() {
        return Some(CheckpointWork::Pass(request));
    }
    Some(CheckpointWork::Keep {
        request,
        seq,
        edit,
        salt,
    })
}

/// After how many of its tokens copies of a request are to be kept, where windows or states can
/// only be copied as they are: where its messages end, where it parts from what was computed
/// before, behind its last picture, and one token before the end of its prompt, so that the same
/// prompt finds it again.
pub(crate) fn checkpoints_of(
    request: &RequestState,
    n_done: usize,
    n_common: usize,
    room: &Room,
) -> Vec<usize> {
    let n_prompt = request.n_prompt;
    if !room.is_cut_only_at_ends() || n_prompt <= n_done + 1 {
        return Vec::new();
    }
    let mut checkpoints = vec![n_prompt - 1];
    let is_apart = |a: usize, b: usize| a.abs_diff(b) >= MIN_GAIN;
    let inside = n_done + MIN_GAIN..n_prompt - 1;
    // What parts there finds nothing of use behind it.
    checkpoints.extend(request.parting.filter(|place| inside.contains(place)));
    // Each costs a copy, so of two that are close the first in this order is kept.
    for place in std::iter::once(n_common).chain(request.checkpoints.iter().rev().copied()) {
        if inside.contains(&place) && checkpoints.iter().all(|&other| is_apart(place, other)) {
            checkpoints.push(place);
        }
    }
    checkpoints
}
