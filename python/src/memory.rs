//! `Memory`: what a model remembers, by sequence. Edits are whole or refused.

use std::path::PathBuf;
use std::sync::Arc;

use cellar::kv_core::memory::{Memory as _, Seqs};
use cellar::kv_core::{Pos, PosRange, SeqId};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::failed;
use crate::model::Shared;

/// What a model remembers.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Memory {
    pub(crate) model: Arc<Shared>,
}

#[pymethods]
impl Memory {
    /// Number of sequences.
    #[getter]
    fn n_seqs(&self, py: Python<'_>) -> u32 {
        py.detach(|| self.model.lock().engine().memory().n_seqs())
    }

    /// The first and the last position of a sequence; None where it is empty.
    #[pyo3(signature = (seq=0))]
    fn positions(&self, py: Python<'_>, seq: u32) -> Option<(u32, u32)> {
        let positions = || self.model.lock().engine().memory().positions(SeqId(seq));
        let has = py.detach(positions)?;
        Some((has.first.0, has.last.0))
    }

    /// Removes the positions from 'first' to before 'end' of a sequence; returns how many tokens.
    #[pyo3(signature = (seq=0, first=0, end=None))]
    fn remove(&self, py: Python<'_>, seq: u32, first: u32, end: Option<u32>) -> PyResult<u32> {
        if end.is_some_and(|end| end <= first) {
            return Ok(0);
        }
        let range = match end {
            Some(end) => PosRange::from(Pos(first)..Pos(end)),
            None => PosRange::from(Pos(first)..),
        };
        let seqs = Seqs::One(SeqId(seq));
        let removed = py.detach(|| self.model.lock().engine_mut().remove(seqs, range));
        removed.map(|r| r.n_tokens).map_err(|error| failed(&error))
    }

    /// Makes 'to' the same text as 'source', without copying a row where they share cells; returns
    /// how many tokens.
    fn copy(&self, py: Python<'_>, source: u32, to: u32) -> PyResult<u32> {
        let copied = py.detach(|| self.model.lock().copy(SeqId(source), SeqId(to)));
        copied.map_err(|error| failed(&error))
    }

    /// Forgets everything.
    fn clear(&self, py: Python<'_>) {
        let _ = py.detach(|| self.model.lock().engine_mut().clear());
    }

    /// A sequence as bytes, to be restored later by the same model.
    #[pyo3(signature = (seq=0))]
    fn save<'py>(&self, py: Python<'py>, seq: u32) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.bytes(seq));
        Ok(PyBytes::new(py, &bytes?))
    }

    /// Restores what 'save' returned; returns how many tokens.
    #[pyo3(signature = (state, seq=0))]
    fn load(&self, py: Python<'_>, state: Vec<u8>, seq: u32) -> PyResult<usize> {
        py.detach(|| self.restore(&state, seq))
    }

    /// Writes a sequence to a file.
    #[pyo3(signature = (path, seq=0))]
    fn save_file(&self, py: Python<'_>, path: PathBuf, seq: u32) -> PyResult<()> {
        py.detach(|| {
            let bytes = self.bytes(seq)?;
            std::fs::write(&path, bytes).map_err(PyOSError::new_err)
        })
    }

    /// Restores a sequence from a file; returns how many tokens.
    #[pyo3(signature = (path, seq=0))]
    fn load_file(&self, py: Python<'_>, path: PathBuf, seq: u32) -> PyResult<usize> {
        py.detach(|| {
            let state = std::fs::read(&path).map_err(PyOSError::new_err)?;
            self.restore(&state, seq)
        })
    }
}

impl Memory {
    fn bytes(&self, seq: u32) -> PyResult<Vec<u8>> {
        let mut bytes = Vec::new();
        let saved = self.model.lock().save(SeqId(seq), &mut bytes);
        saved.map_err(|error| failed(&error))?;
        Ok(bytes)
    }

    fn restore(&self, state: &[u8], seq: u32) -> PyResult<usize> {
        let mut model = self.model.lock();
        let tokens = model.restore(SeqId(seq), state);
        tokens.map(<[_]>::len).map_err(|error| failed(&error))
    }
}
