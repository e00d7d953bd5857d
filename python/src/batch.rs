//! `generate_batch`: many texts at once on one engine, as a server computes them.

use std::collections::VecDeque;
use std::time::Duration;

use cellar::engine::CompletionOptions;
use cellar::engine::sampler::Step;
use cellar::engine::serve::{
    FinishedText as ServedText, Service, ServiceConfig, ServiceError, TextRequest, TextStream,
};
use cellar::kv_core::backend::BoxedBackend;
use cellar::{CancelFlag, GenerateOptions, Model, TokenId};
use cellar_grammar::Grammar;
use pyo3::prelude::*;

use crate::compute::interruptible;
use crate::failed;
use crate::shared::SharedModel;
use crate::text::{TokenProbabilities, probabilities, reason};

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

/// Continues prompts together and returns their texts in order.
///
/// # Errors
/// A request that is refused or fails; then none is returned.
pub(crate) fn finish_together(
    py: Python<'_>,
    model: &SharedModel<Model>,
    prompts: Vec<Vec<TokenId>>,
    options: &GenerateOptions,
    grammar: Option<&Grammar>,
) -> PyResult<Vec<FinishedText>> {
    let seed = options.sampler.seed;
    let cancel = CancelFlag::default();
    let texts = interruptible(
        py,
        || cancel.cancel(),
        || {
            model.replace(|model| {
                let parts = model.into_engine();
                let config = ServiceConfig {
                    max_queued: prompts.len().max(1),
                    max_queued_tokens: usize::MAX,
                    ..ServiceConfig::default()
                };
                let service = match Service::start(parts.engine, parts.file.tokenizer(), &config) {
                    Ok(service) => service,
                    Err(error) => return (None, Err(error)),
                };
                let texts = finished(&service, prompts, options, grammar, &cancel);
                match service.stop() {
                    Ok(engine) => (Some(Model::with_engine(parts.file, engine)), texts),
                    Err(error) => (None, Err(error)),
                }
            })
        },
    )??;
    let texts = texts.map_err(|error| failed(&error))?;
    let finished = (seed..).zip(texts).map(|(seed, text)| FinishedText {
        text: text.text,
        tokens: text.tokens.iter().map(|token| token.0).collect(),
        finish_reason: reason(&text.finish),
        logprobs: text.logprobs.iter().map(probabilities).collect(),
        seed,
    });
    Ok(finished.collect())
}

/// Submits all, and waits for each, until it is cancelled.
fn finished(
    service: &Service<BoxedBackend>,
    prompts: Vec<Vec<TokenId>>,
    options: &GenerateOptions,
    grammar: Option<&Grammar>,
    cancel: &CancelFlag,
) -> Result<Vec<ServedText>, ServiceError> {
    let steps = || -> Vec<Box<dyn Step>> {
        let step = grammar.map(|grammar| Box::new(grammar.step()) as Box<dyn Step>);
        step.into_iter().collect()
    };
    let submit = |(number, prompt): (u64, Vec<TokenId>)| {
        let mut sampler = options.sampler.clone();
        sampler.seed = sampler.seed.wrapping_add(number);
        service.submit(TextRequest {
            prompt,
            options: CompletionOptions {
                sampler,
                n_predict: options.n_predict,
                stop: options.stop.clone(),
                stop_tokens: options.stop_tokens.clone(),
                logprobs: options.logprobs,
                ..CompletionOptions::default()
            },
            steps: steps(),
            ..TextRequest::default()
        })
    };
    let texts: Result<VecDeque<_>, _> = (0..).zip(prompts).map(submit).collect();
    let (mut texts, mut finished) = (texts?, Vec::new());
    while let Some(text) = texts.pop_front() {
        // Those that are left behind are cancelled, too.
        finished.push(finish(text, cancel)?);
    }
    Ok(finished)
}

fn finish(mut text: TextStream, cancel: &CancelFlag) -> Result<ServedText, ServiceError> {
    let mut taken = String::new();
    while let Some(piece) = text.next_piece_within(Duration::from_millis(50))? {
        if cancel.is_cancelled() {
            return Err(ServiceError::Stopped);
        }
        taken += &piece;
    }
    let logprobs = text.take_logprobs();
    let rest = text.finish()?;
    Ok(ServedText {
        text: taken,
        logprobs: [logprobs, rest.logprobs].concat(),
        ..rest
    })
}
