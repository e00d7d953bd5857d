//! [`Branch`]: the tokens of a text that runs or has ended, under the id of its request, so that
//! another one can branch off.
//!
//! Invariant: the tokens are those of the prompt and those that the client was given, in their
//! order. Their rows are the memory's business: a prompt that begins with them reuses what is
//! there.

use std::sync::{Mutex, PoisonError};

use cellar_engine::serve::TextRequest;
use kv_core::TokenId;

use crate::shelves::ShelfLimits;

/// How many texts can be branched from.
pub(crate) const LIMITS: ShelfLimits = ShelfLimits {
    n_entries: 1024,
    n_bytes: 32 << 20,
};

/// The tokens of a text, which grows.
#[derive(Debug)]
pub(crate) struct Branch {
    /// The model that writes it.
    model: String,
    /// True if its prompt has pictures, which tokens do not tell.
    has_pictures: bool,
    tokens: Mutex<Vec<TokenId>>,
}

impl Branch {
    /// The text of a request, of which the prompt is there.
    pub(crate) fn new(model: &str, request: &TextRequest) -> Self {
        Self {
            model: model.to_owned(),
            has_pictures: !request.pictures.is_empty(),
            tokens: Mutex::new(request.prompt.clone()),
        }
    }

    /// Bytes that it takes once it has so many tokens more.
    pub(crate) fn n_bytes(&self, n_more: usize) -> usize {
        let n_tokens = self.tokens().len().saturating_add(n_more);
        size_of::<Self>().saturating_add(n_tokens.saturating_mul(size_of::<TokenId>()))
    }

    /// It has these tokens more.
    pub(crate) fn extend(&self, tokens: impl IntoIterator<Item = TokenId>) {
        let mut all = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(tokens);
    }

    /// The model that writes it.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// True if its prompt has pictures.
    pub(crate) fn has_pictures(&self) -> bool {
        self.has_pictures
    }

    /// What there is of it now.
    pub(crate) fn tokens(&self) -> Vec<TokenId> {
        let all = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }
}
