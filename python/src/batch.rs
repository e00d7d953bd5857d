//! `generate_batch`: many texts at once on one engine, as a server computes them.

use cellar::engine::serve::TextRequest;
use cellar::{CancelFlag, Model};
use pyo3::prelude::*;

use crate::compute::interruptible;
use crate::shared::SharedModel;
use crate::text::{TokenProbabilities, probabilities, reason};
use crate::{CellarError, failed};

/// A text that has ended.
#[pyclass(module = "cellar", frozen, get_all)]
pub(crate) struct FinishedText {
    /// The text.
    text: String,
    /// Its tokens.
    tokens: Vec<u32>,
    /// Why it ended.
    finish_reason: &'static str,
    /// The log probabilities of its tokens, where they were wanted.
    logprobs: Vec<TokenProbabilities>,
    /// Its seed.
    seed: u64,
}

#[pymethods]
impl FinishedText {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!(
            "<cellar.FinishedText {:?}, {}>",
            self.text, self.finish_reason
        )
    }
}

/// Computes requests together and returns their texts in order; the seed is the first one's.
///
/// # Errors
/// A request that is refused or fails; then none is returned.
pub(crate) fn finish_together(
    py: Python<'_>,
    model: &SharedModel<Model>,
    requests: Vec<TextRequest>,
    seed: u64,
) -> PyResult<Vec<FinishedText>> {
    let cancel = CancelFlag::default();
    let texts = interruptible(
        py,
        || cancel.cancel(),
        || model.with(|model| model.finish_all(requests, &cancel)),
    )??;
    let texts = texts.map_err(|error| failed(&error))?;
    let texts = texts.ok_or_else(|| CellarError::new_err("cancelled"))?;
    let finished = (seed..).zip(texts).map(|(seed, text)| FinishedText {
        text: text.text,
        tokens: text.tokens.iter().map(|token| token.0).collect(),
        finish_reason: reason(&text.finish),
        logprobs: text.logprobs.iter().map(probabilities).collect(),
        seed,
    });
    Ok(finished.collect())
}
