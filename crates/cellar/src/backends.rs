//! The backends that this crate was built with, chosen at run time. This file and those in
//! `backends/` are the only ones of the workspace's libraries that name concrete backends
//! (`.ci/tidy` checks it).

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "cpu")]
mod cpu;
#[cfg(all(feature = "cuda", any(target_os = "linux", windows)))]
mod cuda;
mod experts;
#[cfg(any(
    all(
        any(feature = "cuda", feature = "opencl"),
        any(target_os = "linux", windows)
    ),
    all(feature = "metal", target_os = "macos")
))]
mod gpu;
#[cfg(all(feature = "metal", target_os = "macos"))]
mod metal;
#[cfg(all(feature = "opencl", any(target_os = "linux", windows)))]
mod opencl;

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use kv_backend::{BackendError, BoxedBackend, CustomOps, DeviceMemory, ExpertMeter, Profile};
use kv_graph::Graph;
use kv_graph::weights::WeightSource;
use kv_rows::RowLayout;
use model_core::expert_tensors::ExpertLayers;
use serde::Serialize;

pub use self::experts::ExpertMemory;

#[cfg(feature = "candle")]
use self::candle::CandleDevice;

#[cfg(all(feature = "candle-cuda", feature = "cuda"))]
compile_error!(
    "the features cuda and candle-cuda exclude each other: candle links the CUDA driver, cuda loads it"
);

/// What computes. Those that this crate was built without cannot be opened, and say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendKind {
    /// Cellar's own kernels on the CPU (feature `cpu`).
    Cpu,
    /// Cellar's own kernels on an NVIDIA GPU (feature `cuda`, on Linux and Windows). The driver is
    /// looked for when it is opened.
    Cuda,
    /// Cellar's own kernels on the GPU of a Mac (feature `metal`, on macOS). They have never run on
    /// Apple hardware.
    Metal,
    /// Cellar's own kernels on a GPU with an OpenCL driver (feature `opencl`, on Linux and
    /// Windows). They have never run on such a GPU, only on a driver for CPUs.
    OpenCl,
    /// Plain candle operations on the CPU: the reference, slower (feature `candle`).
    Candle,
    /// The same on an NVIDIA GPU, with candle's kernels (feature `candle-cuda`).
    CandleCuda,
    /// The same on the GPU of a Mac, with candle's kernels (feature `candle-metal`).
    CandleMetal,
}

/// How activations are kept that meet quantized weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// On the CPU, as f32 for models with at most 8 MiB of quantized weights (and of BF16, where
    /// activations would be rounded), otherwise as int8. On a GPU, as [`Self::Int8`].
    #[default]
    Auto,
    /// No rounding; slow prompts.
    F32,
    /// Fast: blocks of int8 with a scale; BF16 for BF16 weights where the CPU multiplies BF16. On a
    /// GPU, halves in products of many tokens.
    Int8,
}

/// Whether weights are packed into the kernels' layout when they are loaded. For the CPU backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repack {
    /// Where the layout is faster and memory has room for a second copy of the weights.
    #[default]
    Auto,
    /// Read the memory-mapped file, whose pages processes share: slower.
    Never,
}

/// What a backend is opened with.
#[derive(Clone, Debug, Default)]
pub struct BackendOptions {
    /// Which; `None` takes the one that suits: a GPU where there is one and the model fits
    /// ([`choose_backend`](crate::choose_backend)), else the fastest that this crate was built
    /// with.
    pub kind: Option<BackendKind>,
    /// How many of the model's layers a GPU computes, counted from the last; the CPU computes those
    /// before them. `None` computes all on the GPU. For [`choose_backend`](crate::choose_backend),
    /// which knows the model.
    pub gpu_layers: Option<u32>,
    /// The layers of a mixture whose experts the CPU computes while a GPU computes the rest: their
    /// matrices are in the memory of the host then, or in [`BackendOptions::experts`]. Where the
    /// CPU computes all, it has them in any case. For [`choose_backend`](crate::choose_backend),
    /// too.
    pub host_experts: ExpertLayers,
    /// Its threads, the caller's included; `None` takes one for each physical core. For the CPU.
    pub n_threads: Option<NonZeroUsize>,
    /// How activations are kept.
    pub activations: Activations,
    /// Whether weights are packed.
    pub repack: Repack,
    /// The memory that experts of a mixture have: they are read from the model's file as they are
    /// needed, and the results are the same. `None` holds all. For the CPU, which is chosen where
    /// nothing else is, and for the experts that it computes next to a GPU.
    pub experts: Option<ExpertMemory>,
    /// What reads of experts are counted by, and routers' choices written to, instead of a meter
    /// of the backend's own ([`kv_backend::Backend::expert_meter`]).
    pub expert_meter: Option<Arc<ExpertMeter>>,
    /// What the steps of runs are added to, where they are profiled.
    pub profile: Option<Arc<Profile>>,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Cpu,
        Self::Cuda,
        Self::Metal,
        Self::OpenCl,
        Self::Candle,
        Self::CandleCuda,
        Self::CandleMetal,
    ];

    /// The one with Cellar's own kernels for the GPU of this machine: the vendor's, else OpenCL
    /// where it shows a GPU.
    pub fn own_gpu() -> Self {
        if cfg!(target_os = "macos") {
            Self::Metal
        } else if !is_vendor_gpu_present() && is_opencl_gpu_present() {
            Self::OpenCl
        } else {
            Self::Cuda
        }
    }

    /// Whether it has Cellar's own kernels for GPUs, which hold all that they compute with.
    pub fn is_own_gpu(self) -> bool {
        matches!(self, Self::Cuda | Self::Metal | Self::OpenCl)
    }

    /// Its name, as on the command line and in errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Metal => "metal",
            Self::OpenCl => "opencl",
            Self::Candle => "candle",
            Self::CandleCuda => "candle-cuda",
            Self::CandleMetal => "candle-metal",
        }
    }

    fn not_built(self) -> BackendError {
        let reason = match self {
            Self::Cuda if cfg!(feature = "cuda") => {
                "there are NVIDIA drivers for Linux and Windows only".to_owned()
            }
            Self::Metal if cfg!(feature = "metal") => "only macOS has Metal".to_owned(),
            Self::OpenCl if cfg!(feature = "opencl") => {
                "OpenCL is used on Linux and Windows only".to_owned()
            }
            kind => format!("built without the cargo feature '{kind}'"),
        };
        unavailable(self.name(), reason)
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn unavailable(backend: &'static str, reason: impl Into<String>) -> BackendError {
    BackendError::Unavailable {
        backend,
        reason: reason.into(),
    }
}

/// Opens a backend. Without a kind, this is the fastest on the host: whether a model fits a GPU
/// depends on the model ([`choose_backend`](crate::choose_backend)).
///
/// # Errors
/// [`BackendError`] where its threads cannot be started, this machine lacks the instruction set
/// that the environment names, it cannot profile and is asked to, this crate was built without it,
/// there is no device for it, or it is to share layers, which takes a model.
pub fn open_backend(options: BackendOptions) -> Result<BoxedBackend, BackendError> {
    if let (Some(kind), Some(_)) = (options.kind, options.gpu_layers) {
        let reason = "which layers it computes depends on the model: choose_backend knows it";
        return Err(unavailable(kind.name(), reason));
    }
    if let Some(kind) = options.kind.filter(|kind| kind.is_own_gpu())
        && !options.host_experts.is_empty()
    {
        let reason =
            "which experts it leaves to the CPU depends on the model: choose_backend knows it";
        return Err(unavailable(kind.name(), reason));
    }
    let kind = options.kind.map_or_else(fastest_on_host, Ok)?;
    check_experts(kind, &options)?;
    match kind {
        #[cfg(feature = "cpu")]
        BackendKind::Cpu => cpu::open(&options),
        #[cfg(all(feature = "cuda", any(target_os = "linux", windows)))]
        BackendKind::Cuda => cuda::open(&options),
        #[cfg(all(feature = "metal", target_os = "macos"))]
        BackendKind::Metal => metal::open(&options),
        #[cfg(all(feature = "opencl", any(target_os = "linux", windows)))]
        BackendKind::OpenCl => opencl::open(&options),
        #[cfg(feature = "candle")]
        BackendKind::Candle => candle::open(&options, CandleDevice::Cpu),
        #[cfg(feature = "candle")]
        BackendKind::CandleCuda => candle::open(&options, CandleDevice::Cuda),
        #[cfg(feature = "candle")]
        BackendKind::CandleMetal => candle::open(&options, CandleDevice::Metal),
        #[allow(unreachable_patterns)] // with every feature
        absent => Err(absent.not_built()),
    }
}

/// Whether a backend can read experts as they are needed, if it is to.
fn check_experts(kind: BackendKind, options: &BackendOptions) -> Result<(), BackendError> {
    if options.experts.is_none() || kind == BackendKind::Cpu {
        return Ok(());
    }
    let reason = "it holds all weights: only the cpu backend reads experts as they are needed";
    Err(unavailable(kind.name(), reason))
}

/// The fastest backend on the host that this crate was built with.
pub(crate) fn fastest_on_host() -> Result<BackendKind, BackendError> {
    if cfg!(feature = "cpu") {
        Ok(BackendKind::Cpu)
    } else if cfg!(feature = "candle") {
        Ok(BackendKind::Candle)
    } else {
        let reason = "built without a backend for the CPU; choose a cargo feature: cpu or candle";
        Err(unavailable("cpu", reason))
    }
}

/// Something that computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeDevice {
    /// What it is, for people.
    pub description: String,
    /// Its memory, where that is known.
    pub memory: Option<DeviceMemory>,
}

/// The devices of a backend on this machine; of those that it cannot use, the reason.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub fn backend_devices(
    kind: BackendKind,
) -> Result<Vec<Result<ComputeDevice, BackendError>>, BackendError> {
    match kind {
        #[cfg(all(feature = "cuda", any(target_os = "linux", windows)))]
        BackendKind::Cuda => cuda::devices(),
        #[cfg(all(feature = "metal", target_os = "macos"))]
        BackendKind::Metal => metal::devices(),
        #[cfg(all(feature = "opencl", any(target_os = "linux", windows)))]
        BackendKind::OpenCl => opencl::devices(),
        kind => {
            let backend = open_backend(BackendOptions {
                kind: Some(kind),
                ..BackendOptions::default()
            })?;
            Ok(vec![Ok(ComputeDevice::of(&backend))])
        }
    }
}

impl ComputeDevice {
    /// The device of an open backend.
    pub(crate) fn of(backend: &BoxedBackend) -> Self {
        use kv_backend::Backend;

        Self {
            description: backend.info().device,
            memory: backend.memory(),
        }
    }
}

/// Whether this machine has a GPU and a driver for it, be it that they cannot be used here.
pub(crate) fn is_gpu_present() -> bool {
    is_vendor_gpu_present() || is_opencl_gpu_present()
}

fn is_opencl_gpu_present() -> bool {
    #[cfg(all(feature = "opencl", any(target_os = "linux", windows)))]
    return opencl::is_present();
    #[allow(unreachable_code)] // with the feature
    false
}

/// The same without OpenCL.
fn is_vendor_gpu_present() -> bool {
    #[cfg(all(feature = "cuda", any(target_os = "linux", windows)))]
    return cuda::is_present();
    #[cfg(all(feature = "metal", target_os = "macos"))]
    return metal::is_present();
    #[allow(unreachable_code)] // with a feature
    false
}

/// What a backend would compute, to plan its memory.
#[allow(dead_code)] // it is read by the backends that are compiled in
#[derive(Clone, Copy)]
pub(crate) struct BackendWork<'a> {
    /// The graphs that are compiled and kept.
    pub graphs: &'a [Graph],
    /// The weights, of which only shapes, formats, small vectors and the first rows matter.
    pub weights: &'a Arc<dyn WeightSource>,
    /// The rows of the memory.
    pub layout: &'a RowLayout,
    /// What custom operations of the graphs compute.
    pub custom: &'a CustomOps,
}

/// Where a backend has its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// In the process, rows of the memory too.
    Host,
    /// On a device of its own, rows of the memory too.
    Device,
}

/// What a backend takes in addition to the rows of the memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendMemory {
    /// Where.
    pub place: MemoryPlace,
    /// Weights in the backend's own layout.
    pub packed: usize,
    /// Of the packed weights, as they are stored: these do not stay in memory.
    pub replaced: usize,
    /// Scratch memory of the compiled graphs.
    pub scratch: usize,
    /// Where inputs and weights are put on their way to a device.
    pub transfers: usize,
    /// The experts of mixtures, where they are read as they are needed.
    pub experts: Option<ExpertPlan>,
}

/// The experts that a backend reads as they are needed, in bytes as they lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertPlan {
    /// All of them.
    pub total: usize,
    /// Those that are held; a part of what is packed.
    pub held: usize,
    /// The largest matrix of one: the least that works.
    pub largest: usize,
    /// Those that a token goes through.
    pub of_token: usize,
}

impl BackendMemory {
    /// The memory of two backends on the host that share that of experts, if it is limited.
    pub(crate) fn with(self, other: Self, experts: Option<&ExpertMemory>) -> Self {
        let both = |of: fn(&Self) -> usize| of(&self).saturating_add(of(&other));
        let plans = [self.experts, other.experts].into_iter().flatten();
        let held = |plan: ExpertPlan| plan.held;
        let apart: usize = plans.clone().map(held).sum();
        let budget = experts.map_or(u64::MAX, ExpertMemory::budget);
        let together = apart.min(usize::try_from(budget).unwrap_or(usize::MAX));
        let plan = plans.reduce(|a, b| ExpertPlan {
            total: a.total + b.total,
            held: together,
            largest: a.largest.max(b.largest),
            of_token: a.of_token + b.of_token,
        });
        Self {
            place: self.place,
            packed: both(|of| of.packed) - (apart - together),
            replaced: both(|of| of.replaced),
            scratch: both(|of| of.scratch),
            transfers: both(|of| of.transfers),
            experts: plan,
        }
    }
}

impl ExpertPlan {
    /// Bytes that a token has read, where routers have no favourites: with those, it is fewer.
    pub fn read_by_token(&self) -> f64 {
        let absent = (self.total - self.held.min(self.total)) as f64;
        self.of_token as f64 * absent / self.total.max(1) as f64
    }
}

/// What a backend would take for this work, without packing weights and without its device; `None`
/// where it cannot tell.
///
/// # Errors
/// As [`open_backend`], and where the backend cannot compute the graphs.
pub(crate) fn plan_backend_memory(
    options: &BackendOptions,
    work: &BackendWork<'_>,
) -> Result<Option<BackendMemory>, BackendError> {
    let _ = work; // without a backend that can tell
    let kind = options.kind.map_or_else(fastest_on_host, Ok)?;
    check_experts(kind, options)?;
    match kind {
        #[cfg(feature = "cpu")]
        BackendKind::Cpu => cpu::plan_memory(options, work).map(Some),
        #[cfg(all(feature = "cuda", any(target_os = "linux", windows)))]
        BackendKind::Cuda => gpu::plan_memory("cuda", options, work).map(Some),
        #[cfg(all(feature = "metal", target_os = "macos"))]
        BackendKind::Metal => gpu::plan_memory("metal", options, work).map(Some),
        #[cfg(all(feature = "opencl", any(target_os = "linux", windows)))]
        BackendKind::OpenCl => gpu::plan_memory("opencl", options, work).map(Some),
        #[cfg(feature = "candle")]
        BackendKind::Candle | BackendKind::CandleCuda | BackendKind::CandleMetal => Ok(None),
        #[allow(unreachable_patterns)] // with every feature
        absent => Err(absent.not_built()),
    }
}

/// The numbers of tokens that a backend's programs are compiled for
/// ([`Backend::program_capacities`](kv_backend::Backend::program_capacities)), without
/// opening it.
///
/// # Errors
/// [`BackendError::Unavailable`] where no backend is built that computes on the host.
pub(crate) fn program_capacities(
    options: &BackendOptions,
) -> Result<&'static [usize], BackendError> {
    Ok(match options.kind.map_or_else(fastest_on_host, Ok)? {
        #[cfg(feature = "cpu")]
        BackendKind::Cpu => kv_cpu::PROGRAM_CAPACITIES,
        _ => &[],
    })
}
