//! `Text`: an iterator of pieces. Knows nothing of prompts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cellar::{CancelFlag, FinishReason, TextState};
use pyo3::prelude::*;

use crate::failed;
use crate::model::Shared;

/// A text that a model is writing: an iterator of its pieces.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Text {
    model: Arc<Shared>,
    state: Mutex<TextState>,
    cancel: CancelFlag,
}

impl Text {
    pub(crate) fn new(model: Arc<Shared>, state: TextState, cancel: CancelFlag) -> Self {
        Self {
            model,
            state: Mutex::new(state),
            cancel,
        }
    }

    /// The state; not to be waited for with the GIL held while another thread computes.
    fn state(&self) -> MutexGuard<'_, TextState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Text {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            // Signals such as Ctrl-C reach Python between two tokens.
            py.check_signals()?;
            let piece = py.detach(|| self.state().next_piece(&mut self.model.lock()));
            match piece.map_err(|error| failed(&error))? {
                // A token that ends inside a character, or begins a stop string.
                Some(piece) if piece.is_empty() => {}
                piece => return Ok(piece),
            }
        }
    }

    /// Writes to the end and returns the whole text.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        while self.__next__(py)?.is_some() {}
        Ok(self.text(py))
    }

    /// Ends the text within one layer of the model; from any thread.
    fn cancel(&self) {
        self.cancel.cancel();
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

    /// Why it ended: 'end', 'stop', 'length', 'context' or 'cancelled'; None while it goes on.
    #[getter]
    fn finish_reason(&self, py: Python<'_>) -> Option<&'static str> {
        let reason = py.detach(|| self.state().finish_reason().cloned());
        Some(match reason? {
            FinishReason::EndOfGeneration { .. } => "end",
            FinishReason::StopString { .. } | FinishReason::StopToken { .. } => "stop",
            FinishReason::Length => "length",
            FinishReason::ContextFull => "context",
            FinishReason::Cancelled => "cancelled",
            _ => "other",
        })
    }

    /// Tokens of the prompt that were evaluated: those that the sequence did not have yet.
    #[getter]
    fn n_prompt_evaluated(&self, py: Python<'_>) -> usize {
        py.detach(|| self.state().timings().prompt.n_tokens)
    }
}
