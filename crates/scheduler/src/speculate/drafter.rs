//! [`Drafter`]: drafts the next tokens of one text by prompt lookup.
//!
//! Invariant: what it drafts depends on the tokens of the text and on what became of the drafts
//! before. Knows no model.

use kv_core::TokenId;

use super::{DraftLength, NgramLookup, Speculation, SpeculationOff};

/// The drafts of a text so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculated {
    /// Tokens that were drafted and computed.
    pub n_drafted: usize,
    /// Number of them that the text has.
    pub n_accepted: usize,
    /// Why none were, where speculation was wanted.
    pub off: Option<SpeculationOff>,
}

/// Drafts the next tokens of one text.
#[derive(Clone, Debug)]
pub struct Drafter {
    lookup: NgramLookup,
    length: DraftLength,
    speculated: Speculated,
}

impl Drafter {
    /// A drafter of an empty text; `None` where prompt lookup is not wanted. It drafts at least one
    /// token at once.
    pub fn new(speculation: Speculation) -> Option<Self> {
        match speculation {
            Speculation::Off | Speculation::Draft { .. } | Speculation::Head { .. } => None,
            Speculation::Lookup { n_max } | Speculation::Auto { n_max } => Some(Self {
                lookup: NgramLookup::default(),
                length: DraftLength::new(n_max),
                speculated: Speculated::default(),
            }),
        }
    }

    /// Adds tokens of the text, of the prompt or chosen.
    pub fn push(&mut self, tokens: &[TokenId]) {
        self.lookup.extend(tokens.iter().copied());
    }

    /// Tokens that may follow, at most `n_max`; none where that is not worth computing them.
    pub fn draft(&self, n_max: usize) -> Vec<TokenId> {
        let n_tokens = self.lookup.tokens().len();
        if self.length.next(n_tokens, usize::MAX) == 0 {
            return Vec::new();
        }
        let Some(found) = self.lookup.find() else {
            return Vec::new();
        };
        let n = self.length.next(n_tokens, found.n_match());
        found.draft(n.min(n_max))
    }

    /// Of `n_drafted` tokens that were computed, the first `n_accepted` were right. Comes after the
    /// tokens that were chosen instead.
    pub fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        self.speculated.n_drafted += n_drafted;
        self.speculated.n_accepted += n_accepted;
        let n_tokens = self.lookup.tokens().len();
        self.length.learn(n_tokens, n_drafted, n_accepted);
    }

    /// Its drafts so far.
    pub fn speculated(&self) -> Speculated {
        self.speculated
    }
}
