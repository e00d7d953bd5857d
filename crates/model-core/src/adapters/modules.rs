//! The matrices of a model that a module of transformers is: of a directory by its own names, of a
//! GGUF file by those of a class of its architecture.

use super::{AdapterError, wrong};
use crate::architecture::Registry;
use crate::error::ModelFileError;
use crate::hf::ModuleTarget;
use crate::model_file::OpenModel;

/// Looks up modules.
pub(super) struct Modules<'a> {
    /// The adapter's name in errors.
    label: &'a str,
    model: &'a OpenModel,
    registry: &'a Registry,
}

impl<'a> Modules<'a> {
    pub(super) fn new(label: &'a str, model: &'a OpenModel, registry: &'a Registry) -> Self {
        Self {
            label,
            model,
            registry,
        }
    }

    /// The matrices that have the rows of `module`: one, or several where the model's file has them
    /// in one.
    pub(super) fn targets(&self, module: &str) -> Result<Vec<ModuleTarget>, ModelFileError> {
        // Models that were trained without their head lack the beginning, and the other way round.
        let names = [
            format!("{module}.weight"),
            module.to_owned(),
            format!("model.{module}.weight"),
            module
                .strip_prefix("model.")
                .map_or_else(String::new, |module| format!("{module}.weight")),
        ];
        for name in names.iter().filter(|name| !name.is_empty()) {
            let found = self.named(name)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        let reason = AdapterError::Unknown {
            module: module.to_owned(),
            architecture: self.model.model().architecture().to_owned(),
        };
        Err(wrong(self.label, reason))
    }

    fn named(&self, name: &str) -> Result<Vec<ModuleTarget>, ModelFileError> {
        if let Some(weights) = self.model.directory_weights() {
            return Ok(weights.targets_of(name));
        }
        let weights = self.model.weights();
        let architecture = self.model.model().architecture();
        let classes = self.registry.hf_classes().iter();
        for class in classes.filter(|class| class.architecture == architecture) {
            let mut found = class.targets_in_gguf(name, self.model.metadata())?;
            found.retain(|target| weights.describe(&target.matrix).is_ok());
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }
}
