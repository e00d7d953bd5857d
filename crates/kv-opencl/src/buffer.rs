//! [`OpenClBuffer`]: memory of the device, with an address that host and device share.
//!
//! The host touches its bytes by copies on the queue alone.

use std::ffi::c_void;
use std::sync::Arc;

use kv_backend::BackendError;

use crate::api::{BACKEND, Call, Status, failure};
use crate::context::Context;

const CL_MEM_READ_WRITE: u64 = 1;

/// Memory of a device.
#[derive(Debug)]
pub struct OpenClBuffer {
    context: Arc<Context>,
    bytes: *mut u8,
    len: usize,
}

// SAFETY: an address, whose bytes are touched by the device and by copies on its queue alone.
unsafe impl Send for OpenClBuffer {}
// SAFETY: as above.
unsafe impl Sync for OpenClBuffer {}

impl OpenClBuffer {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] with what is free.
    pub(crate) fn zeros(
        context: &Arc<Context>,
        len: usize,
        what: &str,
    ) -> Result<Self, BackendError> {
        let short = |why: String| BackendError::OutOfMemory {
            backend: BACKEND,
            wanted: len,
            what: format!("{what}; {} {why}", context.facts.name),
        };
        let memory = context.memory();
        let has_free = || format!("has {} of {} bytes free", memory.free, memory.total);
        if len as u64 > memory.free {
            return Err(short(has_free()));
        }
        let longest = context.facts.max_buffer;
        if len as u64 > longest {
            return Err(short(format!("takes buffers of at most {longest} bytes")));
        }
        // Drivers refuse to allocate nothing.
        let n_bytes = len.max(16);
        // SAFETY: freed in `drop`. The alignment is that of the largest type, 128 bytes.
        let bytes = unsafe { (context.api.clSVMAlloc)(context.raw, CL_MEM_READ_WRITE, n_bytes, 0) };
        if bytes.is_null() {
            return Err(short(has_free()));
        }
        context.add_used(len);
        let buffer = Self {
            context: Arc::clone(context),
            bytes: bytes.cast(),
            len,
        };
        let zero = 0_u8;
        // SAFETY: all bytes of the allocation; the pattern is copied before this returns.
        let status = unsafe {
            let (pattern, none) = (std::ptr::from_ref(&zero).cast(), std::ptr::null_mut());
            (context.api.clEnqueueSVMMemFill)(
                context.queue,
                bytes,
                pattern,
                1,
                n_bytes,
                0,
                std::ptr::null(),
                none,
            )
        };
        Status::check(status)
            .map_err(|status| context.failed("clearing memory", Call::Returns, status))?;
        Ok(buffer)
    }

    /// The address of `len` bytes from `at` on.
    ///
    /// # Errors
    /// If they are not all in the buffer.
    pub(crate) fn address(&self, at: usize, len: usize) -> Result<*mut c_void, BackendError> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.bytes.wrapping_add(at).cast()),
            _ => Err(failure(format!(
                "{len} bytes from byte {at} on are not in a buffer of {}",
                self.len
            ))),
        }
    }
}

impl Drop for OpenClBuffer {
    fn drop(&mut self) {
        self.context.remove_used(self.len);
        let (bytes, none) = (self.bytes.cast(), std::ptr::null_mut());
        // SAFETY: allocated by `zeros`; the queue frees it after all that uses it. What fails here
        // cannot be mended.
        unsafe {
            (self.context.api.clEnqueueSVMFree)(
                self.context.queue,
                1,
                &bytes,
                none,
                none,
                0,
                std::ptr::null(),
                none.cast(),
            )
        };
    }
}
