//! [`TokenPiece`]: the text of a request, token by token.
//!
//! Invariant: the texts of the pieces concatenated are the text. Plain data.

use kv_core::TokenId;

use crate::logprobs::TokenLogprobs;

/// A part of a text: what one token released, or at the end what was held back.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenPiece {
    /// The token; `None` at the end of the text.
    pub token: Option<TokenId>,
    /// Its text, of whole characters. Empty where the token ends inside a character, or may begin a
    /// stop string.
    pub text: String,
    /// Its log probabilities, where they are wanted.
    pub logprobs: Option<TokenLogprobs>,
}

/// How much of a prompt is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens that are done, those that were cached included.
    pub n_done: usize,
    /// All tokens of the prompt.
    pub n_tokens: usize,
    /// Tokens that were cached.
    pub n_reused: usize,
}

/// The text of some pieces.
pub(crate) fn text_of(pieces: &[TokenPiece]) -> String {
    pieces.iter().map(|piece| piece.text.as_str()).collect()
}

/// The log probabilities of some pieces.
pub(crate) fn logprobs_of(pieces: Vec<TokenPiece>) -> Vec<TokenLogprobs> {
    let of_tokens = pieces.into_iter().filter_map(|piece| piece.logprobs);
    of_tokens.collect()
}
