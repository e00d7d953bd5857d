//! [`GpuWeights`]: the weights of a model, on the device from their first use on.
//!
//! Invariant: a weight is uploaded once, also where several graphs and operations use it. Knows
//! nothing of operations.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::backend::{BackendError, CustomOps, OnProgress};
use kv_core::block::BlockFormat;
use kv_core::weights::{Weight, WeightError, WeightSource};

use crate::custom::HostOps;
use crate::device::{Device, Region};

/// The weights of a model.
pub struct GpuWeights<D: Device> {
    source: Arc<dyn WeightSource>,
    /// What custom operations of its graphs compute.
    pub(crate) custom: HostOps,
    uploaded: Mutex<HashMap<Key, Arc<DeviceWeight<D>>>>,
    _on_progress: OnProgress,
}

/// A weight, and in which form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    name: String,
    form: WeightForm,
}

/// In which form a weight is on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WeightForm {
    /// As `f32`: gains, biases, small tables.
    Floats,
    /// In its own format, in planes where it has blocks: matrices.
    Stored,
}

/// A weight on the device.
#[derive(Debug)]
pub(crate) struct DeviceWeight<D: Device> {
    pub(crate) buffer: D::Buffer,
    pub(crate) format: BlockFormat,
    pub(crate) shape: Vec<usize>,
}

impl<D: Device> GpuWeights<D> {
    pub(crate) fn new(
        source: Arc<dyn WeightSource>,
        custom: CustomOps,
        on_progress: OnProgress,
    ) -> Self {
        Self {
            source,
            custom: HostOps::new(custom),
            uploaded: Mutex::default(),
            _on_progress: on_progress,
        }
    }

    /// The weight `name` as the host has it.
    pub(crate) fn host(
        &self,
        name: &str,
        wanted: &[usize],
        node: &str,
    ) -> Result<Weight, BackendError> {
        let weight = self.source.require(name).map_err(|error| match error {
            WeightError::Missing { name } => BackendError::MissingWeight {
                name,
                node: node.to_owned(),
                shape: wanted.to_vec(),
            },
            other => BackendError::Weight(other),
        })?;
        match weight.shape() == wanted {
            true => Ok(weight),
            false => Err(BackendError::WeightShape {
                name: name.to_owned(),
                wanted: wanted.to_vec(),
                got: weight.shape().to_vec(),
            }),
        }
    }

    /// A weight on the device.
    pub(crate) fn get(
        &self,
        device: &D,
        weight: &Weight,
        form: WeightForm,
    ) -> Result<Arc<DeviceWeight<D>>, BackendError> {
        let key = Key {
            name: weight.name().to_owned(),
            form,
        };
        // A map of finished weights is whole even where a holder of the lock panicked.
        let mut uploaded = self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = uploaded.get(&key) {
            return Ok(Arc::clone(known));
        }
        let new = Arc::new(upload(device, weight, form)?);
        uploaded.insert(key, Arc::clone(&new));
        Ok(new)
    }
}

fn upload<D: Device>(
    device: &D,
    weight: &Weight,
    form: WeightForm,
) -> Result<DeviceWeight<D>, BackendError> {
    let what = format!("weight '{}'", weight.name());
    let floats;
    let (format, bytes) = match form {
        WeightForm::Floats => {
            floats = weight.to_f32();
            (BlockFormat::F32, bytemuck::cast_slice::<f32, u8>(&floats))
        }
        WeightForm::Stored => (weight.format(), &**weight.bytes()),
    };
    let buffer = device.allocate(bytes.len(), &what)?;
    let to = Region {
        buffer: &buffer,
        at: 0,
    };
    device.write(to, bytes)?;
    Ok(DeviceWeight {
        buffer,
        format,
        shape: weight.shape().to_vec(),
    })
}

impl<D: Device> std::fmt::Debug for GpuWeights<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let uploaded = self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "GpuWeights({} on the device)", uploaded.len())
    }
}
