//! [`AdaptedWeights`]: a model's weights and those of its adapters.

use std::fmt;
use std::sync::Arc;

use kv_graph::weights::{SourceChanged, Weight, WeightError, WeightInfo, WeightSource};

use super::Adapters;

/// The weights of a model, and those of its adapters under names of their own.
pub struct AdaptedWeights {
    model: Arc<dyn WeightSource>,
    adapters: Arc<Adapters>,
}

impl AdaptedWeights {
    /// Both together.
    pub fn new(model: Arc<dyn WeightSource>, adapters: Arc<Adapters>) -> Self {
        Self { model, adapters }
    }
}

impl WeightSource for AdaptedWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        match self.adapters.weight(name) {
            Some(weight) => weight.ok(),
            None => self.model.get(name),
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.model.names();
        names.extend(self.adapters.weight_names());
        names
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        match self.adapters.weight(name) {
            Some(weight) => weight,
            None => self.model.require(name),
        }
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        match self.adapters.describe_weight(name) {
            Some(info) => Ok(info),
            None => self.model.describe(name),
        }
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.model.check()?;
        self.adapters.check_files()
    }
}

impl fmt::Debug for AdaptedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdaptedWeights({:?})", self.adapters)
    }
}
