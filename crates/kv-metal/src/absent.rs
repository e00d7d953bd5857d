//! Systems without Metal: everything says so.

use kv_backend::BackendError;

use crate::info::{MetalDeviceInfo, unavailable};

/// A GPU of Apple's: there is none on this system.
#[derive(Debug)]
pub enum MetalDevice {}

fn no_metal() -> BackendError {
    unavailable("only macOS has Metal")
}

impl MetalDevice {
    /// Opens a GPU by its number.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`], always on this system.
    pub fn open(_ordinal: u32) -> Result<Self, BackendError> {
        Err(no_metal())
    }

    /// Opens the first GPU that can be used.
    ///
    /// # Errors
    /// As [`MetalDevice::open`].
    pub fn open_first() -> Result<Self, BackendError> {
        Err(no_metal())
    }
}

/// The GPUs of this machine that Metal shows.
///
/// # Errors
/// [`BackendError::Unavailable`], always on this system.
pub fn devices() -> Result<Vec<Result<MetalDeviceInfo, BackendError>>, BackendError> {
    Err(no_metal())
}

/// True if this machine has a GPU that Metal shows, be it that it cannot be used here.
pub fn is_gpu_present() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_without_metal_says_so() {
        let wanted = "the metal backend is not available: only macOS has Metal";
        assert_eq!(MetalDevice::open(0).unwrap_err().to_string(), wanted);
        assert_eq!(MetalDevice::open_first().unwrap_err().to_string(), wanted);
        assert_eq!(devices().unwrap_err().to_string(), wanted);
        assert!(!is_gpu_present());
    }
}
