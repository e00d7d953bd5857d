//! `Memory`: what a model remembers of its texts.

use std::path::PathBuf;
use std::sync::Arc;

use cellar::kv_core::memory::Memory as _;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::failed;
use crate::shared::SharedModel;

/// The memory of a model.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Memory {
    pub(crate) model: Arc<SharedModel<cellar::Model>>,
}

#[pymethods]
impl Memory {
    /// Number of sequences: texts that are computed or remembered at once.
    #[getter]
    fn n_seqs(&self, py: Python<'_>) -> PyResult<u32> {
        py.detach(|| self.model.with(|model| model.engine().memory().n_seqs()))
    }

    /// Cells that hold tokens.
    #[getter]
    fn n_used(&self, py: Python<'_>) -> PyResult<u32> {
        py.detach(|| {
            self.model
                .with(|model| model.engine().memory().cell_use().n_used)
        })
    }

    /// Forgets everything. Texts that go on are computed again up to where they were.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.model.with(|model| model.clear()))
    }

    /// Restores what 'Text.save' returned, and returns its tokens: a prompt that begins with them
    /// costs only what follows.
    fn load(&self, py: Python<'_>, state: Vec<u8>) -> PyResult<Vec<u32>> {
        py.detach(|| self.restore(&state))
    }

    /// The same from a file.
    fn load_file(&self, py: Python<'_>, path: PathBuf) -> PyResult<Vec<u32>> {
        py.detach(|| {
            let state = std::fs::read(&path).map_err(PyOSError::new_err)?;
            self.restore(&state)
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let cells = py.detach(|| self.model.with(|model| model.engine().memory().cell_use()))?;
        Ok(format!(
            "<cellar.Memory, {} of {} cells are used>",
            cells.n_used, cells.n_cells
        ))
    }
}

impl Memory {
    fn restore(&self, state: &[u8]) -> PyResult<Vec<u32>> {
        let restored = self.model.with(|model| model.restore(state))?;
        let tokens = restored.map_err(|error| failed(&error))?;
        Ok(tokens.into_iter().map(|token| token.0).collect())
    }
}
