//! [`Source`]: keys and tensors by the names that a kind of tower has for them.
//!
//! Knows no layer.

use std::sync::Arc;

use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::gguf::Metadata;
use model_core::media::MediaKind;

use crate::family::Family;

/// Keys and tensors, while they are read.
pub(super) struct Source<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) weights: &'a Arc<dyn WeightSource>,
    /// The beginning of the keys.
    keys: &'static str,
    pub(super) dim: usize,
    /// Rows and columns of pixels of a patch; 0 where it hears.
    pub(super) patch: usize,
}

impl<'a> Source<'a> {
    /// # Errors
    /// [`ModelError`] where a size is missing or 0.
    pub(super) fn new(
        metadata: &'a Metadata,
        weights: &'a Arc<dyn WeightSource>,
        family: &Family,
    ) -> Result<Self, ModelError> {
        let media = family.tower.media();
        let keys = match media {
            MediaKind::Picture => "clip.vision",
            MediaKind::Sound => "clip.audio",
        };
        let mut source = Self {
            metadata,
            weights,
            keys,
            dim: 0,
            patch: 0,
        };
        source.dim = source.positive("embedding_length")?;
        if media == MediaKind::Picture {
            source.patch = source.positive("patch_size")?;
        }
        Ok(source)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.weights.describe(name).is_ok()
    }

    pub(super) fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        let found = self.weights.describe(name);
        found.map(|info| info.shape).map_err(ModelError::Weight)
    }

    /// The whole key.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.keys)
    }

    pub(super) fn count(&self, key: &str) -> Result<usize, ModelError> {
        let count: u32 = self.metadata.get(&self.key(key))?;
        Ok(count as usize)
    }

    /// A count that is not 0.
    pub(super) fn positive(&self, key: &str) -> Result<usize, ModelError> {
        match self.count(key)? {
            0 => Err(setting(&self.key(key), "it is 0".to_owned())),
            count => Ok(count),
        }
    }

    pub(super) fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let count: Option<u32> = self.metadata.optional(&self.key(key))?;
        Ok(count.map(|count| count as usize))
    }
}

pub(super) fn setting(key: &str, reason: String) -> ModelError {
    ModelError::Setting {
        key: key.to_owned(),
        reason,
    }
}
