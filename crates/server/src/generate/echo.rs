//! [`EchoedPrompt`]: a prompt as a part of its answer.
//!
//! Invariant: its tokens begin where its text says, in the order of the text. Knows no API.

use std::sync::Arc;

use cellar_engine::TokenLogprobs;
use kv_core::TokenId;
use model_core::tokenizer::{DecodeFrom, DecodeStream, SpecialPieces, Tokenizer};

/// A prompt as a part of its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct EchoedPrompt {
    /// The text: as it was given, or what its tokens spell, control tokens included.
    pub text: String,
    /// All of its tokens.
    pub tokens: Arc<[TokenId]>,
    /// Where in the text each of them begins, in characters. A token that the tokenizer put before
    /// the text begins where the next one does.
    pub offsets: Arc<[usize]>,
    /// The log probabilities of all tokens but the first, where they are wanted.
    pub logprobs: Vec<TokenLogprobs>,
}

impl EchoedPrompt {
    /// A prompt of these tokens, which were made of a text where there is one.
    pub(crate) fn new(tokenizer: &Tokenizer, text: Option<String>, tokens: &[TokenId]) -> Self {
        let n_added = match text {
            Some(_) => usize::from(tokenizer.adds_first().is_some()),
            None => 0,
        };
        // A token that the vocabulary lacks is refused before anything is computed.
        let text = text.unwrap_or_else(|| {
            let decoded = tokenizer.decode(tokens, SpecialPieces::Render);
            decoded.unwrap_or_default()
        });
        let n_chars = text.chars().count();
        let mut decoder = DecodeStream::new(DecodeFrom::TextStart, SpecialPieces::Render);
        let mut written = 0;
        let offset = |(index, &token): (usize, &TokenId)| {
            let offset = written.min(n_chars);
            if index >= n_added {
                let piece = decoder.push(tokenizer, token).unwrap_or_default();
                written += piece.chars().count();
            }
            offset
        };
        let offsets = tokens.iter().enumerate().map(offset).collect();
        Self {
            text,
            tokens: tokens.into(),
            offsets,
            logprobs: Vec::new(),
        }
    }
}
