//! Which tokens a step has: decodes first, then chunks of prompts, then drafted tokens.
//!
//! Invariant: the first of the requests always has tokens in a step. Knows nothing of cells: a step
//! that does not fit is composed again, smaller.

use kv_core::Pos;
use kv_core::batch::Batch;

use crate::data::active::ActiveRequest;
use crate::data::step::{Feed, Step};
use crate::parts::pace::MIN_CHUNK;

/// The feeds of a step.
#[derive(Clone, Debug)]
pub(crate) struct Composition {
    pub(crate) feeds: Vec<Feed>,
    /// Number of tokens of prompts in them.
    pub(crate) n_prefill: usize,
    /// Number of drafted tokens in them.
    pub(crate) n_draft: usize,
}

/// The most tokens of a step in addition to one of each request that decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Of prompts.
    pub(crate) n_prefill: usize,
    /// Of prompts and drafted ones together; none are drafted where it is less than the first.
    pub(crate) n_both: usize,
}

impl StepLimits {
    /// Without drafted tokens.
    pub(crate) fn prefill(n_prefill: usize) -> Self {
        let n_both = 0;
        Self { n_prefill, n_both }
    }
}

/// Tokens of the requests: one of each that decodes, in the order of precedence, then at most
/// `n_prefill` of prompts, in the order of their numbers in `prefill`, but of the first request's
/// prompt a small chunk whatever the order is; then drafted ones.
pub(crate) fn compose(
    requests: &[&ActiveRequest],
    prefill: &[usize],
    limits: StepLimits,
) -> Composition {
    let decoding = requests.iter().filter(|request| request.is_decoding());
    let mut feeds: Vec<Feed> = decoding.map(|request| request.feed(1)).collect();
    let first = requests.first().filter(|first| !first.is_decoding());
    let chunk = limits.n_prefill.clamp(1, MIN_CHUNK);
    let reserved = first.map_or(0, |first| first.n_left().min(chunk));
    let (mut left, mut n_used) = (limits.n_prefill.saturating_sub(reserved), 0);
    let in_order = prefill
        .iter()
        .filter_map(|&at| Some((at, *requests.get(at)?)));
    for (number, request) in in_order {
        // What was reserved is the first request's.
        left += if number == 0 { reserved } else { 0 };
        let n = request.n_left().min(left);
        if request.is_decoding() || n == 0 {
            continue;
        }
        let feed = request.feed(n);
        left = left.saturating_sub(feed.tokens.len());
        n_used += feed.tokens.len();
        feeds.push(feed);
    }
    let n_draft = add_drafts(requests, &mut feeds, limits.n_both.saturating_sub(n_used));
    Composition {
        feeds,
        n_prefill: n_used,
        n_draft,
    }
}

/// Adds at most `n` drafted tokens to the feeds, which are those of the requests that decode, in
/// their order, and others. Returns how many.
fn add_drafts(requests: &[&ActiveRequest], feeds: &mut [Feed], n: usize) -> usize {
    let mut left = n;
    let decoding = requests.iter().filter(|request| request.is_decoding());
    for (feed, request) in feeds.iter_mut().zip(decoding) {
        if request.takes_drafts() {
            let draft = &request.draft[..request.draft.len().min(left)];
            feed.tokens.extend_from_slice(draft);
            feed.n_draft = draft.len();
            left -= draft.len();
        }
    }
    n - left
}

/// The feeds as a batch.
pub(crate) fn step(feeds: Vec<Feed>) -> Step {
    let mut batch = Batch::new();
    for feed in &feeds {
        for (at, &token) in feed.tokens.iter().enumerate() {
            let mut entry = batch.push_token(token).in_sequence(feed.seq);
            let number = feed.first.as_usize() + at;
            let mut together = feed.together.iter();
            if let Some(range) = together.find(|range| range.contains(&number)) {
                let last = u32::try_from(range.end - 1).unwrap_or(u32::MAX);
                entry = entry.seeing_to(Pos(last));
            }
            if feed.is_wanted(at) {
                entry.with_output();
            }
        }
    }
    Step { feeds, batch }
}
