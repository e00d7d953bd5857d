//! Cellar's own kernels on the CPU. Knows nothing of other backends.

use std::sync::Arc;

use kv_backend::{Backend, BackendError, BoxedBackend, OnProgress};
use kv_cpu::activations::ActivationKind;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig, RepackChoice};

use super::{
    Activations, BackendMemory, BackendOptions, BackendWork, ExpertPlan, MemoryPlace, Repack,
};

/// Opens it.
///
/// # Errors
/// As [`super::open_backend`].
pub(super) fn open(options: &BackendOptions) -> Result<BoxedBackend, BackendError> {
    let backend = plain(options)?;
    let backend = match &options.expert_meter {
        Some(meter) => backend.with_expert_meter(Arc::clone(meter)),
        None => backend,
    };
    Ok(BoxedBackend::new(match &options.profile {
        Some(profile) => backend.with_profile(Arc::clone(profile)),
        None => backend,
    }))
}

/// What it would take for this work.
///
/// # Errors
/// As [`super::plan_backend_memory`].
pub(super) fn plan_memory(
    options: &BackendOptions,
    work: &BackendWork<'_>,
) -> Result<BackendMemory, BackendError> {
    let mut backend = plain(options)?;
    backend.set_custom_ops(work.custom.clone())?;
    let weights = backend.load_weights(Arc::clone(work.weights), OnProgress::default())?;
    let planned = backend.plan_memory(work.graphs, &weights, work.layout)?;
    Ok(BackendMemory {
        place: MemoryPlace::Host,
        packed: planned.packed,
        replaced: planned.replaced,
        scratch: planned.programs,
        transfers: 0,
        experts: planned.experts.map(|experts| ExpertPlan {
            total: experts.total,
            held: experts.held,
            largest: experts.largest,
            of_token: experts.of_token,
        }),
    })
}

fn plain(options: &BackendOptions) -> Result<CpuBackend, BackendError> {
    let backend = CpuBackend::new(CpuConfig {
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
    })?;
    Ok(match &options.experts {
        Some(memory) => backend.with_expert_memory(memory.cpu.clone()),
        None => backend,
    })
}
