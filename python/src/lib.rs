//! The Python module `cellar._native`: models, texts, vectors and memory, with the GIL released
//! while anything is computed.
//!
//! Invariant: Python objects share one model behind a lock, and each call takes it for as long as
//! it computes, so that texts may take turns from any thread. Knows nothing that `cellar` does not.

mod adapters;
mod batch;
mod chat;
mod compute;
mod embedder;
mod hub;
mod memory;
mod model;
mod options;
mod shared;
mod text;
mod values;

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyFileNotFoundError};
use pyo3::prelude::*;

create_exception!(cellar, CellarError, PyException);

/// An error of Cellar's, with its causes in one line.
fn failed(error: &dyn std::error::Error) -> PyErr {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message += &format!(": {text}");
        }
        cause = error.source();
    }
    CellarError::new_err(message)
}

/// An error of opening a file: Python's own where there is none.
fn not_opened(path: &std::path::Path, error: &dyn std::error::Error) -> PyErr {
    if path.exists() {
        failed(error)
    } else {
        PyFileNotFoundError::new_err(format!("no model at '{}'", path.display()))
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // numpy's functions are looked up now: where an import is interrupted later, that would be a
    // panic.
    module.py().import("numpy")?;
    numpy::PyArray1::<f32>::from_vec(module.py(), Vec::new());
    module.add_class::<model::Model>()?;
    module.add_class::<text::Text>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<embedder::Embedder>()?;
    module.add_class::<embedder::Reranker>()?;
    module.add_class::<batch::FinishedText>()?;
    module.add_class::<text::TokenProbabilities>()?;
    module.add_class::<text::Timings>()?;
    module.add_function(wrap_pyfunction!(hub::pull, module)?)?;
    module.add("CellarError", module.py().get_type::<CellarError>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
