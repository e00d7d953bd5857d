//! [`Context`]: a device's context with its streams.
//!
//! Invariant: all work goes to one stream, in order, but for launches that are recorded, which go
//! to a stream of their own that runs nothing. Callers may come from any thread.

use std::sync::Mutex;

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys;
use kv_backend::{BackendError, DeviceMemory};

use crate::driver::{self, CudaDeviceInfo, Version, failed, unavailable};

/// A device that is in use.
#[derive(Debug)]
pub(crate) struct Context {
    ordinal: u32,
    device: sys::CUdevice,
    raw: sys::CUcontext,
    name: String,
    capability: Version,
    driver: Version,
    stream: sys::CUstream,
    /// The stream on which launches are recorded: by one thread at a time.
    pub(crate) recording: Mutex<RecordingStream>,
}

/// See [`Context::recording`].
#[derive(Debug)]
pub(crate) struct RecordingStream(pub(crate) sys::CUstream);

// SAFETY: the driver's handles may be used from every thread on which the context is current, and
// all methods make it so first. The driver locks what it must.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}
// SAFETY: as above.
unsafe impl Send for RecordingStream {}

impl Context {
    /// Opens a device.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason.
    pub(crate) fn open(ordinal: u32) -> Result<Self, BackendError> {
        let driver = driver::start()?;
        let (device, capability) = driver::find(ordinal)?;
        let name = result::device::get_name(device).unwrap_or_else(|_| format!("GPU {ordinal}"));
        let refused = |error| {
            let error: BackendError = failed("it cannot be opened")(error);
            unavailable(format!("{name}: {error}"))
        };
        // SAFETY: a device that the driver named; released in `drop`.
        let raw = unsafe { result::primary_ctx::retain(device) }.map_err(refused)?;
        // The other handles are created on it, so that `drop` cleans up from here on.
        let mut context = Self {
            ordinal,
            device,
            raw,
            name: name.clone(),
            capability,
            driver,
            stream: std::ptr::null_mut(),
            recording: Mutex::new(RecordingStream(std::ptr::null_mut())),
        };
        context.bind()?;
        let stream = || result::stream::create(StreamKind::NonBlocking).map_err(refused);
        context.stream = stream()?;
        context.recording = Mutex::new(RecordingStream(stream()?));
        Ok(context)
    }

    /// Makes the context current on this thread, which every call of the driver needs.
    ///
    /// # Errors
    /// Those of the driver; so for all methods.
    pub(crate) fn bind(&self) -> Result<(), BackendError> {
        // SAFETY: the context is retained until `drop`.
        unsafe { result::ctx::set_current(self.raw) }.map_err(failed("using the device"))
    }

    /// The stream on which everything runs.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits for everything on the stream.
    pub(crate) fn wait(&self) -> Result<(), BackendError> {
        self.bind()?;
        // SAFETY: the stream lives as long as the context.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("waiting"))
    }

    /// The device's memory.
    pub(crate) fn memory(&self) -> Result<DeviceMemory, BackendError> {
        self.bind()?;
        let (free, total) = result::mem_get_info().map_err(failed("asking for free memory"))?;
        Ok(DeviceMemory {
            total: total as u64,
            free: free as u64,
        })
    }

    /// The device's name, for people.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn describe(&self) -> Result<CudaDeviceInfo, BackendError> {
        Ok(CudaDeviceInfo {
            ordinal: self.ordinal,
            name: self.name.clone(),
            memory: self.memory()?,
            capability: self.capability,
            driver: self.driver,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let is_current = self.bind().is_ok();
        let recording = self.recording.get_mut();
        let recording = recording.unwrap_or_else(std::sync::PoisonError::into_inner);
        for stream in [self.stream, recording.0] {
            if is_current && !stream.is_null() {
                // SAFETY: created by `open` and used by nothing after this; what fails here cannot
                // be mended.
                let _ = unsafe { result::stream::synchronize(stream) };
                // SAFETY: as above.
                let _ = unsafe { result::stream::destroy(stream) };
            }
        }
        // SAFETY: retained once, by `open`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
