//! The devices that OpenCL shows, and what a device must have for the kernels.

use std::ffi::c_void;
use std::fmt;

use kv_backend::{BackendError, DeviceMemory};

use crate::api::{Api, Handle, Status, api, text, unavailable, value};
use crate::context::Context;

/// Lanes of a warp: kernels rely on them.
pub(crate) const SUBGROUP: usize = 32;

/// With this variable, CPUs count as GPUs: for tests.
const CPU: &str = "CELLAR_OPENCL_CPU";

const CL_DEVICE_TYPE_CPU: u64 = 1 << 1;
const CL_DEVICE_TYPE_GPU: u64 = 1 << 2;
const CL_DEVICE_SVM_COARSE_GRAIN_BUFFER: u64 = 1;
const CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT: u64 = 1 << 7;

/// A GPU that OpenCL shows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenClDeviceInfo {
    /// Its number, for [`OpenClDevice::open`](crate::OpenClDevice::open).
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its memory, and what this process has not used of it: what others use, OpenCL does not tell.
    pub memory: DeviceMemory,
    /// The version of OpenCL and of the driver, as the driver names them.
    pub version: String,
}

impl fmt::Display for OpenClDeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.name, self.version)
    }
}

/// The GPUs of this machine that OpenCL shows; of those that cannot be used, the reason.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub fn devices() -> Result<Vec<Result<OpenClDeviceInfo, BackendError>>, BackendError> {
    let n = all()?.len() as u32;
    Ok((0..n).map(|i| Ok(Context::open(i)?.describe())).collect())
}

/// True if this machine has a GPU that OpenCL shows, be it that it cannot be used here.
pub fn is_gpu_present() -> bool {
    all().is_ok()
}

/// The devices of all drivers: at least one.
///
/// # Errors
/// [`BackendError::Unavailable`] where there is none.
pub(crate) fn all() -> Result<Vec<Handle>, BackendError> {
    let api = api()?;
    let is_cpu_wanted = std::env::var_os(CPU).is_some_and(|value| !value.is_empty());
    let (gpus, cpus) = (
        of_type(api, CL_DEVICE_TYPE_GPU)?,
        of_type(api, CL_DEVICE_TYPE_CPU)?,
    );
    let n_cpus = cpus.len();
    let found: Vec<Handle> = if is_cpu_wanted {
        gpus.into_iter().chain(cpus).collect()
    } else {
        gpus
    };
    if found.is_empty() {
        return Err(unavailable(match n_cpus {
            0 => "OpenCL shows no GPU".to_owned(),
            n => format!("OpenCL shows no GPU, only {n} CPU ({CPU}=1 takes it, for tests)"),
        }));
    }
    Ok(found)
}

fn of_type(api: &Api, kind: u64) -> Result<Vec<Handle>, BackendError> {
    let ids = |get: &dyn Fn(u32, *mut Handle, *mut u32) -> i32, none: Status| {
        let mut n = 0;
        match Status::check(get(0, std::ptr::null_mut(), &mut n)) {
            Ok(()) => {}
            Err(status) if status == none => return Ok(Vec::new()),
            Err(status) => return Err(unavailable(format!("OpenCL lists no devices: {status}"))),
        }
        let mut ids = vec![std::ptr::null_mut(); n as usize];
        match Status::check(get(n, ids.as_mut_ptr(), std::ptr::null_mut())) {
            Ok(()) => Ok(ids),
            Err(status) => Err(unavailable(format!("OpenCL lists no devices: {status}"))),
        }
    };
    // SAFETY: writes as many handles as there is room for, and their number.
    let platforms = ids(
        &|n, to, found| unsafe { (api.clGetPlatformIDs)(n, to, found) },
        Status::NO_PLATFORM,
    )?;
    let mut devices = Vec::new();
    for platform in platforms {
        // SAFETY: as above, of a platform that was listed.
        devices.extend(ids(
            &|n, to, found| unsafe { (api.clGetDeviceIDs)(platform, kind, n, to, found) },
            Status::NO_DEVICE,
        )?);
    }
    Ok(devices)
}

/// What is known of a device that has all that the kernels need, but for what each kernel needs.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) total: u64,
    pub(crate) max_buffer: u64,
    pub(crate) local_memory: u64,
    /// Options for the compiler.
    pub(crate) options: String,
}

impl Facts {
    /// Asks a device.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with what it lacks.
    pub(crate) fn ask(api: &Api, device: Handle) -> Result<Self, BackendError> {
        let name = device_text(api, device, 0x102B)?;
        let lacks = |what: String| unavailable(format!("{name}: {what}"));
        let version = device_text(api, device, 0x102F)?;
        if parse_version(&version).is_none_or(|version| version < (2, 1)) {
            return Err(lacks(format!(
                "it has '{version}', and OpenCL 2.1 is needed"
            )));
        }
        let extensions = device_text(api, device, 0x1030)?;
        let has = |wanted: &str| extensions.split(' ').any(|name| name == wanted);
        for wanted in ["cl_khr_fp16", "cl_khr_subgroup_shuffle"] {
            if !has(wanted) {
                return Err(lacks(format!("its driver has no {wanted}")));
            }
        }
        let number = |which: u32| device_value::<u64>(api, device, which);
        if number(0x1053)? & CL_DEVICE_SVM_COARSE_GRAIN_BUFFER == 0 {
            return Err(lacks("it has no shared virtual memory".to_owned()));
        }
        let mut options = "-cl-std=CLC++2021".to_owned();
        if has("cl_intel_required_subgroup_size") {
            let sizes = subgroup_sizes(api, device)?;
            if !sizes.contains(&SUBGROUP) {
                return Err(lacks(format!(
                    "it has subgroups of {sizes:?}, not of {SUBGROUP}"
                )));
            }
            options += " -DSUBGROUP=__attribute__((intel_reqd_sub_group_size(32)))";
        }
        if number(0x101B)? & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT != 0 {
            options += " -cl-fp32-correctly-rounded-divide-sqrt";
        }
        Ok(Self {
            version: format!("{version}, driver {}", device_text(api, device, 0x102D)?),
            total: number(0x101F)?,
            max_buffer: number(0x1010)?,
            local_memory: number(0x1023)?,
            name,
            options,
        })
    }
}

/// Major and minor version of a text like `OpenCL 3.0 NEO`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let number = text.strip_prefix("OpenCL ")?.split(' ').next()?;
    let (major, minor) = number.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn device_text(api: &Api, device: Handle, which: u32) -> Result<String, BackendError> {
    // SAFETY: writes at most as many bytes as there is room for.
    text(|n, to, len| unsafe { (api.clGetDeviceInfo)(device, which, n, to, len) }).map_err(untold)
}

fn device_value<T: Copy + Default>(
    api: &Api,
    device: Handle,
    which: u32,
) -> Result<T, BackendError> {
    // SAFETY: as above.
    value(|n, to, len| unsafe { (api.clGetDeviceInfo)(device, which, n, to, len) }).map_err(untold)
}

fn subgroup_sizes(api: &Api, device: Handle) -> Result<Vec<usize>, BackendError> {
    const CL_DEVICE_SUB_GROUP_SIZES_INTEL: u32 = 0x4108;
    let mut sizes = [0_usize; 16];
    let mut n_bytes = 0;
    let to: *mut c_void = sizes.as_mut_ptr().cast();
    // SAFETY: writes at most as many bytes as there is room for.
    let status = unsafe {
        let which = CL_DEVICE_SUB_GROUP_SIZES_INTEL;
        (api.clGetDeviceInfo)(device, which, size_of_val(&sizes), to, &mut n_bytes)
    };
    Status::check(status).map_err(untold)?;
    Ok(sizes[..n_bytes / size_of::<usize>()].to_vec())
}

fn untold(status: Status) -> BackendError {
    unavailable(format!("OpenCL does not describe its device: {status}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(parse_version("OpenCL 3.1 (Build 0)"), Some((3, 1)));
        assert_eq!(parse_version("OpenCL 1.2"), Some((1, 2)));
        assert_eq!(parse_version("Vulkan 1.2"), None);
    }
}
