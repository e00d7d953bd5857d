//! Several texts of one prompt: it is computed once, then each text but the first starts with a
//! copy of the sequence.
//!
//! Until the prompt is complete, the request stands for all its texts; one that is cancelled hands
//! it to the next. A copy shares the cells of the prompt. A text for which there is no sequence or
//! no room waits, as after a preemption. Invariant: a copy is made before its original goes on, so
//! it holds the prompt and nothing else, also where windows and states can only be copied at their
//! ends.

use kv_core::SeqId;
use kv_core::memory::{Edit, Memory};

use super::room::Need;
use super::view::PartsView;
use crate::data::active::{ActiveRequest, SharedPrefix};
use crate::data::edits::copy;

/// The start of the next text that waits for its copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ForkStart {
    /// A cached prefix has to make room.
    Evict,
    /// It begins in this sequence.
    Copy {
        seq: SeqId,
        edit: Edit,
        shared: SharedPrefix,
    },
    /// It waits.
    Wait,
}

/// The start of the next text that waits for its copy.
pub(crate) fn fork_start<M: Memory>(parts: PartsView<'_, M>) -> Option<ForkStart> {
    let fork = parts.running.forks().first()?;
    let (from, n_prompt) = (fork.from, fork.request.n_prompt);
    let is_original = |r: &&ActiveRequest| {
        r.seq == from && r.n_done == n_prompt && r.request.group == fork.request.group
    };
    let original = parts.running.iter().find(is_original);
    let shared = original.map(|r| r.shared.cut(n_prompt));
    let need = Need {
        n_tokens: fork.request.tokens.len(),
        shared,
    };
    let tenant = fork.request.tenant;
    let limits = parts.queue.limits(tenant);
    let can_run = limits.may_run(parts.running.n_of_tenant(tenant))
        && (parts.room).takes(&[need], parts.running.as_slice(), parts.config);
    let Some(shared) = shared.filter(|_| can_run) else {
        return Some(ForkStart::Wait);
    };
    let copied = parts.free.map(|to| (to, copy(from, to, n_prompt)));
    let start = match copied.filter(|(_, edit)| parts.memory.check(edit).is_ok()) {
        Some((seq, edit)) => ForkStart::Copy { seq, edit, shared },
        None if parts.can_evict() => ForkStart::Evict,
        None => ForkStart::Wait,
    };
    Some(start)
}
