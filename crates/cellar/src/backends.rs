//! The backends that this crate was built with, chosen at run time. This is the only file of the
//! workspace's libraries that names concrete backends (`.ci/tidy` checks it).

use std::num::NonZeroUsize;
use std::sync::Arc;

use kv_core::backend::{BackendError, BoxedBackend, CustomOps, Profile};
use kv_core::graph::Graph;
use kv_core::layers::RowLayout;
use kv_core::weights::WeightSource;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendKind {
    /// Cellar's own kernels on the CPU.
    #[cfg(feature = "cpu")]
    Cpu,
    /// Plain candle operations on the CPU: the reference, slower.
    #[cfg(feature = "candle")]
    Candle,
}

/// How activations are kept that meet quantized weights. For the CPU backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// As f32 for models with at most 8 MiB of quantized weights (and of BF16, where activations
    /// would be rounded), otherwise as int8.
    #[default]
    Auto,
    /// No rounding; slow prompts.
    F32,
    /// Fast: blocks of int8 with a scale; BF16 for BF16 weights where the CPU multiplies BF16.
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
    /// Which; `None` takes the fastest one that this crate was built with.
    pub kind: Option<BackendKind>,
    /// Its threads, the caller's included; `None` takes one for each physical core.
    pub n_threads: Option<NonZeroUsize>,
    /// How activations are kept.
    pub activations: Activations,
    /// Whether weights are packed.
    pub repack: Repack,
    /// What the steps of runs are added to, where they are profiled.
    pub profile: Option<Arc<Profile>>,
}

/// Opens a backend.
///
/// # Errors
/// [`BackendError`] where its threads cannot be started, this machine lacks the instruction set
/// that the environment names, it cannot profile and is asked to, or the crate was built without
/// any.
pub fn open_backend(options: BackendOptions) -> Result<BoxedBackend, BackendError> {
    match options.kind.map_or_else(fastest, Ok)? {
        #[cfg(feature = "cpu")]
        BackendKind::Cpu => cpu(options),
        #[cfg(feature = "candle")]
        BackendKind::Candle => candle(options),
    }
}

/// The fastest backend that this crate was built with.
#[allow(unreachable_code)] // with every feature, only the first is reached
fn fastest() -> Result<BackendKind, BackendError> {
    #[cfg(feature = "cpu")]
    return Ok(BackendKind::Cpu);
    #[cfg(feature = "candle")]
    return Ok(BackendKind::Candle);
    Err(BackendError::Unavailable {
        backend: "any",
        reason: "built without a backend; choose a feature: cpu or candle".to_owned(),
    })
}

/// What a backend would compute, to plan its memory.
#[derive(Clone, Copy)]
pub struct BackendWork<'a> {
    /// The graphs that are compiled and kept.
    pub graphs: &'a [Graph],
    /// The weights, of which only shapes, formats, small vectors and the first rows matter.
    pub weights: &'a Arc<dyn WeightSource>,
    /// The rows of the memory.
    pub layout: &'a RowLayout,
    /// What custom operations of the graphs compute.
    pub custom: &'a CustomOps,
}

/// What a backend takes in addition to the rows of the memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendMemory {
    /// Weights in the backend's own layout.
    pub packed: usize,
    /// Of the packed weights, as they are stored: these do not stay in memory.
    pub replaced: usize,
    /// Scratch memory of the compiled graphs.
    pub scratch: usize,
}

/// What a backend would take for this work, without packing weights; `None` where it cannot tell.
///
/// # Errors
/// As [`open_backend`], and where the backend cannot compute the graphs.
pub fn plan_backend_memory(
    options: BackendOptions,
    work: &BackendWork<'_>,
) -> Result<Option<BackendMemory>, BackendError> {
    match options.kind.map_or_else(fastest, Ok)? {
        #[cfg(feature = "cpu")]
        BackendKind::Cpu => plan_cpu_memory(options, work).map(Some),
        #[cfg(feature = "candle")]
        BackendKind::Candle => Ok(None),
    }
}

#[cfg(feature = "cpu")]
fn plan_cpu_memory(
    options: BackendOptions,
    work: &BackendWork<'_>,
) -> Result<BackendMemory, BackendError> {
    use kv_core::backend::{Backend, OnProgress};

    let mut backend = cpu_backend(&options)?;
    backend.set_custom_ops(work.custom.clone())?;
    let weights = backend.load_weights(Arc::clone(work.weights), OnProgress::default())?;
    let planned = backend.plan_memory(work.graphs, &weights, work.layout)?;
    Ok(BackendMemory {
        packed: planned.packed,
        replaced: planned.replaced,
        scratch: planned.programs,
    })
}

#[cfg(feature = "cpu")]
fn cpu(options: BackendOptions) -> Result<BoxedBackend, BackendError> {
    let backend = cpu_backend(&options)?;
    Ok(BoxedBackend::new(match options.profile {
        Some(profile) => backend.with_profile(profile),
        None => backend,
    }))
}

#[cfg(feature = "cpu")]
fn cpu_backend(options: &BackendOptions) -> Result<kv_cpu::CpuBackend, BackendError> {
    use kv_cpu::activations::ActivationKind;
    use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig, RepackChoice};

    CpuBackend::new(CpuConfig {
        n_threads: options.n_threads,
        activations: match options.activations {
            Activations::Auto => ActivationChoice::Auto,
            Activations::F32 => ActivationChoice::Always(ActivationKind::F32),
            Activations::Int8 => ActivationChoice::Always(ActivationKind::Int8),
        },
        repack: match options.repack {
            Repack::Auto => RepackChoice::Auto,
            Repack::Never => RepackChoice::Never,
        },
        ..CpuConfig::default()
    })
}

#[cfg(feature = "candle")]
fn candle(options: BackendOptions) -> Result<BoxedBackend, BackendError> {
    use std::sync::Once;

    /// Candle computes on rayon's global pool, which backends share.
    static POOL: Once = Once::new();

    let unavailable = |reason: String| BackendError::Unavailable {
        backend: "candle",
        reason,
    };
    if options.profile.is_some() {
        return Err(unavailable("it does not profile its steps".to_owned()));
    }
    let mut built = Ok(());
    POOL.call_once(|| {
        let pool = rayon::ThreadPoolBuilder::new();
        built = pool
            .num_threads(options.n_threads.map_or(0, NonZeroUsize::get))
            .build_global();
    });
    built.map_err(|error| unavailable(error.to_string()))?;
    Ok(BoxedBackend::new(kv_candle::CandleBackend::cpu()))
}
