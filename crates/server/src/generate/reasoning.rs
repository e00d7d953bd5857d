//! The reasoning of an answer: its length, and the limit of it.
//!
//! Knows no request, and no API.

use std::ops::Range;

use cellar_engine::sampler::{ReasoningBudget, ReasoningMarks};
use kv_core::TokenId;
use model_core::tokenizer::{DecodeFrom, DecodeStream, SpecialPieces, Tokenizer};

use crate::model::ServedModel;

/// How many tokens of a text begin in these parts of it, of which the first come first.
pub(super) fn n_tokens_of(
    tokenizer: &Tokenizer,
    tokens: &[TokenId],
    special: SpecialPieces,
    parts: &[Range<usize>],
) -> usize {
    let mut decoder = DecodeStream::new(DecodeFrom::Continuation, special);
    let mut written = 0;
    let is_in_parts = |id: &&TokenId| {
        let is_inside = parts.iter().any(|part| part.contains(&written));
        // A token that is not in the vocabulary was not generated.
        written += decoder.push(tokenizer, **id).unwrap_or_default().len();
        is_inside
    };
    tokens.iter().filter(is_in_parts).count()
}

/// The step that ends the reasoning of the answer to this prompt after so many tokens.
pub(super) fn reasoning_budget(
    model: &ServedModel,
    n_tokens: usize,
    prompt: &str,
) -> ReasoningBudget {
    let marks = cellar_chat::reasoning_marks(model.template_source().unwrap_or_default());
    let marks = marks.iter().map(|marks| ReasoningMarks {
        open: marks.open.to_owned(),
        close: marks.close.to_owned(),
        answer: marks.answer.to_owned(),
    });
    ReasoningBudget::new(n_tokens, marks.collect(), prompt, model.tokenizer())
}
