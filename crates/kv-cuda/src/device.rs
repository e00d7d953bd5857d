//! [`CudaDevice`]: the [`Device`] of this crate.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::result;
use kv_backend::{BackendError, DeviceMemory};
use kv_gpu::{Argument, Device, Region};

use crate::buffer::CudaBuffer;
use crate::context::Context;
use crate::driver::{BACKEND, CudaDeviceInfo, failed, failure, n_devices};
use crate::module::{self, CudaKernel};
use crate::ptx::{Parameter, Ptx};
use crate::recording::{self, CudaRecording};
use crate::staging::Staging;

/// An NVIDIA GPU.
pub struct CudaDevice {
    // First, so that it is dropped before the context.
    staging: Staging,
    context: Arc<Context>,
    ptx: Ptx,
    info: CudaDeviceInfo,
}

impl CudaDevice {
    /// Opens a GPU by its number, as [`devices`](crate::devices) counts them.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason, in one line.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        let context = Arc::new(Context::open(ordinal)?);
        let ptx = module::kernels()?;
        module::check(&context, &ptx)?;
        Ok(Self {
            staging: Staging::new(&context)?,
            info: context.describe()?,
            context,
            ptx,
        })
    }

    /// Opens the first GPU that can be used.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason, in one line: of several GPUs, that of the
    /// first.
    pub fn open_first() -> Result<Self, BackendError> {
        let first = Self::open(0);
        match first {
            Ok(device) => Ok(device),
            Err(error) => {
                let n = n_devices()?;
                (1..n).find_map(|i| Self::open(i).ok()).ok_or(error)
            }
        }
    }

    /// The device's description, with its memory as it was when it was opened.
    pub fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(&self.info).finish()
    }
}

impl Device for CudaDevice {
    type Buffer = CudaBuffer;
    type Kernel = CudaKernel;
    type Recording = CudaRecording;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn description(&self) -> String {
        self.info.to_string()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.context.memory().ok()
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<CudaBuffer, BackendError> {
        CudaBuffer::zeros(&self.context, bytes, what)
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        let to = to.buffer.address(to.at, bytes.len())?;
        self.context.bind()?;
        self.staging.write(to, bytes)
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        let from = from.buffer.address(from.at, bytes.len())?;
        self.context.bind()?;
        self.staging.read(from, bytes)
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        let from = from.buffer.address(from.at, len)?;
        let to = to.buffer.address(to.at, len)?;
        if len == 0 {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: all bytes are in buffers that are freed after what is on the stream.
        unsafe { result::memcpy_dtod_async(to, from, len, self.context.stream()) }
            .map_err(failed("copying on the device"))
    }

    fn kernel(&self, name: &str) -> Result<CudaKernel, BackendError> {
        CudaKernel::load(&self.context, &self.ptx, name)
    }

    fn launch(
        &self,
        kernel: &CudaKernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        let wanted = &kernel.signature.parameters;
        let name = &kernel.name;
        if wanted.len() != arguments.len() {
            let (wanted, got) = (wanted.len(), arguments.len());
            return Err(failure(format!(
                "kernel '{name}' takes {wanted} arguments, got {got}"
            )));
        }
        let mut addresses = Vec::with_capacity(arguments.len());
        for (i, (wanted, argument)) in wanted.iter().zip(arguments).enumerate() {
            addresses.push(match (wanted, argument) {
                (Parameter::Buffer, Argument::Buffer(region)) => {
                    region.buffer.address(region.at, 0)?
                }
                (Parameter::Settings(n), Argument::Settings(bytes)) if *n == bytes.len() => 0,
                _ => {
                    return Err(failure(format!(
                        "argument {i} of kernel '{name}' must be {wanted:?}"
                    )));
                }
            });
        }
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .zip(&mut addresses)
            .map(|(argument, address)| match argument {
                Argument::Buffer(_) => std::ptr::from_mut(address).cast(),
                Argument::Settings(bytes) => bytes.as_ptr().cast_mut().cast(),
            })
            .collect();
        self.context.bind()?;
        let stream = recording::stream_for_launch(&self.context, &kernel.module);
        let blocks = (grid[0], grid[1], 1);
        let threads = (kernel.signature.n_threads, 1, 1);
        // SAFETY: number, kinds and sizes of the arguments are those of the kernel, and the driver
        // copies them before it returns. What the kernel does with the buffers is kv-gpu's to
        // answer for; its tests run every kernel in a simulator that finds accesses outside.
        unsafe {
            result::launch_kernel(
                kernel.module.function,
                blocks,
                threads,
                0,
                stream,
                &mut pointers,
            )
        }
        .map_err(|error| failed(&format!("launching kernel '{name}'"))(error))
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CudaRecording, BackendError> {
        CudaRecording::record(&self.context, launches)
    }

    fn replay(&self, recording: &CudaRecording) -> Result<(), BackendError> {
        recording.replay()
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.context.wait()
    }
}
