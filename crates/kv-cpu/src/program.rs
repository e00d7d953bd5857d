//! [`CpuProgram`]: a plan with all the memory that its runs need.
//!
//! Invariant: a run allocates nothing once outputs have their size. Knows how a run begins and
//! ends; what each step does is in [`crate::execute`].

use std::sync::Mutex;

use kv_backend::{BackendError, Profile, Profiler, StepKind};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::layers::RowLayout;

use crate::activations::RowBuffer;
use crate::attend::{Scratch, Workspace};
use crate::execute::{Angles, ExpertBuffers, GatedRow, Run, gated_len, pieces_of_output};
use crate::kernels::Kernels;
use crate::plan::{AttentionOp, PlainStep, Plan, Prologue, StepOp};
use crate::storage::{AlignedBytes, CpuRows};
use crate::team::Team;
use crate::validate::{InputScratch, check_inputs};
use crate::values::{Buf, Frame, SharedValues};

/// A compiled graph with its scratch memory.
pub struct CpuProgram {
    plan: Plan,
    layout: RowLayout,
    arena: AlignedBytes,
    quantized: [RowBuffer; 3],
    gated_row: GatedRow,
    angles: Vec<Angles>,
    scratch: Vec<Mutex<Scratch>>,
    attention: Workspace,
    experts: ExpertBuffers,
    marks: InputScratch,
    /// Empty between runs; kept for its capacity.
    outputs: Vec<SharedValues<'static>>,
}

/// The memory of a program, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramMemory {
    /// The arena that holds all intermediate values.
    pub arena: usize,
    /// Their bytes if no two buffers shared memory.
    pub without_reuse: usize,
    /// All that a run writes to: the arena, quantized activations, and the buffers of attention,
    /// experts and rotations.
    pub total: usize,
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
        n_threads: usize,
    ) -> Result<Self, BackendError> {
        let arena = AlignedBytes::zeroed(plan.arena_len * size_of::<f32>(), "intermediate values")?;
        let n_tokens = plan.capacity.n_tokens;
        let mut quantized = RowBuffer::of_each_kind();
        let mut gated_row = GatedRow::new();
        let mut experts = ExpertBuffers::default();
        let mut attention = Workspace::default();
        let mut scratch: Vec<Scratch> = (0..n_threads).map(|_| Scratch::default()).collect();
        for step in &plan.steps {
            let x = step.reads.first().copied().unwrap_or(Buf::EMPTY);
            match &step.op {
                StepOp::MatMul(matmul) => {
                    if !matches!(matmul.prologue, Prologue::None) {
                        scratch.iter_mut().for_each(|s| s.reserve_row(x.width));
                    }
                    for rows in &mut quantized {
                        if matmul.takes(rows.kind()) {
                            rows.reshape(x.rows, x.width);
                        }
                    }
                    gated_row.begin(matmul);
                    for output in matmul.outputs.iter().filter(|o| o.gate().is_some()) {
                        // Fewer rows have wider tasks.
                        let len = |rows| {
                            let (_, step) = pieces_of_output(output, rows, n_threads);
                            gated_len(rows, step)
                        };
                        let len = (1..=x.rows).map(len).max().unwrap_or(0);
                        scratch.iter_mut().for_each(|s| s.reserve_row(len));
                    }
                }
                StepOp::Experts(op) => {
                    let Some((matrices, n_used)) = op.matrices() else {
                        continue;
                    };
                    let n_slots = x.rows * n_used;
                    let kind = matrices.activation_kind();
                    for rows in quantized.iter_mut().filter(|rows| rows.kind() == kind) {
                        rows.reshape(n_slots, matrices.n_columns());
                    }
                    experts.reserve(matrices, n_slots);
                }
                StepOp::Attention(
                    AttentionOp::Attend { spec, .. }
                    | AttentionOp::AttendSparse { spec, .. }
                    | AttentionOp::AttendBatch { spec, .. },
                ) => {
                    scratch.iter_mut().for_each(|s| s.reserve(spec, n_tokens));
                    attention.reserve(spec, n_tokens);
                }
                StepOp::Attention(AttentionOp::Index { index, .. }) => {
                    scratch.iter_mut().for_each(|s| s.reserve_row(index.dim));
                }
                StepOp::Attention(AttentionOp::Plain(of)) => {
                    if let PlainStep::Scores { layer } | PlainStep::Sum { layer } = of.step
                        && let Some(rows) = layout.layers().get(layer)
                    {
                        scratch.iter_mut().for_each(|s| s.reserve_rows(rows));
                    }
                }
                _ => {}
            }
        }
        let angles = plan
            .ropes
            .iter()
            .map(|t| Angles::new(n_tokens, t.frequencies.len()));
        Ok(Self {
            layout: layout.clone(),
            arena,
            quantized,
            gated_row,
            angles: angles.collect(),
            scratch: scratch.into_iter().map(Mutex::new).collect(),
            attention,
            experts,
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
        let bytes = |n_values| n_values * size_of::<f32>();
        let arena = bytes(self.plan.arena_len);
        let of_thread = |scratch: &Mutex<Scratch>| match scratch.lock() {
            Ok(scratch) => scratch.n_bytes(),
            Err(poisoned) => poisoned.into_inner().n_bytes(),
        };
        let buffers = [
            self.quantized.iter().map(RowBuffer::n_bytes).sum(),
            self.angles.iter().map(Angles::n_bytes).sum(),
            self.scratch.iter().map(of_thread).sum::<usize>(),
            self.attention.n_bytes(),
            self.experts.n_bytes(),
        ];
        ProgramMemory {
            arena,
            without_reuse: bytes(self.plan.total_len),
            total: arena + buffers.iter().sum::<usize>(),
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
        let profiler = Profiler::start(profile);
        let buffers = outputs.resize(self.plan.outputs.iter().map(Buf::len));
        let mut shared = reuse(std::mem::take(&mut self.outputs));
        shared.extend(buffers.iter_mut().map(|b| SharedValues::new(b)));
        let frame = Frame {
            arena: SharedValues::new(self.arena.floats_mut()),
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
            quantized: &mut self.quantized,
            gated_row: &mut self.gated_row,
            angles: &mut self.angles,
            ropes: &self.plan.ropes,
            scratch: &self.scratch,
            attention: &mut self.attention,
            experts: &mut self.experts,
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
