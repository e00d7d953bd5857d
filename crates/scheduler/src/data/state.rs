//! [`RequestState`]: a request that was taken and has not ended.
//!
//! Invariant: the tokens of a request are its prompt and what was chosen since, so they are all
//! that is needed to compute it again after a preemption.

use std::ops::Range;

use kv_core::{SeqId, TokenId};

use super::ids::{Micros, RequestId, TenantId};
use super::request::{Overflow, Priority, PromptRows, Request, Retention, SourceUse};
use super::reuse::{Missed, PrefixUse};
use super::stored::StoreWait;

/// A request that was taken and has not ended.
#[derive(Clone, Debug)]
pub(crate) struct RequestState {
    pub(crate) id: RequestId,
    pub(crate) priority: Priority,
    /// Number of requests that came before it.
    pub(crate) arrival: u64,
    pub(crate) waits_since: Micros,
    pub(crate) n_prompt: usize,
    pub(crate) prefix: PrefixUse,
    pub(crate) prompt_rows: PromptRows,
    /// After so many tokens of its prompt others are likely to part from it.
    pub(crate) checkpoints: Vec<usize>,
    /// After so many others part from it whose first tokens take long to compute.
    pub(crate) parting: Option<usize>,
    /// Tokens of its prompt that see each other.
    pub(crate) together: Vec<Range<usize>>,
    /// Further texts of the prompt, until it is complete.
    pub(crate) siblings: Vec<RequestId>,
    pub(crate) tenant: TenantId,
    /// The texts with which it shares the cells of its prompt, by the first of them.
    pub(crate) group: Option<RequestId>,
    /// The prompt and the tokens chosen since.
    pub(crate) tokens: Vec<TokenId>,
    /// True if it was ever admitted.
    pub(crate) was_admitted: bool,
    /// A step with this request failed: it is computed alone next.
    pub(crate) is_suspect: bool,
    /// The memory did not let it go back before a drafted token: it takes no more of them.
    pub(crate) takes_no_drafts: bool,
    /// Its state on the host or the disk.
    pub(crate) saved: Option<SavedState>,
    pub(crate) overflow: Overflow,
    pub(crate) source: SourceUse,
    pub(crate) retention: Retention,
    /// The memory holds something else of it, or the host, than its tokens alone would give: others
    /// were dropped from it.
    pub(crate) is_shifted: bool,
    /// The prefix that it waits for, while it is not admitted for that reason.
    pub(crate) awaited: Option<PrefixWait>,
    /// Its progress with a store of prefixes.
    pub(crate) store: StoreWait,
    /// Why that store gave nothing, or less.
    pub(crate) store_missed: Option<Missed>,
}

/// The urgency of a request: its priority, and what it rose by waiting. Larger goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank(u8);

impl Rank {
    /// The rank after `waited`, of which each `aging` counts as one priority.
    pub(crate) fn of(priority: Priority, waited: u64, aging: Micros) -> Self {
        let risen = waited / aging.0.max(1);
        let highest = Priority::Interactive as u64;
        Self((priority as u64).saturating_add(risen).min(highest) as u8)
    }
}

/// A prefix that a running request is computing, for one that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixWait {
    /// The arrival of the request that computes it.
    pub(crate) arrival: u64,
    /// Number of its tokens.
    pub(crate) n_tokens: usize,
}

/// The place of a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Host,
    Disk,
}

/// The saved state of a preempted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedState {
    /// Number of its tokens that have to be in the memory when the state comes back.
    pub(crate) first: usize,
    /// Number of its tokens that the memory holds after that.
    pub(crate) n_tokens: usize,
    pub(crate) n_bytes: u64,
    pub(crate) tier: Tier,
}

impl SavedState {
    /// Number of tokens in the state.
    pub(crate) fn n_saved(self) -> usize {
        self.n_tokens - self.first
    }
}

/// A text whose prompt another one computed, and which has no sequence yet.
#[derive(Clone, Debug)]
pub(crate) struct Fork {
    pub(crate) request: RequestState,
    /// The sequence that holds the prompt.
    pub(crate) from: SeqId,
    pub(crate) rank: Rank,
}

impl RequestState {
    /// The state of a request that comes now, the first of its texts as number `arrival`.
    pub(crate) fn new(now: Micros, arrival: u64, request: Request) -> Self {
        Self {
            id: request.id,
            priority: request.priority,
            arrival,
            waits_since: now,
            n_prompt: request.prompt.len(),
            prefix: request.prefix,
            prompt_rows: request.prompt_rows,
            checkpoints: request.checkpoints,
            parting: request.parting,
            together: request.together,
            siblings: request.siblings,
            tenant: request.tenant.id,
            group: None,
            tokens: request.prompt,
            was_admitted: false,
            is_suspect: false,
            takes_no_drafts: false,
            saved: None,
            overflow: request.overflow,
            source: request.source,
            retention: request.retention,
            is_shifted: false,
            awaited: None,
            store: StoreWait::No,
            store_missed: None,
        }
    }

    /// More tokens follow: all that it has are its prompt then.
    pub(crate) fn extend(&mut self, tokens: Vec<TokenId>) {
        if !tokens.is_empty() {
            self.tokens.extend(tokens);
            self.n_prompt = self.tokens.len();
        }
    }

    /// True if it goes on when it is as long as it can be.
    pub(crate) fn can_shift(&self) -> bool {
        matches!(self.overflow, Overflow::Shift { .. })
    }

    /// True if the rows of all tokens of its prompt are wanted, and its text has not begun.
    pub(crate) fn wants_prompt_rows(&self) -> bool {
        self.prompt_rows == PromptRows::All && self.tokens.len() == self.n_prompt
    }

    /// The texts that it stands for.
    pub(crate) fn texts(&self) -> impl Iterator<Item = RequestId> + '_ {
        std::iter::once(self.id).chain(self.siblings.iter().copied())
    }

    /// True if it stands for this text and others.
    pub(crate) fn is_shared_by(&self, text: RequestId) -> bool {
        !self.siblings.is_empty() && self.texts().any(|id| id == text)
    }

    /// The state of one of its texts, with its first token.
    pub(crate) fn text(&self, number: u64, id: RequestId, token: TokenId) -> Self {
        let mut tokens = self.tokens.clone();
        tokens.push(token);
        Self {
            id,
            arrival: self.arrival + number,
            siblings: Vec::new(),
            prompt_rows: PromptRows::Last,
            group: Some(self.group.unwrap_or(self.id)),
            tokens,
            ..self.clone()
        }
    }

    /// Takes one of its texts out, of several; the next one takes the place of the first.
    pub(crate) fn drop_text(&mut self, id: RequestId) {
        if self.id == id && !self.siblings.is_empty() {
            self.id = self.siblings.remove(0);
            // Answers are for the one that is gone.
            self.store = StoreWait::No;
        } else {
            self.siblings.retain(|&sibling| sibling != id);
        }
    }
}
