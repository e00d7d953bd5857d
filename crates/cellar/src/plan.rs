//! [`plan_memory`]: the bytes that a backend takes for a model, of the host and of a device of its
//! own: weights in its own layout, and scratch memory of the graphs that a long prompt and
//! generation compile.
//!
//! Invariant: of the weights, only small vectors and first rows are read; no device is needed.

use std::collections::HashSet;

use cellar_engine::Workload;
use kv_backend::DeviceMemory;
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, Op};
use serde::Serialize;

use crate::backends::{
    BackendKind, BackendMemory, BackendOptions, BackendWork, ComputeDevice, ExpertMemory,
    MemoryPlace, backend_devices, plan_backend_memory, program_capacities,
};
use crate::choice::{
    DEVICE_RESERVE, DeviceNeeds, ModelWork, device_needs, largest_device_n_ctx, most_device_layers,
    share_needs,
};
use crate::error::Error;
use crate::gpu_layers::{Share, Shares, n_layers, on_host, placement};

/// The bytes that a backend takes for a model.
#[derive(Debug)]
pub struct BackendPlan {
    /// The backend; `None` for the one that suits the host.
    pub kind: Option<BackendKind>,
    /// On the host, in addition to the memory; `None` where the backend cannot tell.
    pub host: Option<BackendMemory>,
    /// Of the weights on the host, those of which only the rows of tokens are read.
    pub looked_up: u64,
    /// On a device of its own, with the memory.
    pub device: Option<DeviceReport>,
}

/// What a model takes, and where: the rows of its memory, weights as they are stored or packed, but
/// for those that are looked up, and scratch memory of its programs. In bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Of the host.
    pub host: u64,
    /// Of a device with a memory of its own.
    pub device: u64,
    /// Of `host`, experts that are read as they are needed: see [`ExpertMemory`].
    pub experts: u64,
}

impl MemoryNeeds {
    /// The same next to a model whose experts take `held` bytes of the memory that both have.
    #[must_use]
    pub fn next_to(self, held: u64, memory: &ExpertMemory) -> Self {
        let both = held.saturating_add(self.experts);
        let over = both.saturating_sub(memory.budget()).min(self.experts);
        Self {
            host: self.host.saturating_sub(over),
            experts: self.experts - over,
            ..self
        }
    }
}

/// The bytes that a model takes whose memory has `memory` bytes. Of a directory's weights, whose
/// values are computed when they are read, [`weight_shapes`](crate::weight_shapes) suffice.
///
/// # Errors
/// As [`plan_memory`].
pub fn taken(
    options: &BackendOptions,
    work: &ModelWork<'_>,
    memory: u64,
) -> Result<MemoryNeeds, Error> {
    let backend = plan_memory(options, work)?;
    let stored = weight_bytes(&**work.weights, |_| true);
    let (host, device) = (backend.host, backend.device);
    let replaced = host.map_or(0, |host| host.replaced as u64);
    let read = stored.saturating_sub(replaced);
    let added = host.map_or(0, |host| (host.packed + host.scratch) as u64);
    let experts = host.and_then(|host| host.experts);
    // Rows on a device are not on the host.
    let memory = match &device {
        Some(device) => memory.saturating_sub(device.rows),
        None => memory,
    };
    let (unified, device) = match device {
        Some(device) if device.unified => (device.total, 0),
        device => (0, device.map_or(0, |device| device.total)),
    };
    let mapped = read.saturating_sub(backend.looked_up);
    let host = [memory, mapped, added, unified];
    Ok(MemoryNeeds {
        host: host.into_iter().fold(0, u64::saturating_add),
        device,
        experts: experts.map_or(0, |experts| experts.held as u64),
    })
}

/// Some weights, as they are stored.
fn weight_bytes(weights: &dyn WeightSource, is_one: impl Fn(&str) -> bool) -> u64 {
    let infos = weights.names().into_iter().filter(|name| is_one(name));
    let infos = infos.filter_map(|name| weights.describe(&name).ok());
    let bytes = infos.map(|info| info.n_bytes());
    bytes.fold(0, u64::saturating_add)
}

/// The bytes of matrices of which graphs read nothing but the rows of tokens. The pages of a mapped
/// file that have them come as tokens need them, and the system may take them away again.
fn looked_up(graphs: &[Graph], weights: &dyn WeightSource) -> u64 {
    let (mut of_tokens, mut whole) = (HashSet::new(), HashSet::new());
    for node in graphs.iter().flat_map(Graph::nodes) {
        match &node.op {
            Op::Embed { weight } => {
                of_tokens.insert(weight.as_str());
            }
            op => whole.extend(op.spec().weights()),
        }
    }
    weight_bytes(weights, |name| {
        of_tokens.contains(name) && !whole.contains(name)
    })
}

/// The layers that a GPU computes where the CPU computes the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayersOnGpu {
    /// How many, counted from the last.
    pub last: u32,
    /// Of how many.
    pub of: u32,
}

/// What a device must hold. Sizes are in bytes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DeviceReport {
    /// The device, where this machine has one.
    pub name: Option<String>,
    /// True if it shares the machine's memory, in which the total is then.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unified: bool,
    /// The layers that it computes; all where not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayersOnGpu>,
    /// Of how many of them the host computes the experts; of none where not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_experts: Option<usize>,
    /// Rows and states of the memory.
    pub rows: u64,
    /// Weights.
    pub weights: u64,
    /// Scratch memory of programs.
    pub scratch: u64,
    /// Where inputs and weights are put on their way.
    pub transfers: u64,
    /// All of these.
    pub total: u64,
    /// What the device has free, without what the driver may need.
    pub room: Option<u64>,
    /// The largest context with which the total fits it.
    pub largest_n_ctx: Option<u32>,
}

/// Plans for the backend that the options name, or that suits the model on this machine.
///
/// # Errors
/// Where the backend cannot compute the model.
pub fn plan_memory(options: &BackendOptions, work: &ModelWork<'_>) -> Result<BackendPlan, Error> {
    let gpu = BackendOptions {
        kind: Some(options.kind.unwrap_or_else(BackendKind::own_gpu)),
        ..options.clone()
    };
    match options.kind {
        Some(kind) if kind.is_own_gpu() => work.on_gpu(&gpu, first_gpu(kind)),
        None if options.experts.is_some() && options.host_experts.is_empty() => {
            work.on_host(options)
        }
        None => match work.fitting(&gpu) {
            Some((gpu, device)) => work.on_gpu(&gpu, Some(device)),
            None => work.on_host(options),
        },
        Some(_) => work.on_host(options),
    }
}

/// What the first GPU of this machine has free for models, where there is one with a memory of its
/// own.
pub fn gpu_room(kind: BackendKind) -> Option<u64> {
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

impl ModelWork<'_> {
    fn load(&self, capacities: &[usize]) -> Result<Workload, Error> {
        let (model, config) = (self.model, self.config);
        Ok(Workload::with_capacities(
            model,
            config,
            self.outputs,
            capacities,
        )?)
    }

    /// The GPU, where there is one, for as many layers as it has room for.
    fn fitting(&self, gpu: &BackendOptions) -> Option<(BackendOptions, ComputeDevice)> {
        let device = first_gpu(gpu.kind?)?;
        let needs = device_needs(gpu, self).ok().flatten()?;
        let gpu_layers = match room_of(&device, gpu) {
            Some(room) if needs.total() > room => Some(most_device_layers(gpu, self, room)?),
            _ => gpu.gpu_layers,
        };
        let gpu = BackendOptions {
            gpu_layers,
            ..gpu.clone()
        };
        Some((gpu, device))
    }

    /// What a GPU takes, and the CPU for the layers that are not on it.
    fn on_gpu(
        &self,
        gpu: &BackendOptions,
        device: Option<ComputeDevice>,
    ) -> Result<BackendPlan, Error> {
        let load = self.load(&[])?;
        let placement = placement(gpu, self)?;
        let layers = placement.point.as_ref().map(|point| {
            let n = n_layers(&**self.model)?;
            Ok::<_, Error>(LayersOnGpu {
                last: n - point.n_first(),
                of: n,
            })
        });
        let shares = Shares::new(&load, &placement)?;
        let needs = share_needs(gpu, self, &placement, &shares.backend)?;
        let report = |needs| {
            let room = device.as_ref().and_then(|device| room_of(device, gpu));
            Ok::<_, Error>(DeviceReport {
                name: device.map(|device| device.description),
                unified: gpu.kind == Some(BackendKind::Metal),
                layers: layers.transpose()?,
                host_experts: placement.experts.as_ref().map(|share| share.n_layers),
                largest_n_ctx: room.and_then(|room| largest_device_n_ctx(gpu, self, room)),
                room,
                ..DeviceReport::from(needs)
            })
        };
        let (host, looked_up) = self.host_with_device(gpu, &load, shares.host)?;
        Ok(BackendPlan {
            kind: gpu.kind,
            host: Some(host),
            looked_up,
            device: needs.map(report).transpose()?,
        })
    }

    /// The CPU's memory while a device computes: the last logits, and the layers and experts that
    /// it computes. With it, the bytes of matrices that the CPU looks tokens up in.
    fn host_with_device(
        &self,
        gpu: &BackendOptions,
        load: &Workload,
        shares: Vec<Share>,
    ) -> Result<(BackendMemory, u64), Error> {
        let nothing = BackendMemory {
            place: MemoryPlace::Host,
            packed: 0,
            replaced: 0,
            scratch: 0,
            transfers: 0,
            experts: None,
        };
        let mut host = BackendMemory {
            scratch: outputs(load),
            ..nothing
        };
        if shares.is_empty() {
            host.replaced = usize::MAX;
            return Ok((host, 0));
        }
        for share in &shares {
            let work = share.work(self.weights);
            let planned = plan_backend_memory(&on_host(gpu)?, &work)?;
            host = host.with(planned.unwrap_or(nothing), gpu.experts.as_ref());
        }
        let graphs: Vec<Graph> = shares.into_iter().flat_map(|share| share.graphs).collect();
        let weights = graphs.iter().flat_map(Graph::weights);
        let used: HashSet<&str> = weights.map(|weight| weight.name.as_str()).collect();
        let elsewhere = weight_bytes(&**self.weights, |name| !used.contains(name));
        let elsewhere = usize::try_from(elsewhere).unwrap_or(usize::MAX);
        host.replaced = host.replaced.saturating_add(elsewhere);
        Ok((host, looked_up(&graphs, &**self.weights)))
    }

    fn on_host(&self, options: &BackendOptions) -> Result<BackendPlan, Error> {
        let load = self.load(program_capacities(options)?)?;
        let work = BackendWork {
            graphs: &load.graphs,
            weights: self.weights,
            layout: &load.settings.layout,
            custom: &load.custom,
        };
        let planned = plan_backend_memory(options, &work)?;
        let looked_up = match &planned {
            Some(_) => looked_up(&load.graphs, &**self.weights),
            // A backend that cannot tell may copy it.
            None => 0,
        };
        Ok(BackendPlan {
            kind: options.kind,
            looked_up,
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

/// What a device has free for a model; `None` where that is not known.
fn room_of(device: &ComputeDevice, options: &BackendOptions) -> Option<u64> {
    let is_unified = options.kind == Some(BackendKind::Metal);
    // Other programs use unified memory, too.
    let free_here = DeviceMemory::of_host()
        .map(|memory| memory.free)
        .filter(|_| is_unified)
        .unwrap_or(u64::MAX);
    let memory = device.memory?;
    Some(memory.free.saturating_sub(DEVICE_RESERVE).min(free_here))
}

impl From<DeviceNeeds> for DeviceReport {
    fn from(needs: DeviceNeeds) -> Self {
        Self {
            rows: needs.rows,
            weights: needs.weights,
            scratch: needs.scratch,
            transfers: needs.transfers,
            total: needs.total(),
            ..Self::default()
        }
    }
}
