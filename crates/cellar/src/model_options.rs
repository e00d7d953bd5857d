//! [`ModelOptions`]: the settings that a model is opened with. Plain data.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use cellar_engine::{DraftModel, EngineConfig};
use kv_backend::OnProgress;
use kv_rows::{KvType, KvTypes};
use model_core::adapters::{AdapterOptions, AdapterSpec};
use model_core::head_file::HeadFile;
use model_core::model_file::ModelFile;

use crate::architectures::architectures;
use crate::backends::{BackendKind, BackendOptions};
use crate::error::Error;
use crate::model::Model;

/// The settings that a model is opened with: fields, and methods for those that most callers need.
///
/// ```no_run
/// use cellar::{BackendKind, KvType, ModelOptions};
///
/// let model = ModelOptions::default()
///     .with_backend(BackendKind::Cpu)
///     .with_context(8192)
///     .with_kv_type(KvType::Q8_0)
///     .open("model.gguf")?;
/// # Ok::<(), cellar::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ModelOptions {
    /// What computes.
    pub backend: BackendOptions,
    /// The context's length, KV types and so on.
    pub engine: EngineConfig,
    /// Told how far loading is.
    pub on_progress: OnProgress,
    /// Adapters and control vectors that it is loaded with.
    pub adapters: AdapterOptions,
    /// The file of the vision tower, where it is neither in the model's directory nor the one
    /// `mmproj` file next to it.
    pub mmproj: Option<PathBuf>,
    /// A smaller model that drafts for it, with [`Speculation::Draft`](cellar_engine::Speculation).
    pub draft_model: Option<DraftModel>,
    /// The use of a head that drafts, of its file or of another.
    pub head: HeadUse,
}

impl ModelOptions {
    /// A backend of this kind, and no other.
    #[must_use]
    pub fn with_backend(mut self, kind: BackendKind) -> Self {
        self.backend.kind = Some(kind);
        self
    }

    /// So many threads on the CPU, the caller's included.
    #[must_use]
    pub fn with_threads(mut self, n_threads: NonZeroUsize) -> Self {
        self.backend.n_threads = Some(n_threads);
        self
    }

    /// So many of the model's last layers on a GPU, the others on the CPU.
    #[must_use]
    pub fn with_gpu_layers(mut self, n_layers: u32) -> Self {
        self.backend.gpu_layers = Some(n_layers);
        self
    }

    /// A memory for so many tokens.
    #[must_use]
    pub fn with_context(mut self, n_tokens: u32) -> Self {
        self.engine.n_ctx = Some(n_tokens);
        self
    }

    /// So many texts at the same time.
    #[must_use]
    pub fn with_sequences(mut self, n_seqs: u32) -> Self {
        self.engine.n_seqs = n_seqs;
        self
    }

    /// Keys and values stored as this type.
    #[must_use]
    pub fn with_kv_type(mut self, kv_type: KvType) -> Self {
        self.engine.kv_types = KvTypes::from(kv_type);
        self
    }

    /// One more adapter: a GGUF file or a PEFT directory, and the scale of texts that do not say
    /// one.
    #[must_use]
    pub fn with_adapter(mut self, path: impl Into<PathBuf>, scale: f32) -> Self {
        self.adapters.adapters.push(AdapterSpec {
            path: path.into(),
            name: None,
            scale,
        });
        self
    }

    /// The head of the file that drafts, where it has one.
    #[must_use]
    pub fn with_head(mut self) -> Self {
        self.head = HeadUse::Drafts;
        self
    }

    /// Opens a model with them.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open(self, path: impl AsRef<Path>) -> Result<Model, Error> {
        Model::open_with(path, self)
    }

    /// The file with the adapters and the head that are wanted.
    pub(crate) fn prepare(&self, file: ModelFile) -> Result<ModelFile, Error> {
        let mut file = match self.adapters.open(&file, &architectures())? {
            Some(adapters) => file.with_adapters(adapters)?,
            None => file,
        };
        match &self.head {
            HeadUse::Unused => {}
            HeadUse::Drafts => {
                file.use_draft_head()?;
            }
            HeadUse::File(path) => {
                let registry = architectures();
                let head = HeadFile::open(path, &registry)?;
                let head = head.ok_or_else(|| Error::NoHead { path: path.clone() })?;
                file.use_head_of(&head, &registry)?;
            }
        }
        Ok(file)
    }
}

/// The use of a head that drafts. It takes rows of the memory as a layer does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HeadUse {
    /// It is not.
    #[default]
    Unused,
    /// That of the model's file is, where it has one, for texts with
    /// [`Speculation::Head`](cellar_engine::Speculation::Head) or
    /// [`Speculation::Auto`](cellar_engine::Speculation::Auto).
    Drafts,
    /// That in this file or directory is (EAGLE-3), in the same way.
    File(PathBuf),
}
