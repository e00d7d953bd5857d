//! [`TokenPair`]: the tokens of two texts that a model reads together.
//!
//! Invariant: the first text's tokens and marks come before [`TokenPair::second`], the second's
//! after. Knows no algorithm.

use kv_core::TokenId;

/// The tokens of two texts, with the marks around and between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenPair {
    /// All tokens.
    pub tokens: Vec<TokenId>,
    /// The start of the second text; tokens from there on have type 1, those before type 0.
    pub second: usize,
    /// Marks after the second text.
    pub(super) n_closing: usize,
}

/// The number of marks that stand between the texts of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PairSeparators {
    /// The one that ends the first (BERT).
    One,
    /// That and a separator (RoBERTa, XLM-RoBERTa).
    Two,
}

impl TokenPair {
    /// Cuts off the end of the second text, but not the marks after it, so that at most `n` tokens
    /// are left; nothing where the rest alone is longer.
    pub fn truncate(&mut self, n: usize) {
        let Some(first_closing) = self.tokens.len().checked_sub(self.n_closing) else {
            return;
        };
        let Some(end) = n.checked_sub(self.n_closing) else {
            return;
        };
        if self.second <= end && end < first_closing {
            self.tokens.drain(end..first_closing);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_second_text_is_cut() {
        let whole = TokenPair {
            tokens: [0, 5, 6, 2, 7, 8, 9, 2].map(TokenId).to_vec(),
            second: 4,
            n_closing: 1,
        };
        let cut = |n: usize| {
            let mut pair = whole.clone();
            pair.truncate(n);
            pair.tokens.iter().map(|id| id.0).collect::<Vec<_>>()
        };
        assert_eq!(cut(9), [0, 5, 6, 2, 7, 8, 9, 2]);
        assert_eq!(cut(8), [0, 5, 6, 2, 7, 8, 9, 2]);
        assert_eq!(cut(7), [0, 5, 6, 2, 7, 8, 2]);
        assert_eq!(cut(5), [0, 5, 6, 2, 2]);
        assert_eq!(cut(4), [0, 5, 6, 2, 7, 8, 9, 2]);
        assert_eq!(cut(0), [0, 5, 6, 2, 7, 8, 9, 2]);
    }
}
