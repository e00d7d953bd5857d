//! [`HfDirectory`]: an open model directory, translated, with the model that it makes.
//!
//! Invariant: every tensor of the files is used by the model, and no tensor that the model needs is
//! missing. Knows no backend.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use kv_graph::Graph;
use kv_graph::weights::WeightError;

use crate::architecture::{Model, Registry, all_graphs};
use crate::error::{ModelError, ModelFileError};
use crate::gguf::Metadata;
use crate::hf::{HfTranslation, HfWeights};

/// A model directory, translated, whose model can be computed.
#[derive(Debug)]
pub struct HfDirectory {
    label: String,
    metadata: Metadata,
    weights: Arc<HfWeights>,
    model: Arc<dyn Model>,
}

impl HfDirectory {
    /// Opens a directory and checks that its model is whole: every tensor that the architecture
    /// needs is there, and it needs every tensor that is there.
    ///
    /// # Errors
    /// [`ModelFileError`] as [`HfTranslation::open`], and where tensors and model do not agree.
    pub fn open(directory: impl AsRef<Path>, registry: &Registry) -> Result<Self, ModelFileError> {
        let translation = HfTranslation::open(directory, registry.hf_classes())?;
        Self::from_translation(translation, registry)
    }

    /// A directory that was translated before, with its model checked as [`Self::open`] does.
    ///
    /// # Errors
    /// [`ModelFileError`] where tensors and model do not agree.
    pub fn from_translation(
        translation: HfTranslation,
        registry: &Registry,
    ) -> Result<Self, ModelFileError> {
        let model = model(&translation, registry)?;
        let label = translation.label().to_owned();
        let (metadata, weights) = translation.into_parts();
        Ok(Self {
            label,
            metadata,
            weights: Arc::new(weights),
            model,
        })
    }

    /// The metadata that a GGUF file of this model would have.
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

    /// The directory's name in errors.
    pub fn label(&self) -> &str {
        &self.label
    }
}

/// The model, with errors in the names of the files; every tensor of the files must be used by it.
fn model(
    translation: &HfTranslation,
    registry: &Registry,
) -> Result<Arc<dyn Model>, ModelFileError> {
    let (metadata, weights) = (translation.metadata(), translation.weights());
    let no_model = |reason| ModelFileError::Model {
        file: translation.label().to_owned(),
        reason,
    };
    let renamed = |name: &str| match weights.name_in_files(name) {
        Some(own) => format!("{own} ({name})"),
        None => name.to_owned(),
    };
    let model = registry.model(metadata, weights).map_err(|error| {
        no_model(match error {
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
        })
    })?;
    // A head is there to be used.
    let whole = model.with_draft_head();
    let whole = whole.as_ref().unwrap_or(&model);
    let graphs = all_graphs(&**whole).map_err(no_model)?;
    let used = graphs.iter().flat_map(Graph::weights);
    let used: HashSet<&str> = used.map(|weight| &*weight.name).collect();
    match weights
        .translated()
        .find(|name| !used.contains(name.as_str()))
    {
        None => Ok(model),
        Some(name) => Err(ModelFileError::Tensor {
            name: renamed(name),
            reason: format!(
                "a model of this config does not use it ({})",
                model.architecture()
            ),
        }),
    }
}
