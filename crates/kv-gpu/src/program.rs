//! [`GpuProgram`]: the steps of a graph, and how they are run, recorded and run again.
//!
//! Launches are recorded at the second run with the same buffers and grids, and replayed from then
//! on: those between two steps that the host computes as one recording. Where the device cannot
//! record, they are launched one by one. Invariant: what differs from run to run is in the inputs,
//! never in a launch's settings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_backend::{BackendError, RowStorage, check_inputs};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_graph::{Graph, Node};
use kv_rows::RowLayout;

use crate::arena::{Arena, RunMemory};
use crate::custom::HostStep;
use crate::device::{Argument, Device, Region};
use crate::inputs::{InputPlan, RunCounts};
use crate::lower::LoweredGraph;
use crate::rows::GpuRows;
use crate::weights::DeviceWeight;

/// Recordings that a program keeps.
const MAX_RECORDINGS: usize = 16;
/// Thread blocks that a grid has in its second dimension at most, on every device: CUDA's bound.
pub(crate) const MAX_GRID_Y: u32 = 65_535;

/// The values that all programs of a backend share.
#[derive(Debug)]
pub(crate) struct ProgramContext<D: Device> {
    pub(crate) device: D,
    pub(crate) memory: Mutex<RunMemory<D>>,
    /// The kernels that programs use, by name.
    kernels: Mutex<HashMap<String, Arc<D::Kernel>>>,
}

impl<D: Device> ProgramContext<D> {
    pub(crate) fn new(device: D) -> Self {
        Self {
            device,
            memory: Mutex::default(),
            kernels: Mutex::default(),
        }
    }

    /// A kernel, looked up on the device once.
    pub(crate) fn kernel(&self, name: &str) -> Result<Arc<D::Kernel>, BackendError> {
        let mut known = locked(&self.kernels);
        if let Some(kernel) = known.get(name) {
            return Ok(Arc::clone(kernel));
        }
        let kernel = Arc::new(self.device.kernel(name)?);
        known.insert(name.to_owned(), Arc::clone(&kernel));
        Ok(kernel)
    }
}

/// The lock's data; whoever panicked with it left nothing half done.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that a kernel reads or writes.
#[derive(Debug)]
pub(crate) enum Operand<D: Device> {
    /// Scratch memory, from a byte on.
    Scratch(usize),
    /// The inputs, from a byte on.
    Inputs(usize),
    /// A buffer of the rows, by its number.
    Rows(usize),
    /// A weight.
    Weight(Arc<DeviceWeight<D>>),
}

impl<D: Device> Clone for Operand<D> {
    fn clone(&self) -> Self {
        match self {
            Self::Scratch(at) => Self::Scratch(*at),
            Self::Inputs(at) => Self::Inputs(*at),
            Self::Rows(number) => Self::Rows(*number),
            Self::Weight(weight) => Self::Weight(Arc::clone(weight)),
        }
    }
}

/// Thread blocks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grid {
    /// The same in every run.
    Fixed([u32; 2]),
    /// `x` blocks for each piece of few rows of a visibility.
    Few { x: u32, visibility: usize },
    /// `x` blocks for each piece of many rows of a visibility.
    Many { x: u32, visibility: usize },
    /// `x` blocks for each chain of states.
    Chains { x: u32 },
}

/// Threads of a block of kernels that have a thread for each value.
pub(crate) const THREADS: u32 = 256;

impl Grid {
    /// Blocks that have a thread for each of `n` values.
    pub(crate) fn values(n: u32) -> Self {
        Self::rows(n.div_ceil(THREADS))
    }

    /// A block for each of `n` rows.
    pub(crate) fn rows(n: u32) -> Self {
        Self::Fixed([n, 1])
    }

    /// `x` blocks for each piece of few rows, or of many.
    pub(crate) fn pieces(many: u32, x: u32, visibility: usize) -> Self {
        match many {
            0 => Self::Few { x, visibility },
            _ => Self::Many { x, visibility },
        }
    }

    /// The same, unless it is larger than [`MAX_GRID_Y`] in every run.
    ///
    /// # Errors
    /// [`BackendError::Input`] with the size.
    pub(crate) fn checked(self) -> Result<Self, BackendError> {
        match self {
            Self::Fixed(grid) => within_bounds(grid).map(Self::Fixed),
            _ => Ok(self),
        }
    }

    fn blocks(self, counts: &RunCounts) -> Result<[u32; 2], BackendError> {
        let pieces = |visibility: usize| counts.pieces.get(visibility).copied().unwrap_or_default();
        within_bounds(match self {
            // Checked when the graph was lowered.
            Self::Fixed(grid) => return Ok(grid),
            Self::Few { x, visibility } => [x, pieces(visibility).few],
            Self::Many { x, visibility } => [x, pieces(visibility).many],
            Self::Chains { x } => [x, counts.n_chains],
        })
    }
}

/// A grid that every device takes.
fn within_bounds(grid: [u32; 2]) -> Result<[u32; 2], BackendError> {
    if grid[1] <= MAX_GRID_Y {
        Ok(grid)
    } else {
        Err(BackendError::Input {
            input: "graph",
            reason: format!(
                "{} thread blocks in the second dimension of a launch, of at most {MAX_GRID_Y}: run fewer \
                 tokens at once (a smaller ubatch)",
                grid[1]
            ),
        })
    }
}

/// A launch of a kernel.
#[derive(Debug)]
pub(crate) struct Launch<D: Device> {
    pub(crate) kernel: Arc<D::Kernel>,
    pub(crate) grid: Grid,
    pub(crate) operands: Vec<Operand<D>>,
    pub(crate) settings: Vec<u8>,
}

/// One step of a program.
#[derive(Debug)]
pub(crate) enum Step<D: Device> {
    /// A kernel.
    Launch(Launch<D>),
    /// A custom operation.
    Host(Box<HostStep<D>>),
}

impl<D: Device> Step<D> {
    fn is_launch(&self) -> bool {
        matches!(self, Self::Launch(_))
    }
}

/// Steps in pieces: neighbouring launches together, and what the host computes between them.
fn pieces<D: Device>(steps: &[Step<D>]) -> impl Iterator<Item = &[Step<D>]> {
    steps.chunk_by(|a, b| a.is_launch() == b.is_launch())
}

/// The programs and buffers that a recording is for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RecordingKey {
    rows: u64,
    scratch: u64,
    inputs: u64,
    counts: RunCounts,
}

/// The bytes that are allocated for the inputs of a run of so many bytes.
pub(crate) fn block_bytes(n_bytes: usize) -> usize {
    n_bytes.next_power_of_two().max(4096)
}

/// A compiled graph.
#[derive(Debug)]
pub struct GpuProgram<D: Device> {
    shared: Arc<ProgramContext<D>>,
    graph: Graph,
    layout: RowLayout,
    inputs: InputPlan,
    steps: Vec<Step<D>>,
    scratch_bytes: usize,
    outputs: Vec<Option<Operand<D>>>,
    /// The inputs on the host.
    words: Vec<u32>,
    /// True if launches are recorded: not once the device could not.
    records: bool,
    /// Keys that were seen once (`None`) or recorded, a recording for each piece of launches; the
    /// last used last.
    recordings: Vec<(RecordingKey, Option<Vec<D::Recording>>)>,
}

impl<D: Device> GpuProgram<D> {
    pub(crate) fn new(
        shared: Arc<ProgramContext<D>>,
        graph: &Graph,
        layout: &RowLayout,
        lowered: LoweredGraph<D>,
    ) -> Result<Self, BackendError> {
        // Now, so that no run fails for want of memory.
        let mut memory = locked(&shared.memory);
        memory
            .scratch
            .reserve(&shared.device, lowered.scratch_bytes)?;
        let n_inputs = block_bytes(lowered.inputs.fixed_bytes());
        memory.inputs.reserve(&shared.device, n_inputs)?;
        drop(memory);
        Ok(Self {
            records: true,
            shared,
            graph: graph.clone(),
            layout: layout.clone(),
            inputs: lowered.inputs,
            steps: lowered.steps,
            scratch_bytes: lowered.scratch_bytes,
            outputs: lowered.outputs,
            words: Vec::new(),
            recordings: Vec::new(),
        })
    }

    /// Launches of kernels and operations on the host of a run.
    pub fn n_steps(&self) -> usize {
        self.steps.len()
    }

    /// Runs the program once.
    pub(crate) fn run(
        &mut self,
        rows: &mut GpuRows<D>,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        if rows.layout() != &self.layout {
            return Err(BackendError::Input {
                input: "rows",
                reason: "they have another layout than the program".to_owned(),
            });
        }
        check_inputs(&self.graph, &self.layout, inputs)?;
        inputs.check_cancelled()?;
        let shared = Arc::clone(&self.shared);
        // One program after the other: they share this memory.
        let mut memory = locked(&shared.memory);
        memory.scratch.reserve(&shared.device, self.scratch_bytes)?;
        let counts = self.upload(&mut memory.inputs, inputs)?.rounded();
        self.launch_all(&memory, rows, (inputs, counts))?;
        self.read_outputs(&memory, outputs)
    }

    /// Writes the inputs to the device.
    fn upload(
        &mut self,
        block: &mut Arena<D>,
        inputs: &GraphInputs<'_>,
    ) -> Result<RunCounts, BackendError> {
        let device = &self.shared.device;
        let counts = self.inputs.write(&self.graph, inputs, &mut self.words)?;
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        block.reserve(device, block_bytes(bytes.len()))?;
        if let Some(buffer) = block.buffer() {
            device.write(Region { buffer, at: 0 }, bytes)?;
        }
        Ok(counts)
    }

    fn launch_all(
        &mut self,
        memory: &RunMemory<D>,
        rows: &GpuRows<D>,
        (inputs, counts): (&GraphInputs<'_>, RunCounts),
    ) -> Result<(), BackendError> {
        let key = RecordingKey {
            rows: rows.id(),
            scratch: memory.scratch.generation(),
            inputs: memory.inputs.generation(),
            counts,
        };
        // With other memory than this, none can be replayed again.
        self.recordings
            .retain(|(known, _)| (known.scratch, known.inputs) == (key.scratch, key.inputs));
        let known = self.recordings.iter().position(|(known, _)| *known == key);
        let entry = known.map(|at| self.recordings.remove(at));
        let buffers = Buffers {
            scratch: memory.scratch.buffer(),
            inputs: memory.inputs.buffer(),
            rows,
        };
        let recording = match entry {
            Some((_, Some(recording))) => Some(recording),
            Some((_, None)) if self.records => self.record(&buffers, (inputs, &key.counts))?,
            Some((_, None)) | None => None,
        };
        let (device, n_steps) = (&self.shared.device, self.steps.len());
        let mut recorded = recording.iter().flatten();
        let mut done = 0;
        for piece in pieces(&self.steps) {
            let is_launches = piece.first().is_some_and(Step::is_launch);
            let replayed = if is_launches { recorded.next() } else { None };
            if let Some(recording) = replayed {
                inputs.check_cancelled()?;
                inputs.report_step(done, n_steps);
                device.replay(recording)?;
                done += piece.len();
                continue;
            }
            for step in piece {
                inputs.check_cancelled()?;
                inputs.report_step(done, n_steps);
                buffers.run(device, step, (&key.counts, inputs))?;
                done += 1;
            }
        }
        if self.recordings.len() >= MAX_RECORDINGS {
            self.recordings.remove(0);
        }
        self.recordings.push((key, recording));
        Ok(())
    }

    /// Records all launches, which runs none, each piece for itself; `None`, from then on, where
    /// the device cannot: it takes memory.
    fn record(
        &mut self,
        buffers: &Buffers<'_, D>,
        (inputs, counts): (&GraphInputs<'_>, &RunCounts),
    ) -> Result<Option<Vec<D::Recording>>, BackendError> {
        let device = &self.shared.device;
        let launches = pieces(&self.steps).filter(|piece| piece.iter().all(Step::is_launch));
        let recordings = launches.map(|piece| {
            device.record(&mut || {
                let mut steps = piece.iter();
                steps.try_for_each(|step| buffers.run(device, step, (counts, inputs)))
            })
        });
        match recordings.collect::<Result<Vec<_>, _>>() {
            Ok(recordings) => Ok(Some(recordings)),
            Err(lost @ BackendError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                tracing::warn!("{error}: kernels of this graph are launched one by one");
                self.records = false;
                Ok(None)
            }
        }
    }

    fn read_outputs(
        &self,
        memory: &RunMemory<D>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        let wanted = self.graph.outputs().iter();
        let sizes = wanted.map(|&id| self.graph.node(id).map_or(0, Node::n_values));
        for (values, from) in outputs.resize(sizes).iter_mut().zip(&self.outputs) {
            let (buffer, at) = match from {
                Some(Operand::Scratch(at)) => (memory.scratch.buffer(), *at),
                Some(Operand::Inputs(at)) => (memory.inputs.buffer(), *at),
                _ => continue,
            };
            if let Some(buffer) = buffer {
                let from = Region { buffer, at };
                let device = &self.shared.device;
                device.read(from, bytemuck::cast_slice_mut(values))?;
            }
        }
        Ok(())
    }
}

/// The buffers of a run.
pub(crate) struct Buffers<'a, D: Device> {
    scratch: Option<&'a D::Buffer>,
    inputs: Option<&'a D::Buffer>,
    rows: &'a GpuRows<D>,
}

impl<D: Device> Buffers<'_, D> {
    fn run(
        &self,
        device: &D,
        step: &Step<D>,
        (counts, inputs): (&RunCounts, &GraphInputs<'_>),
    ) -> Result<(), BackendError> {
        let launch = match step {
            Step::Launch(launch) => launch,
            Step::Host(step) => return step.run(device, self, inputs),
        };
        let grid = launch.grid.blocks(counts)?;
        if grid.contains(&0) {
            return Ok(());
        }
        let operands = launch.operands.iter();
        let operands = operands.map(|operand| self.region(device, operand).map(Argument::Buffer));
        let mut arguments = operands.collect::<Result<Vec<_>, _>>()?;
        arguments.push(Argument::Settings(&launch.settings));
        device.launch(&launch.kernel, grid, &arguments)
    }

    /// The place of an operand.
    ///
    /// # Errors
    /// If its buffer was not allocated, which no program lets happen.
    pub(crate) fn region<'s>(
        &'s self,
        device: &D,
        operand: &'s Operand<D>,
    ) -> Result<Region<'s, D>, BackendError> {
        let (buffer, at) = match operand {
            Operand::Scratch(at) => (self.scratch, *at),
            Operand::Inputs(at) => (self.inputs, *at),
            Operand::Rows(number) => (self.rows.buffer(*number), 0),
            Operand::Weight(weight) => (Some(&weight.buffer), 0),
        };
        let buffer = buffer.ok_or_else(|| BackendError::Device {
            backend: device.name(),
            reason: "a buffer of a program is not there".to_owned(),
        })?;
        Ok(Region { buffer, at })
    }
}
