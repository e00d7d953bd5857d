//! [`OpenClDevice`]: the [`Device`] of this crate.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kv_backend::{BackendError, DeviceMemory};
use kv_gpu::{Argument, Device, Region};

use crate::api::{BACKEND, Call, Status, unavailable};
use crate::buffer::OpenClBuffer;
use crate::context::Context;
use crate::info::{OpenClDeviceInfo, all};
use crate::kernel::OpenClKernel;
use crate::recording::{self, OpenClRecording, RecordedLaunch};

/// A GPU with an OpenCL driver.
pub struct OpenClDevice {
    context: Arc<Context>,
    info: OpenClDeviceInfo,
}

impl OpenClDevice {
    /// Opens a GPU by its number, as [`devices`](crate::devices) counts them, and compiles a kernel
    /// for it.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        let context = Context::open(ordinal)?;
        let info = context.describe();
        let device = Self { context, info };
        match device.kernel("add") {
            Ok(_) => Ok(device),
            Err(error) => Err(unavailable(format!("{}: {error}", device.info.name))),
        }
    }

    /// Opens the first GPU that can be used.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason: of several GPUs, that of the first.
    pub fn open_first() -> Result<Self, BackendError> {
        let first = Self::open(0);
        match first {
            Ok(device) => Ok(device),
            Err(error) => {
                let n = all()?.len() as u32;
                (1..n).find_map(|i| Self::open(i).ok()).ok_or(error)
            }
        }
    }

    /// The device's description, with its memory as it was when it was opened.
    pub fn info(&self) -> &OpenClDeviceInfo {
        &self.info
    }

    /// Copies bytes on the queue; `call` is whether the copy is waited for.
    ///
    /// # Safety
    /// Both sides have `len` bytes, which stay until they are copied.
    unsafe fn copy_bytes(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
        call: Call,
    ) -> Result<(), BackendError> {
        if len == 0 {
            return Ok(());
        }
        let (context, none) = (&self.context, std::ptr::null_mut());
        let blocks = u32::from(call == Call::Waits);
        // SAFETY: the caller answers for both sides.
        let status = unsafe {
            (context.api.clEnqueueSVMMemcpy)(
                context.queue,
                blocks,
                to,
                from,
                len,
                0,
                std::ptr::null(),
                none,
            )
        };
        Status::check(status).map_err(|status| context.failed("copying", call, status))
    }
}

impl fmt::Debug for OpenClDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OpenClDevice").field(&self.info).finish()
    }
}

impl Device for OpenClDevice {
    type Buffer = OpenClBuffer;
    type Kernel = OpenClKernel;
    type Recording = OpenClRecording;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn description(&self) -> String {
        self.info.to_string()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        Some(self.context.memory())
    }

    fn has_tensor_cores(&self) -> bool {
        false
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<OpenClBuffer, BackendError> {
        OpenClBuffer::zeros(&self.context, bytes, what)
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        let to = to.buffer.address(to.at, bytes.len())?;
        // SAFETY: the bytes fit there, as was checked, and are copied before this returns.
        unsafe { self.copy_bytes(to, bytes.as_ptr().cast(), bytes.len(), Call::Waits) }
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        let from = from.buffer.address(from.at, bytes.len())?;
        // SAFETY: the bytes are there, as was checked, and are copied before this returns.
        unsafe { self.copy_bytes(bytes.as_mut_ptr().cast(), from, bytes.len(), Call::Waits) }
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        let from = from.buffer.address(from.at, len)?;
        let to = to.buffer.address(to.at, len)?;
        // SAFETY: all bytes are in buffers that are freed after what is on the queue.
        unsafe { self.copy_bytes(to, from, len, Call::Returns) }
    }

    fn kernel(&self, name: &str) -> Result<OpenClKernel, BackendError> {
        OpenClKernel::load(&self.context, name)
    }

    fn launch(
        &self,
        kernel: &OpenClKernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        if recording::is_recording(&self.context) {
            let kernel = kernel.instance(&self.context, arguments)?;
            recording::add(RecordedLaunch { kernel, grid });
            return Ok(());
        }
        kernel.launch(grid, arguments)
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<OpenClRecording, BackendError> {
        OpenClRecording::record(&self.context, launches)
    }

    fn replay(&self, recording: &OpenClRecording) -> Result<(), BackendError> {
        recording.replay()
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.context.wait()
    }
}
