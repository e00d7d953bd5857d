//! [`ModelInUse`]: a loaded model that a request uses.
//!
//! Invariant: a model is not unloaded while one of these is there.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::Models;
use super::entry::KeepLoaded;
use crate::model::ServedModel;

/// A loaded model, which stays loaded until the last clone of this is dropped.
#[derive(Clone, Debug)]
pub struct ModelInUse {
    model: Arc<ServedModel>,
    held: Arc<Use>,
}

/// Ends the use when it is dropped.
struct Use {
    models: Models,
    at: usize,
}

impl ModelInUse {
    /// The caller has counted the use.
    pub(super) fn new(models: &Models, at: usize, model: Arc<ServedModel>) -> Self {
        Self {
            model,
            held: Arc::new(Use {
                models: models.clone(),
                at,
            }),
        }
    }

    /// The model for a thread that works for this request.
    pub(crate) fn shared(&self) -> Arc<ServedModel> {
        Arc::clone(&self.model)
    }

    /// Sets how long the model stays loaded after its requests. Without effect where it cannot be
    /// unloaded.
    pub fn keep(&self, keep: KeepLoaded) {
        self.held.models.set_keep(self.held.at, keep);
    }
}

impl Deref for ModelInUse {
    type Target = ServedModel;

    fn deref(&self) -> &ServedModel {
        &self.model
    }
}

impl fmt::Debug for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Use").field("at", &self.at).finish()
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.models.release(self.at);
    }
}
