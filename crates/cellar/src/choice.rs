//! [`choose_backend`]: a GPU where there is one, for as many of the model's layers as fit it, else
//! the CPU.
//!
//! Invariant: what a device must hold is known, and compared with what it has free, before anything
//! is loaded. Knows no concrete backend but by its kind.

use std::collections::HashMap;
use std::iter;
use std::sync::Arc;

use cellar_engine::{EngineConfig, MemoryBudget, PromptOutputs, Workload};
use kv_backend::{Backend, BoxedBackend, DetachedExperts, Split};
use kv_block::BlockFormat;
use kv_graph::weights::{Weight, WeightInfo, WeightSource};
use model_core::architecture::Model;
use model_core::expert_tensors::ExpertLayers;

use crate::backends::{
    BackendKind, BackendMemory, BackendOptions, ComputeDevice, MemoryPlace, is_gpu_present,
    open_backend, plan_backend_memory,
};
use crate::error::Error;
use crate::gpu_layers::{
    Placement, Share, Shares, on_gpu, on_host, placement, possible_gpu_layers,
};

/// Bytes of a device that are left free: the driver keeps kernels, recorded launches and tables of
/// inputs there, and rounds what is allocated up.
pub const DEVICE_RESERVE: u64 = 256 << 20;

/// What is to be computed on a backend that is chosen.
#[derive(Clone, Copy)]
pub struct ModelWork<'a> {
    /// The model.
    pub model: &'a Arc<dyn Model>,
    /// Its weights, of which none is read.
    pub weights: &'a Arc<dyn WeightSource>,
    /// The engine that computes it. Its budget is that of a device's memory, too:
    /// [`MemoryBudget::Unlimited`] compares nothing.
    pub config: &'a EngineConfig,
    /// Of which tokens of a prompt the outputs are wanted.
    pub outputs: PromptOutputs,
}

/// A backend that was chosen.
#[derive(Debug)]
pub struct Choice {
    /// The backend.
    pub backend: BoxedBackend,
    /// Which it is.
    pub kind: BackendKind,
    /// Why this one, in a line for people.
    pub reason: String,
    /// Whether this machine has a GPU with a driver, be it that they cannot be used. Without one
    /// there was nothing to choose.
    pub is_gpu_present: bool,
}

/// What a device must hold, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNeeds {
    /// Rows and states of the memory.
    pub rows: u64,
    /// Weights.
    pub weights: u64,
    /// Scratch memory.
    pub scratch: u64,
    /// Where inputs and weights are put on their way.
    pub transfers: u64,
}

impl DeviceNeeds {
    /// All of it.
    pub fn total(&self) -> u64 {
        let parts = [self.weights, self.scratch, self.transfers];
        parts.into_iter().fold(self.rows, u64::saturating_add)
    }
}

/// What a device that has not room for it all could hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShortage {
    /// The device.
    pub device: ComputeDevice,
    /// What it would have to hold.
    pub needs: DeviceNeeds,
    /// What it has free, without [`DEVICE_RESERVE`].
    pub room: u64,
    /// The largest context with which the model fits; `None` where it fits with none.
    pub largest_n_ctx: Option<u32>,
    /// The most layers that fit, where the CPU computes those before them; `None` where none do.
    pub most_layers: Option<u32>,
    /// The fewest layers, the first ones, whose experts the CPU has to compute so that all else
    /// fits; `None` where none suffice.
    pub host_experts: Option<u32>,
}

/// Opens the backend that suits: of the kind in the options, or, without one, a GPU where there is
/// one that computes the model, for as many layers as it has room for, else the CPU.
///
/// # Errors
/// [`Error::Backend`] as [`open_backend`], and where a backend that was asked for cannot compute
/// the model; [`Error::DeviceMemory`] where the model does not fit a device that was asked for;
/// [`Error::Model`] and [`Error::HostExperts`] where it cannot be shared with the CPU as was asked
/// for.
pub fn choose_backend(options: BackendOptions, work: &ModelWork<'_>) -> Result<Choice, Error> {
    if options.gpu_layers == Some(0) {
        return host_choice(&options, "no layers are to be on a GPU".to_owned());
    }
    let is_free = (options.kind, options.gpu_layers) == (None, None);
    if is_free && options.experts.is_some() && options.host_experts.is_empty() {
        return host_choice(&options, "it reads experts as they are needed".to_owned());
    }
    if let Some(kind) = options.kind {
        let backend = open_checked(&options, work)?;
        return Ok(Choice {
            backend,
            kind,
            reason: "it was asked for".to_owned(),
            is_gpu_present: kind.is_own_gpu(),
        });
    }
    let own_gpu = BackendKind::own_gpu();
    let gpu = BackendOptions {
        kind: Some(own_gpu),
        ..options.clone()
    };
    let opened = match open_checked(&gpu, work) {
        Err(Error::DeviceMemory(shortage)) if shortage.most_layers.is_some() => {
            let fewer = BackendOptions {
                gpu_layers: shortage.most_layers,
                ..gpu
            };
            open_checked(&fewer, work)
        }
        opened => opened,
    };
    match opened {
        Ok(backend) => Ok(Choice {
            reason: ComputeDevice::of(&backend).description,
            backend,
            kind: own_gpu,
            is_gpu_present: true,
        }),
        Err(error) => host_choice(&options, error.to_string()),
    }
}

fn host_choice(options: &BackendOptions, reason: String) -> Result<Choice, Error> {
    let host = on_host(options)?;
    let kind = host.kind.unwrap_or(BackendKind::Cpu);
    Ok(Choice {
        backend: open_backend(host)?,
        kind,
        reason,
        is_gpu_present: is_gpu_present(),
    })
}

/// What a device of this kind of backend must hold; `None` where the backend has no memory of its
/// own, or cannot tell.
///
/// # Errors
/// [`Error::Backend`] where it cannot compute the model; [`Error::Engine`] where the configuration
/// does not fit the model.
pub(crate) fn device_needs(
    options: &BackendOptions,
    work: &ModelWork<'_>,
) -> Result<Option<DeviceNeeds>, Error> {
    let load = Workload::new(work.model, work.config, work.outputs)?;
    let placement = placement(options, work)?;
    let share = Shares::new(&load, &placement)?.backend;
    share_needs(options, work, &placement, &share)
}

/// The same of a device whose share of the model is known.
///
/// # Errors
/// [`Error::Backend`] where its backend cannot compute the share.
pub(crate) fn share_needs(
    options: &BackendOptions,
    work: &ModelWork<'_>,
    placement: &Placement,
    share: &Share,
) -> Result<Option<DeviceNeeds>, Error> {
    let weights = weight_shapes(&**work.weights);
    let planned = plan_backend_memory(&on_gpu(options, placement), &share.work(&weights))?;
    let of_device = planned.filter(|planned| planned.place == MemoryPlace::Device);
    Ok(of_device.map(|planned| DeviceNeeds::new(share.layout.bytes(), &planned)))
}

impl DeviceNeeds {
    fn new(rows: u64, planned: &BackendMemory) -> Self {
        Self {
            rows,
            weights: planned.packed as u64,
            scratch: planned.scratch as u64,
            transfers: planned.transfers as u64,
        }
    }
}

/// Opens a backend on whose device, if it has one, the model fits, or as many of its layers as are
/// wanted.
fn open_checked(options: &BackendOptions, work: &ModelWork<'_>) -> Result<BoxedBackend, Error> {
    let placement = placement(options, work)?;
    let mut backend = open_backend(on_gpu(options, &placement))?;
    if !options.kind.is_some_and(BackendKind::is_own_gpu) {
        return Ok(backend);
    }
    check_device(&backend, options, work)?;
    let mut host = on_host(options)?;
    if host.experts.is_some() {
        // Both backends on the host count together.
        host.expert_meter.get_or_insert_default();
    }
    if let Some(share) = placement.experts {
        let experts = open_backend(host.clone())?;
        backend = BoxedBackend::new(DetachedExperts::new(backend, experts, share)?);
    }
    if let Some(point) = placement.point {
        let first = open_backend(host)?;
        backend = BoxedBackend::new(Split::new(first, backend, point));
    }
    Ok(backend)
}

/// Whether the model fits the device of an open backend.
fn check_device(
    backend: &BoxedBackend,
    options: &BackendOptions,
    work: &ModelWork<'_>,
) -> Result<(), Error> {
    let (Some(needs), Some(memory)) = (device_needs(options, work)?, backend.memory()) else {
        return Ok(());
    };
    let room = memory.free.saturating_sub(DEVICE_RESERVE);
    if work.config.budget == MemoryBudget::Unlimited || needs.total() <= room {
        return Ok(());
    }
    Err(Error::DeviceMemory(Box::new(DeviceShortage {
        device: ComputeDevice::of(backend),
        needs,
        room,
        largest_n_ctx: largest_device_n_ctx(options, work, room),
        most_layers: most_device_layers(options, work, room),
        host_experts: fewest_host_experts(options, work, room),
    })))
}

/// True if a device of `room` bytes holds what it computes; false where that cannot be told.
fn fits(options: &BackendOptions, work: &ModelWork<'_>, room: u64) -> bool {
    let needs = device_needs(options, work).ok().flatten();
    needs.is_some_and(|needs| needs.total() <= room)
}

/// The most of the model's last layers, fewer than all, with which a device of `room` bytes holds
/// what it computes; `None` where that is no layer, or cannot be told.
pub(crate) fn most_device_layers(
    options: &BackendOptions,
    work: &ModelWork<'_>,
    room: u64,
) -> Option<u32> {
    let Ok(model) = work.config.model(work.model) else {
        return None;
    };
    let mut possible = possible_gpu_layers(&*model);
    possible.retain(|&n| options.gpu_layers.is_none_or(|wanted| n < wanted));
    // More layers never take fewer bytes.
    let n_fitting = possible.partition_point(|&n| {
        let options = BackendOptions {
            gpu_layers: Some(n),
            ..options.clone()
        };
        fits(&options, work, room)
    });
    possible.get(n_fitting.checked_sub(1)?).copied()
}

/// The fewest of the model's first layers whose experts the CPU has to compute so that a device of
/// `room` bytes holds all else; `None` where none suffice, or that cannot be told.
pub fn fewest_host_experts(
    options: &BackendOptions,
    work: &ModelWork<'_>,
    room: u64,
) -> Option<u32> {
    let matrices = ExpertLayers::all().matrices(&work.weights.names()).ok()?;
    let up_to_each = matrices.into_keys().map(|layer| layer + 1);
    let possible: Vec<u32> = iter::once(0).chain(up_to_each).collect();
    // Fewer layers with experts never take more bytes.
    let n_too_few = possible.partition_point(|&n_first| {
        let host_experts = ExpertLayers {
            n_first,
            ..options.host_experts.clone()
        };
        let options = BackendOptions {
            host_experts,
            ..options.clone()
        };
        !fits(&options, work, room)
    });
    possible.get(n_too_few).copied()
}

/// The largest context with which a device of `room` bytes holds the model, with all else as it is;
/// `None` where none does, or that cannot be told.
pub(crate) fn largest_device_n_ctx(
    options: &BackendOptions,
    work: &ModelWork<'_>,
    room: u64,
) -> Option<u32> {
    let fits_with = |n_ctx| {
        let config = EngineConfig {
            n_ctx: Some(n_ctx),
            budget: MemoryBudget::Unlimited,
            ..work.config.clone()
        };
        let work = ModelWork {
            config: &config,
            ..*work
        };
        fits(options, &work, room)
    };
    // Rows alone give a limit that costs no graphs. More tokens never take fewer bytes.
    let limit = work.config.largest_n_ctx(&**work.model, room)?;
    let (mut fitting, mut too_large) = (0, limit.saturating_add(1));
    while too_large - fitting > 1 {
        let middle = fitting + (too_large - fitting) / 2;
        if fits_with(middle) {
            fitting = middle;
        } else {
            too_large = middle;
        }
    }
    (fitting > 0).then_some(fitting)
}

/// Bytes at the beginning of a weight that are not zero: more than a group of rows that is packed.
const N_FILLED: usize = 1 << 20;

/// Weights with the shapes and formats of `weights`, to plan with: those of a directory are
/// computed when they are read.
///
/// Their values are zeros, whose pages are never read, but for the first ones: F16 and F32 take all
/// of their bits there, as most values do.
pub fn weight_shapes(weights: &dyn WeightSource) -> Arc<dyn WeightSource> {
    let names = weights.names().into_iter();
    let described = names.filter_map(|name| {
        let info = weights.describe(&name).ok()?;
        Some((name, info))
    });
    Arc::new(Shapes(described.collect()))
}

struct Shapes(HashMap<String, WeightInfo>);

impl WeightSource for Shapes {
    fn get(&self, name: &str) -> Option<Weight> {
        let WeightInfo { shape, format } = self.0.get(name)?.clone();
        let n_bytes = format.row_bytes(shape.iter().product())?;
        let mut bytes = Vec::new();
        if matches!(format, BlockFormat::F16 | BlockFormat::F32) {
            // A third, in F16 and nearly in F32.
            bytes = [0x55, 0x35].repeat(n_bytes.min(N_FILLED) / 2);
        }
        bytes.resize(n_bytes, 0);
        Weight::new(name, shape, format, bytes.into()).ok()
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, kv_graph::weights::WeightError> {
        match self.0.get(name) {
            Some(info) => Ok(info.clone()),
            None => self.require(name).map(|weight| weight.info()),
        }
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}
