//! Matrix multiplications: the pieces that a matrix is cut into, and what a task computes of one.
//!
//! Invariant: every column of an output belongs to one task, and the rows are quantized before any
//! task reads them. Does not know how weights are stored or multiplied: that is [`Matrix`]'s.

use std::ops::Range;
use std::sync::PoisonError;

use kv_backend::{BackendError, StepKind};

use crate::activations::{ActivationKind, Activations, RowBuffer};
use crate::kernels::Kernels;
use crate::kernels::prefetch::CacheLevel;
use crate::matrix::Matrix;
use crate::output::SharedOutput;
use crate::plan::{Epilogue, MatMul, MatMulOutput, Prologue, Step};
use crate::values::{Buf, Frame};

use super::elementwise::{GateKernel, gate_kernel};
use super::gate_epilogue::{GatedOutput, gated_len};
use super::{ROWS_STEP, Run, TASKS_PER_THREAD, VALUES_PER_TASK, piece};

/// Weight rows of a task come in multiples of this for several tokens: the rows that kernels take
/// at a time.
const PANEL_STEP: usize = 32;
/// The same for weights without a scale: whole tiles, and so many that reading all tokens once for
/// them is no longer the bottleneck.
const FLOATS_STEP: usize = 48;
/// Weight bytes that are worth a task of their own.
const MIN_BYTES_PER_TASK: usize = 16 * 1024;
/// Weight bytes that a task has at most.
const MAX_BYTES_PER_TASK: usize = 256 * 1024;
/// Tokens whose multiplication takes about as long as reading the weights from memory.
const TOKENS_PER_READ: usize = 16;

/// [`Prologue`], with what it reads.
#[derive(Clone, Copy)]
enum RowPrologue<'a> {
    None,
    RmsNorm { gain: &'a [f32], eps: f32 },
    Gate { kernel: GateKernel, up: &'a [f32] },
}

impl Run<'_> {
    /// Prefetches the weights of the next matrix multiplication: waiting threads read the first
    /// pieces, this one the gain of its prologue.
    pub(crate) fn prefetch_next_matmul(&self, steps: &[Step<Buf>]) {
        let next = steps.iter().find_map(|step| Some((step.matmul()?, step)));
        let Some((matmul, step)) = next else {
            return;
        };
        let (n_tokens, Some(first)) = (step.read(0).rows, matmul.outputs.first()) else {
            return;
        };
        if let Prologue::RmsNorm { gain, .. } = &matmul.prologue {
            CacheLevel::L2.prefetch(gain.as_ptr().cast(), size_of_val(&**gain));
        }
        let n_tasks = self.n_pieces(matmul, n_tokens);
        let matrix = &first.matrix;
        let (n_first, rows) = pieces_of_output(first, n_tokens, self.n_threads);
        let n_rows = (n_tasks / self.n_threads).min(n_first) * rows;
        self.lead
            .hint_next_job(matrix.start(), n_rows * matrix.row_bytes());
    }

    /// Tasks that all matrices of so many rows are cut into.
    fn n_pieces(&self, matmul: &MatMul, n_rows: usize) -> usize {
        let pieces = |o: &MatMulOutput| pieces_of_output(o, n_rows, self.n_threads).0;
        matmul.outputs.iter().map(pieces).sum()
    }

    /// Quantizes the rows for every kind of activations that a matrix reads, after the prologue.
    fn quantize(&mut self, matmul: &MatMul, step: &Step<Buf>) -> Result<(), BackendError> {
        let x = step.read(0);
        let shared = self.quantized.each_mut().map(|rows| {
            matmul.takes(rows.kind()).then(|| {
                rows.reshape(x.rows, x.width);
                rows.shared()
            })
        });
        if shared.iter().all(Option::is_none) {
            return Ok(());
        }
        // SAFETY: allocation lets no step write what it reads.
        let read = |buf: Buf| unsafe { self.frame.read(buf) };
        let (values, kernels, scratch) = (read(x), self.kernels, self.scratch);
        let prologue = match &matmul.prologue {
            Prologue::None | Prologue::Quantized => RowPrologue::None,
            Prologue::RmsNorm { gain, eps } => RowPrologue::RmsNorm { gain, eps: *eps },
            Prologue::Gate {
                activation,
                read: operand,
            } => RowPrologue::Gate {
                kernel: gate_kernel(kernels, *activation)?,
                up: read(step.read(*operand)),
            },
        };
        let per_task = (VALUES_PER_TASK / x.width.max(1)).max(1);
        self.lead.each(x.rows.div_ceil(per_task), &|thread, task| {
            let mut scratch = scratch[thread]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            for row in piece(task, per_task, x.rows) {
                let range = row * x.width..(row + 1) * x.width;
                let values = match prologue {
                    RowPrologue::None => &values[range],
                    RowPrologue::RmsNorm { gain, eps } => {
                        let to = scratch.row(x.width);
                        (kernels.rms_norm)(&values[range], gain, eps, to);
                        to
                    }
                    RowPrologue::Gate { kernel, up } => {
                        let to = scratch.row(x.width);
                        to.copy_from_slice(&values[range.clone()]);
                        kernel(to, &up[range]);
                        to
                    }
                };
                for shared in shared.iter().flatten() {
                    // SAFETY: each row belongs to one task, and no task reads before all are done.
                    unsafe { shared.quantize_row(kernels, row, values) };
                }
            }
            Ok(())
        })
    }

    /// All matrices of the same rows: the rows are quantized once, then tasks take pieces of the
    /// matrices.
    pub(super) fn matmul(&mut self, matmul: &MatMul, step: &Step<Buf>) -> Result<(), BackendError> {
        let x = step.read(0);
        if x.rows == 0 {
            return Ok(());
        }
        if !matches!(matmul.prologue, Prologue::Quantized) {
            self.quantize(matmul, step)?;
        }
        self.profiler.record(|| (StepKind::Quantize, 0));
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let kernels = self.kernels;
        let (frame, n_threads) = (self.frame, self.n_threads);
        let n_tasks = self.n_pieces(matmul, x.rows);
        let (rows, quantized) = match matmul.prologue {
            Prologue::Quantized => (self.gated_row.rows(), None),
            _ => (&*self.quantized, self.gated_row.begin(matmul)),
        };
        let acts = |matrix: &Matrix| {
            let kind = matrix.activation_kind();
            let rows = rows.iter().find(|rows| rows.kind() == kind);
            rows.map_or(Activations::F32(values), RowBuffer::rows)
        };
        let scratch = self.scratch;
        let task = |thread: usize, mut task: usize| {
            for (output, &out) in matmul.outputs.iter().zip(&step.writes) {
                let (n, rows_per_task) = pieces_of_output(output, x.rows, n_threads);
                if task >= n {
                    task -= n;
                    continue;
                }
                let columns = piece(task, rows_per_task, output.matrix.n_rows());
                let Some(gate) = output.gate() else {
                    let plain = PlainOutput {
                        output,
                        residual: residual(output, step),
                        out,
                    };
                    return plain.multiply(kernels, &frame, acts(&output.matrix), columns);
                };
                let mut scratch = scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                let scratch = scratch.row(gated_len(x.rows, columns.len()));
                let gated = GatedOutput {
                    output,
                    gate,
                    quantized,
                    out,
                };
                return gated.multiply(kernels, &frame, acts, columns, scratch);
            }
            Ok(())
        };
        self.lead.each(n_tasks, &task)
    }
}

/// The buffer of an output's residual.
fn residual(output: &MatMulOutput, step: &Step<Buf>) -> Option<Buf> {
    match output.epilogue {
        Epilogue::Residual { read } => Some(step.read(read)),
        _ => None,
    }
}

/// Number of pieces of an output's matrix, and weight rows of each.
pub(crate) fn pieces_of_output(
    output: &MatMulOutput,
    n_tokens: usize,
    n_threads: usize,
) -> (usize, usize) {
    // As many tasks as one matrix after the other would be.
    let n_matrices = match (output.gate(), n_tokens) {
        (Some(_), 1) => 2,
        _ => 1,
    };
    pieces_of(&output.matrix, n_tokens, n_matrices * n_threads)
}

/// Number of pieces of a matrix that is multiplied with `n_tokens` rows, and weight rows of each.
pub(super) fn pieces_of(matrix: &Matrix, n_tokens: usize, n_threads: usize) -> (usize, usize) {
    let n_rows = matrix.n_rows();
    // For many tokens a row is work for longer.
    let work = matrix.row_bytes() * n_tokens.div_ceil(TOKENS_PER_READ);
    let worth = MIN_BYTES_PER_TASK.div_ceil(work.max(1));
    let share = n_rows.div_ceil(n_threads * TASKS_PER_THREAD);
    let most = MAX_BYTES_PER_TASK.div_ceil(work.max(1));
    let step = share.min(most).max(worth);
    let multiple = match (n_tokens, matrix.activation_kind()) {
        (1, _) => ROWS_STEP,
        (_, ActivationKind::F32 | ActivationKind::Bf16) => FLOATS_STEP,
        _ => PANEL_STEP,
    };
    let step = step.next_multiple_of(multiple);
    (n_rows.div_ceil(step), step)
}

/// One output whose epilogue adds a residual, or nothing.
struct PlainOutput<'a> {
    output: &'a MatMulOutput,
    residual: Option<Buf>,
    out: Buf,
}

impl PlainOutput<'_> {
    /// Some columns, with bias and residual.
    fn multiply(
        &self,
        kernels: &Kernels,
        frame: &Frame<'_>,
        acts: Activations<'_>,
        columns: Range<usize>,
    ) -> Result<(), BackendError> {
        let (output, out) = (self.output, self.out);
        let values = frame.write(out);
        // SAFETY: `values` are `out.rows` rows of `out.width`, initialised (the arena was zeroed),
        // and each column belongs to one task.
        let mut to = unsafe {
            SharedOutput::from_raw(values.start(), out.rows, out.width).columns(columns.clone())
        };
        output.matrix.multiply(kernels, acts, &mut to)?;
        for row in 0..out.rows {
            let range = row * out.width + columns.start..row * out.width + columns.end;
            if let Some(bias) = &output.bias {
                // SAFETY: these columns belong to this task, which no longer writes them through
                // `to`.
                let to = unsafe { values.range(range.clone()) };
                (kernels.add)(to, &bias[columns.clone()]);
            }
            if let Some(residual) = self.residual {
                // SAFETY: these columns belong to this task; the residual is another buffer, which
                // no task writes in this step.
                unsafe { (kernels.add)(values.range(range.clone()), &frame.read(residual)[range]) };
            }
        }
        Ok(())
    }
}
