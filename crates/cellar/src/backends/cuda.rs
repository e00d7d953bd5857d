//! NVIDIA GPUs. Knows nothing of other backends.

use kv_backend::{BackendError, BoxedBackend};
use kv_cuda::CudaDevice;

use super::{BackendOptions, ComputeDevice, gpu};

/// Opens the first GPU that can be used.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason.
pub(super) fn open(options: &BackendOptions) -> Result<BoxedBackend, BackendError> {
    gpu::open("cuda", options, CudaDevice::open_first)
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
