//! Runs the steps of a program, divided among the thread team.
//!
//! Invariant: how work is divided changes no bit of the result: every value is computed by one task
//! from the same operands in the same order. Does not know graphs.

mod attention;
mod custom;
mod elementwise;
mod experts;
mod gate_epilogue;
mod matmul;
mod norm;
mod recurrent;
mod rows;

use std::ops::Range;
use std::sync::Mutex;

use kv_backend::GraphInputs;
use kv_backend::{BackendError, Profiler};

use crate::activations::RowBuffer;
use crate::attend::{Scratch, Workspace};
use crate::kernels::Kernels;
use crate::plan::{RopeTable, Step, StepOp};
use crate::storage::CpuRows;
use crate::team::TeamGuard;
use crate::values::{Buf, Frame, SharedValues};

pub(crate) use experts::{ExpertBuffers, ExpertMatrices, Experts, ReadExperts};
pub(crate) use gate_epilogue::{GatedRow, gated_len};
pub(crate) use matmul::pieces_of_output;

/// Values that are worth a task of their own: some microseconds of elementwise work.
pub(crate) const VALUES_PER_TASK: usize = 8192;
/// Tasks for each thread: where a thread is preempted, others take most of its share, and all end
/// at about the same time.
const TASKS_PER_THREAD: usize = 10;
/// Weight rows of a task come in multiples of this: outputs of two tasks share no cache line.
const ROWS_STEP: usize = 16;

/// Computes one row of a buffer: `(row, values)`.
type FillRow<'a> = dyn Fn(usize, &mut [f32]) -> Result<(), BackendError> + Sync + 'a;

/// Cosines and sines of a ubatch's positions, `[tokens, pairs]` each.
#[derive(Debug)]
pub(crate) struct Angles {
    n_pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    pub(crate) fn n_bytes(&self) -> usize {
        (self.cos.capacity() + self.sin.capacity()) * size_of::<f32>()
    }

    pub(crate) fn new(n_tokens: usize, n_pairs: usize) -> Self {
        let zeros = || vec![0.0; n_tokens * n_pairs];
        Self {
            n_pairs,
            cos: zeros(),
            sin: zeros(),
        }
    }
}

/// One run of a program.
pub(crate) struct Run<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) lead: TeamGuard<'a>,
    pub(crate) n_threads: usize,
    pub(crate) frame: Frame<'a>,
    pub(crate) inputs: &'a GraphInputs<'a>,
    /// The rows of the current matrix multiplication, one buffer for each kind of activations.
    pub(crate) quantized: &'a mut [RowBuffer; 3],
    pub(crate) gated_row: &'a mut GatedRow,
    pub(crate) angles: &'a mut [Angles],
    pub(crate) ropes: &'a [RopeTable],
    pub(crate) scratch: &'a [Mutex<Scratch>],
    pub(crate) attention: &'a mut Workspace,
    pub(crate) experts: &'a mut ExpertBuffers,
    pub(crate) profiler: Profiler<'a>,
}

/// The `at`-th piece of `n` things cut into pieces of `step`.
pub(crate) fn piece(at: usize, step: usize, n: usize) -> Range<usize> {
    at * step..((at + 1) * step).min(n)
}

impl Run<'_> {
    /// The angles of every rotation, once for all layers.
    pub(crate) fn rotations(&mut self) -> Result<(), BackendError> {
        let GraphInputs {
            positions,
            coordinates,
            ..
        } = *self.inputs;
        for (table, angles) in self.ropes.iter().zip(self.angles.iter_mut()) {
            let n = angles.n_pairs;
            let (cos, sin) = (
                SharedValues::new(&mut angles.cos),
                SharedValues::new(&mut angles.sin),
            );
            let tokens_per_task = (VALUES_PER_TASK / 16 / n.max(1)).max(1);
            let n_tokens = match table.sections {
                None => positions.len(),
                Some(_) => coordinates.len(),
            };
            let n_tasks = n_tokens.div_ceil(tokens_per_task);
            self.lead.each(n_tasks, &|_, task| {
                for token in piece(task, tokens_per_task, n_tokens) {
                    let range = token * n..(token + 1) * n;
                    // SAFETY: each token belongs to one task.
                    let (cos, sin) = unsafe { (cos.range(range.clone()), sin.range(range)) };
                    let (spec, frequencies) = (&table.spec, table.frequencies.as_slice());
                    match &table.sections {
                        None => spec.angles(frequencies, positions[token], cos, sin),
                        Some(sections) => {
                            let at = coordinates[token];
                            spec.section_angles(frequencies, sections, at, cos, sin);
                        }
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Runs one step.
    pub(crate) fn step(
        &mut self,
        step: &Step<Buf>,
        rows: &mut CpuRows,
    ) -> Result<(), BackendError> {
        match &step.op {
            StepOp::MatMul(matmul) => self.matmul(matmul, step),
            StepOp::Elementwise(op) => self.elementwise(*op, step),
            StepOp::Norm(op) => self.norm(op, step),
            StepOp::Rows(op) => self.copy_rows(op, step),
            StepOp::Attention(op) => self.attention(op, step, rows),
            StepOp::Recurrent(op) => self.recurrent(op, step, rows),
            StepOp::Experts(op) => self.experts(op, step),
            StepOp::Custom(call) => self.custom(call, step, rows),
        }
    }

    /// Calls `fill(row, values)` for each row of `out`.
    fn rows(&mut self, out: Buf, fill: &FillRow<'_>) -> Result<(), BackendError> {
        let values = self.frame.write(out);
        let per_task = (VALUES_PER_TASK / out.width.max(1)).max(1);
        self.lead.each(out.rows.div_ceil(per_task), &|_, task| {
            piece(task, per_task, out.rows).try_for_each(|row| {
                // SAFETY: each row belongs to one task, and allocation lets no step read what it
                // writes.
                fill(row, unsafe {
                    values.range(row * out.width..(row + 1) * out.width)
                })
            })
        })
    }
}

impl Step<Buf> {
    /// The buffer of an operand; empty where there is none.
    fn read(&self, at: usize) -> Buf {
        self.reads.get(at).copied().unwrap_or(Buf::EMPTY)
    }

    /// The buffer of the first result; empty where there is none.
    fn write(&self) -> Buf {
        self.writes.first().copied().unwrap_or(Buf::EMPTY)
    }
}
