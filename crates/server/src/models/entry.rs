//! What is known of a model, loaded or not, and how it is loaded.
//!
//! Invariant: a plan allocates nothing, so its bytes are known before memory is taken. Knows no
//! files.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cellar_engine::serve::Service;
use kv_backend::BoxedBackend;
use model_core::weight_summary::WeightSummary;

use crate::error::ApiError;
use crate::model::{Job, ServedModel, Work};

/// Bytes of memory that a model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// Of this machine.
    pub host: u64,
    /// Of a device that computes.
    pub device: u64,
    /// Of `host`, experts that are read as they are needed: models share the memory of
    /// [`MemoryBudget::experts`](super::MemoryBudget::experts) for these.
    pub experts: u64,
}

impl ModelBytes {
    /// Both together.
    pub fn total(self) -> u64 {
        self.host.saturating_add(self.device)
    }

    /// What both take.
    pub fn plus(self, other: Self) -> Self {
        Self {
            host: self.host.saturating_add(other.host),
            device: self.device.saturating_add(other.device),
            experts: self.experts.saturating_add(other.experts),
        }
    }
}

/// How long a model stays loaded without requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeepLoaded {
    /// Until its memory is needed for another model, or the server ends.
    #[default]
    Forever,
    /// This long; zero unloads it after the request.
    For(Duration),
}

/// What is known of a model without loading it.
#[derive(Clone, Debug, Default)]
pub struct ModelFacts {
    /// Its architecture; empty where its file cannot be read.
    pub architecture: String,
    /// What it does, where that is known.
    pub job: Option<Job>,
    /// Tokens of its vocabulary.
    pub n_vocab: Option<usize>,
    /// Tokens of its context.
    pub n_ctx: Option<usize>,
    /// The width of its embeddings.
    pub n_embd: Option<usize>,
    /// How many weights it has, and how they are stored; empty where its file cannot be read.
    pub weights: WeightSummary,
    /// The source of its chat template.
    pub template: Option<String>,
    /// `gguf` or `safetensors`; empty where there is no file.
    pub format: &'static str,
    /// The size of its file.
    pub file_bytes: u64,
    /// When its file was last written.
    pub modified: Option<SystemTime>,
    /// Why it could not be read at last.
    pub error: Option<String>,
}

impl ModelFacts {
    /// What a loaded model tells.
    pub(crate) fn of(model: &ServedModel) -> Self {
        Self {
            architecture: model.architecture().to_owned(),
            job: Some(model.job()),
            n_vocab: Some(model.tokenizer().n_tokens()),
            n_ctx: n_ctx(model),
            n_embd: Some(model.n_embd()),
            weights: model.weights().clone(),
            template: model.template_source().map(str::to_owned),
            ..Self::default()
        }
    }

    /// True if its chat template has a place for tools.
    pub(crate) fn takes_tools(&self) -> bool {
        let template = self.template.as_deref().unwrap_or_default();
        template.contains("tools")
    }
}

/// Tokens of a prompt and its answer, where a model continues texts.
pub(crate) fn n_ctx(model: &ServedModel) -> Option<usize> {
    match model.work() {
        Work::Texts(service) => Some(service.prompt_limits().n_tokens),
        Work::Embeddings(_) | Work::Scores(_) => None,
    }
}

/// Loads one model, any number of times. Runs on a thread of its own.
pub trait LoadModel: fmt::Debug + Send + Sync {
    /// Opens its file and plans its memory, without allocating it.
    ///
    /// # Errors
    /// [`ApiError::load_failed`] where it cannot be read or computed.
    fn plan(&self) -> Result<PlannedModel, ApiError>;

    /// Keeps what should outlive a loaded model, before its memory is freed. No request uses it.
    fn before_unload(&self, _model: &ServedModel) {}
}

/// Loads what was planned.
pub type FinishLoad = Box<dyn FnOnce() -> Result<ServedModel, ApiError> + Send>;

/// A model that was planned and is not loaded yet.
pub struct PlannedModel {
    /// What it will take.
    pub bytes: ModelBytes,
    /// Loads it. Its errors are [`ApiError::load_failed`], or [`ApiError::no_memory`] where the
    /// machine has less free than the plan counted on.
    pub load: FinishLoad,
}

impl fmt::Debug for PlannedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlannedModel")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A model that a server has, loaded or not.
#[derive(Debug)]
pub struct ModelEntry {
    /// Its name.
    pub id: String,
    /// Other names for it.
    pub aliases: Vec<String>,
    /// What is known without loading it.
    pub facts: ModelFacts,
    /// How it is loaded; one without can never be unloaded.
    pub loader: Option<Arc<dyn LoadModel>>,
    /// How long it stays loaded, where no request says otherwise.
    pub keep: KeepLoaded,
    /// The model, where it is loaded already, and what it takes.
    pub loaded: Option<(ServedModel, ModelBytes)>,
}

impl ModelEntry {
    /// A loaded model that stays as long as the server.
    pub fn fixed(model: ServedModel) -> Self {
        Self {
            id: model.id().to_owned(),
            aliases: model.settings().aliases.clone(),
            facts: ModelFacts::of(&model),
            loader: None,
            keep: KeepLoaded::Forever,
            loaded: Some((model, ModelBytes::default())),
        }
    }
}

/// Whether a model is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadState {
    /// It is not.
    Unloaded,
    /// It is being loaded.
    Loading,
    /// It is.
    Loaded,
    /// Its memory is being freed.
    Unloading,
}

/// When a loaded model is unloaded, unless a request comes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// Not by time.
    Never,
    /// After this time.
    In(Duration),
}

/// A model as lists of models show it.
#[derive(Clone, Debug)]
pub struct ModelStatus {
    /// Its name.
    pub id: String,
    /// Other names for it.
    pub aliases: Vec<String>,
    /// What is known of it.
    pub facts: ModelFacts,
    /// Whether it is in memory.
    pub state: LoadState,
    /// Why it could not be loaded at last.
    pub error: Option<String>,
    /// What it holds; zero where it is not loaded, or the caller did not tell.
    pub bytes: ModelBytes,
    /// When it is unloaded.
    pub expiry: Expiry,
    /// How many requests use it.
    pub n_uses: usize,
    /// How often it was loaded, unloaded, and could not be loaded.
    pub counts: LoadCounts,
    /// The model, for handlers that look at it and do not wait.
    pub(crate) model: Option<Arc<ServedModel>>,
}

impl ModelStatus {
    /// What computes its texts, where it is loaded and continues texts.
    pub fn service(&self) -> Option<&Service<BoxedBackend>> {
        self.model.as_deref()?.service().ok()
    }
}

/// How often a model came and went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Loads, the first included.
    pub n_loads: u64,
    /// Unloads.
    pub n_unloads: u64,
    /// Loads that failed.
    pub n_failures: u64,
}
