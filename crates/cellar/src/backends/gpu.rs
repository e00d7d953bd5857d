//! What the backends with Cellar's own kernels for GPUs share. Knows no device.

use kv_backend::{BackendError, BoxedBackend};
use kv_gpu::{Device, GpuBackend, GpuConfig, GpuWork, Precision};
use kv_graph::weights::WeightSource;

use super::{Activations, BackendMemory, BackendOptions, BackendWork, MemoryPlace, unavailable};

/// Opens a backend on the device that `device` opens.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason.
pub(super) fn open<D: Device>(
    name: &'static str,
    options: &BackendOptions,
    device: impl FnOnce() -> Result<D, BackendError>,
) -> Result<BoxedBackend, BackendError> {
    if options.profile.is_some() {
        return Err(unavailable(name, "it does not profile its steps"));
    }
    let backend = GpuBackend::new(device()?, config(options));
    Ok(BoxedBackend::new(backend))
}

/// What it would take for this work, which needs no GPU.
///
/// # Errors
/// As [`super::plan_backend_memory`].
pub(super) fn plan_memory(
    name: &'static str,
    options: &BackendOptions,
    work: &BackendWork<'_>,
) -> Result<BackendMemory, BackendError> {
    let gpu_work = GpuWork {
        backend: name,
        graphs: work.graphs,
        weights: work.weights,
        layout: work.layout,
        custom: work.custom,
    };
    let planned = kv_gpu::plan_memory(config(options), gpu_work)?;
    let stored = |source: &dyn WeightSource| {
        let infos = source.names().into_iter();
        let bytes = infos.filter_map(|name| Some(source.describe(&name).ok()?.n_bytes()));
        usize::try_from(bytes.fold(0, u64::saturating_add)).unwrap_or(usize::MAX)
    };
    Ok(BackendMemory {
        place: MemoryPlace::Device,
        packed: planned.weights,
        // Nothing is read from the file any more once it is on the device.
        replaced: stored(&**work.weights),
        scratch: planned.scratch,
        transfers: planned.staging + planned.inputs,
        experts: None,
    })
}

fn config(options: &BackendOptions) -> GpuConfig {
    GpuConfig {
        precision: match options.activations {
            Activations::F32 => Precision::Precise,
            Activations::Auto | Activations::Int8 => Precision::Fast,
        },
    }
}
