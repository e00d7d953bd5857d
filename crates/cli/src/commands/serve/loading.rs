//! How a model is loaded, at the start and later, and what is known of it before.
//!
//! Invariant: a file that cannot be read is an error value wherever it is met, never an end of the
//! server.

use std::path::Path;
use std::sync::Arc;

use cellar_engine::{EngineError, MemoryBudget};
use cellar_server::{
    ApiError, Job, LoadModel, ModelBytes, ModelFacts, ModelSettings, PlannedModel, ServedModel,
};
use kv_backend::BackendError;
use model_core::architecture::OutputKind;
use model_core::model_file::{ModelFile, OpenModel};

use super::{engine_config, load, prefixes, room};
use crate::args::ServeArgs;
use crate::failure::{MemoryShortage, one_line, usage};
use crate::models::ModelSource;
use crate::resolve;

/// Loads a model as the flags of the server say.
#[derive(Clone, Debug)]
pub(super) struct Loader {
    pub(super) args: Arc<ServeArgs>,
    pub(super) source: ModelSource,
    pub(super) settings: ModelSettings,
}

impl Loader {
    /// Opens the file, and plans the memory.
    ///
    /// # Errors
    /// As of [`ModelSource::load`] and of [`room::bytes_of`].
    pub(super) fn open(&self) -> anyhow::Result<(ModelFile, ModelBytes)> {
        let mut file = self.source.load_with(&self.args.changes())?;
        self.args.speculation.use_head(&mut file)?;
        check_served(&file)?;
        let bytes = room::bytes_of(&self.args, &self.source, &file)?;
        Ok((file, bytes))
    }

    /// 507 where it takes more memory than is free, else 500.
    fn failed(id: &str, error: anyhow::Error) -> ApiError {
        let error = resolve::does_not_fit(error);
        let message = format!("the model '{id}' cannot be loaded: {}", one_line(&error));
        match error.downcast_ref() {
            Some(&MemoryShortage {
                needed, available, ..
            }) => ApiError::no_memory(message).of_bytes(needed, available),
            None if is_out_of_memory(&error) => ApiError::no_memory(message),
            None => ApiError::load_failed(message),
        }
    }
}

impl LoadModel for Loader {
    fn plan(&self) -> Result<PlannedModel, ApiError> {
        let id = self.settings.id.clone();
        let opened = self.open();
        let (file, bytes) = opened.map_err(|error| Self::failed(&id, error))?;
        let Self {
            args,
            source,
            settings,
        } = self.clone();
        Ok(PlannedModel {
            bytes,
            load: Box::new(move || {
                load(&args, &source, &file, settings).map_err(|error| Self::failed(&id, error))
            }),
        })
    }

    fn before_unload(&self, model: &ServedModel) {
        if let (Some(_), Ok(service)) = (&self.args.tiers, model.service()) {
            prefixes::save(model.id(), service);
        }
    }
}

/// Whether the backend could not allocate what it needs.
fn is_out_of_memory(error: &anyhow::Error) -> bool {
    let of_engine = error.downcast_ref();
    let failed = of_engine.and_then(|error| match error {
        EngineError::Backend(failed) => Some(failed),
        _ => None,
    });
    let failed = failed.or_else(|| error.downcast_ref());
    matches!(failed, Some(BackendError::OutOfMemory { .. }))
}

/// Checks that a server can do something with a model.
///
/// # Errors
/// A usage error where it fills masks, writes from a source, or is a classifier.
fn check_served(file: &OpenModel) -> anyhow::Result<()> {
    match file.model().output() {
        OutputKind::Logits | OutputKind::MaskLogits(_) => resolve::continues_texts(file),
        OutputKind::Embeddings | OutputKind::Scores { n_labels: 1 } => Ok(()),
        OutputKind::Scores { n_labels } => usage(format!(
            "'{}' is a classifier with {n_labels} labels, and cannot be served",
            file.model().architecture()
        )),
    }
}

/// What is known of a model without loading it, from its file, which may be open already; with an
/// error where it cannot be read.
pub(super) fn facts(
    args: &ServeArgs,
    source: &ModelSource,
    file: Option<&OpenModel>,
) -> ModelFacts {
    let read = || {
        let file = source.open()?;
        check_served(&file)?;
        anyhow::Ok(facts_of(args, &file))
    };
    let facts = match file {
        Some(file) => Ok(facts_of(args, file)),
        None => read(),
    };
    let facts = facts.unwrap_or_else(|error| ModelFacts {
        error: Some(one_line(&error)),
        ..ModelFacts::default()
    });
    match source {
        ModelSource::Embedded => ModelFacts {
            format: "gguf",
            file_bytes: cellar_stories::STORIES_LLAMA.len() as u64,
            ..facts
        },
        ModelSource::File(path) => of_file(path, facts),
    }
}

fn facts_of(args: &ServeArgs, file: &OpenModel) -> ModelFacts {
    let model = &**file.model();
    let metadata = file.metadata();
    let job = match model.output() {
        OutputKind::Logits | OutputKind::MaskLogits(_) => Job::Texts,
        OutputKind::Embeddings => Job::Embeddings,
        OutputKind::Scores { .. } => Job::Scores,
    };
    let config = cellar_engine::EngineConfig {
        budget: MemoryBudget::Unlimited,
        ..engine_config(args, file)
    };
    let settings = config.settings(model).ok();
    let template = metadata.optional::<&str>("tokenizer.chat_template");
    ModelFacts {
        architecture: model.architecture().to_owned(),
        job: Some(job),
        n_vocab: None,
        n_ctx: settings
            .filter(|_| job == Job::Texts)
            .map(|settings| settings.n_ctx as usize),
        n_embd: Some(model.embedding_dim()),
        weights: file.weight_summary(),
        // A template of another type is as good as none.
        template: template.ok().flatten().map(str::to_owned),
        ..ModelFacts::default()
    }
}

/// The same with what the file system tells.
fn of_file(path: &Path, facts: ModelFacts) -> ModelFacts {
    let Ok(path) = crate::by_name::locate(path) else {
        return facts;
    };
    let format = if path.is_dir() { "safetensors" } else { "gguf" };
    let files = super::scan::files_of(&path);
    let metadata = files.iter().filter_map(|file| std::fs::metadata(file).ok());
    let metadata: Vec<_> = metadata.collect();
    ModelFacts {
        format,
        file_bytes: metadata.iter().map(std::fs::Metadata::len).sum(),
        modified: metadata.iter().filter_map(|m| m.modified().ok()).max(),
        ..facts
    }
}

#[cfg(test)]
mod tests {
    use cellar_engine::ConfigError;

    use super::*;

    #[test]
    fn memory_that_vanished_after_the_plan_is_a_shortage_with_numbers() {
        let short = EngineError::Config(ConfigError::OverBudget {
            n_ctx: 64,
            n_cells: 64,
            wanted: 3 << 20,
            available: 1 << 20,
            largest_n_ctx: Some(16),
        });
        let error = Loader::failed("chat", short.into());
        assert_eq!(error.status.as_u16(), 507);
        let json = error.openai();
        assert_eq!(json["error"]["needed_bytes"], 3 << 20);
        assert_eq!(json["error"]["available_bytes"], 1 << 20);
        assert!(error.message.contains("--ctx 16"), "{error}");
        let other = Loader::failed("chat", anyhow::anyhow!("no such file"));
        assert_eq!(other.status.as_u16(), 500);
    }
}
