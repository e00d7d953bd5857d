//! The functions of OpenCL that are called, from the library of this machine, and their errors.
//!
//! Invariant: every function of [`Api`] is there, or [`api`] has a reason. The library stays
//! loaded.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use kv_backend::BackendError;
use libloading::Library;

/// The backend's name.
pub(crate) const BACKEND: &str = "opencl";

/// An object of OpenCL, or none.
pub(crate) type Handle = *mut c_void;

const LIBRARY: &str = if cfg!(windows) {
    "OpenCL.dll"
} else {
    "libOpenCL.so.1"
};

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

/// Declares [`Api`] and how it is found: a field for each function, by OpenCL's name.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of OpenCL.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "system" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            /// Looks all functions up.
            fn find(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the type is that of the specification.
                        let found = unsafe { library.get(name.as_bytes()) };
                        *found.map_err(|_| {
                            let name = stringify!($name);
                            format!("{LIBRARY} has no {name}: it is older than OpenCL 2.1")
                        })?
                    },)*
                })
            }
        }
    };
}

functions! {
    clGetPlatformIDs: fn(u32, *mut Handle, *mut u32) -> i32;
    clGetDeviceIDs: fn(Handle, u64, u32, *mut Handle, *mut u32) -> i32;
    clGetDeviceInfo: fn(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clCreateContext: fn(*const isize, u32, *const Handle, Handle, Handle, *mut i32) -> Handle;
    clCreateCommandQueueWithProperties: fn(Handle, Handle, *const u64, *mut i32) -> Handle;
    clCreateProgramWithSource: fn(Handle, u32, *const *const c_char, *const usize, *mut i32) -> Handle;
    clBuildProgram: fn(Handle, u32, *const Handle, *const c_char, Handle, Handle) -> i32;
    clGetProgramBuildInfo: fn(Handle, Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clReleaseProgram: fn(Handle) -> i32;
    clCreateKernel: fn(Handle, *const c_char, *mut i32) -> Handle;
    clReleaseKernel: fn(Handle) -> i32;
    clGetKernelWorkGroupInfo: fn(Handle, Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clGetKernelSubGroupInfo:
        fn(Handle, Handle, u32, usize, *const c_void, usize, *mut c_void, *mut usize) -> i32;
    clSetKernelArg: fn(Handle, u32, usize, *const c_void) -> i32;
    clSetKernelArgSVMPointer: fn(Handle, u32, *const c_void) -> i32;
    clSVMAlloc: fn(Handle, u64, usize, u32) -> *mut c_void;
    clEnqueueSVMFree:
        fn(Handle, u32, *const *mut c_void, Handle, Handle, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueSVMMemFill:
        fn(Handle, *mut c_void, *const c_void, usize, usize, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueSVMMemcpy:
        fn(Handle, u32, *mut c_void, *const c_void, usize, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueNDRangeKernel:
        fn(Handle, Handle, u32, *const usize, *const usize, *const usize, u32, *const Handle, *mut Handle) -> i32;
    clFlush: fn(Handle) -> i32;
    clFinish: fn(Handle) -> i32;
}

/// The library of this machine, loaded once in a process.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub(crate) fn api() -> Result<&'static Api, BackendError> {
    static LOADED: OnceLock<Result<Api, String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        if cfg!(all(target_env = "musl", target_feature = "crt-static")) {
            let reason = "this program is linked statically, so it can load no driver; a build for \
                          glibc can";
            return Err(reason.to_owned());
        }
        // SAFETY: a library for programs, which may be loaded at any time.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|_| format!("no OpenCL driver: {LIBRARY} was not found"))?;
        let api = Api::find(&library)?;
        // Its functions are called until the process ends.
        std::mem::forget(library);
        Ok(api)
    });
    loaded.as_ref().map_err(unavailable)
}

/// A status other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i32);

impl Status {
    /// No device in a platform.
    pub(crate) const NO_DEVICE: Self = Self(-1);
    /// No driver of any vendor.
    pub(crate) const NO_PLATFORM: Self = Self(-1001);

    /// `Ok` for success.
    pub(crate) fn check(status: i32) -> Result<(), Self> {
        if status == 0 {
            Ok(())
        } else {
            Err(Self(status))
        }
    }

    /// The names of those that calls here may return.
    fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            -1 => "CL_DEVICE_NOT_FOUND",
            -2 => "CL_DEVICE_NOT_AVAILABLE",
            -3 => "CL_COMPILER_NOT_AVAILABLE",
            -4 => "CL_MEM_OBJECT_ALLOCATION_FAILURE",
            -5 => "CL_OUT_OF_RESOURCES",
            -6 => "CL_OUT_OF_HOST_MEMORY",
            -11 => "CL_BUILD_PROGRAM_FAILURE",
            -14 => "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST",
            -30 => "CL_INVALID_VALUE",
            -33 => "CL_INVALID_DEVICE",
            -34 => "CL_INVALID_CONTEXT",
            -36 => "CL_INVALID_COMMAND_QUEUE",
            -43 => "CL_INVALID_BUILD_OPTIONS",
            -46 => "CL_INVALID_KERNEL_NAME",
            -54 => "CL_INVALID_WORK_GROUP_SIZE",
            -1001 => "CL_PLATFORM_NOT_FOUND_KHR",
            _ => return None,
        })
    }

    /// True if the device is gone, and with it all memory: every later call fails. Drivers report
    /// a kernel that went wrong as a queue that is no longer valid, or as a lack of resources when
    /// something waits for it.
    pub(crate) fn is_fatal(self, call: Call) -> bool {
        match self.0 {
            -2 | -14 | -33 | -34 | -36 => true,
            -5 => call == Call::Waits,
            _ => false,
        }
    }
}

/// Whether a call waits for what was enqueued before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// It returns at once.
    Returns,
    /// It waits.
    Waits,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "error {}", self.0),
        }
    }
}

/// A text that a function with a size writes: its length is asked for first.
pub(crate) fn text(get: impl Fn(usize, *mut c_void, *mut usize) -> i32) -> Result<String, Status> {
    let mut len = 0;
    Status::check(get(0, std::ptr::null_mut(), &mut len))?;
    let mut bytes = vec![0_u8; len + 1];
    Status::check(get(len, bytes.as_mut_ptr().cast(), std::ptr::null_mut()))?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().trim().to_owned())
}

/// A value that a function with a size writes.
pub(crate) fn value<T: Copy + Default>(
    get: impl Fn(usize, *mut c_void, *mut usize) -> i32,
) -> Result<T, Status> {
    let mut value = T::default();
    let at = std::ptr::from_mut(&mut value).cast();
    Status::check(get(size_of::<T>(), at, std::ptr::null_mut()))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_resources_is_fatal_where_something_waits() {
        let lack = Status(-5);
        assert!(lack.is_fatal(Call::Waits) && !lack.is_fatal(Call::Returns));
        assert!(Status(-36).is_fatal(Call::Returns));
        assert!(!Status(-54).is_fatal(Call::Waits));
        assert_eq!(lack.to_string(), "CL_OUT_OF_RESOURCES");
        assert_eq!(Status(-99).to_string(), "error -99");
    }
}
