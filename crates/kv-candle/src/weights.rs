//! [`Weights`]: what graphs name, decoded to `f32` tensors once and shared between programs.
//!
//! Invariant: a weight is decoded at its first use and never again, also where two operations use
//! it (tied embeddings). Knows nothing of graphs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Tensor};
use kv_backend::{BackendError, CustomOps};
use kv_graph::weights::{WeightError, WeightSource};

use crate::error::OnDevice;

/// The weights of a model on one device.
pub struct Weights {
    source: Arc<dyn WeightSource>,
    device: Device,
    loaded: Mutex<HashMap<String, Tensor>>,
    /// The custom operations of its graphs.
    pub(crate) custom: CustomOps,
}

impl Weights {
    pub(crate) fn new(source: Arc<dyn WeightSource>, device: Device, custom: CustomOps) -> Self {
        Self {
            source,
            device,
            loaded: Mutex::default(),
            custom,
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Drops the tensors of these weights.
    pub(crate) fn forget(&self, names: &[String]) {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().for_each(|name| drop(loaded.remove(name)));
    }

    /// The weight `name`, which `node` needs in the shape `wanted`.
    pub(crate) fn get(
        &self,
        name: &str,
        wanted: &[usize],
        node: &str,
    ) -> Result<Tensor, BackendError> {
        let fits = |got: &[usize]| {
            if got == wanted {
                return Ok(());
            }
            let (wanted, got) = (wanted.to_vec(), got.to_vec());
            Err(BackendError::WeightShape {
                name: name.to_owned(),
                wanted,
                got,
            })
        };
        // A map of finished tensors is whole even where a holder of the lock panicked.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = loaded.get(name) {
            return fits(tensor.dims()).map(|()| tensor.clone());
        }
        let weight = self.source.require(name).map_err(|error| match error {
            WeightError::Missing { name } => BackendError::MissingWeight {
                name,
                node: node.to_owned(),
                shape: wanted.to_vec(),
            },
            other => BackendError::Weight(other),
        })?;
        fits(weight.shape())?;
        let tensor = Tensor::from_vec(weight.to_f32(), wanted, &self.device).on_device()?;
        loaded.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let n_loaded = self
            .loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len();
        write!(
            f,
            "Weights({n_loaded} loaded on {:?})",
            self.device.location()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_graph::weights::MemoryWeights;

    fn weights() -> Weights {
        let mut source = MemoryWeights::new();
        source
            .insert_f32("w", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            .unwrap();
        Weights::new(Arc::new(source), Device::Cpu, CustomOps::new())
    }

    #[test]
    fn a_weight_is_decoded_once() {
        let weights = weights();
        let first = weights.get("w", &[2, 3], "embd").unwrap();
        let second = weights.get("w", &[2, 3], "logits").unwrap();
        assert_eq!(first.id(), second.id());
        assert_eq!(
            first.to_vec2::<f32>().unwrap(),
            [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
        );
    }

    #[test]
    fn absence_and_wrong_shapes_are_named_before_and_after_loading() {
        let weights = weights();
        let text = |wanted: &[usize]| weights.get("w", wanted, "x").unwrap_err().to_string();
        let wrong = "weight 'w' has shape [2, 3], but the model's settings need [3, 2]";
        assert_eq!(text(&[3, 2]), wrong);
        weights.get("w", &[2, 3], "x").unwrap();
        assert_eq!(text(&[3, 2]), wrong);
        let missing = weights.get("v", &[4], "norm").unwrap_err();
        assert_eq!(
            missing.to_string(),
            "weight 'v' is missing; node 'norm' needs it as [4]"
        );
    }
}
