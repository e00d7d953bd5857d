//! [`GpuWeights`]: the weights of a model, on the device from their first use on.
//!
//! Invariant: a weight is uploaded once, also where several graphs and operations use it; what is
//! in blocks is split into planes on the device, in pieces of bounded size. Knows nothing of
//! operations.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kv_backend::{BackendError, CustomOps, LoadProgress, OnProgress};
use kv_block::BlockFormat;
use kv_graph::weights::{Weight, WeightError, WeightSource};

use crate::custom::HostOps;
use crate::device::{Argument, Device, Region};
use crate::kernels::word;
use crate::planes::Planes;
use crate::program::{ProgramContext, locked};

/// Bytes of a weight that are uploaded at once.
const STAGING_BYTES: usize = 16 << 20;

/// The weights of a model.
pub struct GpuWeights<D: Device> {
    source: Arc<dyn WeightSource>,
    /// The custom operations of its graphs.
    pub(crate) custom: HostOps,
    uploaded: Mutex<DeviceWeights<D>>,
    on_progress: OnProgress,
    /// True if memory is only counted.
    is_plan: bool,
}

/// The weights on the device, and the staging that brings them there.
struct DeviceWeights<D: Device> {
    weights: HashMap<Key, Arc<DeviceWeight<D>>>,
    /// Stored blocks on their way to planes.
    staging: Option<D::Buffer>,
    staging_bytes: usize,
    /// The same on the host.
    piece: Vec<u8>,
    progress: LoadProgress,
}

impl<D: Device> Default for DeviceWeights<D> {
    fn default() -> Self {
        Self {
            weights: HashMap::new(),
            staging: None,
            staging_bytes: 0,
            piece: Vec::new(),
            progress: LoadProgress::default(),
        }
    }
}

/// The key of a value on the device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// A weight, or several as one.
    Weights {
        names: Vec<String>,
        form: WeightForm,
    },
    /// Values that follow from a graph.
    Constant(String),
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
    pub(crate) planes: Planes,
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
            on_progress,
            is_plan: false,
        }
    }

    /// The same for a plan: memory is counted, no block is uploaded.
    pub(crate) fn planned(
        source: Arc<dyn WeightSource>,
        custom: CustomOps,
        on_progress: OnProgress,
    ) -> Self {
        Self {
            is_plan: true,
            ..Self::new(source, custom, on_progress)
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
        if weight.shape() == wanted {
            Ok(weight)
        } else {
            Err(BackendError::WeightShape {
                name: name.to_owned(),
                wanted: wanted.to_vec(),
                got: weight.shape().to_vec(),
            })
        }
    }

    /// A weight on the device.
    pub(crate) fn get(
        &self,
        shared: &ProgramContext<D>,
        weight: &Weight,
        form: WeightForm,
    ) -> Result<Arc<DeviceWeight<D>>, BackendError> {
        let key = Key::Weights {
            names: vec![weight.name().to_owned()],
            form,
        };
        self.once(key, weight.bytes().len(), |uploaded| match form {
            WeightForm::Floats => {
                let shape = weight.shape().to_vec();
                upload_floats(&shared.device, &what(weight), shape, &weight.to_f32())
            }
            WeightForm::Stored if self.is_plan => {
                uploaded.staging_bytes = uploaded.staging_bytes.max(piece_bytes(weight));
                allocate_blocks(&shared.device, weight)
            }
            WeightForm::Stored => uploaded.upload_blocks(shared, weight),
        })
    }

    /// The values of several weights one after the other, as one weight on the device.
    pub(crate) fn joined(
        &self,
        device: &D,
        weights: &[Weight],
    ) -> Result<Arc<DeviceWeight<D>>, BackendError> {
        let names = weights.iter().map(|weight| weight.name().to_owned());
        let key = Key::Weights {
            names: names.collect(),
            form: WeightForm::Floats,
        };
        let n_bytes = weights.iter().map(|weight| weight.bytes().len()).sum();
        self.once(key, n_bytes, |_| {
            let values: Vec<f32> = weights.iter().flat_map(Weight::to_f32).collect();
            let names: Vec<String> = weights.iter().map(what).collect();
            upload_floats(device, &names.join(", "), vec![values.len()], &values)
        })
    }

    /// Values that are not the model's, but follow from a graph.
    pub(crate) fn constant(
        &self,
        device: &D,
        name: String,
        values: &[f32],
    ) -> Result<Arc<DeviceWeight<D>>, BackendError> {
        self.once(Key::Constant(name.clone()), 0, |_| {
            upload_floats(device, &name, vec![values.len()], values)
        })
    }

    /// The value that `upload` puts on the device for a key, of so many bytes of the model, at its
    /// first use.
    fn once(
        &self,
        key: Key,
        n_bytes: usize,
        upload: impl FnOnce(&mut DeviceWeights<D>) -> Result<DeviceWeight<D>, BackendError>,
    ) -> Result<Arc<DeviceWeight<D>>, BackendError> {
        let mut uploaded = locked(&self.uploaded);
        if let Some(known) = uploaded.weights.get(&key) {
            return Ok(Arc::clone(known));
        }
        let new = Arc::new(upload(&mut uploaded)?);
        uploaded.weights.insert(key, Arc::clone(&new));
        self.report(&mut uploaded.progress, n_bytes);
        Ok(new)
    }

    /// Drops these weights, and what was joined of them.
    pub(crate) fn forget(&self, names: &[String]) {
        let is_kept = |key: &Key| match key {
            Key::Weights { names: all, .. } => !all.iter().any(|name| names.contains(name)),
            Key::Constant(_) => true,
        };
        let mut uploaded = locked(&self.uploaded);
        uploaded.weights.retain(|key, _| is_kept(key));
    }

    /// The bytes that are allocated to bring the weights there that are, or were planned to be.
    pub(crate) fn staging_bytes(&self) -> usize {
        locked(&self.uploaded).staging_bytes
    }

    fn report(&self, progress: &mut LoadProgress, bytes: usize) {
        if progress.total == 0 {
            let names = self.source.names();
            let infos = names
                .iter()
                .filter_map(|name| self.source.describe(name).ok());
            let bytes = infos.map(|info| {
                let n_values: usize = info.shape.iter().product();
                info.format.row_bytes(n_values).unwrap_or_default() as u64
            });
            progress.total = bytes.sum();
        }
        progress.done += bytes as u64;
        self.on_progress.report(*progress);
    }
}

fn upload_floats<D: Device>(
    device: &D,
    what: &str,
    shape: Vec<usize>,
    values: &[f32],
) -> Result<DeviceWeight<D>, BackendError> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let buffer = device.allocate(bytes.len(), what)?;
    device.write(Region::start(&buffer), bytes)?;
    Ok(DeviceWeight {
        buffer,
        format: BlockFormat::F32,
        shape,
        planes: Planes::default(),
    })
}

/// Room for the planes of a weight.
fn allocate_blocks<D: Device>(
    device: &D,
    weight: &Weight,
) -> Result<DeviceWeight<D>, BackendError> {
    let format = weight.format();
    let planes = Planes::new(format, weight.bytes().len() / format.block_bytes())?;
    Ok(DeviceWeight {
        buffer: device.allocate(planes.bytes(), &what(weight))?,
        format,
        shape: weight.shape().to_vec(),
        planes,
    })
}

/// Bytes of a weight that are uploaded at once.
fn piece_bytes(weight: &Weight) -> usize {
    let block_bytes = weight.format().block_bytes();
    (STAGING_BYTES / block_bytes * block_bytes).min(weight.bytes().len())
}

fn what(weight: &Weight) -> String {
    format!("weight '{}'", weight.name())
}

impl<D: Device> DeviceWeights<D> {
    fn upload_blocks(
        &mut self,
        shared: &ProgramContext<D>,
        weight: &Weight,
    ) -> Result<DeviceWeight<D>, BackendError> {
        let (device, stored) = (&shared.device, weight.bytes());
        let block_bytes = weight.format().block_bytes();
        let planned = allocate_blocks(device, weight)?;
        let (planes, buffer) = (planned.planes, &planned.buffer);
        let piece_bytes = piece_bytes(weight);
        if self.staging_bytes < piece_bytes {
            device.wait()?;
            self.staging = Some(device.allocate(piece_bytes, "weights that are uploaded")?);
            self.staging_bytes = piece_bytes;
        }
        let Some(staging) = &self.staging else {
            return Err(BackendError::Input {
                input: "weights",
                reason: format!("weight '{}' has no values", weight.name()),
            });
        };
        let staging = Region::start(staging);
        let kernel = shared.kernel("split")?;
        for start in (0..stored.len()).step_by(piece_bytes.max(1)) {
            let len = piece_bytes.min(stored.len() - start);
            self.piece.resize(len, 0);
            if !stored.copy(start, &mut self.piece) {
                return Err(BackendError::Device {
                    backend: device.name(),
                    reason: format!("weight '{}' can no longer be read", weight.name()),
                });
            }
            stored.release(start..start + len);
            device.write(staging, &self.piece)?;
            let settings = planes.split(word(start / block_bytes)?, word(len / block_bytes)?);
            let arguments = [
                Argument::Buffer(staging),
                Argument::Buffer(Region::start(buffer)),
                Argument::Settings(bytemuck::bytes_of(&settings)),
            ];
            device.launch(&kernel, [word(len.div_ceil(256))?, 1], &arguments)?;
        }
        Ok(planned)
    }
}

impl<D: Device> std::fmt::Debug for GpuWeights<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let uploaded = locked(&self.uploaded);
        write!(f, "GpuWeights({} on the device)", uploaded.weights.len())
    }
}
