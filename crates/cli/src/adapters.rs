//! Adapters and control vectors of the command line, on an open model.

use cellar::architectures;
use model_core::adapters::AdapterOptions;
use model_core::model_file::{ModelFile, OpenModel};

use crate::models::ModelSource;

impl ModelSource {
    /// [`Self::open`] with adapters.
    pub(crate) fn open_with(&self, options: &AdapterOptions) -> anyhow::Result<OpenModel> {
        let file = self.open()?;
        Ok(match options.open(&file, &architectures())? {
            Some(adapters) => file.with_adapters(adapters)?,
            None => file,
        })
    }

    /// [`Self::load`] with adapters.
    pub(crate) fn load_with(&self, options: &AdapterOptions) -> anyhow::Result<ModelFile> {
        let file = self.load()?;
        Ok(match options.open(&file, &architectures())? {
            Some(adapters) => file.with_adapters(adapters)?,
            None => file,
        })
    }
}
