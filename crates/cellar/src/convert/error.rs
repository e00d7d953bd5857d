//! [`ConvertError`]: a model that cannot be converted.

use std::io;

use kv_core::block::QuantizeError;
use kv_core::weights::{SourceChanged, WeightError};
use model_core::error::GgufError;

/// A model that cannot be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The importance matrix is of another model.
    #[error("{0}")]
    Weighting(String),
    /// A tensor cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A tensor cannot be encoded.
    #[error("tensor '{name}': {source}")]
    Quantize {
        /// Its name.
        name: String,
        /// The reason.
        source: QuantizeError,
    },
    /// The model's file has changed since it was opened.
    #[error(transparent)]
    Changed(#[from] SourceChanged),
    /// The file would not be GGUF.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
}
