//! `Text`: an iterator of pieces. Knows nothing of prompts.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cellar::engine::{Pace, TokenLogprobs};
use cellar::{CancelFlag, FinishReason, TextState};
use cellar_grammar::GrammarFailure;
use pyo3::exceptions::{PyOSError, PyStopAsyncIteration};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::shared::SharedModel;
use crate::{CellarError, failed};

/// A text that a model is writing: an iterator of its pieces.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Text {
    model: Arc<SharedModel<cellar::Model>>,
    state: Mutex<TextState>,
    cancel: CancelFlag,
    seed: u64,
    /// Why a grammar left no token.
    failure: Option<GrammarFailure>,
}

/// The log probability of a token, and the likeliest in its place.
#[pyclass(module = "cellar", frozen, get_all)]
#[derive(Clone)]
pub(crate) struct TokenProbabilities {
    /// The token.
    token: u32,
    /// The natural logarithm of its probability.
    logprob: f64,
    /// The likeliest tokens with theirs, the likeliest first.
    top: Vec<(u32, f64)>,
}

/// Numbers of tokens that were evaluated, and times.
#[pyclass(module = "cellar", frozen, get_all)]
#[derive(Clone, Copy)]
pub(crate) struct Timings {
    prompt_tokens: usize,
    prompt_seconds: f64,
    generated_tokens: usize,
    generated_seconds: f64,
}

impl Text {
    pub(crate) fn new(
        model: Arc<SharedModel<cellar::Model>>,
        state: TextState,
        cancel: CancelFlag,
        seed: u64,
    ) -> Self {
        Self {
            model,
            state: Mutex::new(state),
            cancel,
            seed,
            failure: None,
        }
    }

    pub(crate) fn with_failure(self, failure: Option<GrammarFailure>) -> Self {
        Self { failure, ..self }
    }

    /// The state; not to be waited for with the GIL held while another thread computes.
    fn state(&self) -> MutexGuard<'_, TextState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> PyResult<Vec<u8>> {
        let mut bytes = Vec::new();
        let saved = self
            .model
            .with(|model| model.save(&self.state(), &mut bytes));
        saved?.map_err(|error| failed(&error))?;
        Ok(bytes)
    }

    fn next_piece(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            // Signals such as Ctrl-C reach Python between two tokens.
            py.check_signals()?;
            let piece = py.detach(|| self.model.with(|model| self.state().next_piece(model)))?;
            match piece {
                // A token that ends inside a character, or begins a stop string.
                Ok(Some(piece)) if piece.is_empty() => {}
                Ok(piece) => return Ok(piece),
                Err(error) => return Err(text_failed(&error, self.failure.as_ref())),
            }
        }
    }
}

#[pymethods]
impl Text {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.next_piece(py)
    }

    fn __aiter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __anext__<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let asyncio = this.py().import("asyncio")?;
        asyncio.call_method1("to_thread", (this.getattr("_next")?,))
    }

    /// The next piece for an asynchronous iteration.
    fn _next(&self, py: Python<'_>) -> PyResult<String> {
        let piece = self.next_piece(py)?;
        piece.ok_or_else(|| PyStopAsyncIteration::new_err(()))
    }

    /// Writes to the end and returns the whole text.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        while self.next_piece(py)?.is_some() {}
        Ok(self.text(py))
    }

    /// Ends the text within one layer of the model; from any thread.
    fn cancel(&self) {
        self.cancel.cancel();
    }

    /// The text as bytes, which 'memory.load' takes, also in another process: what was computed of
    /// its prompt and its tokens.
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.bytes());
        Ok(PyBytes::new(py, &bytes?))
    }

    /// Writes it to a file.
    fn save_file(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| {
            let bytes = self.bytes()?;
            std::fs::write(&path, bytes).map_err(PyOSError::new_err)
        })
    }

    /// The text so far.
    #[getter]
    fn text(&self, py: Python<'_>) -> String {
        py.detach(|| self.state().text().to_owned())
    }

    /// Its tokens so far.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> Vec<u32> {
        py.detach(|| self.state().tokens().iter().map(|token| token.0).collect())
    }

    /// The log probabilities of its tokens so far, where 'logprobs' asked for them.
    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Vec<TokenProbabilities> {
        py.detach(|| self.state().logprobs().iter().map(probabilities).collect())
    }

    /// Its seed: the one that was given, or that was drawn.
    #[getter]
    fn seed(&self) -> u64 {
        self.seed
    }

    /// Why it ended: 'end', 'stop', 'length', 'context' or 'cancelled'; None while it goes on.
    #[getter]
    fn finish_reason(&self, py: Python<'_>) -> Option<&'static str> {
        py.detach(|| self.state().finish_reason().map(reason))
    }

    /// Tokens of the prompt that were computed: those that the memory did not have yet.
    #[getter]
    fn n_prompt_evaluated(&self, py: Python<'_>) -> usize {
        self.timings(py).prompt_tokens
    }

    /// The time so far.
    #[getter]
    fn timings(&self, py: Python<'_>) -> Timings {
        let timings = py.detach(|| self.state().usage().timings());
        let of = |pace: Pace| (pace.n_tokens, pace.time.as_secs_f64());
        let (prompt_tokens, prompt_seconds) = of(timings.prompt);
        let (generated_tokens, generated_seconds) = of(timings.generation);
        Timings {
            prompt_tokens,
            prompt_seconds,
            generated_tokens,
            generated_seconds,
        }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let n_tokens = self.tokens(py).len();
        let end = self.finish_reason(py).unwrap_or("goes on");
        format!(
            "<cellar.Text of {n_tokens} tokens, {end}: {:?}>",
            self.text(py)
        )
    }
}

#[pymethods]
impl TokenProbabilities {
    fn __repr__(&self) -> String {
        format!(
            "<cellar.TokenProbabilities of token {}: {:.4}>",
            self.token, self.logprob
        )
    }
}

#[pymethods]
impl Timings {
    fn __repr__(&self) -> String {
        format!(
            "<cellar.Timings: prompt {} tokens in {:.3} s, text {} tokens in {:.3} s>",
            self.prompt_tokens, self.prompt_seconds, self.generated_tokens, self.generated_seconds
        )
    }
}

/// Why a text cannot go on; where a grammar leaves no token, its reason.
pub(crate) fn text_failed(error: &cellar::Error, failure: Option<&GrammarFailure>) -> PyErr {
    match failure.and_then(GrammarFailure::reason) {
        Some(reason) => {
            CellarError::new_err(format!("the schema or grammar cannot go on: {reason}"))
        }
        None => failed(error),
    }
}

pub(crate) fn probabilities(of: &TokenLogprobs) -> TokenProbabilities {
    let top = of.top.iter().map(|top| (top.token.0, top.logprob));
    TokenProbabilities {
        token: of.chosen.token.0,
        logprob: of.chosen.logprob,
        top: top.collect(),
    }
}

pub(crate) fn reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfGeneration { .. } => "end",
        FinishReason::StopString { .. } | FinishReason::StopToken { .. } => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextFull => "context",
        FinishReason::Cancelled => "cancelled",
        _ => "other",
    }
}
