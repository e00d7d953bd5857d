//! The gate epilogue: two products of which one gates the other are computed together, and the row
//! of one token is quantized while it is made.
//!
//! Invariant: values and quantized values have the bits that one product after the other, the gate
//! and the quantization would give them. Does not know how weights are stored or multiplied.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_backend::BackendError;

use crate::activations::{Activations, PART, RowBuffer, SharedRows};
use crate::kernels::Kernels;
use crate::kernels::prefetch::CacheLevel;
use crate::matrix::Matrix;
use crate::output::OutputColumns;
use crate::plan::{GateEpilogue, MatMul, MatMulOutput};
use crate::values::{Buf, Frame, SharedValues};

use super::elementwise::gate_kernel;
use super::piece;

/// Memory for one gated row that is quantized part by part, each as soon as it is complete.
#[derive(Debug)]
pub(crate) struct GatedRow {
    rows: [RowBuffer; 3],
    /// Number of values of each part.
    n_done: Vec<AtomicUsize>,
}

impl GatedRow {
    /// No memory yet.
    pub(crate) fn new() -> Self {
        Self {
            rows: RowBuffer::of_each_kind(),
            n_done: Vec::new(),
        }
    }

    /// Begins the row that an epilogue of these outputs quantizes, where one does.
    pub(crate) fn begin(&mut self, matmul: &MatMul) -> Option<QuantizedRow<'_>> {
        let (kind, width) = matmul.outputs.iter().find_map(|output| {
            let kind = output.gate()?.quantize?;
            Some((kind, output.matrix.n_rows()))
        })?;
        let rows = self.rows.iter_mut().find(|rows| rows.kind() == kind)?;
        rows.reshape(1, width);
        let n_parts = width.div_ceil(PART);
        if self.n_done.len() < n_parts {
            self.n_done.resize_with(n_parts, AtomicUsize::default);
        }
        let n_done = &mut self.n_done[..n_parts];
        n_done.iter_mut().for_each(|n| *n.get_mut() = 0);
        let row = rows.shared();
        Some(QuantizedRow { row, n_done, width })
    }

    /// The row that was begun last, once all of its values were added.
    pub(crate) fn rows(&self) -> &[RowBuffer; 3] {
        &self.rows
    }
}

/// A row that several threads compute and quantize.
#[derive(Clone, Copy)]
pub(crate) struct QuantizedRow<'a> {
    row: SharedRows<'a>,
    n_done: &'a [AtomicUsize],
    width: usize,
}

impl QuantizedRow<'_> {
    /// Counts these columns of `values` as computed, and quantizes the parts that they complete.
    ///
    /// # Safety
    /// Columns are added once, by the thread that wrote them, and not written after that.
    unsafe fn add(&self, kernels: &Kernels, values: SharedValues<'_>, columns: Range<usize>) {
        for part in columns.start / PART..columns.end.div_ceil(PART) {
            let all = piece(part, PART, self.width);
            let n_added = columns.end.min(all.end) - columns.start.max(all.start);
            // The thread that completes a part sees what the others have written of it.
            let n_before = self.n_done[part].fetch_add(n_added, Ordering::AcqRel);
            if n_before + n_added == all.len() {
                // SAFETY: no thread writes these columns any more, one alone completes them, and
                // the rows are read when all tasks are done.
                unsafe { self.row.quantize_part(kernels, part, values.range(all)) };
            }
        }
    }
}

/// Scratch values of a task that computes both products of a gate.
pub(crate) fn gated_len(n_tokens: usize, n_columns: usize) -> usize {
    2 * n_tokens * n_columns
}

/// Rows that are gated and stored at a time.
const ROWS_PER_STORE: usize = 16;

/// One output with a gate epilogue.
#[derive(Clone, Copy)]
pub(super) struct GatedOutput<'a> {
    pub(super) output: &'a MatMulOutput,
    pub(super) gate: &'a GateEpilogue,
    /// The result as one row that is quantized at once, where it is.
    pub(super) quantized: Option<QuantizedRow<'a>>,
    pub(super) out: Buf,
}

impl GatedOutput<'_> {
    /// Computes some columns in `scratch`, which stays in the cache until they are gated.
    pub(super) fn multiply<'a>(
        &self,
        kernels: &Kernels,
        frame: &Frame<'_>,
        acts: impl Fn(&Matrix) -> Activations<'a>,
        columns: Range<usize>,
        scratch: &mut [f32],
    ) -> Result<(), BackendError> {
        let (output, gate) = (self.output, self.gate);
        let n = columns.len();
        let (gate_values, up) = scratch.split_at_mut(scratch.len() / 2);
        let both = [
            (&output.matrix, &output.bias, &mut *gate_values),
            (&gate.up, &gate.up_bias, &mut *up),
        ];
        for (matrix, bias, values) in both {
            let mut to = OutputColumns::alone(values, matrix.n_rows(), columns.clone());
            matrix.multiply(kernels, acts(matrix), &mut to)?;
            if let Some(bias) = bias {
                let bias = &bias[columns.clone()];
                values
                    .chunks_exact_mut(n)
                    .for_each(|row| (kernels.add)(row, bias));
            }
        }
        let kernel = gate_kernel(kernels, gate.activation)?;
        let out = self.out;
        let to = frame.write(out);
        let start_of = |row: usize| row * out.width + columns.start;
        let some = gate_values
            .chunks_mut(ROWS_PER_STORE * n)
            .zip(up.chunks(ROWS_PER_STORE * n));
        for (at, (gate_values, up)) in some.enumerate() {
            // The next rows are far apart in memory, and rarely in the cache.
            for row in (at + 1) * ROWS_PER_STORE..out.rows.min((at + 2) * ROWS_PER_STORE) {
                let start = to.start().wrapping_add(start_of(row));
                CacheLevel::for_streams().prefetch(start.cast(), n * size_of::<f32>());
            }
            kernel(gate_values, up);
            for (row, values) in (at * ROWS_PER_STORE..).zip(gate_values.chunks_exact(n)) {
                let start = start_of(row);
                // SAFETY: these columns belong to this task.
                unsafe { to.range(start..start + n) }.copy_from_slice(values);
            }
        }
        if let Some(quantized) = &self.quantized {
            // SAFETY: they were just written, by the one task that they belong to.
            unsafe { quantized.add(kernels, to, columns) };
        }
        Ok(())
    }
}
