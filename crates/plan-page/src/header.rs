//! [`HeaderModel`]: a model of which only the headers of its files are known. Knows no plan.

use std::sync::Arc;

use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, Registry, with_draft_head};
use model_core::directory::HfDirectory;
use model_core::error::{GgufError, ModelFileError};
use model_core::file_start::FileStart;
use model_core::gguf::GgufFile;
use model_core::hf::{HfConfig, HfTranslation};
use model_core::weight_summary::WeightSummary;
use serde_json::{Map, Value};

/// The architectures that the program `cellar` has, too.
fn architectures() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    model_bert::register(&mut registry);
    registry
}

/// The model with the head of its file that drafts, which the program uses by itself where there is
/// a whole one.
fn with_head(model: Arc<dyn Model>, weights: &dyn WeightSource) -> Arc<dyn Model> {
    let with = with_draft_head(&*model, weights).ok().flatten();
    with.unwrap_or(model)
}

/// A model without the values of its weights.
#[derive(Debug)]
pub struct HeaderModel {
    model: Arc<dyn Model>,
    weights: WeightSummary,
    name: String,
}

/// The files of a directory in the layout of the transformers library, as far as they are needed.
#[derive(Clone, Debug)]
pub struct DirectoryHeaders {
    /// The directory's name.
    pub name: String,
    /// `config.json`.
    pub config: Map<String, Value>,
    /// `generation_config.json`, where there is one.
    pub generation_config: Option<Map<String, Value>>,
    /// The header of every safetensors file.
    pub starts: Vec<FileStart>,
}

/// Why there is no model.
#[derive(Debug)]
pub enum HeaderError {
    /// More bytes of the file are needed than so many.
    StartTooShort(u64),
    /// It is none that can be planned.
    File(ModelFileError),
}

impl From<ModelFileError> for HeaderError {
    fn from(error: ModelFileError) -> Self {
        match error {
            ModelFileError::Gguf {
                reason: GgufError::StartTooShort { n_bytes },
                ..
            } => Self::StartTooShort(n_bytes),
            other => Self::File(other),
        }
    }
}

impl HeaderModel {
    /// The model of a GGUF file, or of all parts of a split one, by their first bytes.
    ///
    /// # Errors
    /// [`HeaderError::StartTooShort`] where more of a file is needed; [`HeaderError::File`] where
    /// it is no model that Cellar has.
    pub fn from_gguf(starts: Vec<FileStart>) -> Result<Self, HeaderError> {
        let file = GgufFile::from_starts(starts)?;
        // A name of another kind is as good as none.
        let name = file.metadata().get::<&str>("general.name");
        let name = name.unwrap_or_default().to_owned();
        let model = architectures().model(file.metadata(), &file);
        let model = model.map_err(|reason| ModelFileError::Model {
            file: file.label().to_owned(),
            reason,
        })?;
        Ok(Self {
            model: with_head(model, &file),
            weights: WeightSummary::of_gguf(&file),
            name,
        })
    }

    /// The model of a directory, by its config and the headers of its safetensors files.
    ///
    /// # Errors
    /// [`HeaderError::File`] where it is no model that Cellar has.
    pub fn from_directory(headers: DirectoryHeaders) -> Result<Self, HeaderError> {
        let DirectoryHeaders {
            name,
            config,
            generation_config,
            starts,
        } = headers;
        let registry = architectures();
        let config = HfConfig::new("'config.json'", config);
        let generation =
            generation_config.map(|json| HfConfig::new("'generation_config.json'", json));
        let classes = registry.hf_classes();
        let translation =
            HfTranslation::from_headers(&name, config, generation.as_ref(), &starts, classes)?;
        let directory = HfDirectory::from_translation(translation, &registry)?;
        let weights: &dyn WeightSource = &**directory.weights();
        Ok(Self {
            model: with_head(Arc::clone(directory.model()), weights),
            weights: WeightSummary::of_weights(directory.metadata(), weights),
            name,
        })
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// How many weights it has, and how they are stored.
    pub fn weights(&self) -> &WeightSummary {
        &self.weights
    }

    /// The name that its files give it, which may be empty.
    pub fn name(&self) -> &str {
        &self.name
    }
}
