//! Candle's errors as [`BackendError`]s, and the checks that several files need.
//!
//! Knows nothing of what was being computed.

use kv_backend::BackendError;

/// The backend's short name.
pub(crate) const NAME: &str = "candle";

/// Turns the device library's failures into ours.
pub(crate) trait OnDevice<T> {
    /// The value, or [`BackendError::Device`] with candle's words.
    fn on_device(self) -> Result<T, BackendError>;
}

impl<T> OnDevice<T> for candle_core::Result<T> {
    fn on_device(self) -> Result<T, BackendError> {
        self.map_err(|error| failure(error.to_string()))
    }
}

/// A failure of the device, or of a graph that no builder made.
pub(crate) fn failure(reason: String) -> BackendError {
    BackendError::Device {
        backend: NAME,
        reason,
    }
}
