//! The backends by name. This is the only file of the program that names concrete backends
//! (`.ci/tidy` checks it).

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Once};

use clap::ValueEnum;
use kv_candle::CandleBackend;
use kv_core::backend::{BoxedBackend, Profile};
use kv_cpu::activations::ActivationKind;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig, RepackChoice};

use crate::failure::usage;
use crate::machine;

/// A backend on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// Cellar's own kernels on the CPU.
    #[default]
    Cpu,
    /// Plain candle operations on the CPU: the reference, slower.
    Candle,
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Candle => "candle",
        })
    }
}

/// The type of activations on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationsName {
    /// f32 for models with at most 8 MiB of quantised weights (and of BF16, where activations
    /// would be rounded), otherwise int8.
    #[default]
    Auto,
    /// No rounding; slow prompts.
    F32,
    /// Fast: blocks of int8 with a scale; BF16 for BF16 weights where the CPU multiplies BF16.
    Int8,
}

impl From<ActivationsName> for ActivationChoice {
    fn from(name: ActivationsName) -> Self {
        match name {
            ActivationsName::Auto => Self::Auto,
            ActivationsName::F32 => Self::Always(ActivationKind::F32),
            ActivationsName::Int8 => Self::Always(ActivationKind::Int8),
        }
    }
}

/// Whether weights are repacked, on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepackName {
    /// Where the layout is faster and memory has room for a second copy of the weights.
    #[default]
    Auto,
    /// Read the memory-mapped file, whose pages processes share: slower.
    Never,
}

impl From<RepackName> for RepackChoice {
    fn from(name: RepackName) -> Self {
        match name {
            RepackName::Auto => Self::Auto,
            RepackName::Never => Self::Never,
        }
    }
}

/// What a backend is opened with.
#[derive(Clone, Debug)]
pub(crate) struct BackendOptions {
    /// Its threads, the caller's included; one for each physical core where not given.
    pub(crate) n_threads: Option<u16>,
    /// How activations are kept.
    pub(crate) activations: ActivationsName,
    /// Whether weights are repacked.
    pub(crate) repack: RepackName,
    /// What the steps of runs are added to, where they are profiled.
    pub(crate) profile: Option<Arc<Profile>>,
}

/// Opens a backend.
///
/// # Errors
/// Where its threads cannot be started, this machine lacks the instruction set that the environment
/// names, or the backend cannot profile and is asked to.
pub(crate) fn open(name: BackendName, options: BackendOptions) -> anyhow::Result<BoxedBackend> {
    let BackendOptions {
        n_threads,
        activations,
        repack,
        profile,
    } = options;
    let n_threads = n_threads.and_then(|n| NonZeroUsize::new(n.into()));
    let n_threads = n_threads.unwrap_or_else(machine::n_cores);
    match name {
        BackendName::Cpu => {
            let config = CpuConfig {
                n_threads: Some(n_threads),
                activations: activations.into(),
                repack: repack.into(),
                ..CpuConfig::default()
            };
            let backend = CpuBackend::new(config)?;
            Ok(BoxedBackend::new(match profile {
                Some(profile) => backend.with_profile(profile),
                None => backend,
            }))
        }
        BackendName::Candle if profile.is_some() => {
            usage("the candle backend does not profile its steps; --backend cpu does")
        }
        BackendName::Candle => {
            // Candle computes on rayon's global pool, which a second backend shares.
            static POOL: Once = Once::new();
            let mut built = Ok(());
            POOL.call_once(|| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads.get());
                built = pool.build_global();
            });
            built?;
            Ok(BoxedBackend::new(CandleBackend::cpu()))
        }
    }
}
