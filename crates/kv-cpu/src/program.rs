//! [`CpuProgram`]: a plan, and the memory that its runs need.
//!
//! Invariant: a run allocates nothing once outputs have their size. Knows how a run begins and
//! ends; what each step does is in [`crate::execute`].

use std::sync::{Arc, Mutex};

use kv_backend::{BackendError, Profile, Profiler, StepKind};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_rows::RowLayout;

use crate::execute::{Angles, Run};
use crate::kernels::Kernels;
use crate::plan::Plan;
use crate::run_memory::{RunMemory, locked};
use crate::storage::CpuRows;
use crate::team::Team;
use crate::validate::{InputScratch, check_inputs};
use crate::values::{Buf, Frame, SharedValues};

/// A compiled graph.
pub struct CpuProgram {
    plan: Plan,
    layout: RowLayout,
    /// That of all programs of the backend.
    memory: Arc<Mutex<RunMemory>>,
    angles: Vec<Angles>,
    marks: InputScratch,
    /// Empty between runs; kept for its capacity.
    outputs: Vec<SharedValues<'static>>,
}

/// The memory of a program, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramMemory {
    /// All intermediate values, in the arena that the programs of a backend share.
    pub arena: usize,
    /// Their bytes if no two buffers shared memory.
    pub without_reuse: usize,
    /// The part that is not shared with other programs: the angles of rotations.
    pub own: usize,
}

impl std::fmt::Debug for CpuProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (n_steps, memory) = (self.n_steps(), self.memory());
        f.debug_struct("CpuProgram")
            .field("n_steps", &n_steps)
            .field("memory", &memory)
            .finish()
    }
}

impl CpuProgram {
    pub(crate) fn new(
        plan: Plan,
        layout: &RowLayout,
        memory: Arc<Mutex<RunMemory>>,
    ) -> Result<Self, BackendError> {
        locked(&memory).reserve(&plan, layout)?;
        let n_tokens = plan.capacity.n_tokens;
        let angles = plan
            .ropes
            .iter()
            .map(|t| Angles::new(n_tokens, t.frequencies.len()));
        Ok(Self {
            layout: layout.clone(),
            memory,
            angles: angles.collect(),
            marks: InputScratch::default(),
            outputs: Vec::with_capacity(plan.outputs.len()),
            plan,
        })
    }

    /// Number of steps of a run.
    pub fn n_steps(&self) -> usize {
        self.plan.steps.len()
    }

    /// Memory for intermediate values.
    pub fn memory(&self) -> ProgramMemory {
        ProgramMemory {
            arena: self.plan.arena_bytes(),
            without_reuse: self.plan.total_len * size_of::<f32>(),
            own: self.angles.iter().map(Angles::n_bytes).sum(),
        }
    }

    pub(crate) fn run(
        &mut self,
        (kernels, team, profile): (&Kernels, &Team, Option<&Profile>),
        rows: &mut CpuRows,
        (inputs, outputs): (&GraphInputs<'_>, &mut GraphOutputs),
    ) -> Result<(), BackendError> {
        if *rows.layout() != self.layout {
            let reason = format!(
                "the program was compiled for {} layers of {} bytes, the rows are {} of {}",
                self.layout.layers().len(),
                self.layout.bytes(),
                rows.layout().layers().len(),
                rows.layout().bytes()
            );
            return Err(BackendError::Input {
                input: "rows",
                reason,
            });
        }
        let shape = self.plan.begin_run(inputs)?;
        check_inputs(&self.plan.needs, shape, inputs, &mut self.marks)?;
        let lead = team.lead();
        let mut memory = locked(&self.memory);
        let memory = &mut *memory;
        let profiler = Profiler::start(profile);
        let buffers = outputs.resize(self.plan.outputs.iter().map(Buf::len));
        let mut shared = reuse(std::mem::take(&mut self.outputs));
        shared.extend(buffers.iter_mut().map(|b| SharedValues::new(b)));
        let frame = Frame {
            arena: SharedValues::new(memory.arena.floats_mut()),
            outputs: &shared,
            embeddings: inputs.embeddings,
        };
        let mut run = Run {
            kernels,
            profiler,
            lead,
            n_threads: team.n_threads(),
            frame,
            inputs,
            quantized: &mut memory.quantized,
            gated_row: &mut memory.gated_row,
            angles: &mut self.angles,
            ropes: &self.plan.ropes,
            scratch: &memory.scratch,
            attention: &mut memory.attention,
            experts: &mut memory.experts,
        };
        let steps = &self.plan.steps;
        run.prefetch_next_matmul(steps);
        let result = run.rotations().and_then(|()| {
            run.profiler.record(|| (StepKind::Elementwise, 0));
            steps.iter().enumerate().try_for_each(|(at, step)| {
                inputs.check_cancelled()?;
                inputs.report_step(at, steps.len());
                if step.matmul().is_some() {
                    run.prefetch_next_matmul(&steps[at + 1..]);
                }
                run.step(step, rows)?;
                run.profiler.record(|| step.op.kind_and_weight_bytes());
                Ok(())
            })
        });
        drop(run);
        self.outputs = reuse(shared);
        result
    }
}

/// The same vector, emptied, for values of another lifetime: keeps its memory (the standard library
/// collects in place where size and alignment stay; the test of allocations would notice).
fn reuse<'a>(mut values: Vec<SharedValues<'_>>) -> Vec<SharedValues<'a>> {
    values.clear();
    values.into_iter().map(SharedValues::emptied).collect()
}
