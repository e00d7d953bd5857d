//! The backends and their settings as flags name them, and what is reported of the choice. Choosing
//! and opening them is the library's work.

use std::num::NonZeroUsize;
use std::sync::Arc;

use cellar::{
    Activations, BackendKind, BackendOptions, ExpertLayers, ExpertMemory, ModelWork, Repack,
};
use cellar_engine::EngineError;
use clap::ValueEnum;
use kv_backend::{Backend, BoxedBackend, ExpertMeter, Profile};

use crate::failure::{usage, words};
use crate::progress::Progress;
use crate::terminal::note;

/// A backend on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// A GPU where there is one and the model fits, else the CPU.
    Auto,
    /// Cellar's own kernels on the CPU.
    Cpu,
    /// Cellar's own kernels on an NVIDIA GPU.
    Cuda,
    /// Cellar's own kernels on the GPU of a Mac; never run on Apple hardware so far.
    Metal,
    /// Cellar's own kernels on a GPU with an OpenCL driver; never run on one so far.
    #[value(name = "opencl")]
    OpenCl,
    /// Plain candle operations on the CPU: the reference, slower (cargo feature candle).
    Candle,
    /// The same on an NVIDIA GPU.
    #[cfg(feature = "candle-cuda")]
    CandleCuda,
    /// The same on the GPU of a Mac.
    #[cfg(feature = "candle-metal")]
    CandleMetal,
}

impl BackendName {
    /// Whether it has Cellar's own kernels for GPUs, or may turn out to.
    pub(crate) fn is_own_gpu(self) -> bool {
        matches!(self, Self::Auto | Self::Cuda | Self::Metal | Self::OpenCl)
    }

    /// As it is given to the flag.
    pub(crate) fn flag(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The backend, if one is named.
    pub(crate) fn kind(self) -> Option<BackendKind> {
        match self {
            Self::Auto => None,
            Self::Cpu => Some(BackendKind::Cpu),
            Self::Cuda => Some(BackendKind::Cuda),
            Self::Metal => Some(BackendKind::Metal),
            Self::OpenCl => Some(BackendKind::OpenCl),
            Self::Candle => Some(BackendKind::Candle),
            #[cfg(feature = "candle-cuda")]
            Self::CandleCuda => Some(BackendKind::CandleCuda),
            #[cfg(feature = "candle-metal")]
            Self::CandleMetal => Some(BackendKind::CandleMetal),
        }
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

impl From<ActivationsName> for Activations {
    fn from(name: ActivationsName) -> Self {
        match name {
            ActivationsName::Auto => Self::Auto,
            ActivationsName::F32 => Self::F32,
            ActivationsName::Int8 => Self::Int8,
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

impl From<RepackName> for Repack {
    fn from(name: RepackName) -> Self {
        match name {
            RepackName::Auto => Self::Auto,
            RepackName::Never => Self::Never,
        }
    }
}

/// The flags that choose a backend.
#[derive(Clone, Debug)]
pub(crate) struct BackendFlags {
    /// Which, if one was named: without, as [`BackendName::Auto`], but silent where there is no
    /// GPU.
    pub(crate) name: Option<BackendName>,
    /// How many layers a GPU computes, where it is not to compute all.
    pub(crate) gpu_layers: Option<u32>,
    /// Its threads, the caller's included; one for each physical core where not given.
    pub(crate) n_threads: Option<u16>,
    /// How activations are kept.
    pub(crate) activations: ActivationsName,
    /// Whether weights are repacked.
    pub(crate) repack: RepackName,
    /// The memory of experts, where they are read as they are needed.
    pub(crate) experts: Option<ExpertMemory>,
    /// The layers whose experts the CPU computes while a GPU computes the rest.
    pub(crate) host_experts: ExpertLayers,
    /// What counts their reads, where routers' choices are written down, too.
    pub(crate) expert_meter: Option<Arc<ExpertMeter>>,
    /// What the steps of runs are added to, where they are profiled.
    pub(crate) profile: Option<Arc<Profile>>,
}

impl BackendFlags {
    /// What the library opens.
    pub(crate) fn options(&self) -> BackendOptions {
        BackendOptions {
            kind: self.name.and_then(BackendName::kind),
            gpu_layers: self.gpu_layers,
            n_threads: self.n_threads.and_then(|n| NonZeroUsize::new(n.into())),
            activations: self.activations.into(),
            repack: self.repack.into(),
            experts: self.experts.clone(),
            host_experts: self.host_experts.clone(),
            expert_meter: self.expert_meter.clone(),
            profile: self.profile.clone(),
        }
    }

    /// Opens the backend that was named, or the one that suits the model, reports which where there
    /// was a choice, and has `build` load the model. Where a GPU that was not named fails at it,
    /// the CPU takes over.
    ///
    /// # Errors
    /// As [`cellar::choose_backend`] and of `build`; a usage error where the backend cannot profile
    /// and is asked to.
    pub(crate) fn load<T>(
        &self,
        work: &ModelWork<'_>,
        build: impl Fn(BoxedBackend) -> Result<T, EngineError>,
    ) -> anyhow::Result<T> {
        let options = self.options();
        if let (Some(kind), true) = (options.kind, self.profile.is_some())
            && kind != BackendKind::Cpu
        {
            return usage(format!(
                "the {kind} backend does not profile its steps; --backend cpu does"
            ));
        }
        let choice = cellar::choose_backend(options.clone(), work)?;
        let is_asked = options.kind.is_some();
        let on_host = |name: &str, reason: &str| report(&format!("backend: {name}; {reason}"));
        if is_asked || !choice.kind.is_own_gpu() {
            let is_wanted = self.name == Some(BackendName::Auto) || choice.is_gpu_present;
            if !is_asked && is_wanted {
                on_host(choice.kind.name(), &choice.reason);
            }
            return Ok(build(choice.backend)?);
        }
        report(&format!("backend: {}, {}", choice.kind, choice.reason));
        match build(choice.backend) {
            Err(EngineError::Backend(error)) => {
                let host = BackendOptions {
                    kind: None,
                    gpu_layers: None,
                    ..options
                };
                let backend = cellar::open_backend(host)?;
                on_host(&backend.info().name, &error.to_string());
                Ok(build(backend)?)
            }
            other => Ok(other?),
        }
    }
}

/// Prints a line on stderr, around bars.
fn report(line: &str) {
    Progress::suspend(|| note(words(line)));
}
