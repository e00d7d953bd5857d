//! `Memory`: what a model remembers, by sequence. Edits are whole or refused.

use std::path::PathBuf;
use std::sync::Arc;

use cellar::kv_core::memory::{Memory as _, Seqs};
use cellar::kv_core::{Pos, PosRange, SeqId};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::failed;
use crate::shared::SharedModel;
use crate::values::Count;

/// The memory of a model. A text whose sequence is changed here cannot go on.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Memory {
    pub(crate) model: Arc<SharedModel<cellar::Model>>,
}

#[pymethods]
impl Memory {
    /// Number of sequences.
    #[getter]
    fn n_seqs(&self, py: Python<'_>) -> PyResult<u32> {
        py.detach(|| self.model.with(|model| model.engine().memory().n_seqs()))
    }

    /// The first and the last position of a sequence; None where it is empty.
    #[pyo3(signature = (seq=Count(0)))]
    fn positions(&self, py: Python<'_>, seq: Count) -> PyResult<Option<(u32, u32)>> {
        let seq = SeqId(seq.0);
        let has = py.detach(|| {
            self.model
                .with(|model| model.engine().memory().positions(seq))
        })?;
        Ok(has.map(|has| (has.first.0, has.last.0)))
    }

    /// Removes the positions from 'first' to before 'end' of a sequence; returns how many tokens.
    #[pyo3(signature = (seq=Count(0), first=Count(0), end=None))]
    fn remove(
        &self,
        py: Python<'_>,
        seq: Count,
        first: Count,
        end: Option<Count>,
    ) -> PyResult<u32> {
        let range = match end {
            Some(end) if end.0 <= first.0 => return Ok(0),
            Some(end) => PosRange::from(Pos(first.0)..Pos(end.0)),
            None => PosRange::from(Pos(first.0)..),
        };
        let seqs = Seqs::One(SeqId(seq.0));
        let removed = py.detach(|| {
            self.model
                .with(|model| model.engine_mut().remove(seqs, range))
        });
        removed?.map(|r| r.n_tokens).map_err(|error| failed(&error))
    }

    /// Makes 'to' the same text as 'source', without copying a row where they share cells; returns
    /// how many tokens.
    fn copy(&self, py: Python<'_>, source: Count, to: Count) -> PyResult<u32> {
        let (source, to) = (SeqId(source.0), SeqId(to.0));
        let copied = py.detach(|| self.model.with(|model| model.copy(source, to)));
        copied?.map_err(|error| failed(&error))
    }

    /// Forgets everything.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            self.model.with(|model| {
                let _ = model.engine_mut().clear();
            })
        })
    }

    /// A sequence as bytes, to be restored later by the same model.
    #[pyo3(signature = (seq=Count(0)))]
    fn save<'py>(&self, py: Python<'py>, seq: Count) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.bytes(seq));
        Ok(PyBytes::new(py, &bytes?))
    }

    /// Restores what 'save' returned; returns how many tokens.
    #[pyo3(signature = (state, seq=Count(0)))]
    fn load(&self, py: Python<'_>, state: Vec<u8>, seq: Count) -> PyResult<usize> {
        py.detach(|| self.restore(&state, seq))
    }

    /// Writes a sequence to a file.
    #[pyo3(signature = (path, seq=Count(0)))]
    fn save_file(&self, py: Python<'_>, path: PathBuf, seq: Count) -> PyResult<()> {
        py.detach(|| {
            let bytes = self.bytes(seq)?;
            std::fs::write(&path, bytes).map_err(PyOSError::new_err)
        })
    }

    /// Restores a sequence from a file; returns how many tokens.
    #[pyo3(signature = (path, seq=Count(0)))]
    fn load_file(&self, py: Python<'_>, path: PathBuf, seq: Count) -> PyResult<usize> {
        py.detach(|| {
            let state = std::fs::read(&path).map_err(PyOSError::new_err)?;
            self.restore(&state, seq)
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let tokens = py.detach(|| {
            self.model.with(|model| {
                let memory = model.engine().memory();
                let seqs = (0..memory.n_seqs()).map(SeqId);
                seqs.map(|seq| memory.n_tokens(seq)).collect::<Vec<_>>()
            })
        })?;
        Ok(format!("<cellar.Memory, tokens of sequences: {tokens:?}>"))
    }
}

impl Memory {
    fn bytes(&self, seq: Count) -> PyResult<Vec<u8>> {
        let mut bytes = Vec::new();
        let saved = self
            .model
            .with(|model| model.save(SeqId(seq.0), &mut bytes));
        saved?.map_err(|error| failed(&error))?;
        Ok(bytes)
    }

    fn restore(&self, state: &[u8], seq: Count) -> PyResult<usize> {
        let restored = self.model.with(|model| {
            let tokens = model.restore(SeqId(seq.0), state);
            tokens.map(<[_]>::len)
        });
        restored?.map_err(|error| failed(&error))
    }
}
