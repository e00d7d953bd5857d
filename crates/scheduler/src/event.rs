//! What goes into a scheduler and what comes out: [`Event`], [`Outcome`] and [`StepPlan`].
//!
//! Plain data. Decides nothing.

use kv_core::batch::{Batch, Output};
use kv_core::memory::Edit;
use kv_core::{Pos, SeqId, TokenId};

use crate::prefix::Reuse;
use crate::request::{PromptRows, Request, RequestError, RequestId};

/// What happened outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request came.
    Submit(Request),
    /// Cached prefixes are to be dropped.
    ClearPrefixes,
    /// Cancels a request. One that is unknown, or has ended, changes nothing.
    Cancel(RequestId),
    /// The step that was planned last was computed: what became of each request whose output it
    /// had.
    StepDone(Vec<RowReport>),
    /// The step that was planned last could not be computed, and the memory was rolled back.
    StepFailed(StepFailure),
}

/// What was chosen from the row of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowReport {
    /// The request.
    pub request: RequestId,
    /// What became of it.
    pub progress: Progress,
}

/// What became of a request by one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It goes on with this token.
    Token(TokenId),
    /// Its text is complete.
    Ended,
    /// Nothing could be chosen from its row.
    Failed,
}

/// How a step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFailure {
    /// It may succeed with other requests: those of the step are tried one by one, and only one
    /// that fails again, alone, is given up.
    Computation,
    /// The device is lost: all requests are given up.
    DeviceLost,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was not taken.
    Refused {
        /// The request.
        request: RequestId,
        /// Why.
        why: RequestError,
    },
    /// It was given a sequence. Comes again where it goes on after a preemption.
    Admitted {
        /// The request.
        request: RequestId,
        /// Its sequence, until it ends or is preempted.
        seq: SeqId,
        /// How much of it was cached.
        reuse: Reuse,
    },
    /// Its sequence was taken from it; it waits, and will go on exactly where it was.
    Preempted {
        /// The request.
        request: RequestId,
        /// Tokens that have to be computed again.
        n_tokens: usize,
    },
    /// It has ended. The last outcome of a request that was taken, and it comes once.
    Ended {
        /// The request.
        request: RequestId,
        /// Why.
        end: End,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its text is complete, as was reported.
    Complete,
    /// It is as long as a request can be in this memory.
    ContextFull,
    /// It was cancelled.
    Cancelled,
    /// No token could be chosen, or its step failed when it was computed alone.
    Failed,
}

/// What to do next, and what became of requests meanwhile.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// What to do.
    pub work: Work,
    /// Requests that were admitted, preempted or ended.
    pub outcomes: Vec<Outcome>,
}

/// What to do next.
#[derive(Clone, Debug)]
pub enum Work {
    /// Nothing, until an event comes.
    Idle,
    /// These edits of the memory, which it does not refuse; then ask again.
    Edit(Vec<Edit>),
    /// Compute this step, then report it.
    Decode(Step),
}

/// The tokens that one step computes.
#[derive(Clone, Debug)]
pub struct Step {
    /// What each request is fed, in the order of the batch.
    pub feeds: Vec<Feed>,
    /// The same as a batch, for which the memory has room.
    pub batch: Batch,
}

impl Step {
    /// What the rows are for, in their order: each once for every text that it is a row of.
    pub fn rows(&self) -> impl Iterator<Item = StepRow> + '_ {
        let places = self.feeds.iter().flat_map(|feed| {
            let wanted = (0..feed.tokens.len()).filter(|&at| feed.is_wanted(at));
            wanted.map(move |at| (feed, at))
        });
        places.enumerate().flat_map(|(row, (feed, at))| {
            let is_last = at + 1 == feed.tokens.len();
            feed.texts.iter().map(move |&request| StepRow {
                row,
                request,
                token: feed.first.as_usize() + at,
                use_of: match feed.output == Output::Wanted && is_last {
                    true => RowUse::NextToken,
                    false => RowUse::Prompt,
                },
            })
        })
    }

    /// The texts that it is computed for.
    pub fn texts(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.feeds
            .iter()
            .flat_map(|feed| feed.texts.iter().copied())
    }
}

/// One row that a step gives, for one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    /// Its number among the rows of the step.
    pub row: usize,
    /// The text.
    pub request: RequestId,
    /// The token of the request that it is the row of, counted from 0.
    pub token: usize,
    /// What it is for.
    pub use_of: RowUse,
}

/// What a row is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUse {
    /// The next token is chosen from it: it is to be reported. Of a prompt whose rows are all
    /// wanted, it is the last of these, too.
    NextToken,
    /// It is a row of a prompt of which more is to be computed.
    Prompt,
}

/// The next tokens of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feed {
    /// The request.
    pub request: RequestId,
    /// Its sequence.
    pub seq: SeqId,
    /// The position of the first token.
    pub first: Pos,
    /// The tokens, at least one.
    pub tokens: Vec<TokenId>,
    /// Whether the next token is chosen from the row of the last one.
    pub output: Output,
    /// Whether the rows of the others are wanted, too.
    pub prompt_rows: PromptRows,
    /// The texts that it is computed for: the request, and while it is the prompt of several, its
    /// siblings.
    pub texts: Vec<RequestId>,
}

impl Feed {
    /// Whether the row of token number `at` is wanted.
    pub(crate) fn is_wanted(&self, at: usize) -> bool {
        let is_last = at + 1 == self.tokens.len();
        self.prompt_rows == PromptRows::All || (is_last && self.output == Output::Wanted)
    }
}
