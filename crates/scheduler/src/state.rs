//! [`RequestState`]: a request that was taken, and [`Running`]: one that has a sequence.
//!
//! Invariant: the tokens of a request are its prompt and what was chosen since, so they are all
//! that is needed to compute it again after a preemption.

use kv_core::batch::Output;
use kv_core::{Pos, SeqId, TokenId};

use crate::event::{Feed, Outcome};
use crate::prefix::{PrefixUse, Reuse};
use crate::queue::Rank;
use crate::request::{
    MAX_PROMPT_ROWS, Micros, Overflow, Priority, PromptRows, RequestId, SourceUse,
};
use crate::room::Trunk;
use crate::share::Awaited;
use crate::swap::Swapped;
use crate::tenant::TenantId;

/// A request that was taken and has not ended.
#[derive(Clone, Debug)]
pub(crate) struct RequestState {
    pub(crate) id: RequestId,
    pub(crate) priority: Priority,
    /// How many requests came before it.
    pub(crate) arrival: u64,
    pub(crate) waits_since: Micros,
    pub(crate) n_prompt: usize,
    pub(crate) prefix: PrefixUse,
    pub(crate) prompt_rows: PromptRows,
    /// After so many tokens of its prompt others are likely to part from it.
    pub(crate) checkpoints: Vec<usize>,
    /// Further texts of the prompt, until it is complete.
    pub(crate) siblings: Vec<RequestId>,
    pub(crate) tenant: TenantId,
    /// The texts with which it shares the cells of its prompt, by the first of them.
    pub(crate) group: Option<RequestId>,
    /// The prompt and the tokens chosen since.
    pub(crate) tokens: Vec<TokenId>,
    /// Whether it was ever admitted.
    pub(crate) was_admitted: bool,
    /// A step with this request failed: it is computed alone next.
    pub(crate) is_suspect: bool,
    /// The memory did not let it go back before a drafted token: it takes no more of them.
    pub(crate) takes_no_drafts: bool,
    /// What the host has of it.
    pub(crate) swapped: Option<Swapped>,
    pub(crate) overflow: Overflow,
    pub(crate) source: SourceUse,
    /// What the memory holds of it, or the host, is not what its tokens alone would be: others were
    /// dropped from it.
    pub(crate) is_shifted: bool,
    /// What it waits for, while it is not admitted for that reason.
    pub(crate) awaited: Option<Awaited>,
}

/// A request that has a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) request: RequestState,
    pub(crate) seq: SeqId,
    pub(crate) rank: Rank,
    /// Tokens that the memory holds.
    pub(crate) n_done: usize,
    /// After so many of its tokens a copy is to be kept: no step goes past one of them.
    pub(crate) checkpoints: Vec<usize>,
    /// Whose cells its first tokens are in.
    pub(crate) trunk: Trunk,
    /// How much of it was cached when it was admitted.
    pub(crate) reuse: Reuse,
    /// Tokens that may follow, for the next step.
    pub(crate) draft: Vec<TokenId>,
    /// Its KV rows came back rounded: others must not have them.
    pub(crate) is_rounded: bool,
    /// Its source is to be encoded before its first step.
    pub(crate) awaits_source: bool,
}

/// What a step that is being computed has of a request.
#[derive(Clone, Debug)]
pub(crate) struct Fed {
    pub(crate) request: RequestId,
    /// Tokens of the request.
    pub(crate) n_tokens: usize,
    /// Drafted tokens behind them.
    pub(crate) draft: Vec<TokenId>,
}

impl RequestState {
    /// True if it goes on when it is as long as it can be.
    pub(crate) fn can_shift(&self) -> bool {
        matches!(self.overflow, Overflow::Shift { .. })
    }

    /// Whether the rows of all tokens of its prompt are wanted, and its text has not begun.
    pub(crate) fn wants_prompt_rows(&self) -> bool {
        self.prompt_rows == PromptRows::All && self.tokens.len() == self.n_prompt
    }
}

impl Running {
    /// Tokens that are to be computed.
    pub(crate) fn n_left(&self) -> usize {
        self.request.tokens.len() - self.n_done
    }

    /// The tokens that the memory holds.
    pub(crate) fn held(&self) -> &[TokenId] {
        &self.request.tokens[..self.n_done]
    }

    /// True if others may share its KV rows.
    pub(crate) fn is_exact(&self) -> bool {
        !self.is_rounded && !self.request.is_shifted
    }

    /// It goes on past the checkpoint where it is.
    pub(crate) fn pass_checkpoint(&mut self) {
        self.checkpoints.retain(|&at| at > self.n_done);
    }

    /// The outcome that says that a text has this sequence.
    pub(crate) fn admitted(&self, request: RequestId) -> Outcome {
        Outcome::Admitted {
            request,
            seq: self.seq,
            reuse: self.reuse,
        }
    }

    /// Whether it is at its last token: the next one follows from a step with this token alone.
    pub(crate) fn is_decoding(&self) -> bool {
        self.n_left() == 1
    }

    /// Whether its text has begun and goes on.
    pub(crate) fn has_begun(&self) -> bool {
        self.is_decoding() && self.request.tokens.len() > self.request.n_prompt
    }

    /// Whether tokens can be drafted.
    pub(crate) fn takes_drafts(&self) -> bool {
        let request = &self.request;
        let is_sound = !request.is_suspect && !request.takes_no_drafts;
        self.has_begun() && is_sound && request.siblings.is_empty()
    }

    /// What goes first, smaller first.
    pub(crate) fn precedence(&self) -> (std::cmp::Reverse<Rank>, u64) {
        (std::cmp::Reverse(self.rank), self.request.arrival)
    }

    /// At most `n` of its next tokens.
    pub(crate) fn feed(&self, n: usize) -> Feed {
        let next = self.checkpoints.iter().filter(|&&at| at > self.n_done);
        // What comes back from the host is not computed.
        let comes_back = self.request.swapped.map(Swapped::first);
        let limit = comes_back
            .unwrap_or(usize::MAX)
            .min(self.request.tokens.len());
        let limit = next.fold(limit, |limit, &at| limit.min(at));
        let (prompt_rows, n) = if self.request.wants_prompt_rows() {
            (PromptRows::All, n.min(MAX_PROMPT_ROWS))
        } else {
            (PromptRows::Last, n)
        };
        let end = (self.n_done + n).min(limit);
        let is_last = end == self.request.tokens.len();
        Feed {
            request: self.request.id,
            seq: self.seq,
            first: Pos(u32::try_from(self.n_done).unwrap_or(u32::MAX)),
            tokens: self.request.tokens[self.n_done..end].to_vec(),
            n_draft: 0,
            output: if is_last {
                Output::Wanted
            } else {
                Output::Skip
            },
            prompt_rows,
            texts: self.request.texts().collect(),
        }
    }
}
