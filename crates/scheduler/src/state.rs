//! [`RequestState`]: a request that was taken, and [`Running`]: one that has a sequence.
//!
//! Invariant: the tokens of a request are its prompt and what was chosen since, so they are all that
//! is needed to compute it again after a preemption.

use kv_core::batch::Output;
use kv_core::{Pos, SeqId, TokenId};

use crate::event::{Feed, Outcome};
use crate::prefix::{PrefixUse, Reuse};
use crate::queue::Rank;
use crate::request::{MAX_PROMPT_ROWS, Micros, Priority, PromptRows, RequestId};

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
    /// Further texts of the prompt, until it is complete.
    pub(crate) siblings: Vec<RequestId>,
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
}

/// A request that has a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) request: RequestState,
    pub(crate) seq: SeqId,
    pub(crate) rank: Rank,
    /// Tokens that the memory holds.
    pub(crate) n_done: usize,
    /// A copy is to be kept one token before the end of its prompt.
    pub(crate) wants_checkpoint: bool,
    /// How much of it was cached when it was admitted.
    pub(crate) reuse: Reuse,
    /// Tokens that may follow, for the next step.
    pub(crate) draft: Vec<TokenId>,
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

impl Running {
    /// Tokens that are to be computed.
    pub(crate) fn n_left(&self) -> usize {
        self.request.tokens.len() - self.n_done
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

    /// Whether its text has begun and goes on: tokens can be drafted.
    pub(crate) fn takes_drafts(&self) -> bool {
        let request = &self.request;
        let has_begun = request.tokens.len() > request.n_prompt;
        let is_sound = !request.is_suspect && !request.takes_no_drafts;
        self.is_decoding() && has_begun && is_sound && request.siblings.is_empty()
    }

    /// What goes first, smaller first.
    pub(crate) fn precedence(&self) -> (std::cmp::Reverse<Rank>, u64) {
        (std::cmp::Reverse(self.rank), self.request.arrival)
    }

    /// At most `n` of its next tokens.
    pub(crate) fn feed(&self, n: usize) -> Feed {
        let cut = self.request.n_prompt.saturating_sub(1);
        let limit = match self.wants_checkpoint && self.n_done < cut {
            true => cut,
            false => self.request.tokens.len(),
        };
        // The rows of a prompt are wanted once: its text has not begun.
        let prompt_rows = match self.request.tokens.len() == self.request.n_prompt {
            true => self.request.prompt_rows,
            false => PromptRows::Last,
        };
        let n = match prompt_rows {
            PromptRows::Last => n,
            PromptRows::All => n.min(MAX_PROMPT_ROWS),
        };
        let end = (self.n_done + n).min(limit);
        let is_last = end == self.request.tokens.len();
        Feed {
            request: self.request.id,
            seq: self.seq,
            first: Pos(u32::try_from(self.n_done).unwrap_or(u32::MAX)),
            tokens: self.request.tokens[self.n_done..end].to_vec(),
            n_draft: 0,
            output: match is_last {
                true => Output::Wanted,
                false => Output::Skip,
            },
            prompt_rows,
            texts: self.request.texts().collect(),
        }
    }
}
