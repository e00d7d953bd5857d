//! Two products of which one gates the other, computed together, and the row of one token rounded while it is made.
//!
//! Invariant: values and rounded values have the bits that one product after the other, the gate and the rounding
//! would give them. Does not know how weights are stored or multiplied.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::backend::BackendError;

use crate::activations::{Activations, PART, RowBuffer, SharedRows};
use crate::kernels::Kernels;
use crate::kernels::fetch::Level;
use crate::matrix::Matrix;
use crate::output::OutputColumns;
use crate::plan::{Buf, Gated, Product};
use crate::values::{Frame, SharedValues};

use super::{gate, piece};

/// Memory for one gated row that is rounded part by part, each as soon as it is complete.
#[derive(Debug)]
pub(crate) struct GatedRow {
    rows: [RowBuffer; 3],
    /// How many values of each part there are.
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

    /// Memory for what one of these products gates, where that is rounded: begins such a row.
    pub(crate) fn begin<V>(&mut self, products: &[Product<V>]) -> Option<Rounding<'_>> {
        let (kind, width) = products.iter().find_map(|product| {
            let kind = product.gates.as_ref()?.rounded?;
            Some((kind, product.matrix.n_rows()))
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
        Some(Rounding { row, n_done, width })
    }

    /// The row that was begun last, once all of its values were added.
    pub(crate) fn rows(&self) -> &[RowBuffer; 3] {
        &self.rows
    }
}

/// A row that several threads make and round.
#[derive(Clone, Copy)]
pub(crate) struct Rounding<'a> {
    row: SharedRows<'a>,
    n_done: &'a [AtomicUsize],
    width: usize,
}

impl Rounding<'_> {
    /// Takes note that `values` has these columns now, and rounds what is complete with them.
    ///
    /// # Safety
    /// Columns are added once, by the thread that wrote them, and not written after that.
    unsafe fn add(&self, kernels: &Kernels, values: SharedValues<'_>, columns: Range<usize>) {
        for part in columns.start / PART..columns.end.div_ceil(PART) {
            let all = piece(part, PART, self.width);
            let n_added = columns.end.min(all.end) - columns.start.max(all.start);
            // Whoever completes a part sees what the others have written of it.
            let n_before = self.n_done[part].fetch_add(n_added, Ordering::AcqRel);
            if n_before + n_added == all.len() {
                // SAFETY: nobody writes these columns any more, only one completes them, and the rows are read when
                // all tasks are done.
                unsafe { self.row.prepare_part(kernels, part, values.range(all)) };
            }
        }
    }
}

/// Values of two products that one task computes, one to gate the other.
pub(crate) fn gated_len(n_tokens: usize, n_columns: usize) -> usize {
    2 * n_tokens * n_columns
}

/// Rows that are gated, and put where they belong, at a time.
const ROWS: usize = 16;

/// One product that gates another one.
#[derive(Clone, Copy)]
pub(super) struct GatedProduct<'a> {
    pub(super) product: &'a Product<Buf>,
    pub(super) gated: &'a Gated,
    /// Where the result is one row that is rounded at once.
    pub(super) rounding: Option<Rounding<'a>>,
}

impl GatedProduct<'_> {
    /// Computes some columns in memory of their own, from which nothing drives them out until they are gated.
    pub(super) fn multiply<'a>(
        &self,
        (kernels, frame): (&Kernels, &Frame<'_>),
        acts: impl Fn(&Matrix) -> Activations<'a>,
        columns: Range<usize>,
        room: &mut [f32],
    ) -> Result<(), BackendError> {
        let (product, gated) = (self.product, self.gated);
        let n = columns.len();
        let (gate_values, up) = room.split_at_mut(room.len() / 2);
        let of_both = [
            (&product.matrix, &product.bias, &mut *gate_values),
            (&gated.matrix, &gated.bias, &mut *up),
        ];
        for (matrix, bias, values) in of_both {
            let mut to = OutputColumns::alone(values, matrix.n_rows(), columns.clone());
            matrix.multiply(kernels, acts(matrix), &mut to)?;
            if let Some(bias) = bias {
                let bias = &bias[columns.clone()];
                values
                    .chunks_exact_mut(n)
                    .for_each(|row| (kernels.add)(row, bias));
            }
        }
        let gate = gate(kernels, gated.activation)?;
        let out = product.out;
        let to = frame.write(out);
        let start_of = |row: usize| row * out.width + columns.start;
        let some = gate_values.chunks_mut(ROWS * n).zip(up.chunks(ROWS * n));
        for (at, (gate_values, up)) in some.enumerate() {
            // Where the next ones go is far apart, and seldom near.
            for row in (at + 1) * ROWS..out.rows.min((at + 2) * ROWS) {
                let start = to.start().wrapping_add(start_of(row));
                Level::of_streams().fetch(start.cast(), n * size_of::<f32>());
            }
            gate(gate_values, up);
            for (row, values) in (at * ROWS..).zip(gate_values.chunks_exact(n)) {
                let start = start_of(row);
                // SAFETY: these columns belong to this task.
                unsafe { to.range(start..start + n) }.copy_from_slice(values);
            }
        }
        if let Some(rounding) = &self.rounding {
            // SAFETY: they were just written, by the one task that they belong to.
            unsafe { rounding.add(kernels, to, columns) };
        }
        Ok(())
    }
}
