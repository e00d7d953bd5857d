//! [`Error`]: why a model cannot be opened or go on. Decides nothing.

use engine::EngineError;
use kv_core::backend::BackendError;
use model_core::error::ModelFileError;

/// Why a model cannot be opened or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is not usable.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// The backend cannot be opened.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The engine refuses or fails.
    #[error(transparent)]
    Engine(#[from] EngineError),
}
