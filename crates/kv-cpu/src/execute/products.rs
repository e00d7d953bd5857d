//! Products of rows with matrices: the pieces that a matrix is cut into, and what a task does to one.
//!
//! Invariant: every column of a product belongs to one task, and the rows are prepared before any
//! task reads them. Does not know how weights are stored or multiplied: that is [`Matrix`]'s.

use std::ops::Range;
use std::sync::PoisonError;

use kv_core::backend::BackendError;

use crate::activations::{ActivationKind, Activations, RowBuffer};
use crate::kernels::Kernels;
use crate::kernels::fetch::Level;
use crate::matrix::Matrix;
use crate::output::SharedOutput;
use crate::plan::{Before, Buf, Product, Step};
use crate::values::Frame;
use kv_core::backend::StepKind;

use super::gated::{GatedProduct, gated_len};
use super::{ChangeBy, ROWS_STEP, Run, TASKS_PER_THREAD, VALUES_PER_TASK, gate, piece};

/// What [`ROWS_STEP`] is for one token, for several, whose kernels take so many rows at a time.
const PANEL_STEP: usize = 32;
/// The same for weights without a scale: whole tiles, and so many that reading all tokens once for them is no
/// longer what takes the time.
const FLOATS_STEP: usize = 48;
/// Weight bytes that are worth a task of their own, and how many one should have at most.
const BYTES_PER_TASK: usize = 16 * 1024;
const MOST_BYTES_PER_TASK: usize = 256 * 1024;
/// Tokens whose multiplication takes about as long as reading the weights from memory.
const TOKENS_PER_READ: usize = 16;

/// [`Before`], with what it reads.
#[derive(Clone, Copy)]
enum RowBefore<'a> {
    Nothing,
    RmsNorm(&'a [f32], f32),
    Gate(ChangeBy, &'a [f32]),
}

impl Run<'_> {
    /// Lets whoever waits ask for the weights that are multiplied next, and asks for the gain before them: it comes from
    /// memory like them, once for every token.
    pub(crate) fn ask_for_first_of(&self, steps: &[Step<Buf>]) {
        let next = steps.iter().find_map(|step| match step {
            Step::Linear {
                x,
                before,
                products,
            } => products.first().map(|p| (p, x.rows, before, products)),
            _ => None,
        });
        if let Some((first, n_tokens, before, products)) = next {
            if let Before::RmsNorm { gain, .. } = before {
                Level::Second.fetch(gain.as_ptr().cast(), size_of_val(&**gain));
            }
            let n_tasks = self.n_pieces(products, n_tokens);
            let matrix = &first.matrix;
            let (n_first, step) = pieces_of_product(first, n_tokens, self.n_threads);
            let n_rows = (n_tasks / self.n_threads).min(n_first) * step;
            self.lead
                .hint_next_job(matrix.start(), n_rows * matrix.row_bytes());
        }
    }

    /// Tasks that all products of so many rows are cut into.
    fn n_pieces(&self, products: &[Product<Buf>], n_rows: usize) -> usize {
        let pieces = |p: &Product<Buf>| pieces_of_product(p, n_rows, self.n_threads).0;
        products.iter().map(pieces).sum()
    }

    /// Prepares rows for every kind of products that is not of floats, in one go.
    fn prepare(
        &mut self,
        (x, before): (Buf, &Before<Buf>),
        products: &[Product<Buf>],
    ) -> Result<(), BackendError> {
        let is_wanted = |kind| products.iter().any(|p| p.takes(kind));
        let shared = self.prepared.each_mut().map(|rows| {
            is_wanted(rows.kind()).then(|| {
                rows.reshape(x.rows, x.width);
                rows.shared()
            })
        });
        if shared.iter().all(Option::is_none) {
            return Ok(());
        }
        // SAFETY: the plan lets no step write what it reads.
        let read = |buf: Buf| unsafe { self.frame.read(buf) };
        let (values, kernels, scratch) = (read(x), self.kernels, self.scratch);
        let before = match before {
            Before::Nothing | Before::Rounded => RowBefore::Nothing,
            Before::RmsNorm { gain, eps } => RowBefore::RmsNorm(gain, *eps),
            Before::Gate(activation, y) => RowBefore::Gate(gate(kernels, *activation)?, read(*y)),
        };
        let per_task = (VALUES_PER_TASK / x.width.max(1)).max(1);
        self.lead.each(x.rows.div_ceil(per_task), &|thread, task| {
            let mut scratch = scratch[thread]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            for row in piece(task, per_task, x.rows) {
                let range = row * x.width..(row + 1) * x.width;
                let values = match before {
                    RowBefore::Nothing => &values[range],
                    RowBefore::RmsNorm(gain, eps) => {
                        let to = scratch.row(x.width);
                        (kernels.rms_norm)(&values[range], gain, eps, to);
                        to
                    }
                    RowBefore::Gate(gate, other) => {
                        let to = scratch.row(x.width);
                        to.copy_from_slice(&values[range.clone()]);
                        gate(to, &other[range]);
                        to
                    }
                };
                for shared in shared.iter().flatten() {
                    // SAFETY: each row belongs to one task, and nobody reads before all are done.
                    unsafe { shared.prepare_row(kernels, row, values) };
                }
            }
            Ok(())
        })
    }

    /// All products of the same rows: the rows are prepared once, then tasks take pieces of the
    /// matrices.
    pub(super) fn linear(
        &mut self,
        (x, before): (Buf, &Before<Buf>),
        products: &[Product<Buf>],
    ) -> Result<(), BackendError> {
        if x.rows == 0 {
            return Ok(());
        }
        if !matches!(before, Before::Rounded) {
            self.prepare((x, before), products)?;
        }
        self.profiler.record(|| (StepKind::Quantize, 0));
        // SAFETY: the plan lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let kernels = self.kernels;
        let (frame, n_threads) = (self.frame, self.n_threads);
        let n_tasks = self.n_pieces(products, x.rows);
        let (prepared, rounding) = match before {
            Before::Rounded => (self.gated_row.rows(), None),
            _ => (&*self.prepared, self.gated_row.begin(products)),
        };
        let acts = |matrix: &Matrix| {
            let kind = matrix.activation_kind();
            let rows = prepared.iter().find(|rows| rows.kind() == kind);
            rows.map_or(Activations::F32(values), RowBuffer::rows)
        };
        let scratch = self.scratch;
        let task = |thread: usize, mut task: usize| {
            for product in products {
                let (n, step) = pieces_of_product(product, x.rows, n_threads);
                if task < n {
                    let columns = piece(task, step, product.matrix.n_rows());
                    let Some(gated) = &product.gates else {
                        let acts = acts(&product.matrix);
                        return multiply(kernels, &frame, (product, acts), columns);
                    };
                    let mut scratch = scratch[thread]
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    let room = scratch.row(gated_len(x.rows, columns.len()));
                    let product = GatedProduct {
                        product,
                        gated,
                        rounding,
                    };
                    return product.multiply((kernels, &frame), acts, columns, room);
                }
                task -= n;
            }
            Ok(())
        };
        self.lead.each(n_tasks, &task)
    }
}

/// As [`pieces_of`], of a product with what it gates, too.
pub(crate) fn pieces_of_product<V>(
    product: &Product<V>,
    n_tokens: usize,
    n_threads: usize,
) -> (usize, usize) {
    // As many tasks as one matrix after the other would be.
    let n_matrices = match (&product.gates, n_tokens) {
        (Some(_), 1) => 2,
        _ => 1,
    };
    pieces_of(&product.matrix, n_tokens, n_matrices * n_threads)
}

/// Number of pieces of a matrix that is multiplied with `n_tokens` rows, and weight rows of each.
pub(crate) fn pieces_of(matrix: &Matrix, n_tokens: usize, n_threads: usize) -> (usize, usize) {
    let n_rows = matrix.n_rows();
    // For many tokens a row is work for longer.
    let work = matrix.row_bytes() * n_tokens.div_ceil(TOKENS_PER_READ);
    let worth = BYTES_PER_TASK.div_ceil(work.max(1));
    let share = n_rows.div_ceil(n_threads * TASKS_PER_THREAD);
    let most = MOST_BYTES_PER_TASK.div_ceil(work.max(1));
    let step = share.min(most).max(worth);
    let multiple = match (n_tokens, matrix.activation_kind()) {
        (1, _) => ROWS_STEP,
        (_, ActivationKind::F32 | ActivationKind::Bf16) => FLOATS_STEP,
        _ => PANEL_STEP,
    };
    let step = step.next_multiple_of(multiple);
    (n_rows.div_ceil(step), step)
}

/// Some columns of one product, with bias and residual.
fn multiply(
    kernels: &Kernels,
    frame: &Frame<'_>,
    (product, acts): (&Product<Buf>, Activations<'_>),
    columns: Range<usize>,
) -> Result<(), BackendError> {
    let out = product.out;
    let values = frame.write(out);
    // SAFETY: `values` are `out.rows` rows of `out.width`, initialised (the arena was zeroed), and
    // each column belongs to one task.
    let mut to = unsafe {
        SharedOutput::from_raw(values.start(), out.rows, out.width).columns(columns.clone())
    };
    product.matrix.multiply(kernels, acts, &mut to)?;
    for row in 0..out.rows {
        let range = row * out.width + columns.start..row * out.width + columns.end;
        if let Some(bias) = &product.bias {
            // SAFETY: these columns belong to this task, which writes them through `to` no more.
            (kernels.add)(
                unsafe { values.range(range.clone()) },
                &bias[columns.clone()],
            );
        }
        if let Some(residual) = product.residual {
            // SAFETY: as above; the residual is another buffer, which nobody writes in this step.
            unsafe { (kernels.add)(values.range(range.clone()), &frame.read(residual)[range]) };
        }
    }
    Ok(())
}
