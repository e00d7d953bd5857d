//! [`MetalDevice`]: the [`Device`] of this crate.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use kv_backend::{BackendError, DeviceMemory};
use kv_gpu::{Argument, Device, Region};
use objc2::rc::autoreleasepool;
use objc2_metal::MTLBlitCommandEncoder;

use crate::buffer::MetalBuffer;
use crate::context::{Context, n_gpus};
use crate::info::{BACKEND, MetalDeviceInfo, failure, unavailable};
use crate::kernel::{Libraries, MetalKernel};
use crate::recording::{Launch, LaunchArgument, MetalRecording};

/// Copies on the GPU begin at multiples of this many bytes, and are as long.
const COPY_UNIT: usize = 4;

/// A GPU of Apple silicon.
pub struct MetalDevice {
    context: Arc<Context>,
    libraries: Mutex<Libraries>,
    info: MetalDeviceInfo,
}

impl MetalDevice {
    /// Opens a GPU by its number, as [`devices`](crate::devices) counts them, and compiles a kernel
    /// for it.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        let context = Arc::new(Context::open(ordinal)?);
        let device = Self {
            libraries: Mutex::default(),
            info: context.describe(),
            context,
        };
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
                let n = n_gpus()?;
                (1..n).find_map(|i| Self::open(i).ok()).ok_or(error)
            }
        }
    }

    /// The device's description, with its memory as it was when it was opened.
    pub fn info(&self) -> &MetalDeviceInfo {
        &self.info
    }
}

impl fmt::Debug for MetalDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MetalDevice").field(&self.info).finish()
    }
}

impl Device for MetalDevice {
    type Buffer = MetalBuffer;
    type Kernel = MetalKernel;
    type Recording = MetalRecording;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn description(&self) -> String {
        self.info.to_string()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        Some(self.context.memory())
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<MetalBuffer, BackendError> {
        autoreleasepool(|_| MetalBuffer::zeros(&self.context, bytes, what))
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        to.buffer.check(to.at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        autoreleasepool(|_| {
            let mut queue = self.context.queue();
            let is_unit = |n: usize| n.is_multiple_of(COPY_UNIT);
            if !queue.is_idle()? && is_unit(to.at) && is_unit(bytes.len()) {
                let staged = MetalBuffer::staged(&self.context, bytes)?;
                // SAFETY: the staged bytes fit there, as was checked.
                unsafe {
                    queue
                        .blit()?
                        .copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                            &staged.raw,
                            0,
                            &to.buffer.raw,
                            to.at,
                            bytes.len(),
                        );
                }
                return queue.staged(bytes.len());
            }
            queue.wait()?;
            let at = to.buffer.address(to.at);
            // SAFETY: the bytes fit there, as was checked; the GPU is idle and the queue locked.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
            Ok(())
        })
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        from.buffer.check(from.at, bytes.len())?;
        autoreleasepool(|_| {
            let mut queue = self.context.queue();
            queue.wait()?;
            let at = from.buffer.address(from.at);
            // SAFETY: the bytes are there, as was checked; the GPU is idle and the queue locked.
            unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
            Ok(())
        })
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        from.buffer.check(from.at, len)?;
        to.buffer.check(to.at, len)?;
        if len == 0 {
            return Ok(());
        }
        autoreleasepool(|_| {
            let mut queue = self.context.queue();
            if [from.at, to.at, len]
                .iter()
                .all(|n| n.is_multiple_of(COPY_UNIT))
            {
                // SAFETY: all bytes are in the buffers, as was checked.
                unsafe {
                    queue
                        .blit()?
                        .copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                            &from.buffer.raw,
                            from.at,
                            &to.buffer.raw,
                            to.at,
                            len,
                        );
                }
                return Ok(());
            }
            queue.wait()?;
            let (from, to) = (from.buffer.address(from.at), to.buffer.address(to.at));
            // SAFETY: as above; the GPU is idle and the queue locked.
            unsafe { std::ptr::copy(from, to, len) };
            Ok(())
        })
    }

    fn kernel(&self, name: &str) -> Result<MetalKernel, BackendError> {
        // A map is whole even where a holder of the lock panicked.
        let libraries = self.libraries.lock();
        let mut libraries = libraries.unwrap_or_else(PoisonError::into_inner);
        autoreleasepool(|_| libraries.load(&self.context.raw, name))
    }

    fn launch(
        &self,
        kernel: &MetalKernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        let (name, info) = (kernel.info.name, kernel.info);
        let (wanted, got) = (info.n_buffers + 1, arguments.len());
        if wanted != got {
            return Err(failure(format!(
                "kernel '{name}' takes {wanted} arguments, got {got}"
            )));
        }
        let given = arguments.iter().enumerate().map(|(i, argument)| {
            match argument {
                Argument::Buffer(region) if i < info.n_buffers => {
                    region.buffer.check(region.at, 0)?;
                    Ok(LaunchArgument::Buffer(region.buffer.clone(), region.at))
                }
                Argument::Settings(bytes)
                    if i == info.n_buffers && bytes.len() == info.settings_bytes =>
                {
                    Ok(LaunchArgument::Settings((*bytes).into()))
                }
                _ => Err(failure(format!(
                    "argument {i} of kernel '{name}': it takes {} buffers, then {} bytes of settings",
                    info.n_buffers, info.settings_bytes
                ))),
            }
        });
        let launch = Launch {
            kernel: kernel.clone(),
            grid,
            arguments: given.collect::<Result<_, BackendError>>()?,
        };
        launch.submit(&self.context)
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<MetalRecording, BackendError> {
        MetalRecording::record(&self.context, launches)
    }

    fn replay(&self, recording: &MetalRecording) -> Result<(), BackendError> {
        recording.replay()
    }

    fn wait(&self) -> Result<(), BackendError> {
        autoreleasepool(|_| self.context.queue().wait())
    }
}
