//! The driver: whether there is one, its devices, and its errors as [`BackendError`]s.
//!
//! Invariant: no function of the driver is called before [`start`] has found its library, since the
//! bindings panic without it.

use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use kv_backend::{BackendError, DeviceMemory};

use crate::context::Context;

/// The backend's name.
pub(crate) const BACKEND: &str = "cuda";

/// The oldest CUDA version whose driver has all functions that are called.
const OLDEST_DRIVER: Version = Version {
    major: 11,
    minor: 4,
};
/// The compute capability that the PTX is made for.
const OLDEST_CAPABILITY: Version = Version { major: 8, minor: 0 };

/// A version of CUDA, or a compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDeviceInfo {
    /// Its number, for [`CudaDevice::open`](crate::CudaDevice::open).
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its memory, and what is free of it.
    pub memory: DeviceMemory,
    /// Its compute capability.
    pub capability: Version,
    /// The newest CUDA version that the driver knows.
    pub driver: Version,
}

impl fmt::Display for CudaDeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            capability,
            driver,
            ..
        } = self;
        write!(
            f,
            "{name}, compute capability {capability}, driver for CUDA {driver}"
        )
    }
}

/// The GPUs of this machine; of those that cannot be used, the reason.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub fn devices() -> Result<Vec<Result<CudaDeviceInfo, BackendError>>, BackendError> {
    let n = n_devices()?;
    Ok((0..n).map(|i| Context::open(i)?.describe()).collect())
}

pub(crate) fn unavailable(reason: impl Into<String>) -> BackendError {
    BackendError::Unavailable {
        backend: BACKEND,
        reason: reason.into(),
    }
}

pub(crate) fn failure(reason: impl Into<String>) -> BackendError {
    BackendError::Device {
        backend: BACKEND,
        reason: reason.into(),
    }
}

/// Why the driver does not start.
#[derive(Clone, Debug)]
struct DriverFailure {
    reason: String,
    /// True if a GPU may be there all the same.
    is_gpu_present: bool,
}

/// Loads the driver, once in a process.
///
/// # Errors
/// [`BackendError::Unavailable`] where there is none, or an old one, or it has no device.
pub(crate) fn start() -> Result<Version, BackendError> {
    started().clone().map_err(|not| unavailable(not.reason))
}

/// True if this machine has a GPU of NVIDIA with a driver, be it that neither can be used here.
pub fn is_gpu_present() -> bool {
    match started() {
        Ok(_) => true,
        Err(not) => not.is_gpu_present,
    }
}

fn started() -> &'static Result<Version, DriverFailure> {
    static STARTED: OnceLock<Result<Version, DriverFailure>> = OnceLock::new();
    STARTED.get_or_init(|| {
        let not = |is_gpu_present: bool, reason: String| DriverFailure {
            reason,
            is_gpu_present,
        };
        let library = if cfg!(windows) {
            "nvcuda.dll"
        } else {
            "libcuda.so.1"
        };
        if cfg!(all(target_env = "musl", target_feature = "crt-static")) {
            let reason = "this program is linked statically, so it can load no driver; a build for \
                          glibc can";
            return Err(not(false, reason.to_owned()));
        }
        // SAFETY: the driver's library may be loaded at any time.
        if !unsafe { sys::is_culib_present() } {
            let reason = format!("no NVIDIA driver: {library} was not found");
            return Err(not(false, reason));
        }
        result::init().map_err(|DriverError(code)| match code {
            CUresult::CUDA_ERROR_NO_DEVICE => not(false, no_device()),
            CUresult::CUDA_ERROR_STUB_LIBRARY => {
                let reason = "no NVIDIA driver: the libcuda.so that is found first is the toolkit's, for linking; \
                              take its folder 'stubs' out of LD_LIBRARY_PATH";
                not(false, reason.to_owned())
            }
            code => {
                let hint = match code {
                    CUresult::CUDA_ERROR_SYSTEM_NOT_READY => {
                        "; GPUs that are joined by NVSwitch need the service nvidia-fabricmanager"
                    }
                    CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                        "; its library and its kernel module are of different versions: a restart loads \
                         the same ones"
                    }
                    _ => "",
                };
                let reason = format!("the NVIDIA driver does not start: {}{hint}", text(code));
                not(true, reason)
            }
        })?;
        let mut version = 0;
        // SAFETY: writes one int.
        let asked = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
        asked.map_err(|DriverError(code)| not(true, text(code)))?;
        let version = u32::try_from(version).unwrap_or_default();
        let version = Version {
            major: version / 1000,
            minor: version % 1000 / 10,
        };
        if version >= OLDEST_DRIVER {
            Ok(version)
        } else {
            Err(not(
                true,
                format!(
                    "the NVIDIA driver is too old: it knows CUDA {version}, and {OLDEST_DRIVER} or \
                     newer is needed"
                ),
            ))
        }
    })
}

fn no_device() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => format!("the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES is '{list}')"),
        Err(_) => "the NVIDIA driver shows no GPU".to_owned(),
    }
}

/// The number of devices the driver has: at least one.
///
/// # Errors
/// As [`start`].
pub(crate) fn n_devices() -> Result<u32, BackendError> {
    start()?;
    let n = result::device::get_count().map_err(|error| unavailable(text(error.0)))?;
    match u32::try_from(n) {
        Ok(n @ 1..) => Ok(n),
        _ => Err(unavailable(no_device())),
    }
}

/// A device by its number, with its compute capability.
///
/// # Errors
/// As [`start`]; where there is no such device, or it is too old.
pub(crate) fn find(ordinal: u32) -> Result<(sys::CUdevice, Version), BackendError> {
    let n = n_devices()?;
    if ordinal >= n {
        let reason = format!("there is no GPU {ordinal}, only {n}, counted from 0");
        return Err(unavailable(reason));
    }
    let device = result::device::get(ordinal as i32).map_err(|e| unavailable(text(e.0)))?;
    let attribute = |which| {
        // SAFETY: a device that the driver named.
        let value = unsafe { result::device::get_attribute(device, which) };
        value.map(|n| u32::try_from(n).unwrap_or_default())
    };
    let capability = || -> Result<Version, DriverError> {
        Ok(Version {
            major: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        })
    };
    let capability = capability().map_err(|error| unavailable(text(error.0)))?;
    if capability < OLDEST_CAPABILITY {
        let name = result::device::get_name(device).unwrap_or_default();
        return Err(unavailable(format!(
            "{name} has compute capability {capability}, and {OLDEST_CAPABILITY} or newer is needed"
        )));
    }
    Ok((device, capability))
}

/// An error code in the driver's words.
fn text(code: CUresult) -> String {
    let error = DriverError(code);
    let words = error.error_string().map(|text| text.to_string_lossy());
    match words {
        Ok(words) => format!("{words} ({code:?})"),
        Err(_) => format!("{code:?}"),
    }
}

/// After these the context is gone, and with it all memory: every later call fails.
fn is_fatal(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_MPS_RPC_FAILURE
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

/// The error for the caller of a failed call of the driver; `doing` names the attempt.
pub(crate) fn failed(doing: &str) -> impl FnOnce(DriverError) -> BackendError {
    move |DriverError(code)| {
        let reason = format!("{doing}: {}", text(code));
        if is_fatal(code) {
            BackendError::DeviceLost {
                backend: BACKEND,
                reason,
            }
        } else {
            failure(reason)
        }
    }
}
