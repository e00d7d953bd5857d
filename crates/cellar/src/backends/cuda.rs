//! NVIDIA GPUs. Knows nothing of other backends.

use kv_core::backend::{BackendError, BoxedBackend};
use kv_core::weights::WeightSource;
use kv_cuda::CudaDevice;
use kv_gpu::{GpuBackend, GpuConfig, GpuWork, Precision};

use super::{
    Activations, BackendMemory, BackendOptions, BackendWork, ComputeDevice, MemoryPlace,
    unavailable,
};

const NAME: &str = "cuda";

/// Opens the first GPU that can be used.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason.
pub(super) fn open(options: &BackendOptions) -> Result<BoxedBackend, BackendError> {
    if options.profile.is_some() {
        return Err(unavailable(NAME, "it does not profile its steps"));
    }
    let device = CudaDevice::open_first()?;
    Ok(BoxedBackend::new(GpuBackend::new(device, config(options))))
}

/// What it would take for this work, which needs no GPU.
///
/// # Errors
/// As [`super::plan_backend_memory`].
pub(super) fn plan_memory(
    options: &BackendOptions,
    work: &BackendWork<'_>,
) -> Result<BackendMemory, BackendError> {
    let gpu_work = GpuWork {
        backend: NAME,
        graphs: work.graphs,
        weights: work.weights,
        layout: work.layout,
        custom: work.custom,
    };
    let planned = kv_gpu::plan_memory(config(options), gpu_work)?;
    let stored = |source: &dyn WeightSource| {
        let infos = source.names().into_iter();
        let bytes = infos.filter_map(|name| Some(source.describe(&name).ok()?.n_bytes()));
        bytes.fold(0, usize::saturating_add)
    };
    Ok(BackendMemory {
        place: MemoryPlace::Device,
        packed: planned.weights,
        // Nothing is read from the file any more once it is on the device.
        replaced: stored(&**work.weights),
        scratch: planned.scratch,
        transfers: planned.staging + planned.inputs,
    })
}

/// The GPUs of this machine; of those that cannot be used, the reason.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub(super) fn devices() -> Result<Vec<Result<ComputeDevice, BackendError>>, BackendError> {
    let device = |info: kv_cuda::CudaDeviceInfo| ComputeDevice {
        description: info.to_string(),
        memory: Some(info.memory),
    };
    let found = kv_cuda::devices()?;
    Ok(found.into_iter().map(|info| info.map(device)).collect())
}

/// Whether this machine has a GPU with a driver, be it that neither can be used here.
pub(super) fn is_present() -> bool {
    kv_cuda::is_gpu_present()
}

fn config(options: &BackendOptions) -> GpuConfig {
    GpuConfig {
        precision: match options.activations {
            Activations::F32 => Precision::Precise,
            Activations::Auto | Activations::Int8 => Precision::Fast,
        },
    }
}
