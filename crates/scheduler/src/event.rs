//! What goes into a scheduler and what comes out: [`Event`], [`Outcome`] and [`StepPlan`].
//!
//! Plain data. Decides nothing.

use std::cmp::Ordering;

use kv_core::batch::{Batch, Output};
use kv_core::memory::{Edit, PlannedBatch};
use kv_core::{Pos, SeqId, TokenId};

use crate::prefix::Reuse;
use crate::request::{Micros, PromptRows, Request, RequestError, RequestId};
use crate::shift::{Shift, ShiftResult};
use crate::swap::{Swap, SwappedIn};

/// What happened outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request came.
    Submit(Request),
    /// Cached prefixes are to be dropped.
    ClearPrefixes,
    /// Tokens that may follow the last one of a request, for its next step: as many as there is
    /// room for are computed with it. One that is unknown, or whose text has not begun, changes
    /// nothing.
    Draft {
        /// The request.
        request: RequestId,
        /// The tokens.
        tokens: Vec<TokenId>,
    },
    /// Cancels a request. One that is unknown, or has ended, changes nothing.
    Cancel(RequestId),
    /// The request cannot go on: it ends as [`End::Failed`]. One that is unknown changes nothing.
    Fail(RequestId),
    /// The source of [`Work::Encode`] was encoded.
    Encoded(RequestId),
    /// The tokens of [`Work::Shift`] were dropped, or could not be.
    Shifted {
        /// The request.
        request: RequestId,
        /// The result.
        result: ShiftResult,
    },
    /// The step that was planned last was computed: what became of each request whose output it
    /// had, see [`Step::report`].
    StepDone(Vec<RowReport>),
    /// How long the step took that was computed last.
    StepTime(Micros),
    /// What [`Work::SwapOut`] asked for was done.
    SwappedOut {
        /// The request.
        request: RequestId,
        /// Bytes that its state has; `None` where it was not saved.
        n_bytes: Option<u64>,
    },
    /// What [`Work::SwapIn`] asked for was done, or tried.
    SwappedIn {
        /// The request.
        request: RequestId,
        /// What became of its state.
        result: SwappedIn,
    },
    /// The disk did not take a state ([`Outcome::Spilled`]): the host keeps it.
    SpillFailed(RequestId),
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
        /// Tokens that have to be computed again: none where its state was saved.
        n_tokens: usize,
    },
    /// Its state is to go from the host to the disk, while other things go on. Where the disk does
    /// not take it, that is reported ([`Event::SpillFailed`]).
    Spilled {
        /// The request.
        request: RequestId,
    },
    /// Its saved state is of no use: its bytes are to be freed, as they are when it ends.
    SwapDropped {
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

/// What to do next, and what became of requests meanwhile. `S` is the memory's
/// [`Slot`](kv_core::memory::Memory::Slot).
#[derive(Clone, Debug)]
pub struct StepPlan<S> {
    /// What to do.
    pub work: Work<S>,
    /// Requests that were admitted, preempted or ended.
    pub outcomes: Vec<Outcome>,
}

/// What to do next.
#[derive(Clone, Debug)]
pub enum Work<S> {
    /// Nothing, until an event comes.
    Idle,
    /// These edits of the memory, which it does not refuse; then ask again.
    Edit(Vec<Edit>),
    /// Save a state to the host, then report that ([`Event::SwappedOut`]) before anything else.
    SwapOut {
        /// Which state.
        swap: Swap,
        /// The most bytes that it may have there.
        limit: u64,
    },
    /// Restore a state from the host or the disk, then report that ([`Event::SwappedIn`]) before
    /// anything else.
    SwapIn(Swap),
    /// Encode the source of a request into its sequence, then report that ([`Event::Encoded`] or
    /// [`Event::Fail`]) before anything else.
    Encode {
        /// The request.
        request: RequestId,
        /// Its sequence, which holds nothing.
        seq: SeqId,
    },
    /// Drop tokens in the middle of a text that is full, then report that ([`Event::Shifted`])
    /// before anything else.
    Shift(Shift),
    /// Compute this step, then report it.
    Decode {
        /// The tokens that are computed.
        step: Step,
        /// Its batch, validated and planned: nothing else may change the memory before.
        planned: PlannedBatch<S>,
    },
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
            let n_certain = feed.tokens.len() - feed.n_draft;
            let use_of = match (feed.output, (at + 1).cmp(&n_certain)) {
                (Output::Wanted, Ordering::Equal) => RowUse::NextToken,
                (Output::Wanted, Ordering::Greater) => RowUse::AfterDraft(feed.tokens[at]),
                _ => RowUse::Prompt,
            };
            feed.texts.iter().map(move |&request| StepRow {
                row,
                request,
                token: feed.first.as_usize() + at,
                use_of,
            })
        })
    }

    /// What is to be reported after the step: `take` makes progress of each row that is of use, in
    /// order, and is not called for rows after drafted tokens that were not chosen. It returns
    /// `None` for rows from which nothing is chosen.
    pub fn report(&self, mut take: impl FnMut(StepRow) -> Option<Progress>) -> Vec<RowReport> {
        let mut reports = Vec::new();
        let mut before = None;
        for row in self.rows() {
            let is_used = match row.use_of {
                RowUse::AfterDraft(token) => {
                    before == Some((row.row, row.request, Progress::Token(token)))
                }
                RowUse::NextToken | RowUse::Prompt => true,
            };
            let Some(progress) = is_used.then(|| take(row)).flatten() else {
                continue;
            };
            let request = row.request;
            before = Some((row.row + 1, request, progress));
            reports.push(RowReport { request, progress });
        }
        reports
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
    /// The same where this drafted token was chosen from the row before, and the text goes on; of
    /// no use otherwise.
    AfterDraft(TokenId),
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
    /// The number of the first token among those of the request: its position, unless tokens of
    /// the sequence were dropped or moved.
    pub first: Pos,
    /// The tokens, at least one.
    pub tokens: Vec<TokenId>,
    /// How many of them, at the end, are drafted: whether they follow is decided by the rows before
    /// them.
    pub n_draft: usize,
    /// Whether the next token is chosen from the row of the last one that is not drafted.
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
        let is_last = at + 1 + self.n_draft >= self.tokens.len();
        self.prompt_rows == PromptRows::All || (is_last && self.output == Output::Wanted)
    }
}
