//! [`AdapterChoice`]: the adapters that a request wants, and [`ServedAdapters`]: those of a model,
//! with the scales of requests that do not say any.
//!
//! Invariant: the scales of a request are settled when it comes; changing those of the model
//! changes no text that has begun.

use std::sync::{Arc, Mutex, PoisonError};

use model_core::adapters::Adapters;
use serde::Deserialize;

use crate::error::ApiError;

/// An adapter of a list: llama-server's form.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
pub(crate) struct AdapterScale {
    /// Its number.
    pub id: usize,
    /// Its scale.
    pub scale: f32,
}

/// The adapters that a request wants.
#[derive(Clone, Debug, Default)]
pub struct AdapterChoice {
    /// The name of the model in the request, which may be that of an adapter.
    pub(crate) model: Option<String>,
    /// Adapters with their scales; those that are not in the list are left out.
    pub(crate) lora: Option<Vec<AdapterScale>>,
}

/// The adapters of a model, and the scales of requests that do not say any.
#[derive(Debug)]
pub(crate) struct ServedAdapters {
    adapters: Arc<Adapters>,
    scales: Mutex<Arc<[f32]>>,
}

impl ServedAdapters {
    pub(crate) fn new(adapters: Arc<Adapters>) -> Self {
        let scales = Mutex::new(Arc::clone(adapters.default_scales()));
        Self { adapters, scales }
    }

    /// All of them.
    pub(crate) fn all(&self) -> &Adapters {
        &self.adapters
    }

    /// The scales of requests that do not say any.
    pub(crate) fn scales(&self) -> Arc<[f32]> {
        Arc::clone(&self.scales.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets them: 0 for those that are not in the list.
    ///
    /// # Errors
    /// As [`Self::listed`]; nothing has changed then.
    pub(crate) fn set(&self, list: &[AdapterScale]) -> Result<(), ApiError> {
        let scales = self.listed(list, "id")?;
        *self.scales.lock().unwrap_or_else(PoisonError::into_inner) = scales;
        Ok(())
    }

    /// The scales of a list.
    ///
    /// # Errors
    /// [`ApiError`] 400 where there is no adapter of a number, it is there twice, or a scale is no
    /// number.
    pub(crate) fn listed(
        &self,
        list: &[AdapterScale],
        param: &str,
    ) -> Result<Arc<[f32]>, ApiError> {
        let n = self.adapters.len();
        let mut scales = vec![0.0; n];
        for (at, adapter) in list.iter().enumerate() {
            let AdapterScale { id, scale } = *adapter;
            if list.iter().take(at).any(|other| other.id == id) {
                let message = format!("adapter {id} is in the list twice");
                return Err(ApiError::invalid_param(param, message));
            }
            let Some(place) = scales.get_mut(id) else {
                let message =
                    format!("there is no adapter {id}: the model has {n}, counted from 0");
                return Err(ApiError::invalid_param(param, message));
            };
            *place = scale;
        }
        let checked = self.adapters.check_scales(&scales);
        checked.map_err(|error| ApiError::invalid_param(param, error.to_string()))?;
        Ok(scales.into())
    }

    /// The scales of a request to the model with this name.
    fn chosen(&self, choice: &AdapterChoice, id: &str) -> Result<Arc<[f32]>, ApiError> {
        if let Some(list) = &choice.lora {
            return self.listed(list, "lora");
        }
        let named = choice.model.as_deref().filter(|name| *name != id);
        match named.and_then(|name| self.adapters.find(name)) {
            Some(id) => self.listed(&[AdapterScale { id, scale: 1.0 }], "model"),
            None => Ok(self.scales()),
        }
    }
}

/// The scales of a request to a model with this name and these adapters; `None` where it has none.
///
/// # Errors
/// [`ApiError`] 400 where the request wants adapters that there are not.
pub(crate) fn scales_of(
    choice: &AdapterChoice,
    served: Option<&ServedAdapters>,
    id: &str,
) -> Result<Option<Arc<[f32]>>, ApiError> {
    match (served, &choice.lora) {
        (Some(served), _) => served.chosen(choice, id).map(Some),
        (None, Some(list)) if !list.is_empty() => {
            let message =
                "this model was loaded without adapters: give the server some with --lora";
            Err(ApiError::unsupported("lora", message))
        }
        (None, _) => Ok(None),
    }
}
