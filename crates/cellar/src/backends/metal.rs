//! The GPUs of Macs. Knows nothing of other backends.

use kv_backend::{BackendError, BoxedBackend};
use kv_metal::MetalDevice;

use super::{BackendOptions, ComputeDevice, gpu};

/// Opens the first GPU that can be used.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason.
pub(super) fn open(options: &BackendOptions) -> Result<BoxedBackend, BackendError> {
    gpu::open("metal", options, MetalDevice::open_first)
}

/// The GPUs of this machine; of those that cannot be used, the reason.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub(super) fn devices() -> Result<Vec<Result<ComputeDevice, BackendError>>, BackendError> {
    let device = |info: kv_metal::MetalDeviceInfo| ComputeDevice {
        description: info.to_string(),
        memory: Some(info.memory),
    };
    let found = kv_metal::devices()?;
    Ok(found.into_iter().map(|info| info.map(device)).collect())
}

/// Whether this machine has a GPU that Metal shows, be it that it cannot be used here.
pub(super) fn is_present() -> bool {
    kv_metal::is_gpu_present()
}
