//! The backends and their settings as flags name them. Opening them is the library's work.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use cellar::{Activations, BackendKind, BackendMemory, BackendWork, Repack};
use clap::ValueEnum;
use kv_core::backend::{BoxedBackend, Profile};

use crate::failure::usage;

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

impl From<BackendName> for BackendKind {
    fn from(name: BackendName) -> Self {
        match name {
            BackendName::Cpu => Self::Cpu,
            BackendName::Candle => Self::Candle,
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
/// As [`cellar::open_backend`]; a usage error where the backend cannot profile and is asked to.
pub(crate) fn open(name: BackendName, options: BackendOptions) -> anyhow::Result<BoxedBackend> {
    if name == BackendName::Candle && options.profile.is_some() {
        return usage("the candle backend does not profile its steps; --backend cpu does");
    }
    Ok(cellar::open_backend(library_options(name, options))?)
}

/// What the backend would take for this work; `None` where it cannot tell.
///
/// # Errors
/// As [`cellar::plan_backend_memory`].
pub(crate) fn plan_memory(
    name: BackendName,
    options: BackendOptions,
    work: &BackendWork<'_>,
) -> anyhow::Result<Option<BackendMemory>> {
    let options = library_options(name, options);
    Ok(cellar::plan_backend_memory(options, work)?)
}

fn library_options(name: BackendName, options: BackendOptions) -> cellar::BackendOptions {
    cellar::BackendOptions {
        kind: Some(name.into()),
        n_threads: options.n_threads.and_then(|n| NonZeroUsize::new(n.into())),
        activations: options.activations.into(),
        repack: options.repack.into(),
        profile: options.profile,
    }
}
