//! Drafted tokens in the scheduler: which are taken, what became of them, and how those that were
//! not chosen leave the memory.
//!
//! Invariant: between steps the memory holds tokens of a request and no drafted ones, and a request
//! gets at least one token from each step that computes its last one. Drafts nothing itself.

use kv_core::TokenId;
use kv_core::memory::Memory;

use crate::admit::cut;
use crate::config::SchedulerConfig;
use crate::event::{End, Outcome, Progress, RowReport};
use crate::note::DropReason;
use crate::request::{Micros, RequestId};
use crate::scheduler::{Keep, Scheduler};
use crate::speculate::{MAX_DRAFT, SpeculationOff};
use crate::state::Running;

/// What a request took from a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Drafted tokens that were chosen, and that the memory holds.
    pub(crate) n_accepted: usize,
    /// Why it ends.
    pub(crate) end: Option<End>,
}

/// The most tokens that can be drafted after a text.
pub(crate) fn draft_limit<M: Memory>(
    config: &SchedulerConfig,
    memory: &M,
) -> Result<usize, SpeculationOff> {
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
    running: &mut Running,
    draft: &[TokenId],
    reports: impl Iterator<Item = &'a RowReport>,
    capacity: usize,
) -> Taken {
    let mut taken = Taken::default();
    let mut has_report = false;
    for report in reports {
        has_report = true;
        match report.progress {
            Progress::Token(token) => {
                running.request.tokens.push(token);
                if running.request.tokens.len() > capacity {
                    let is_full = !running.request.can_shift();
                    taken.end = is_full.then_some(End::ContextFull);
                } else if draft.get(taken.n_accepted) == Some(&token) {
                    taken.n_accepted += 1;
                    running.n_done += 1;
                    continue;
                }
            }
            Progress::Ended => taken.end = Some(End::Complete),
            Progress::Failed => taken.end = Some(End::Failed),
        }
        return taken;
    }
    // A row that was not used: its token is computed again.
    if has_report {
        taken.n_accepted = taken.n_accepted.saturating_sub(1);
        running.n_done -= 1;
    } else {
        taken.end = Some(End::Failed);
    }
    taken
}

impl Scheduler {
    /// The most tokens that can be drafted for the next step of a request, which must have begun
    /// its text; those that are beyond it would be dropped.
    pub fn draft_room(&self, id: RequestId) -> usize {
        let mut running = self.running.iter();
        let running = running.find(|r| r.request.id == id && r.takes_drafts());
        let is_in_flight = self.in_flight.iter().any(|fed| fed.request == id);
        match running {
            Some(running) if !is_in_flight => {
                let left = self.capacity().saturating_sub(running.request.tokens.len());
                left.min(self.draft_limit().unwrap_or(0))
            }
            _ => 0,
        }
    }

    /// Keeps drafted tokens for the next step of a request.
    pub(crate) fn take_draft(&mut self, id: RequestId, mut tokens: Vec<TokenId>) {
        let n_vocab = self.config.rules.n_vocab;
        let n_valid = tokens.iter().take_while(|t| t.0 < n_vocab).count();
        tokens.truncate(self.draft_room(id).min(n_valid));
        let mut running = self.running.iter_mut();
        if let Some(running) = running.find(|r| r.request.id == id)
            && running.takes_drafts()
        {
            running.draft = tokens;
        }
    }

    /// Takes tokens that were not chosen out of the memory. Where it refuses, all of the sequence
    /// goes, and its request waits and is computed again.
    pub(crate) fn take_rejected<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        outcomes: &mut Vec<Outcome>,
    ) {
        for (seq, n_tokens) in std::mem::take(&mut self.rejected) {
            if self.dropped.contains(&seq) {
                continue;
            }
            let edit = cut(seq, n_tokens);
            if memory.check(&edit).is_ok() {
                self.edits.push(edit);
                continue;
            }
            let broken = self.cache.take(seq);
            self.drop_lines(now, broken, DropReason::Broken);
            if let Some(running) = self.running.iter_mut().find(|r| r.seq == seq) {
                running.request.takes_no_drafts = true;
                let id = running.request.id;
                outcomes.extend(self.preempt(now, id, Keep::Nothing));
            }
        }
    }
}
