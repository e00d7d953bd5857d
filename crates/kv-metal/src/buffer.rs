//! [`MetalBuffer`]: memory that host and GPU share.

use std::ptr::NonNull;
use std::sync::Arc;

use kv_backend::BackendError;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLBuffer, MTLDevice, MTLResourceOptions};

use crate::context::Context;
use crate::info::{BACKEND, failure};

/// Memory of a device.
#[derive(Clone, Debug)]
pub struct MetalBuffer {
    /// The buffer, which command buffers that use it keep alive.
    pub(crate) raw: Retained<ProtocolObject<dyn MTLBuffer>>,
    len: usize,
}

// SAFETY: a buffer's object may be used from every thread; its bytes are touched by the host only
// while the queue is locked and idle.
unsafe impl Send for MetalBuffer {}
// SAFETY: as above.
unsafe impl Sync for MetalBuffer {}

impl MetalBuffer {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] where the GPU's working set would become larger than Metal
    /// recommends, or the buffer is longer than one may be.
    pub(crate) fn zeros(
        context: &Arc<Context>,
        len: usize,
        what: &str,
    ) -> Result<Self, BackendError> {
        let short = |why: String| BackendError::OutOfMemory {
            backend: BACKEND,
            wanted: len,
            what: format!("{what}; {} {why}", context.name()),
        };
        let memory = context.memory();
        let has_free = || format!("has {} of {} bytes free", memory.free, memory.total);
        if len as u64 > memory.free {
            return Err(short(has_free()));
        }
        let longest = context.raw.maxBufferLength();
        if len > longest {
            return Err(short(format!("takes buffers of at most {longest} bytes")));
        }
        // Metal refuses to allocate nothing.
        let n_bytes = len.max(16);
        let options = MTLResourceOptions::StorageModeShared;
        let raw = context.raw.newBufferWithLength_options(n_bytes, options);
        let buffer = Self {
            raw: raw.ok_or_else(|| short(has_free()))?,
            len,
        };
        // SAFETY: all bytes of a buffer that nothing else knows.
        unsafe { buffer.raw.contents().cast::<u8>().write_bytes(0, n_bytes) };
        Ok(buffer)
    }

    /// A copy of bytes of the host, which are not none.
    pub(crate) fn staged(context: &Context, bytes: &[u8]) -> Result<Self, BackendError> {
        let options = MTLResourceOptions::StorageModeShared;
        let from = NonNull::from(bytes).cast();
        // SAFETY: Metal copies the bytes before it returns.
        let raw = unsafe {
            context
                .raw
                .newBufferWithBytes_length_options(from, bytes.len(), options)
        };
        let raw = raw.ok_or_else(|| BackendError::OutOfMemory {
            backend: BACKEND,
            wanted: bytes.len(),
            what: "bytes on their way to the GPU".to_owned(),
        })?;
        Ok(Self {
            raw,
            len: bytes.len(),
        })
    }

    /// Checks that `len` bytes from `at` on are in the buffer.
    ///
    /// # Errors
    /// If they are not.
    pub(crate) fn check(&self, at: usize, len: usize) -> Result<(), BackendError> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(failure(format!(
                "{len} bytes from byte {at} on are not in a buffer of {}",
                self.len
            ))),
        }
    }

    /// The address of byte `at` on the host, which is in the buffer.
    pub(crate) fn address(&self, at: usize) -> *mut u8 {
        self.raw.contents().cast::<u8>().as_ptr().wrapping_add(at)
    }
}
