//! [`HfDirectory`]: an open model directory.

use std::path::Path;
use std::sync::Arc;

use kv_core::graph::GraphShape;
use kv_core::weights::{WeightError, WeightSource};

use super::files::TensorFiles;
use super::keys::Keys;
use super::{HfConfig, HfError, HfWeights};
use crate::architecture::{Model, ModelError, Registry};
use crate::blocks::{OUTPUT, TOKEN_EMBEDDING};
use crate::gguf::Metadata;

/// A model directory in the keys and names of GGUF. Its files are mapped: they must not be changed
/// while it is open.
#[derive(Debug)]
pub struct HfTranslation {
    label: String,
    metadata: Metadata,
    weights: HfWeights,
}

/// A model directory, translated, whose model can be computed.
#[derive(Debug)]
pub struct HfDirectory {
    label: String,
    metadata: Metadata,
    weights: Arc<HfWeights>,
    model: Arc<dyn Model>,
}

impl HfTranslation {
    /// Opens a directory with a `config.json` and one or more safetensors files. A tokenizer is
    /// translated where there is a `tokenizer.json`. That the tensors make a model is not checked.
    ///
    /// # Errors
    /// [`HfError`] naming the file, key or tensor that is missing, wrong or not supported.
    pub fn open(directory: impl AsRef<Path>, registry: &Registry) -> Result<Self, HfError> {
        let directory = directory.as_ref();
        let config = HfConfig::open(&directory.join("config.json"))?;
        let class = class_of(&config)?;
        let class = registry
            .hf_class(class)
            .ok_or_else(|| unsupported(&config, class, registry))?;
        let config = config.with_defaults(class.defaults);
        let mut keys = Keys::new(class.architecture);
        keys.set_whole("general.architecture", class.architecture);
        keys.set_whole("general.type", "model");
        if let Some(name) = directory.file_name() {
            keys.set_whole("general.name", &*name.to_string_lossy());
        }
        for key in class.keys.iter().copied().flatten() {
            key.apply(&config, &mut keys)?;
        }
        super::tokenizer::translate(directory, &config, &mut keys)?;
        super::sentence::translate(directory, &mut keys)?;
        let (metadata, computed) = keys.into_parts();
        let files = TensorFiles::open(directory)?;
        let mut weights = HfWeights::new(class, &config, &files, computed)?;
        check_embedding(&config, &weights)?;
        tie(&config, &mut weights)?;
        Ok(Self {
            label: format!("'{}'", directory.display()),
            metadata,
            weights,
        })
    }

    /// What a GGUF file of this model would say.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The weights under GGUF names.
    pub fn weights(&self) -> &HfWeights {
        &self.weights
    }
}

impl HfDirectory {
    /// Opens a directory and checks that its model is whole: every tensor that the architecture needs
    /// is there, and it needs every tensor that is there.
    ///
    /// # Errors
    /// [`HfError`] as [`HfTranslation::open`], and where tensors and model do not agree.
    pub fn open(directory: impl AsRef<Path>, registry: &Registry) -> Result<Self, HfError> {
        let HfTranslation {
            label,
            metadata,
            weights,
        } = HfTranslation::open(directory, registry)?;
        let model = model(&label, registry, (&metadata, &weights))?;
        Ok(Self {
            label,
            metadata,
            weights: Arc::new(weights),
            model,
        })
    }

    /// What a GGUF file of this model would say.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The weights under GGUF names.
    pub fn weights(&self) -> &Arc<HfWeights> {
        &self.weights
    }

    /// The model.
    pub fn model(&self) -> &Arc<dyn Model> {
        &self.model
    }

    /// What errors call the directory.
    pub fn label(&self) -> &str {
        &self.label
    }
}

/// Why there is no translation of a class.
fn unsupported(config: &HfConfig, class: &str, registry: &Registry) -> HfError {
    let (file, class) = (config.file().to_owned(), class.to_owned());
    match registry.declined_hf(&class) {
        Some(reason) => HfError::Declined {
            file,
            class,
            reason,
        },
        None => HfError::UnknownClass {
            file,
            class,
            known: registry.hf_classes().map(|c| c.name.to_owned()).collect(),
        },
    }
}

/// The one class that a config names.
fn class_of(config: &HfConfig) -> Result<&str, HfError> {
    let key = "architectures";
    let wanted = "a list of one class, like [\"LlamaForCausalLM\"]";
    match config.optional_texts(key)?.as_deref() {
        Some([class]) => Ok(class),
        Some(_) => Err(config.wrong(key, wanted)),
        None => Err(config.missing(key, wanted)),
    }
}

/// The vocabulary is what the config says.
fn check_embedding(config: &HfConfig, weights: &HfWeights) -> Result<(), HfError> {
    let (Some(vocab), Ok(found)) = (
        config.optional_count("vocab_size")?,
        weights.describe(TOKEN_EMBEDDING),
    ) else {
        return Ok(());
    };
    match found.shape.first() {
        Some(&rows) if rows != vocab => Err(HfError::Tensor {
            name: weights.name_in_files(TOKEN_EMBEDDING).unwrap_or_default(),
            reason: format!(
                "shape {:?}, but 'vocab_size' in {} is {vocab}",
                found.shape,
                config.file()
            ),
        }),
        _ => Ok(()),
    }
}

/// Drops a head that the config says is not used, and misses one that it says is there.
fn tie(config: &HfConfig, weights: &mut HfWeights) -> Result<(), HfError> {
    match config.optional_flag("tie_word_embeddings")? {
        Some(true) => weights.forget(OUTPUT),
        Some(false) if weights.describe(OUTPUT).is_err() => {
            if let Some(name) = weights.name_in_files(OUTPUT) {
                let reason = format!(
                    "it is missing, but 'tie_word_embeddings' in {} is false",
                    config.file()
                );
                return Err(HfError::Tensor { name, reason });
            }
        }
        _ => {}
    }
    Ok(())
}

/// The model, with errors in the names of the files; every tensor of the files must be used by it.
fn model(
    label: &str,
    registry: &Registry,
    (metadata, weights): (&Metadata, &HfWeights),
) -> Result<Arc<dyn Model>, HfError> {
    let renamed = |name: &str| match weights.name_in_files(name) {
        Some(own) => format!("{own} ({name})"),
        None => name.to_owned(),
    };
    let model = registry.model(metadata, weights).map_err(|source| {
        let source = match source {
            ModelError::MissingTensor { name, shape } => ModelError::MissingTensor {
                name: renamed(&name),
                shape,
            },
            ModelError::TensorShape { name, wanted, got } => ModelError::TensorShape {
                name: renamed(&name),
                wanted,
                got,
            },
            ModelError::Weight(WeightError::Missing { name }) => {
                ModelError::Weight(WeightError::Missing {
                    name: renamed(&name),
                })
            }
            other => other,
        };
        HfError::Model {
            file: label.to_owned(),
            source,
        }
    })?;
    let one = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    let graph = model.graph(one).map_err(|source| HfError::Model {
        file: label.to_owned(),
        source,
    })?;
    let used = graph.weights();
    match weights
        .translated()
        .find(|&name| !used.iter().any(|w| w.name == *name))
    {
        None => Ok(model),
        Some(name) => Err(HfError::Tensor {
            name: renamed(name),
            reason: format!(
                "a model of this config does not use it ({})",
                model.architecture()
            ),
        }),
    }
}
