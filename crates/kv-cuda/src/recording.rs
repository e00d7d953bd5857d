//! [`CudaRecording`]: launches as a graph of the driver.
//!
//! Invariant: only launches of the thread that records are recorded; those of other threads run
//! meanwhile as always.

use std::cell::RefCell;
use std::sync::{Arc, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use kv_backend::BackendError;

use crate::context::{Context, RetiredResource};
use crate::driver::{failed, failure};
use crate::module::Module;

/// Launches that were recorded.
#[derive(Debug)]
pub struct CudaRecording {
    context: Arc<Context>,
    graph: sys::CUgraphExec,
    /// The modules whose kernels the graph launches.
    _modules: Vec<Arc<Module>>,
}

// SAFETY: the driver's handles may be used from every thread, one at a time; see `Context`.
unsafe impl Send for CudaRecording {}

/// A thread's recording under way.
struct OpenRecording {
    context: Arc<Context>,
    stream: sys::CUstream,
    modules: Vec<Arc<Module>>,
}

thread_local! {
    static OPEN: RefCell<Option<OpenRecording>> = const { RefCell::new(None) };
}

/// The stream for a launch by this thread, which notes down what it launches while it records.
pub(crate) fn stream_for_launch(context: &Arc<Context>, module: &Arc<Module>) -> sys::CUstream {
    OPEN.with_borrow_mut(|open| match open {
        Some(open) if Arc::ptr_eq(&open.context, context) => {
            if !open.modules.iter().any(|known| Arc::ptr_eq(known, module)) {
                open.modules.push(Arc::clone(module));
            }
            open.stream
        }
        _ => context.stream(),
    })
}

/// A thread's finished recording.
struct RecordedLaunch {
    graph: Result<sys::CUgraph, DriverError>,
    modules: Vec<Arc<Module>>,
}

/// Ends what this thread records, if it does.
fn end() -> Option<RecordedLaunch> {
    let open = OPEN.take()?;
    // SAFETY: the stream records since `record`, on this thread.
    let graph = unsafe { result::stream::end_capture(open.stream) };
    Some(RecordedLaunch {
        graph,
        modules: open.modules,
    })
}

/// Ends recording where the launches panic.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(RecordedLaunch {
            graph: Ok(graph), ..
        }) = end()
            && !graph.is_null()
        {
            // SAFETY: recorded just now; nothing else knows it.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }
}

impl CudaRecording {
    /// Records what `launches` launches.
    ///
    /// # Errors
    /// Those of `launches` and of the driver.
    pub(crate) fn record(
        context: &Arc<Context>,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        if OPEN.with_borrow(Option::is_some) {
            return Err(failure("this thread is recording already"));
        }
        let recording = context.recording.lock();
        let recording = recording.unwrap_or_else(PoisonError::into_inner);
        context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the lock makes this the stream's only user.
        unsafe { result::stream::begin_capture(recording.0, mode) }
            .map_err(failed("beginning to record"))?;
        OPEN.set(Some(OpenRecording {
            context: Arc::clone(context),
            stream: recording.0,
            modules: Vec::new(),
        }));
        let ending = Ending;
        let outcome = launches();
        let RecordedLaunch { graph, modules } = match outcome {
            Ok(()) => end().ok_or_else(|| failure("nothing was recorded"))?,
            Err(error) => return Err(error),
        };
        drop(ending);
        let graph = graph.map_err(failed("recording"))?;
        // SAFETY: a graph that was recorded just now.
        let exec = unsafe { result::graph::instantiate(graph, NO_FLAGS) };
        // SAFETY: nothing else knows the graph.
        let destroyed = unsafe { result::graph::destroy(graph) };
        let recorded = Self {
            context: Arc::clone(context),
            graph: exec.map_err(failed("preparing a recording"))?,
            _modules: modules,
        };
        destroyed.map_err(failed("preparing a recording"))?;
        Ok(recorded)
    }

    /// Runs what was recorded.
    pub(crate) fn replay(&self) -> Result<(), BackendError> {
        self.context.bind()?;
        // SAFETY: the graph lives as long as the recording, and what it uses does, too.
        unsafe { result::graph::launch(self.graph, self.context.stream()) }
            .map_err(failed("running a recording"))
    }
}

const NO_FLAGS: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

impl Drop for CudaRecording {
    fn drop(&mut self) {
        // It may still run.
        self.context.retire(RetiredResource::Graph(self.graph));
    }
}
