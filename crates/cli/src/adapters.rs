//! Models as the command line changes them: with other settings, adapters and control vectors.

use cellar::architectures;
use model_core::adapters::AdapterOptions;
use model_core::model_file::{ModelFile, OpenModel};

use crate::args::{ComputeArgs, OverrideArgs};
use crate::models::ModelSource;

/// The changes that the command line makes to a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelChanges {
    pub(crate) overrides: OverrideArgs,
    pub(crate) adapters: AdapterOptions,
}

impl ComputeArgs {
    /// The changes that they make to a model.
    pub(crate) fn changes(&self) -> ModelChanges {
        ModelChanges {
            overrides: self.overrides.clone(),
            adapters: self.adapters.options(),
        }
    }
}

impl ModelChanges {
    /// True if nothing is changed.
    pub(crate) fn is_empty(&self) -> bool {
        self.overrides.is_empty() && self.adapters == AdapterOptions::default()
    }
}

impl ModelSource {
    /// [`Self::open`] with changes.
    pub(crate) fn open_with(&self, changes: &ModelChanges) -> anyhow::Result<OpenModel> {
        let (mut file, registry) = (self.open()?, architectures());
        if !changes.overrides.is_empty() {
            let settings = changes.overrides.changes(file.model().architecture());
            file = file.with_metadata(settings, &registry)?;
        }
        Ok(match changes.adapters.open(&file, &registry)? {
            Some(adapters) => file.with_adapters(adapters)?,
            None => file,
        })
    }

    /// The model with changes; `None` where there are none.
    pub(crate) fn changed(&self, changes: &ModelChanges) -> anyhow::Result<Option<OpenModel>> {
        if changes.is_empty() {
            Ok(None)
        } else {
            self.open_with(changes).map(Some)
        }
    }

    /// [`Self::load`] with changes.
    pub(crate) fn load_with(&self, changes: &ModelChanges) -> anyhow::Result<ModelFile> {
        Ok(ModelFile::with_tokenizer(self.open_with(changes)?)?)
    }
}
