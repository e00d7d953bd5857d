//! [`Step`]: the tokens that one step computes, and what its rows are for.
//!
//! Plain data. Decides nothing.

use std::cmp::Ordering;
use std::ops::Range;

use kv_core::batch::{Batch, Output};
use kv_core::{Pos, SeqId, TokenId};

use super::event::{Progress, RowReport};
use super::ids::RequestId;
use super::request::PromptRows;

/// The tokens that one step computes.
#[derive(Clone, Debug)]
pub struct Step {
    /// The tokens of each request, in the order of the batch.
    pub feeds: Vec<Feed>,
    /// The same as a batch, for which the memory has room.
    pub batch: Batch,
}

impl Step {
    /// The uses of the rows, in their order: each once for every text that it is a row of.
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

    /// The reports that are due after the step: `take` makes progress of each row that is of use,
    /// in order, and is not called for rows after drafted tokens that were not chosen. It returns
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
    /// The use of the row.
    pub use_of: RowUse,
}

/// The use of a row.
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
    /// Number of these, at the end, that are drafted: the rows before them decide whether they
    /// follow.
    pub n_draft: usize,
    /// The output of the last one that is not drafted: the next token is chosen from its row.
    pub output: Output,
    /// The other rows that are wanted.
    pub prompt_rows: PromptRows,
    /// Tokens of the request that see each other, by their numbers.
    pub together: Vec<Range<usize>>,
    /// The texts that it is computed for: the request, and while it is the prompt of several, its
    /// siblings.
    pub texts: Vec<RequestId>,
}

impl Feed {
    /// True if the row of token number `at` is wanted.
    pub(crate) fn is_wanted(&self, at: usize) -> bool {
        let is_last = at + 1 + self.n_draft >= self.tokens.len();
        self.prompt_rows == PromptRows::All || (is_last && self.output == Output::Wanted)
    }
}
