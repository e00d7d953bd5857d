//! Which tokens a step has: decodes first, then chunks of prompts.
//!
//! Invariant: the first of the running requests always has tokens in a step. Knows nothing of
//! cells: a step that does not fit is composed again, smaller.

use kv_core::batch::Batch;

use crate::event::{Feed, Step};
use crate::state::Running;

/// The smallest chunk of a prompt that the first request is given while others could make room.
pub(crate) const MIN_CHUNK: usize = 16;

/// The feeds of a step.
#[derive(Clone, Debug)]
pub(crate) struct Composed {
    pub(crate) feeds: Vec<Feed>,
    /// How many of their tokens are of prompts.
    pub(crate) n_prefill: usize,
}

/// Tokens of the requests in the order of precedence: one of each that decodes, then at most
/// `n_prefill` of prompts; of the first request's prompt at least one.
pub(crate) fn compose(running: &[Running], n_prefill: usize) -> Composed {
    let decoding = running.iter().filter(|request| request.is_decoding());
    let mut feeds: Vec<Feed> = decoding.map(|request| request.feed(1)).collect();
    let (mut left, mut n_used) = (n_prefill, 0);
    for (number, request) in running.iter().enumerate() {
        let least = usize::from(number == 0);
        let n = request.n_left().min(left.max(least));
        if request.is_decoding() || n == 0 {
            continue;
        }
        let feed = request.feed(n);
        left = left.saturating_sub(feed.tokens.len());
        n_used += feed.tokens.len();
        feeds.push(feed);
    }
    Composed {
        feeds,
        n_prefill: n_used,
    }
}

/// The feeds as a batch.
pub(crate) fn step(feeds: Vec<Feed>) -> Step {
    let mut batch = Batch::new();
    for feed in &feeds {
        for (at, &token) in feed.tokens.iter().enumerate() {
            let entry = batch.push_token(token).in_sequence(feed.seq);
            if feed.is_wanted(at) {
                entry.with_output();
            }
        }
    }
    Step { feeds, batch }
}
