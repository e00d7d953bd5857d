//! [`plan_memory`]: what graphs would take on a device, without a device.
//!
//! Invariant: graphs are lowered as they are for a run, so the numbers are those of the backend.
//! Weights are not read, except small vectors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_backend::{BackendError, CustomOps, DeviceMemory, OnProgress, check_rows, check_weights};
use kv_graph::Graph;
use kv_graph::weights::WeightSource;
use kv_rows::RowLayout;

use crate::config::GpuConfig;
use crate::device::{Argument, Device, Region};
use crate::lower::{Context, lower};
use crate::program::{ProgramContext, block_bytes};
use crate::rows::GpuRows;
use crate::weights::GpuWeights;

/// The allocations of a backend on a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuMemoryPlan {
    /// Rows and states of the memory.
    pub rows: usize,
    /// Weights, in planes.
    pub weights: usize,
    /// Scratch memory, which all programs share.
    pub scratch: usize,
    /// The buffer for stored weights on their way to planes.
    pub staging: usize,
    /// The inputs of a run, for all programs, without the tables of what tokens see, which are
    /// small and differ from run to run.
    pub inputs: usize,
}

impl GpuMemoryPlan {
    /// All of it.
    pub fn total(&self) -> usize {
        let Self {
            rows,
            weights,
            scratch,
            staging,
            inputs,
        } = self;
        [*weights, *scratch, *staging, *inputs]
            .into_iter()
            .fold(*rows, usize::saturating_add)
    }
}

/// The work whose memory is planned.
#[derive(Clone, Copy)]
pub struct GpuWork<'a> {
    /// The backend's name, for errors.
    pub backend: &'static str,
    /// The graphs that are compiled.
    pub graphs: &'a [Graph],
    /// Their weights.
    pub weights: &'a Arc<dyn WeightSource>,
    /// The rows of the memory.
    pub layout: &'a RowLayout,
    /// The custom operations of the graphs.
    pub custom: &'a CustomOps,
}

impl std::fmt::Debug for GpuWork<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuWork({} graphs)", self.graphs.len())
    }
}

/// Plans the memory of a backend with this configuration.
///
/// # Errors
/// As [`Backend::compile`](kv_backend::Backend::compile).
pub fn plan_memory(config: GpuConfig, work: GpuWork<'_>) -> Result<GpuMemoryPlan, BackendError> {
    let shared = ProgramContext::new(Counter {
        name: work.backend,
        allocated: AtomicUsize::new(0),
    });
    let (source, custom) = (Arc::clone(work.weights), work.custom.clone());
    let weights = GpuWeights::planned(source, custom, OnProgress::default());
    let (mut scratch, mut inputs) = (0, 0);
    for graph in work.graphs {
        check_rows(graph, work.layout)?;
        check_weights(graph, &**work.weights)?;
        let lowered = lower(Context {
            shared: &shared,
            config,
            graph,
            weights: &weights,
            layout: work.layout,
        })?;
        scratch = scratch.max(lowered.scratch_bytes);
        inputs = inputs.max(block_bytes(lowered.inputs.fixed_bytes()));
    }
    let device = &shared.device;
    let weights_allocated = device.allocated.swap(0, Ordering::Relaxed);
    GpuRows::allocate(device, work.layout)?;
    Ok(GpuMemoryPlan {
        rows: device.allocated.load(Ordering::Relaxed),
        weights: weights_allocated,
        scratch,
        staging: weights.staging_bytes(),
        inputs,
    })
}

/// A device that counts what is allocated and does nothing.
#[derive(Debug)]
struct Counter {
    name: &'static str,
    allocated: AtomicUsize,
}

impl Device for Counter {
    type Buffer = ();
    type Kernel = ();
    type Recording = ();

    fn name(&self) -> &'static str {
        self.name
    }

    fn description(&self) -> String {
        "a plan".to_owned()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    fn allocate(&self, bytes: usize, _what: &str) -> Result<(), BackendError> {
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn write(&self, _to: Region<'_, Self>, _bytes: &[u8]) -> Result<(), BackendError> {
        Ok(())
    }

    fn read(&self, _from: Region<'_, Self>, _bytes: &mut [u8]) -> Result<(), BackendError> {
        Ok(())
    }

    fn copy(
        &self,
        _from: Region<'_, Self>,
        _to: Region<'_, Self>,
        _len: usize,
    ) -> Result<(), BackendError> {
        Ok(())
    }

    fn kernel(&self, _name: &str) -> Result<(), BackendError> {
        Ok(())
    }

    fn launch(
        &self,
        _kernel: &(),
        _grid: [u32; 2],
        _arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        launches()
    }

    fn replay(&self, _recording: &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
}
