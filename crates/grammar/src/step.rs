//! [`GrammarStep`]: leaves the sampler only tokens that the grammar allows.
//!
//! Invariant: after a failure, no token is left, now and later. Knows nothing of how grammars are
//! compiled.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use cellar_engine::sampler::{Candidates, Step, TokenOrigin};
use kv_core::TokenId;
use llguidance::Matcher;

/// Holds one text to a grammar.
pub struct GrammarStep {
    matcher: Matcher,
    n_tokens: usize,
    /// Tokens that pass by the grammar wherever the text may end.
    passing: Arc<BTreeSet<TokenId>>,
    failure: GrammarFailure,
}

/// Why a grammar left no token, where that was not the grammar's own doing: for the error message
/// after a [`NothingLeft`](cellar_engine::sampler::SampleError::NothingLeft).
#[derive(Clone, Debug, Default)]
pub struct GrammarFailure(Arc<OnceLock<String>>);

impl GrammarFailure {
    /// The reason; `None` as long as there was no failure.
    pub fn reason(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    fn set(&self, reason: &str) {
        // The first failure is the cause of all others.
        let _ = self
            .0
            .set(reason.lines().next().unwrap_or_default().to_owned());
    }
}

impl GrammarStep {
    pub(crate) fn new(matcher: Matcher, n_tokens: usize, passing: Arc<BTreeSet<TokenId>>) -> Self {
        Self {
            matcher,
            n_tokens,
            passing,
            failure: GrammarFailure::default(),
        }
    }

    /// What tells why no token was left, after the step was given away.
    pub fn failure(&self) -> GrammarFailure {
        self.failure.clone()
    }
}

impl Step for GrammarStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let may_end = !self.passing.is_empty() && self.matcher.is_accepting().unwrap_or(false);
        match self.matcher.compute_mask_or_eos() {
            Ok(mask) => candidates.retain(|candidate| {
                let id = candidate.token;
                let is_allowed = id.as_usize() < self.n_tokens && mask.is_allowed(id.0);
                is_allowed || (may_end && self.passing.contains(&id))
            }),
            Err(error) => {
                self.failure.set(&error.to_string());
                candidates.retain(|_| false);
            }
        }
    }

    fn accept(&mut self, token: TokenId, origin: TokenOrigin) {
        if origin == TokenOrigin::Prompt || self.passing.contains(&token) {
            return;
        }
        // The matcher keeps the error, and computes no mask any more.
        if let Err(error) = self.matcher.consume_token(token.0) {
            self.failure.set(&error.to_string());
        }
    }

    fn reset(&mut self) {
        if let Err(error) = self.matcher.reset() {
            self.failure.set(&error.to_string());
        }
    }
}

impl fmt::Debug for GrammarStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarStep")
            .field("n_tokens", &self.n_tokens)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}
