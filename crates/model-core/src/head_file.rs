//! [`HeadFile`]: a head that drafts, in a file of its own, and [`JoinedWeights`]: the weights of a
//! model with such a head.
//!
//! Invariant: a head that is joined to a model has every tensor that its graphs name, in its shape.
//! Knows no family of heads by name.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use kv_graph::weights::{SourceChanged, Weight, WeightError, WeightInfo, WeightSource};

use crate::architecture::{Model, ModelError, Registry, check_tensors};
use crate::blocks::{DraftHead, OWN_HEAD};
use crate::error::ModelFileError;
use crate::gguf::{GgufFile, Metadata};
use crate::hf::HfTranslation;

/// Beginning of the names of tensors of layers.
const LAYER: &str = "blk.";

/// The tensors of a head's file.
pub trait HeadWeights: WeightSource {
    /// The whole numbers of a tensor that holds such in place of weights: a table of tokens. `None`
    /// where there is no tensor of this name.
    ///
    /// # Errors
    /// [`WeightError::UnsupportedFormat`] where it holds something else.
    fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, WeightError>;
}

/// A head that drafts for models of other files.
pub struct HeadFile {
    label: String,
    metadata: Metadata,
    weights: Arc<dyn HeadWeights>,
}

/// A model with a head of another file, and the weights of both.
#[derive(Debug)]
pub struct JoinedModel {
    /// The model, whose graphs have the head.
    pub model: Arc<dyn Model>,
    /// The weights of both.
    pub weights: Arc<JoinedWeights>,
}

impl HeadFile {
    /// Opens a GGUF file or a directory; `None` where it is no head, but a model of its own.
    ///
    /// # Errors
    /// [`ModelFileError`]: the file or directory is not usable.
    pub fn open(path: &Path, registry: &Registry) -> Result<Option<Self>, ModelFileError> {
        let file = if path.is_dir() {
            let translation = HfTranslation::open(path, registry.hf_classes())?;
            let label = translation.label().to_owned();
            let (metadata, weights) = translation.into_parts();
            Self {
                label,
                metadata,
                weights: Arc::new(weights),
            }
        } else {
            let file = GgufFile::open(path)?;
            Self {
                label: file.label().to_owned(),
                metadata: file.metadata().clone(),
                weights: Arc::new(file),
            }
        };
        let is_head = registry.head(file.architecture()?).is_some();
        Ok(is_head.then_some(file))
    }

    /// Its name in errors: its path in quotes.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The metadata, in the keys of GGUF.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// A model that this head drafts for, with the weights of both.
    ///
    /// # Errors
    /// [`ModelError::NoLayerRows`]; [`ModelError`] naming the key or tensor that is missing, or
    /// that does not fit the model, with both numbers.
    pub fn join(
        &self,
        model: &dyn Model,
        weights: Arc<dyn WeightSource>,
        registry: &Registry,
    ) -> Result<JoinedModel, ModelError> {
        let name: &str = self.metadata.get("general.architecture")?;
        let unknown = || ModelError::UnknownArchitecture {
            name: name.to_owned(),
            known: registry.names(),
        };
        let family = registry.head(name).ok_or_else(unknown)?;
        let no_rows = || ModelError::NoLayerRows {
            architecture: model.architecture().to_owned(),
        };
        let rows = model.layer_rows().ok_or_else(no_rows)?;
        let head: DraftHead = family.head(&self.metadata, &*self.weights, &rows)?;
        let model = model.with_own_head(head).ok_or_else(no_rows)?;
        let weights = JoinedWeights {
            model: weights,
            head: Arc::<dyn HeadWeights>::clone(&self.weights),
            first_layer: rows.n_layers,
        };
        check_tensors(&*model, &weights).map_err(|error| weights.in_head(error))?;
        Ok(JoinedModel {
            model,
            weights: Arc::new(weights),
        })
    }

    fn architecture(&self) -> Result<&str, ModelFileError> {
        let name = self.metadata.get("general.architecture");
        name.map_err(|error| ModelFileError::Model {
            file: self.label.clone(),
            reason: error.into(),
        })
    }
}

impl fmt::Debug for HeadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HeadFile").field(&self.label).finish()
    }
}

/// The weights of a model, and those of a head under names of their own.
pub struct JoinedWeights {
    model: Arc<dyn WeightSource>,
    head: Arc<dyn WeightSource>,
    /// The number of the head's first layer.
    first_layer: usize,
}

/// The number of a layer, and the rest of the name of one of its tensors.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.strip_prefix(LAYER)?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

impl JoinedWeights {
    /// Bytes of the head's weights, as they are stored.
    pub(crate) fn head_bytes(&self) -> u64 {
        let stored = self.head.names().into_iter();
        let stored = stored.filter_map(|name| self.head.describe(&name).ok());
        stored.map(|weight| weight.n_bytes()).sum()
    }

    /// An error in the names of the head's file.
    fn in_head(&self, error: ModelError) -> ModelError {
        let own = |name: String| self.name_in_head(&name).unwrap_or(name);
        match error {
            ModelError::MissingTensor { name, shape } => ModelError::MissingTensor {
                name: own(name),
                shape,
            },
            ModelError::TensorShape { name, wanted, got } => ModelError::TensorShape {
                name: own(name),
                wanted,
                got,
            },
            ModelError::UnusedTensor { name } => ModelError::UnusedTensor { name: own(name) },
            other => other,
        }
    }

    /// The name in the head's file; `None` of a weight of the model.
    fn name_in_head(&self, name: &str) -> Option<String> {
        match layer_of(name) {
            Some((layer, rest)) => {
                let own = layer.checked_sub(self.first_layer)?;
                Some(format!("{LAYER}{own}.{rest}"))
            }
            None => name.strip_prefix(OWN_HEAD).map(str::to_owned),
        }
    }
}

impl WeightSource for JoinedWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.require(name).ok()
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.model.names();
        names.retain(|name| self.name_in_head(name).is_none());
        // Tables of tokens are no weights.
        let of_head = self.head.names().into_iter();
        let of_head = of_head.filter(|name| self.head.describe(name).is_ok());
        names.extend(of_head.map(|name| match layer_of(&name) {
            Some((own, rest)) => format!("{LAYER}{}.{rest}", self.first_layer + own),
            None => format!("{OWN_HEAD}{name}"),
        }));
        names
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        let Some(own) = self.name_in_head(name) else {
            return self.model.require(name);
        };
        let weight = self.head.require(&own)?;
        let (shape, bytes) = (weight.shape().to_vec(), weight.bytes().clone());
        Weight::new(name, shape, weight.format(), bytes)
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        match self.name_in_head(name) {
            Some(own) => self.head.describe(&own),
            None => self.model.describe(name),
        }
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.model.check()?;
        self.head.check()
    }
}

impl fmt::Debug for JoinedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JoinedWeights")
            .field(&self.first_layer)
            .finish()
    }
}
