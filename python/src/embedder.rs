//! `Embedder`: vectors of texts. `Reranker`: scores of documents.
//!
//! Texts are computed group by group, and signals such as Ctrl-C are looked for between them.

use std::path::PathBuf;

use cellar::engine::{Normalization, Pooling};
use cellar::kv_backend::BoxedBackend;
use cellar::tasks::LongTexts;
use cellar::{EmbedderConfig, ModelFile, RerankerConfig, architectures};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::options::backend_options;
use crate::shared::SharedModel;
use crate::values::Count;
use crate::{failed, not_opened};

/// A model that gives vectors of texts.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Embedder {
    file: ModelFile,
    embedder: SharedModel<cellar::Embedder<BoxedBackend>>,
    dim: usize,
}

#[pymethods]
impl Embedder {
    /// Opens a GGUF file or a sentence-transformers directory. 'pooling' is 'mean', 'cls' or
    /// 'last', None the file's; 'normalize' is whether vectors have length 1, None as the file
    /// says.
    #[new]
    #[pyo3(signature = (path, *, pooling=None, normalize=None, truncate=false, threads=None, backend=None,
        gpu_layers=None))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn new(
        py: Python<'_>,
        path: PathBuf,
        pooling: Option<&str>,
        normalize: Option<bool>,
        truncate: bool,
        threads: Option<usize>,
        backend: Option<&str>,
        gpu_layers: Option<Count>,
    ) -> PyResult<Self> {
        let pooling = match pooling {
            None => None,
            Some("mean") => Some(Pooling::Mean),
            Some("cls") => Some(Pooling::Cls),
            Some("last") => Some(Pooling::Last),
            Some(other) => {
                let message = format!("pooling: '{other}' is none of: mean, cls, last");
                return Err(PyValueError::new_err(message));
            }
        };
        let config = EmbedderConfig {
            pooling,
            normalization: normalize.map(|unit| {
                if unit {
                    Normalization::Unit
                } else {
                    Normalization::None
                }
            }),
            long_texts: long_texts(truncate),
            ..EmbedderConfig::default()
        };
        let backend = backend_options(backend, gpu_layers, threads)?;
        py.detach(|| {
            let file = ModelFile::open(&path, &architectures());
            let file = file.map_err(|error| not_opened(&path, &error))?;
            let embedder = cellar::embedder(&file, backend, &config);
            let embedder = embedder.map_err(|error| match error {
                cellar::Error::Engine(cellar::engine::EngineError::NoPooling { .. }) => {
                    let advice = "give pooling='mean', 'cls' or 'last'";
                    PyValueError::new_err(format!("{error}: {advice}"))
                }
                error => failed(&error),
            })?;
            Ok(Self {
                file,
                dim: embedder.dim(),
                embedder: SharedModel::new(embedder),
            })
        })
    }

    /// A vector for each text, a numpy array [texts, dim] of float32.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let tokens = py.detach(|| {
            let tokenizer = self.file.tokenizer();
            self.embedder
                .with(|embedder| embedder.tokens(tokenizer, &texts))
        })?;
        let tokens = tokens.map_err(|error| failed(&error))?;
        let mut values = Vec::with_capacity(tokens.len() * self.dim);
        let mut left = tokens.as_slice();
        while !left.is_empty() {
            py.check_signals()?;
            let vectors = py.detach(|| {
                self.embedder.with(|embedder| {
                    let (group, rest) = left.split_at(embedder.n_together(left));
                    left = rest;
                    embedder.embed_tokens(group)
                })
            })?;
            values.extend(
                vectors
                    .map_err(|error| failed(&error))?
                    .into_iter()
                    .flatten(),
            );
        }
        PyArray1::from_vec(py, values).reshape([texts.len(), self.dim])
    }

    /// Values of a vector.
    #[getter]
    fn dim(&self) -> usize {
        self.dim
    }

    /// Frees it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.embedder.close());
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!(
            "<cellar.Embedder {}, {} values>",
            self.file.label(),
            self.dim
        )
    }
}

/// A model that scores how well documents answer a query.
#[pyclass(module = "cellar", frozen)]
pub(crate) struct Reranker {
    file: ModelFile,
    reranker: SharedModel<cellar::Reranker<BoxedBackend>>,
}

#[pymethods]
impl Reranker {
    /// Opens a GGUF file or a directory of a cross-encoder.
    #[new]
    #[pyo3(signature = (path, *, truncate=false, threads=None, backend=None, gpu_layers=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        truncate: bool,
        threads: Option<usize>,
        backend: Option<&str>,
        gpu_layers: Option<Count>,
    ) -> PyResult<Self> {
        let config = RerankerConfig {
            long_texts: long_texts(truncate),
            ..RerankerConfig::default()
        };
        let backend = backend_options(backend, gpu_layers, threads)?;
        py.detach(|| {
            let file = ModelFile::open(&path, &architectures());
            let file = file.map_err(|error| not_opened(&path, &error))?;
            let reranker = cellar::reranker(&file, backend, &config);
            Ok(Self {
                reranker: SharedModel::new(reranker.map_err(|error| failed(&error))?),
                file,
            })
        })
    }

    /// A score for each document, in their order, a numpy array of float32.
    fn scores<'py>(
        &self,
        py: Python<'py>,
        query: &str,
        documents: Vec<String>,
    ) -> PyResult<Bound<'py, PyArray1<f32>>> {
        Ok(PyArray1::from_vec(
            py,
            self.computed(py, query, &documents)?,
        ))
    }

    /// The documents as pairs of their index and their score, the best first.
    fn rank(
        &self,
        py: Python<'_>,
        query: &str,
        documents: Vec<String>,
    ) -> PyResult<Vec<(usize, f32)>> {
        let ranked = cellar::Ranked::sorted(self.computed(py, query, &documents)?);
        Ok(ranked
            .into_iter()
            .map(|one| (one.index, one.score))
            .collect())
    }

    /// Frees it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.reranker.close());
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<cellar.Reranker {}>", self.file.label())
    }
}

impl Reranker {
    fn computed(&self, py: Python<'_>, query: &str, documents: &[String]) -> PyResult<Vec<f32>> {
        let pairs = py.detach(|| {
            let tokenizer = self.file.tokenizer();
            self.reranker
                .with(|reranker| reranker.pairs(tokenizer, query, documents))
        })?;
        let pairs = pairs.map_err(|error| failed(&error))?;
        let (mut scores, mut left) = (Vec::with_capacity(pairs.len()), pairs.as_slice());
        while !left.is_empty() {
            py.check_signals()?;
            let computed = py.detach(|| {
                self.reranker.with(|reranker| {
                    let (group, rest) = left.split_at(reranker.n_together(left));
                    left = rest;
                    reranker.score_pairs(group)
                })
            })?;
            scores.extend(computed.map_err(|error| failed(&error))?);
        }
        Ok(scores)
    }
}

fn long_texts(truncate: bool) -> LongTexts {
    if truncate {
        LongTexts::Truncate
    } else {
        LongTexts::Refuse
    }
}
