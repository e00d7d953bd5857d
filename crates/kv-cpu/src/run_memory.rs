//! [`RunMemory`]: the memory that runs write to, which all programs of a backend share.
//!
//! Invariant: it has room for every program that was compiled, so no run allocates. Programs run
//! one after the other, and none leaves anything for the next. Does not know what steps compute.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_backend::BackendError;
use kv_rows::RowLayout;

use crate::activations::RowBuffer;
use crate::attend::{Scratch, Workspace};
use crate::execute::{ExpertBuffers, GatedRow, gated_len, pieces_of_output};
use crate::plan::{AttentionOp, PlainStep, Plan, Prologue, StepOp};
use crate::storage::AlignedBytes;
use crate::values::Buf;

/// The memory of runs: intermediate values, quantized activations, and the buffers of attention and
/// experts.
#[derive(Debug)]
pub(crate) struct RunMemory {
    pub(crate) arena: AlignedBytes,
    pub(crate) quantized: [RowBuffer; 3],
    pub(crate) gated_row: GatedRow,
    /// One for each thread.
    pub(crate) scratch: Vec<Mutex<Scratch>>,
    pub(crate) attention: Workspace,
    pub(crate) experts: ExpertBuffers,
}

/// The lock's data: whatever a run that panicked left there, the next one writes before it reads.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes room in the buffers of each thread.
fn of_each_thread(scratch: &mut [Mutex<Scratch>], reserve: impl Fn(&mut Scratch)) {
    for own in scratch {
        reserve(own.get_mut().unwrap_or_else(PoisonError::into_inner));
    }
}

impl RunMemory {
    /// Nothing yet, for so many threads.
    pub(crate) fn new(n_threads: usize) -> Result<Self, BackendError> {
        Ok(Self {
            arena: arena_of(0)?,
            quantized: RowBuffer::of_each_kind(),
            gated_row: GatedRow::new(),
            scratch: (0..n_threads).map(|_| Mutex::default()).collect(),
            attention: Workspace::default(),
            experts: ExpertBuffers::default(),
        })
    }

    /// Makes room for the runs of a plan.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`]; programs that were compiled before have their room then.
    pub(crate) fn reserve(&mut self, plan: &Plan, layout: &RowLayout) -> Result<(), BackendError> {
        if plan.arena_bytes() > self.arena.bytes().len() {
            self.arena = arena_of(plan.arena_bytes())?;
        }
        let n_tokens = plan.capacity.n_tokens;
        let n_threads = self.scratch.len();
        for step in &plan.steps {
            let x = step.reads.first().copied().unwrap_or(Buf::EMPTY);
            match &step.op {
                StepOp::MatMul(matmul) => {
                    if !matches!(matmul.prologue, Prologue::None) {
                        of_each_thread(&mut self.scratch, |own| own.reserve_row(x.width));
                    }
                    for rows in &mut self.quantized {
                        if matmul.takes(rows.kind()) {
                            rows.reshape(x.rows, x.width);
                        }
                    }
                    self.gated_row.begin(matmul);
                    for output in matmul.outputs.iter().filter(|o| o.gate().is_some()) {
                        // Fewer rows have wider tasks.
                        let len = |rows| {
                            let (_, step) = pieces_of_output(output, rows, n_threads);
                            gated_len(rows, step)
                        };
                        let len = (1..=x.rows).map(len).max().unwrap_or(0);
                        of_each_thread(&mut self.scratch, |own| own.reserve_row(len));
                    }
                }
                StepOp::Experts(op) => {
                    let Some((matrices, n_used)) = op.matrices() else {
                        continue;
                    };
                    let n_slots = x.rows * n_used;
                    let kind = matrices.activation_kind();
                    for rows in self.quantized.iter_mut().filter(|rows| rows.kind() == kind) {
                        rows.reshape(n_slots, matrices.n_columns());
                    }
                    self.experts.reserve(matrices, n_slots);
                }
                StepOp::Attention(
                    AttentionOp::Attend { spec, .. }
                    | AttentionOp::AttendSparse { spec, .. }
                    | AttentionOp::AttendBatch { spec, .. },
                ) => {
                    of_each_thread(&mut self.scratch, |own| own.reserve(spec, n_tokens));
                    self.attention.reserve(spec, n_tokens);
                }
                StepOp::Attention(AttentionOp::Index { index, .. }) => {
                    of_each_thread(&mut self.scratch, |own| own.reserve_row(index.dim));
                }
                StepOp::Attention(AttentionOp::Plain(of)) => {
                    if let PlainStep::Scores { layer } | PlainStep::Sum { layer } = of.step
                        && let Some(rows) = layout.layers().get(layer)
                    {
                        of_each_thread(&mut self.scratch, |own| own.reserve_rows(rows));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Bytes that are allocated.
    pub(crate) fn n_bytes(&self) -> usize {
        let buffers = [
            self.arena.bytes().len(),
            self.quantized.iter().map(RowBuffer::n_bytes).sum(),
            self.scratch.iter().map(|of| locked(of).n_bytes()).sum(),
            self.attention.n_bytes(),
            self.experts.n_bytes(),
        ];
        buffers.iter().sum()
    }
}

fn arena_of(n_bytes: usize) -> Result<AlignedBytes, BackendError> {
    AlignedBytes::zeroed(n_bytes, "intermediate values")
}
