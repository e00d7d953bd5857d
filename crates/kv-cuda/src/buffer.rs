//! [`CudaBuffer`]: memory of the device.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use kv_backend::BackendError;

use crate::context::{Context, RetiredResource};
use crate::driver::{BACKEND, failed, failure};

/// Memory of a device.
#[derive(Debug)]
pub struct CudaBuffer {
    context: Arc<Context>,
    address: CUdeviceptr,
    len: usize,
}

impl CudaBuffer {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] with what is free.
    pub(crate) fn zeros(
        context: &Arc<Context>,
        len: usize,
        what: &str,
    ) -> Result<Self, BackendError> {
        context.bind()?;
        // The driver refuses to allocate nothing.
        let n_bytes = len.max(1);
        // SAFETY: the context is current; freed after `drop`.
        let mut allocated = unsafe { result::malloc_sync(n_bytes) };
        if allocated.is_err() && context.free_retired()? {
            // SAFETY: as above.
            allocated = unsafe { result::malloc_sync(n_bytes) };
        }
        let address = allocated.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => BackendError::OutOfMemory {
                backend: BACKEND,
                wanted: len,
                what: match context.memory() {
                    Ok(memory) => format!(
                        "{what}; {} has {} of {} bytes free",
                        context.name(),
                        memory.free,
                        memory.total
                    ),
                    Err(_) => what.to_owned(),
                },
            },
            _ => failed("allocating")(error),
        })?;
        let buffer = Self {
            context: Arc::clone(context),
            address,
            len,
        };
        // SAFETY: all bytes of the allocation.
        unsafe { result::memset_d8_async(address, 0, n_bytes, context.stream()) }
            .map_err(failed("clearing memory"))?;
        Ok(buffer)
    }

    /// The address of `len` bytes from `at` on.
    ///
    /// # Errors
    /// If they are not all in the buffer.
    pub(crate) fn address(&self, at: usize, len: usize) -> Result<CUdeviceptr, BackendError> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + at as u64),
            _ => Err(failure(format!(
                "{len} bytes from byte {at} on are not in a buffer of {}",
                self.len
            ))),
        }
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        // Kernels may still use it.
        self.context.retire(RetiredResource::Memory(self.address));
    }
}
