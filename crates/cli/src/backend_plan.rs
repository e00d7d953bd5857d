//! What a backend takes for a model: weights in its own layout, and scratch memory of the graphs that
//! a long prompt and generation compile; on the host, or on a device of its own.
//!
//! Invariant: of the weights, only small vectors and first rows are read; no device is needed. Knows
//! backends by their kind alone.

use std::sync::Arc;

use cellar::{
    BackendKind, BackendMemory, BackendOptions, BackendWork, ComputeDevice, DEVICE_RESERVE,
    DeviceNeeds, MemoryPlace, ModelWork, backend_devices, device_needs, largest_device_n_ctx,
    plan_backend_memory, program_capacities, weight_shapes,
};
use engine::{EngineConfig, PromptOutputs, Workload};
use kv_core::weights::WeightSource;
use model_core::architecture::Model;
use serde::Serialize;

use crate::args::EngineArgs;
use crate::machine::available_memory;
use crate::models::Contents;
use crate::resolve;

/// What is planned.
#[derive(Clone, Copy)]
pub(crate) struct Planned<'a> {
    pub(crate) model: &'a Arc<dyn Model>,
    pub(crate) config: &'a EngineConfig,
    pub(crate) weights: &'a Arc<dyn WeightSource>,
    pub(crate) outputs: PromptOutputs,
}

/// What a backend takes for it.
#[derive(Debug)]
pub(crate) struct BackendPlan {
    pub(crate) kind: Option<BackendKind>,
    /// On the host, in addition to the memory; `None` where the backend cannot tell.
    pub(crate) host: Option<BackendMemory>,
    /// On a device of its own, with the memory.
    pub(crate) device: Option<DeviceReport>,
}

/// What a model takes, and where: the rows of its memory, weights as they are stored or packed, and
/// scratch memory of its programs. In bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) host: u64,
    pub(crate) device: u64,
}

/// What is taken by a model whose memory has so many bytes.
///
/// # Errors
/// As [`plan`].
pub(crate) fn taken(args: &EngineArgs, planned: Planned<'_>, memory: u64) -> anyhow::Result<Taken> {
    let backend = plan(args, planned)?;
    let stored = weight_bytes(&**planned.weights);
    let (host, device) = (backend.host, backend.device);
    let replaced = host.map_or(0, |host| host.replaced as u64);
    let added = host.map_or(0, |host| (host.packed + host.scratch) as u64);
    // Rows on a device are not on the host.
    let memory = match &device {
        Some(device) => memory.saturating_sub(device.rows),
        None => memory,
    };
    let (unified, device) = match device {
        Some(device) if device.unified => (device.total, 0),
        device => (0, device.map_or(0, |device| device.total)),
    };
    let host = [memory, stored.saturating_sub(replaced), added, unified];
    Ok(Taken {
        host: host.into_iter().fold(0, u64::saturating_add),
        device,
    })
}

/// All weights as they are stored.
fn weight_bytes(weights: &dyn WeightSource) -> u64 {
    let infos = weights.names().into_iter();
    let infos = infos.filter_map(|name| weights.describe(&name).ok());
    let bytes = infos.map(|info| info.n_bytes() as u64);
    bytes.fold(0, u64::saturating_add)
}

/// What a device must hold. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceReport {
    /// The device, where this machine has one.
    pub(crate) name: Option<String>,
    /// Whether it shares the machine's memory, in which the total is then.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) unified: bool,
    pub(crate) rows: u64,
    pub(crate) weights: u64,
    pub(crate) scratch: u64,
    /// Where inputs and weights are put on their way.
    pub(crate) transfers: u64,
    pub(crate) total: u64,
    /// What the device has free, without what the driver may need.
    pub(crate) room: Option<u64>,
    /// The largest context with which the total fits it.
    pub(crate) largest_n_ctx: Option<u32>,
}

/// Plans for the backend that the flags name, or that suits the model on this machine.
///
/// # Errors
/// Where the backend cannot compute the model.
pub(crate) fn plan(args: &EngineArgs, planned: Planned<'_>) -> anyhow::Result<BackendPlan> {
    let options = resolve::backend_flags(args)?.options();
    let gpu = BackendOptions {
        kind: Some(options.kind.unwrap_or(BackendKind::OWN_GPU)),
        ..options.clone()
    };
    match options.kind {
        Some(kind) if kind.is_own_gpu() => {
            let work = planned.work();
            let needs = device_needs(&gpu, &work)?;
            let device =
                needs.map(|needs| DeviceReport::new(needs, first_gpu(kind), (&gpu, &work)));
            Ok(BackendPlan {
                kind: options.kind,
                host: Some(planned.outside_device()?),
                device,
            })
        }
        None => match planned.fitting(&gpu) {
            Some(device) => Ok(BackendPlan {
                kind: gpu.kind,
                host: Some(planned.outside_device()?),
                device: Some(device),
            }),
            None => planned.on_host(&options),
        },
        Some(_) => planned.on_host(&options),
    }
}

/// The weights of a GGUF file; of a directory, whose weights are computed when they are read,
/// others of the same shapes.
pub(crate) fn weights(file: Contents) -> Arc<dyn WeightSource> {
    match file {
        Contents::Gguf(file) => Arc::new(file),
        Contents::Directory(directory) => weight_shapes(&**directory.weights()),
    }
}

/// What the first GPU of this machine has free for models, where there is one with a memory of its
/// own.
#[cfg(feature = "serve")]
pub(crate) fn gpu_room(kind: BackendKind) -> Option<u64> {
    if kind == BackendKind::Metal {
        return None;
    }
    let memory = first_gpu(kind)?.memory?;
    Some(memory.free.saturating_sub(DEVICE_RESERVE))
}

/// The first GPU of this machine that can be used.
fn first_gpu(kind: BackendKind) -> Option<ComputeDevice> {
    let devices = backend_devices(kind).ok()?;
    devices.into_iter().find_map(Result::ok)
}

impl Planned<'_> {
    fn work(&self) -> ModelWork<'_> {
        ModelWork {
            model: self.model,
            weights: &**self.weights,
            config: self.config,
            outputs: self.outputs,
        }
    }

    fn load(&self, capacities: &[usize]) -> anyhow::Result<Workload> {
        let (model, config) = (self.model, self.config);
        Ok(Workload::with_capacities(
            model,
            config,
            self.outputs,
            capacities,
        )?)
    }

    /// The GPU, where there is one and the model fits.
    fn fitting(&self, gpu: &BackendOptions) -> Option<DeviceReport> {
        let device = first_gpu(gpu.kind?)?;
        let work = self.work();
        let needs = device_needs(gpu, &work).ok().flatten()?;
        let report = DeviceReport::new(needs, Some(device), (gpu, &work));
        report
            .room
            .is_none_or(|room| report.total <= room)
            .then_some(report)
    }

    /// What stays on the host when a device computes: the last logits.
    fn outside_device(&self) -> anyhow::Result<BackendMemory> {
        let load = self.load(&[])?;
        Ok(BackendMemory {
            place: MemoryPlace::Host,
            packed: 0,
            replaced: usize::MAX,
            scratch: outputs(&load),
            transfers: 0,
        })
    }

    fn on_host(&self, options: &BackendOptions) -> anyhow::Result<BackendPlan> {
        let load = self.load(program_capacities(options)?)?;
        let work = BackendWork {
            graphs: &load.graphs,
            weights: self.weights,
            layout: &load.settings.layout,
            custom: &load.custom,
        };
        let planned = plan_backend_memory(options, &work)?;
        Ok(BackendPlan {
            kind: options.kind,
            host: planned.map(|planned| BackendMemory {
                scratch: planned.scratch + outputs(&load),
                ..planned
            }),
            device: None,
        })
    }
}

/// The last logits, as they come out of the graph and as the engine keeps them.
fn outputs(load: &Workload) -> usize {
    2 * load.n_outputs * load.settings.output_width() * size_of::<f32>()
}

impl DeviceReport {
    fn new(
        needs: DeviceNeeds,
        device: Option<ComputeDevice>,
        (options, work): (&BackendOptions, &ModelWork<'_>),
    ) -> Self {
        let memory = device.as_ref().and_then(|device| device.memory);
        let unified = options.kind == Some(BackendKind::Metal);
        // Other programs use unified memory, too.
        let free_here = available_memory().filter(|_| unified).unwrap_or(u64::MAX);
        let room = memory.map(|memory| memory.free.saturating_sub(DEVICE_RESERVE).min(free_here));
        Self {
            name: device.map(|device| device.description),
            unified,
            rows: needs.rows,
            weights: needs.weights,
            scratch: needs.scratch,
            transfers: needs.transfers,
            total: needs.total(),
            room,
            largest_n_ctx: room.and_then(|room| largest_device_n_ctx(options, work, room)),
        }
    }
}
