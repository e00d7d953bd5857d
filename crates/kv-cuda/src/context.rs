//! [`Context`]: a device's context with its streams.
//!
//! Invariant: all work goes to one stream, in order, but for launches that are recorded, which go
//! to a stream of their own that runs nothing. What is given up is destroyed when the stream has
//! been waited for: nobody waits to give something up. Callers may come from any thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys::{self, CUdeviceptr};
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
    /// What was given up since the last wait.
    retired: Mutex<Vec<RetiredResource>>,
}

/// Something that was given up, which work on the stream may still use.
#[derive(Debug)]
pub(crate) enum RetiredResource {
    /// Memory of the device.
    Memory(CUdeviceptr),
    /// Recorded launches.
    Graph(sys::CUgraphExec),
    /// A module with a kernel.
    Module(sys::CUmodule),
}

impl RetiredResource {
    /// Destroys it; what fails here cannot be mended.
    ///
    /// # Safety
    /// It was made on the context that is current, and nothing uses it any more.
    unsafe fn destroy(self) {
        let _ = match self {
            // SAFETY: the caller's.
            Self::Memory(address) => unsafe { result::free_sync(address) },
            // SAFETY: the caller's.
            Self::Graph(graph) => unsafe { result::graph::exec_destroy(graph) },
            // SAFETY: the caller's.
            Self::Module(module) => unsafe { result::module::unload(module) },
        };
    }
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
// SAFETY: as above.
unsafe impl Send for RetiredResource {}

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
            retired: Mutex::new(Vec::new()),
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

    /// Gives something up, which is destroyed after the next wait. To free memory is to wait for
    /// all that the device does, so nothing is freed while there is work.
    pub(crate) fn retire(&self, retired: RetiredResource) {
        self.retired().push(retired);
    }

    fn retired(&self) -> MutexGuard<'_, Vec<RetiredResource>> {
        // A list is whole even where a holder of the lock panicked.
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for everything on the stream, and destroys what was given up before.
    pub(crate) fn wait(&self) -> Result<(), BackendError> {
        self.bind()?;
        // What is given up while this waits may be used by work that comes after.
        let retired = std::mem::take(&mut *self.retired());
        // SAFETY: the stream lives as long as the context.
        let waited = unsafe { result::stream::synchronize(self.stream) };
        for retired in retired {
            // SAFETY: work that used it was on the stream before it was given up, and has ended; of
            // a lost device nothing is used.
            unsafe { retired.destroy() };
        }
        waited.map_err(failed("waiting"))
    }

    /// Destroys what was given up, where there is something. Returns whether there was.
    pub(crate) fn free_retired(&self) -> Result<bool, BackendError> {
        let is_some = !self.retired().is_empty();
        if is_some {
            self.wait()?;
        }
        Ok(is_some)
    }

    /// The device's memory, after what was given up is free.
    pub(crate) fn memory(&self) -> Result<DeviceMemory, BackendError> {
        self.bind()?;
        self.free_retired()?;
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
        if is_current && !self.stream.is_null() {
            // What fails here cannot be mended.
            let _ = self.wait();
        }
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
