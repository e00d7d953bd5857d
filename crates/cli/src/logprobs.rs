//! [`ShownLogprobs`]: log probabilities as `run --json` and `batch` print them.
//!
//! Invariant: tokens have their ids, as a text may not be what the token alone writes. Computes
//! nothing.

use cellar_engine::{TokenLogprob, TokenLogprobs};
use kv_core::TokenId;
use model_core::tokenizer::{SpecialPieces, Tokenizer};
use serde::Serialize;

/// The log probabilities of one place.
#[derive(Debug, Serialize)]
pub(crate) struct ShownLogprobs {
    #[serde(flatten)]
    chosen: ShownLogprob,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top: Vec<ShownLogprob>,
}

#[derive(Debug, Serialize)]
struct ShownLogprob {
    token: TokenId,
    /// What the token writes; bytes that are no character as U+FFFD.
    text: String,
    /// The natural logarithm of its probability; null where it is impossible.
    logprob: f64,
}

impl ShownLogprobs {
    pub(crate) fn of(tokenizer: &Tokenizer, place: &TokenLogprobs) -> Self {
        let shown = |of: &TokenLogprob| ShownLogprob {
            token: of.token,
            text: piece(tokenizer, of.token),
            logprob: of.logprob,
        };
        Self {
            chosen: shown(&place.chosen),
            top: place.top.iter().map(shown).collect(),
        }
    }
}

/// Those of several places.
pub(crate) fn shown_logprobs(
    tokenizer: &Tokenizer,
    places: &[TokenLogprobs],
) -> Vec<ShownLogprobs> {
    let shown = |place| ShownLogprobs::of(tokenizer, place);
    places.iter().map(shown).collect()
}

fn piece(tokenizer: &Tokenizer, token: TokenId) -> String {
    // A model may have logits beyond the vocabulary, which write nothing.
    let bytes = tokenizer.piece(token, SpecialPieces::Render);
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}
