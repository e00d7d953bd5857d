//! [`OpenClRecording`]: launches as a list of kernels with their arguments.
//!
//! Invariant: only launches of the thread that records are recorded; those of other threads run
//! meanwhile as always.

use std::cell::RefCell;
use std::sync::Arc;

use kv_backend::BackendError;

use crate::api::failure;
use crate::context::Context;
use crate::kernel::KernelInstance;

/// Launches that were recorded.
#[derive(Debug)]
pub struct OpenClRecording {
    context: Arc<Context>,
    launches: Vec<RecordedLaunch>,
}

/// A launch.
#[derive(Debug)]
pub(crate) struct RecordedLaunch {
    pub(crate) kernel: KernelInstance,
    pub(crate) grid: [u32; 2],
}

/// A thread's recording under way.
struct OpenRecording {
    context: Arc<Context>,
    launches: Vec<RecordedLaunch>,
}

thread_local! {
    static OPEN: RefCell<Option<OpenRecording>> = const { RefCell::new(None) };
}

/// True if this thread records what it launches on a device.
pub(crate) fn is_recording(context: &Arc<Context>) -> bool {
    OPEN.with_borrow(|open| {
        let open = open.as_ref();
        open.is_some_and(|open| Arc::ptr_eq(&open.context, context))
    })
}

/// Adds a launch to what this thread records.
pub(crate) fn add(launch: RecordedLaunch) {
    OPEN.with_borrow_mut(|open| {
        if let Some(open) = open {
            open.launches.push(launch);
        }
    });
}

/// Ends recording where the launches panic.
struct RecordingGuard;

impl Drop for RecordingGuard {
    fn drop(&mut self) {
        OPEN.take();
    }
}

impl OpenClRecording {
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
        let ending = RecordingGuard;
        launches()?;
        let recorded = OPEN.take();
        drop(ending);
        Ok(Self {
            context: Arc::clone(context),
            launches: recorded.map(|open| open.launches).unwrap_or_default(),
        })
    }

    /// Runs what was recorded.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn replay(&self) -> Result<(), BackendError> {
        let mut launches = self.launches.iter();
        launches.try_for_each(|launch| launch.kernel.enqueue(launch.grid))?;
        self.context.flush()
    }
}
