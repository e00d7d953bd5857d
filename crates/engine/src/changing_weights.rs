//! [`ChangingWeights`]: a model's weights, to which others come, or from which they go, while it
//! computes.
//!
//! Invariant: the model's own weights stay as they are. Who changes the others sees to it that a
//! backend forgets them.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use kv_graph::weights::{SourceChanged, Weight, WeightError, WeightInfo, WeightSource};
use model_core::adapters::{AdaptedWeights, Adapters};

/// The weights of a model, perhaps with those of adapters.
pub(crate) struct ChangingWeights {
    model: Arc<dyn WeightSource>,
    now: RwLock<Arc<dyn WeightSource>>,
}

impl ChangingWeights {
    pub(crate) fn new(model: Arc<dyn WeightSource>) -> Self {
        Self {
            now: RwLock::new(Arc::clone(&model)),
            model,
        }
    }

    /// Adds the weights of these adapters to the model's, in place of those of others.
    pub(crate) fn set(&self, adapters: Option<&Arc<Adapters>>) {
        let model = Arc::clone(&self.model);
        let changed = match adapters {
            Some(adapters) => Arc::new(AdaptedWeights::new(model, Arc::clone(adapters))) as _,
            None => model,
        };
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = changed;
    }

    fn now(&self) -> Arc<dyn WeightSource> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl WeightSource for ChangingWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.now().get(name)
    }

    fn names(&self) -> Vec<String> {
        self.now().names()
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        self.now().require(name)
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        self.now().describe(name)
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.now().check()
    }
}

impl fmt::Debug for ChangingWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChangingWeights({} weights)", self.names().len())
    }
}
