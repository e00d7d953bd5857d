//! [`Queue`]: the command buffer that is being encoded, and those that run.
//!
//! Everything is encoded in order, into one command buffer until something waits or a run ends. Its
//! encoders run one after the other, and so do the dispatches of one: Metal tracks what they share.
//! Invariant: a command buffer that failed leaves the memory undefined, so that everything after it
//! fails, too.

use std::collections::VecDeque;

use kv_backend::BackendError;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBlitCommandEncoder, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder,
    MTLCommandQueue, MTLComputeCommandEncoder, MTLDevice,
};

use crate::info::{BACKEND, failure};

type CommandBuffer = ProtocolObject<dyn MTLCommandBuffer>;
type ComputeEncoder = ProtocolObject<dyn MTLComputeCommandEncoder>;
type BlitEncoder = ProtocolObject<dyn MTLBlitCommandEncoder>;

/// Bytes on their way to the GPU after which a command buffer is committed, so that it runs.
const MAX_STAGED: usize = 16 << 20;
/// Bytes on their way after which the host waits for the GPU.
const MAX_UNDER_WAY: usize = 64 << 20;

/// The encoded and the running command buffers.
#[derive(Debug)]
pub(crate) struct Queue {
    raw: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    open: Option<OpenCommandBuffer>,
    /// Those that may still run, in order.
    committed: VecDeque<Retained<CommandBuffer>>,
    /// Bytes that were staged since the last commit, and since the last wait.
    staged: usize,
    under_way: usize,
    /// Why the memory is undefined.
    lost: Option<String>,
}

// SAFETY: command buffers and encoders may be used by any thread, by one at a time; the lock in
// which the queue is sees to that.
unsafe impl Send for Queue {}

/// A command buffer that is being encoded.
#[derive(Debug)]
struct OpenCommandBuffer {
    buffer: Retained<CommandBuffer>,
    encoder: Option<Encoder>,
}

#[derive(Debug)]
enum Encoder {
    Compute(Retained<ComputeEncoder>),
    Blit(Retained<BlitEncoder>),
}

impl Encoder {
    fn end(self) {
        match self {
            Self::Compute(encoder) => encoder.endEncoding(),
            Self::Blit(encoder) => encoder.endEncoding(),
        }
    }
}

impl Queue {
    /// A queue of its own on a GPU; `None` where Metal gives none.
    pub(crate) fn new(device: &ProtocolObject<dyn MTLDevice>) -> Option<Self> {
        Some(Self {
            raw: device.newCommandQueue()?,
            open: None,
            committed: VecDeque::new(),
            staged: 0,
            under_way: 0,
            lost: None,
        })
    }

    /// The encoder for launches.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] where something failed before; so for all methods.
    pub(crate) fn compute(&mut self) -> Result<Retained<ComputeEncoder>, BackendError> {
        let open = self.open()?;
        if let Some(Encoder::Compute(encoder)) = &open.encoder {
            return Ok(encoder.clone());
        }
        open.end();
        let encoder = open.buffer.computeCommandEncoder();
        let encoder = encoder.ok_or_else(|| failure("Metal gives no compute encoder"))?;
        open.encoder = Some(Encoder::Compute(encoder.clone()));
        Ok(encoder)
    }

    /// The encoder for copies.
    pub(crate) fn blit(&mut self) -> Result<Retained<BlitEncoder>, BackendError> {
        let open = self.open()?;
        if let Some(Encoder::Blit(encoder)) = &open.encoder {
            return Ok(encoder.clone());
        }
        open.end();
        let encoder = open.buffer.blitCommandEncoder();
        let encoder = encoder.ok_or_else(|| failure("Metal gives no encoder for copies"))?;
        open.encoder = Some(Encoder::Blit(encoder.clone()));
        Ok(encoder)
    }

    fn open(&mut self) -> Result<&mut OpenCommandBuffer, BackendError> {
        self.check()?;
        if self.open.is_none() {
            let buffer = self.raw.commandBuffer();
            let buffer = buffer.ok_or_else(|| failure("Metal gives no command buffer"))?;
            self.open = Some(OpenCommandBuffer {
                buffer,
                encoder: None,
            });
        }
        self.open
            .as_mut()
            .ok_or_else(|| failure("there is no command buffer"))
    }

    /// Counts bytes that were copied aside for a copy that was encoded, and lets the GPU run where
    /// they are many.
    pub(crate) fn staged(&mut self, n_bytes: usize) -> Result<(), BackendError> {
        self.staged += n_bytes;
        self.under_way += n_bytes;
        match (self.staged, self.under_way) {
            (_, MAX_UNDER_WAY..) => self.wait(),
            (MAX_STAGED.., _) => self.commit(),
            _ => Ok(()),
        }
    }

    /// Has the GPU run what is encoded.
    pub(crate) fn commit(&mut self) -> Result<(), BackendError> {
        self.check()?;
        if let Some(mut open) = self.open.take() {
            open.end();
            open.buffer.commit();
            self.committed.push_back(open.buffer);
            self.staged = 0;
        }
        self.reap()
    }

    /// Waits for everything before.
    pub(crate) fn wait(&mut self) -> Result<(), BackendError> {
        self.commit()?;
        while let Some(buffer) = self.committed.front() {
            buffer.waitUntilCompleted();
            self.reap()?;
        }
        self.under_way = 0;
        Ok(())
    }

    /// True if nothing is encoded and nothing runs: then the host may touch the buffers.
    pub(crate) fn is_idle(&mut self) -> Result<bool, BackendError> {
        self.check()?;
        self.reap()?;
        Ok(self.open.is_none() && self.committed.is_empty())
    }

    /// Forgets command buffers that are done, and notes whether one failed.
    fn reap(&mut self) -> Result<(), BackendError> {
        while let Some(buffer) = self.committed.front() {
            match buffer.status() {
                MTLCommandBufferStatus::Completed => {}
                MTLCommandBufferStatus::Error => {
                    let error = buffer.error();
                    let reason = error.map(|error| error.localizedDescription().to_string());
                    self.lost = Some(reason.unwrap_or_else(|| "a run failed".to_owned()));
                    self.committed.clear();
                    return self.check();
                }
                _ => break,
            }
            self.committed.pop_front();
        }
        Ok(())
    }

    fn check(&self) -> Result<(), BackendError> {
        match &self.lost {
            None => Ok(()),
            Some(reason) => Err(BackendError::DeviceLost {
                backend: BACKEND,
                reason: reason.clone(),
            }),
        }
    }
}

impl OpenCommandBuffer {
    fn end(&mut self) {
        if let Some(encoder) = self.encoder.take() {
            encoder.end();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // An encoder must be ended before it is released.
        if let Some(mut open) = self.open.take() {
            open.end();
        }
    }
}
