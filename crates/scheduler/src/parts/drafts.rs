//! [`Drafts`]: drafted tokens of requests: how many are taken, what became of them, and those that
//! have to leave the memory.
//!
//! Invariant: between steps the memory holds tokens of a request and no drafted ones, and a request
//! gets at least one token from each step that computes its last one. Drafts nothing itself.

use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};

use crate::data::active::ActiveRequest;
use crate::data::config::SchedulerConfig;
use crate::data::event::{End, Progress, RowReport};
use crate::speculate::{MAX_DRAFT, SpeculationOff};

/// The drafted tokens of requests.
#[derive(Clone, Debug)]
pub(crate) struct Drafts {
    /// The most tokens that are drafted after a text, or why none are.
    limit: Result<usize, SpeculationOff>,
    rejected: Vec<RejectedDraft>,
}

/// A sequence that holds drafted tokens which were not chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RejectedDraft {
    pub(crate) seq: SeqId,
    /// Number of tokens to leave it.
    pub(crate) n_tokens: usize,
}

/// The result of a step for one text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TextProgress {
    /// Drafted tokens that were chosen, and that the memory holds.
    pub(crate) n_accepted: usize,
    /// The reason why it ends.
    pub(crate) end: Option<End>,
}

impl Drafts {
    pub(crate) fn new<M: Memory>(config: &SchedulerConfig, memory: &M) -> Self {
        Self {
            limit: draft_limit(config, memory),
            rejected: Vec::new(),
        }
    }

    /// The most tokens that are drafted after a text.
    ///
    /// # Errors
    /// [`SpeculationOff`], why the memory takes none.
    pub(crate) fn limit(&self) -> Result<usize, SpeculationOff> {
        self.limit
    }

    /// The most tokens that can be drafted after this text, which takes drafts.
    pub(crate) fn room(&self, active: &ActiveRequest, capacity: usize) -> usize {
        let left = capacity.saturating_sub(active.request.tokens.len());
        left.min(self.limit.unwrap_or(0))
    }

    /// Tokens that were not chosen are to leave a sequence.
    pub(crate) fn reject(&mut self, rejected: RejectedDraft) {
        self.rejected.push(rejected);
    }

    /// True if tokens that were not chosen are to leave the memory.
    pub(crate) fn has_rejected(&self) -> bool {
        !self.rejected.is_empty()
    }

    pub(crate) fn take_rejected(&mut self) -> Vec<RejectedDraft> {
        std::mem::take(&mut self.rejected)
    }
}

/// The most tokens that can be drafted after a text.
fn draft_limit<M: Memory>(config: &SchedulerConfig, memory: &M) -> Result<usize, SpeculationOff> {
    let parts = memory.capacity().parts;
    let has_windows = parts.iter().any(|part| part.width.is_some());
    let step_tokens = u32::try_from(config.n_step()).unwrap_or(u32::MAX);
    let n_ubatch = config.n_ubatch;
    match memory.max_take_back() as usize {
        0 => Err(SpeculationOff::NothingTakenBack),
        _ if has_windows && step_tokens > n_ubatch => Err(SpeculationOff::StepsInPieces {
            step_tokens,
            n_ubatch,
        }),
        n => Ok(n.min(MAX_DRAFT)),
    }
}

/// Adds what was chosen from the rows of a request, whose tokens but the drafted ones are counted
/// as done.
pub(crate) fn take_tokens<'a>(
    active: &mut ActiveRequest,
    draft: &[TokenId],
    reports: impl Iterator<Item = &'a RowReport>,
    capacity: usize,
) -> TextProgress {
    let mut progress = TextProgress::default();
    let mut has_report = false;
    for report in reports {
        has_report = true;
        match report.progress {
            Progress::Token(token) => {
                active.request.tokens.push(token);
                if active.request.tokens.len() > capacity {
                    let is_full = !active.request.can_shift();
                    progress.end = is_full.then_some(End::ContextFull);
                } else if draft.get(progress.n_accepted) == Some(&token) {
                    progress.n_accepted += 1;
                    active.n_done += 1;
                    continue;
                }
            }
            Progress::Ended => progress.end = Some(End::Complete),
            Progress::Failed => progress.end = Some(End::Failed),
        }
        return progress;
    }
    // A row that was not used: its token is computed again.
    if has_report {
        progress.n_accepted = progress.n_accepted.saturating_sub(1);
        active.n_done -= 1;
    } else {
        progress.end = Some(End::Failed);
    }
    progress
}
