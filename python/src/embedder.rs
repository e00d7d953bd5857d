//! `Embedder`: vectors of texts.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use cellar::kv_core::backend::BoxedBackend;
use cellar::{BackendOptions, EmbedderConfig, ModelFile, architectures};
use numpy::{PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::{failed, not_opened};

/// A model that gives vectors of texts.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Embedder {
    file: ModelFile,
    embedder: Mutex<cellar::Embedder<BoxedBackend>>,
}

#[pymethods]
impl Embedder {
    /// Opens a GGUF file or a sentence-transformers directory.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| {
            let file = ModelFile::open(&path, &architectures());
            let file = file.map_err(|error| not_opened(&path, &error))?;
            let config = EmbedderConfig::default();
            let embedder = cellar::embedder(&file, BackendOptions::default(), &config);
            let embedder = embedder.map_err(|error| failed(&error))?;
            Ok(Self {
                file,
                embedder: Mutex::new(embedder),
            })
        })
    }

    /// A vector of length 1 for each text, a numpy array [texts, dim] of float32.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let vectors = py.detach(|| {
            let mut embedder = self.embedder.lock().unwrap_or_else(PoisonError::into_inner);
            embedder.embed(self.file.tokenizer(), &texts)
        });
        let vectors = vectors.map_err(|error| failed(&error))?;
        let dim = self.dim(py);
        numpy::PyArray1::from_vec(py, vectors.concat()).reshape([texts.len(), dim])
    }

    /// Values of a vector.
    #[getter]
    fn dim(&self, py: Python<'_>) -> usize {
        let dim = || {
            self.embedder
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .dim()
        };
        py.detach(dim)
    }
}
