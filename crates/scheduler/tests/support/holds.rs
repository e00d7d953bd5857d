//! Requests that are held before some of their steps, and ready some time later.

use std::collections::BTreeSet;

use cellar_scheduler::{RequestId, Step};
use rand_chacha::ChaCha8Rng;

use super::simulator::below;

/// The requests that wait for something that their next tokens need.
#[derive(Debug)]
pub struct Holds {
    rng: ChaCha8Rng,
    held: Vec<Held>,
    /// The chunks of prompts that were held: each is once.
    chunks: BTreeSet<(RequestId, u32)>,
    pub n_put_off: u64,
}

/// A request that is held.
#[derive(Debug)]
struct Held {
    texts: Vec<RequestId>,
    /// The plans until it is ready.
    left: u32,
}

impl Holds {
    pub fn new(rng: ChaCha8Rng) -> Self {
        Self {
            rng,
            held: Vec::new(),
            chunks: BTreeSet::new(),
            n_put_off: 0,
        }
    }

    pub fn is_held(&self, request: RequestId) -> bool {
        self.held.iter().any(|held| held.texts.contains(&request))
    }

    /// True if a text is held.
    pub fn are_due(&self) -> bool {
        !self.held.is_empty()
    }

    /// A request that gives its sequence back is held no more.
    pub fn forget(&mut self, request: RequestId) {
        self.held.retain(|held| !held.texts.contains(&request));
    }

    /// The texts that are ready now.
    pub fn ready(&mut self) -> Vec<RequestId> {
        self.held.iter_mut().for_each(|held| held.left -= 1);
        let ready = self.held.extract_if(.., |held| held.left == 0);
        ready.flat_map(|held| held.texts).collect()
    }

    /// Of the requests of a step some whose prompts are computed, which are held from now on.
    pub fn hold(&mut self, step: &Step) -> Vec<RequestId> {
        let mut held = Vec::new();
        for feed in &step.feeds {
            let is_chunk = feed.tokens.len() > feed.n_draft + 1;
            if is_chunk
                && below(&mut self.rng, 4) == 0
                && self.chunks.insert((feed.request, feed.first.0))
            {
                let left = 1 + below(&mut self.rng, 8);
                let texts = feed.texts.clone();
                self.held.push(Held { texts, left });
                held.push(feed.request);
            }
        }
        self.n_put_off += u64::from(!held.is_empty());
        held
    }
}
