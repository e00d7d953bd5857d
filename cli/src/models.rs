//! The architectures that the program knows, and the model that is compiled into it.

use std::path::{Path, PathBuf};

use kv_core::weights::SharedBytes;
use model_core::architecture::Registry;
use model_core::gguf::{GgufError, GgufFile};
use model_core::model_file::{ModelFile, ModelFileError};

/// The model in the binary; see `models/README.md`.
static EMBEDDED: &[u8] = include_bytes!("../../models/stories-llama-f16.gguf");

/// What the model in the binary continues where there is no prompt.
pub(crate) const EMBEDDED_PROMPT: &str = "Once upon a time";

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelSource {
    /// The binary itself.
    Embedded,
    /// A GGUF file.
    File(PathBuf),
}

impl ModelSource {
    /// The file, or else the model in the binary.
    pub(crate) fn new(file: Option<&Path>) -> Self {
        file.map_or(Self::Embedded, |path| Self::File(path.to_owned()))
    }

    /// What to call it.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Embedded => "the model in the binary".to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }

    /// The file, whatever is in it.
    pub(crate) fn gguf(&self) -> Result<GgufFile, GgufError> {
        match self {
            Self::Embedded => GgufFile::from_bytes(embedded()),
            Self::File(path) => GgufFile::open(path),
        }
    }

    /// The model with its tokenizer.
    pub(crate) fn load(&self) -> Result<ModelFile, ModelFileError> {
        let registry = registry();
        match self {
            Self::Embedded => ModelFile::from_bytes(embedded(), &registry),
            Self::File(path) => ModelFile::open(path, &registry),
        }
    }
}

/// Every architecture that this program knows.
pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    registry
}

fn embedded() -> SharedBytes {
    SharedBytes::new(std::sync::Arc::new(EMBEDDED))
}
