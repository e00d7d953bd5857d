//! [`ActiveRequest`]: a request that has a sequence.
//!
//! Invariant: the memory holds the first `n_done` of its tokens, or will by the next step, and no
//! step goes past one of its checkpoints.

use std::cmp::Reverse;

use kv_core::batch::Output;
use kv_core::{Pos, SeqId, TokenId};

use super::event::Outcome;
use super::ids::{Micros, RequestId};
use super::request::{MAX_PROMPT_ROWS, PromptRows};
use super::reuse::Reuse;
use super::state::{Rank, RequestState};
use super::step::Feed;

/// A request that has a sequence.
#[derive(Clone, Debug)]
pub(crate) struct ActiveRequest {
    pub(crate) request: RequestState,
    pub(crate) seq: SeqId,
    pub(crate) rank: Rank,
    /// Tokens that the memory holds.
    pub(crate) n_done: usize,
    /// After so many of its tokens a copy is to be kept: no step goes past one of them.
    pub(crate) checkpoints: Vec<usize>,
    /// The cells of its first tokens.
    pub(crate) shared: SharedPrefix,
    /// Its cached tokens when it was admitted.
    pub(crate) reuse: Reuse,
    /// Tokens that may follow, for the next step.
    pub(crate) draft: Vec<TokenId>,
    /// Its KV rows came back rounded: others must not have them.
    pub(crate) is_rounded: bool,
    /// Its source is to be encoded before its first step.
    pub(crate) awaits_source: bool,
    /// True while an input of its next tokens is not there yet: no step has any of them.
    pub(crate) is_held: bool,
}

/// The cells that the first tokens of a sequence are in, where others may have them, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedPrefix {
    /// The same for all sequences that share some of these cells.
    pub(crate) root: u64,
    /// Number of tokens at the beginning that are in cells of the root.
    pub(crate) n_tokens: usize,
}

impl SharedPrefix {
    /// Those of a sequence that begins with nothing of others.
    pub(crate) fn new(root: u64) -> Self {
        let n_tokens = usize::MAX;
        Self { root, n_tokens }
    }

    /// Those of a sequence that shares the first `n` tokens.
    pub(crate) fn cut(self, n: usize) -> Self {
        let n_tokens = self.n_tokens.min(n);
        Self { n_tokens, ..self }
    }
}

/// The part of the step in flight that is of one request.
#[derive(Clone, Debug)]
pub(crate) struct PendingFeed {
    pub(crate) request: RequestId,
    /// Tokens of the request.
    pub(crate) n_tokens: usize,
    /// Drafted tokens behind them.
    pub(crate) draft: Vec<TokenId>,
}

impl PendingFeed {
    pub(crate) fn of(feed: &Feed) -> Self {
        let n_tokens = feed.tokens.len() - feed.n_draft;
        Self {
            request: feed.request,
            n_tokens,
            draft: feed.tokens[n_tokens..].to_vec(),
        }
    }
}

/// The fate of the tokens of a request that gives its sequence back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// They stay for others, from now on.
    Prefix(Micros),
    /// They go: what the memory holds of them is not known, or not wanted.
    Nothing,
}

impl ActiveRequest {
    /// A request whose first tokens the memory holds, or will by the next step.
    pub(crate) fn new(
        request: RequestState,
        seq: SeqId,
        rank: Rank,
        shared: SharedPrefix,
        reuse: Reuse,
    ) -> Self {
        Self {
            request,
            seq,
            rank,
            n_done: reuse.n_tokens,
            checkpoints: Vec::new(),
            shared,
            reuse,
            draft: Vec::new(),
            is_rounded: false,
            awaits_source: false,
            is_held: false,
        }
    }

    pub(crate) fn id(&self) -> RequestId {
        self.request.id
    }

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

    /// True if it is at its last token: the next one follows from a step with this token alone.
    pub(crate) fn is_decoding(&self) -> bool {
        self.n_left() == 1
    }

    /// True if its text has begun and goes on.
    pub(crate) fn has_begun(&self) -> bool {
        self.is_decoding() && self.request.tokens.len() > self.request.n_prompt
    }

    /// True if tokens can be drafted.
    pub(crate) fn takes_drafts(&self) -> bool {
        let request = &self.request;
        let is_sound = !request.is_suspect && !request.takes_no_drafts;
        self.has_begun() && is_sound && request.siblings.is_empty()
    }

    /// True if it is as long as it can be and goes on without some of its tokens.
    pub(crate) fn is_full(&self, capacity: usize) -> bool {
        self.is_decoding() && self.request.tokens.len() > capacity && self.request.can_shift()
    }

    /// Half of its tokens behind the first `n_keep` are gone.
    pub(crate) fn drop_tokens(&mut self, n_keep: usize) {
        let first = n_keep.min(self.n_done);
        let end = first + (self.n_done - first) / 2;
        let n_of_prompt = end.min(self.request.n_prompt) - first.min(self.request.n_prompt);
        self.request.tokens.drain(first..end);
        self.request.n_prompt -= n_of_prompt;
        self.request.is_shifted = true;
        self.n_done -= end - first;
        self.shared = self.shared.cut(first);
        self.checkpoints.clear();
        self.draft.clear();
    }

    /// Its place in the order of requests, smaller first.
    pub(crate) fn precedence(&self) -> (Reverse<Rank>, u64) {
        (Reverse(self.rank), self.request.arrival)
    }

    /// The end of its next tokens that is nearest to this one and parts none that see each other.
    fn whole_end(&self, end: usize) -> usize {
        let mut ranges = self.request.together.iter();
        match ranges.find(|range| range.start < end && end < range.end) {
            Some(range) if range.start > self.n_done => range.start,
            Some(range) => range.end,
            None => end,
        }
    }

    /// At most `n` of its next tokens, or as many as have to come together.
    pub(crate) fn feed(&self, n: usize) -> Feed {
        let next = self.checkpoints.iter().filter(|&&at| at > self.n_done);
        let n_tokens = self.request.tokens.len();
        // What comes back from the host is not computed.
        let limit = self
            .request
            .saved
            .map_or(n_tokens, |s| s.first.min(n_tokens));
        let limit = next.fold(limit, |limit, &at| limit.min(at));
        let (prompt_rows, n) = if self.request.wants_prompt_rows() {
            (PromptRows::All, n.min(MAX_PROMPT_ROWS))
        } else {
            (PromptRows::Last, n)
        };
        let end = self.whole_end((self.n_done + n).min(limit));
        let output = if end == n_tokens {
            Output::Wanted
        } else {
            Output::Skip
        };
        Feed {
            request: self.id(),
            seq: self.seq,
            first: Pos(u32::try_from(self.n_done).unwrap_or(u32::MAX)),
            tokens: self.request.tokens[self.n_done..end].to_vec(),
            n_draft: 0,
            output,
            prompt_rows,
            together: self.request.together.clone(),
            texts: self.request.texts().collect(),
        }
    }
}
