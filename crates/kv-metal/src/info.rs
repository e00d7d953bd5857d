//! [`MetalDeviceInfo`], and errors with the backend's name.

use std::fmt;

use kv_backend::{BackendError, DeviceMemory};

/// The backend's name.
pub(crate) const BACKEND: &str = "metal";

/// A GPU that Metal shows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MetalDeviceInfo {
    /// Its number, for [`MetalDevice::open`](crate::MetalDevice::open).
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// The memory that Metal recommends to use at most, and what this process has not used of it.
    /// It is the machine's own memory, which other programs use, too.
    pub memory: DeviceMemory,
}

impl fmt::Display for MetalDeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, unified memory", self.name)
    }
}

pub(crate) fn unavailable(reason: impl Into<String>) -> BackendError {
    BackendError::Unavailable {
        backend: BACKEND,
        reason: reason.into(),
    }
}

#[cfg(target_os = "macos")]
pub(crate) fn failure(reason: impl Into<String>) -> BackendError {
    BackendError::Device {
        backend: BACKEND,
        reason: reason.into(),
    }
}
