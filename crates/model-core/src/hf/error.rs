//! [`HfError`]: why a model directory cannot be used. Names file, key or tensor.

use std::io;
use std::path::PathBuf;

use kv_core::weights::WeightError;

use crate::architecture::ModelError;
use crate::gguf::MetadataError;

/// Why a model directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HfError {
    /// A file cannot be read.
    #[error("cannot read '{}': {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file is not what its name says.
    #[error("'{}': {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A key is not there.
    #[error("{file}: '{key}' is missing ({expected} wanted)")]
    MissingKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What should be there.
        expected: String,
    },
    /// A key has a value that it cannot have.
    #[error("{file}: '{key}' is {found}, not {expected}")]
    WrongKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The value in the file.
        found: String,
        /// What should be there.
        expected: String,
    },
    /// A class of models without a translation.
    #[error("{file}: class '{class}' is not supported; known are: {}", known.join(", "))]
    UnknownClass {
        /// The file.
        file: String,
        /// The class in the file.
        class: String,
        /// Classes that are known.
        known: Vec<String>,
    },
    /// A class of models that is not computed, on purpose.
    #[error("{file}: class '{class}' is not supported: {reason}")]
    Declined {
        /// The file.
        file: String,
        /// The class in the file.
        class: String,
        /// Why not, and what to do instead.
        reason: &'static str,
    },
    /// A tensor is not as the translation needs it.
    #[error("tensor '{name}': {reason}")]
    Tensor {
        /// Its name in the file.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor's bytes and shape do not agree.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// What was translated makes no model.
    #[error("{file}: {source}")]
    Model {
        /// The directory.
        file: String,
        /// What is missing or wrong.
        source: ModelError,
    },
    /// What was translated lacks a key.
    #[error("{file}: {source}")]
    Metadata {
        /// The directory.
        file: String,
        /// What is missing or wrong.
        source: MetadataError,
    },
}
