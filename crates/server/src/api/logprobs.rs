//! Log probabilities in the shapes of OpenAI's endpoints and of llama-server.
//!
//! Invariant: bytes are those that a token writes, also where they are no character. Computes
//! nothing.

use cellar_engine::{Logprobs, TokenLogprob, TokenLogprobs};
use kv_core::TokenId;
use model_core::tokenizer::{SpecialPieces, Tokenizer};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::generate::EchoedPrompt;

/// What stands for minus infinity, which JSON does not have: as OpenAI.
const IMPOSSIBLE: f64 = -9999.0;

/// What this parameter of a request asks for.
///
/// # Errors
/// [`ApiError`] 400 where it is too much.
pub fn check(wanted: Logprobs, param: &str) -> Result<Logprobs, ApiError> {
    match wanted.check() {
        Ok(()) => Ok(wanted),
        Err(error) => Err(ApiError::invalid_param(param, error.to_string())),
    }
}

fn finite(logprob: f64) -> f64 {
    logprob.max(IMPOSSIBLE)
}

/// The bytes that a token writes; none where the vocabulary lacks it.
fn bytes(tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
    let bytes = tokenizer.piece(token, SpecialPieces::Render);
    bytes.unwrap_or_default()
}

fn text(tokenizer: &Tokenizer, token: TokenId) -> String {
    String::from_utf8_lossy(&bytes(tokenizer, token)).into_owned()
}

/// A token with its text, its bytes and its log probability.
fn entry(tokenizer: &Tokenizer, of: &TokenLogprob) -> Value {
    let bytes = bytes(tokenizer, of.token);
    json!({
        "token": String::from_utf8_lossy(&bytes),
        "logprob": finite(of.logprob),
        "bytes": bytes,
    })
}

/// The entry of each place, with those of the likeliest tokens there.
fn entries(places: &[TokenLogprobs], entry: impl Fn(&TokenLogprob) -> Value) -> Vec<Value> {
    let of_place = |place: &TokenLogprobs| {
        let mut chosen = entry(&place.chosen);
        chosen["top_logprobs"] = place.top.iter().map(&entry).collect();
        chosen
    };
    places.iter().map(of_place).collect()
}

/// The `logprobs` of a choice of `/v1/chat/completions`.
pub fn chat(tokenizer: &Tokenizer, places: &[TokenLogprobs]) -> Value {
    json!({ "content": self::places(tokenizer, places), "refusal": null })
}

/// The `logprobs` of a text of `/v1/responses`.
pub fn places(tokenizer: &Tokenizer, places: &[TokenLogprobs]) -> Vec<Value> {
    entries(places, |of| entry(tokenizer, of))
}

/// The `logprobs` of a choice of `/v1/completions`, of a prompt, whose first token has none, and of
/// the tokens behind it; `offset` is where the text of the first of these begins without a prompt,
/// in characters, and becomes where the next one does.
pub fn completion(
    tokenizer: &Tokenizer,
    prompt: Option<&EchoedPrompt>,
    places: &[TokenLogprobs],
    offset: &mut usize,
) -> Value {
    let (mut tokens, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut add = |token: String, place: Option<&TokenLogprobs>, offset: usize| {
        tokens.push(token);
        logprobs.push(place.map(|place| finite(place.chosen.logprob)));
        tops.push(place.map(|place| likeliest(tokenizer, place)));
        offsets.push(offset);
    };
    if let Some(prompt) = prompt {
        let places = std::iter::once(None).chain(prompt.logprobs.iter().map(Some));
        let tokens = prompt.tokens.iter().zip(prompt.offsets.iter());
        for ((&token, &offset), place) in tokens.zip(places) {
            add(text(tokenizer, token), place, offset);
        }
        *offset = prompt.text.chars().count();
    }
    for place in places {
        let token = text(tokenizer, place.chosen.token);
        let n_chars = token.chars().count();
        add(token, Some(place), *offset);
        *offset += n_chars;
    }
    json!({
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}

/// The log probabilities of the likeliest tokens and of the chosen one, by their text.
fn likeliest(tokenizer: &Tokenizer, place: &TokenLogprobs) -> Map<String, Value> {
    let entry = |of: &TokenLogprob| (text(tokenizer, of.token), json!(finite(of.logprob)));
    let chosen = std::iter::once(&place.chosen);
    place.top.iter().chain(chosen).map(entry).collect()
}

/// The `completion_probabilities` of llama-server.
pub fn llama(tokenizer: &Tokenizer, places: &[TokenLogprobs]) -> Value {
    let with_id = |of: &TokenLogprob| {
        let mut entry = entry(tokenizer, of);
        entry["id"] = json!(of.token.0);
        entry
    };
    json!(entries(places, with_id))
}
