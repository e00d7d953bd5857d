//! [`MetalRecording`]: launches as a list, which is encoded again for each run.
//!
//! Invariant: only launches of the thread that records are recorded; those of other threads run
//! meanwhile as always.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

use kv_backend::BackendError;
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLComputeCommandEncoder, MTLSize};

use crate::buffer::MetalBuffer;
use crate::context::Context;
use crate::info::failure;
use crate::kernel::MetalKernel;

/// Launches that were recorded.
#[derive(Debug)]
pub struct MetalRecording {
    context: Arc<Context>,
    launches: Vec<Launch>,
}

/// A launch whose arguments were checked.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: MetalKernel,
    pub(crate) grid: [u32; 2],
    pub(crate) arguments: Vec<LaunchArgument>,
}

/// An argument: a buffer from a byte on, or settings.
#[derive(Debug)]
pub(crate) enum LaunchArgument {
    Buffer(MetalBuffer, usize),
    Settings(Box<[u8]>),
}

/// A thread's recording under way.
struct OpenRecording {
    context: Arc<Context>,
    launches: Vec<Launch>,
}

thread_local! {
    static OPEN: RefCell<Option<OpenRecording>> = const { RefCell::new(None) };
}

impl Launch {
    /// Encodes it now, or adds it to what this thread records.
    ///
    /// # Errors
    /// Those of Metal.
    pub(crate) fn submit(self, context: &Arc<Context>) -> Result<(), BackendError> {
        let rest = OPEN.with_borrow_mut(|open| match open {
            Some(open) if Arc::ptr_eq(&open.context, context) => {
                open.launches.push(self);
                None
            }
            _ => Some(self),
        });
        match rest {
            None => Ok(()),
            Some(launch) => autoreleasepool(|_| {
                let encoder = context.queue().compute()?;
                launch.encode(&encoder);
                Ok(())
            }),
        }
    }

    fn encode(&self, encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>) {
        let size = |[width, height]: [u32; 2]| MTLSize {
            width: width as usize,
            height: height as usize,
            depth: 1,
        };
        // Metal refuses to launch nothing.
        if self.grid.contains(&0) {
            return;
        }
        encoder.setComputePipelineState(&self.kernel.pipeline);
        for (i, argument) in self.arguments.iter().enumerate() {
            match argument {
                // What a kernel does with its arguments is kv-gpu's to answer for: its tests run
                // every kernel in a simulator that finds accesses outside. SAFETY: number and kinds
                // of the arguments are those of the kernel, and the offset is in the buffer, which
                // the command buffer keeps alive.
                LaunchArgument::Buffer(buffer, at) => unsafe {
                    encoder.setBuffer_offset_atIndex(Some(&buffer.raw), *at, i);
                },
                // SAFETY: as above; the bytes are copied before this returns.
                LaunchArgument::Settings(bytes) => unsafe {
                    let from = NonNull::from(&**bytes).cast();
                    encoder.setBytes_length_atIndex(from, bytes.len(), i);
                },
            }
        }
        let threads = size([self.kernel.info.n_threads, 1]);
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(self.grid), threads);
    }
}

/// Ends recording where the launches panic.
struct RecordingGuard;

impl Drop for RecordingGuard {
    fn drop(&mut self) {
        OPEN.take();
    }
}

impl MetalRecording {
    /// Records what `launches` launches.
    ///
    /// # Errors
    /// Those of `launches`.
    pub(crate) fn record(
        context: &Arc<Context>,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        if OPEN.with_borrow(Option::is_some) {
            return Err(failure("this thread is recording already"));
        }
        OPEN.set(Some(OpenRecording {
            context: Arc::clone(context),
            launches: Vec::new(),
        }));
        let _ending = RecordingGuard;
        launches()?;
        let open = OPEN.take();
        let open = open.ok_or_else(|| failure("nothing was recorded"))?;
        Ok(Self {
            context: open.context,
            launches: open.launches,
        })
    }

    /// Runs what was recorded.
    ///
    /// # Errors
    /// Those of Metal.
    pub(crate) fn replay(&self) -> Result<(), BackendError> {
        autoreleasepool(|_| {
            let mut queue = self.context.queue();
            let encoder = queue.compute()?;
            self.launches
                .iter()
                .for_each(|launch| launch.encode(&encoder));
            queue.commit()
        })
    }
}
