//! [`SharedModel`]: a model that several Python objects use, until it is closed.
//!
//! Invariant: one thread at a time computes with it. Knows no Python objects.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A model, an embedder or a reranker that Python objects share.
pub(crate) struct SharedModel<T>(Mutex<Option<T>>);

impl<T> SharedModel<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(Some(value)))
    }

    /// Uses it alone; not to be called with the GIL held, as another thread may compute for long.
    ///
    /// # Errors
    /// `ValueError` where it is closed.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        self.lock().as_mut().map(work).ok_or_else(closed)
    }

    /// Frees it.
    pub(crate) fn close(&self) {
        *self.lock() = None;
    }

    /// A panic elsewhere leaves it as it was before that call.
    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the model is closed")
}
