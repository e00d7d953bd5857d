//! The backends by name: the only place that knows which there are.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Once};

use clap::ValueEnum;
use kv_candle::CandleBackend;
use kv_core::backend::BoxedBackend;
use kv_cpu::activations::ActivationKind;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig, RepackChoice, StepTimes};

use crate::failure::usage;

/// A backend as it is called on the command line.
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

/// How activations are kept, as it is called on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationsName {
    /// f32 for models of at most 8 MiB of quantised weights (and of BF16, where it would be rounded), else int8.
    #[default]
    Auto,
    /// Nothing is rounded; prompts are slow.
    F32,
    /// Blocks with a scale: fast; BF16 for weights of BF16 where the processor has products of it.
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

/// Whether weights are repacked, as it is called on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepackName {
    /// Where it makes them faster and memory has room for them beside the system's copy of the file; some with each token.
    #[default]
    Auto,
    /// Weights are read from the file, whose pages several processes share: slower.
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

/// Starts a backend with so many threads, which counts what its steps take where `times` are given.
///
/// # Errors
/// Where its threads cannot be started, this machine lacks what the environment asks for, or the backend does not
/// count.
pub(crate) fn open(
    name: BackendName,
    n_threads: NonZeroUsize,
    activations: ActivationsName,
    repack: RepackName,
    times: Option<Arc<StepTimes>>,
) -> anyhow::Result<BoxedBackend> {
    match name {
        BackendName::Cpu => {
            let config = CpuConfig {
                n_threads: Some(n_threads),
                activations: activations.into(),
                repack: repack.into(),
                ..CpuConfig::default()
            };
            let backend = CpuBackend::new(config)?;
            Ok(BoxedBackend::new(match times {
                Some(times) => backend.with_times(times),
                None => backend,
            }))
        }
        BackendName::Candle if times.is_some() => {
            usage("the candle backend does not measure its steps; --backend cpu does")
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
