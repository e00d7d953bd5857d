//! Steps that copy rows, whole or in part.

use kv_backend::BackendError;
use kv_graph::{TopK, gaussian_top_k, mix};

use crate::matrix::Matrix;
use crate::plan::{DecayWeights, EmbedBy, RowsOp, Step};
use crate::values::Buf;

use super::Run;

impl Run<'_> {
    /// Copies the rows of one step.
    pub(super) fn copy_rows(&mut self, op: &RowsOp, step: &Step<Buf>) -> Result<(), BackendError> {
        let bufs = [step.read(0), step.write()];
        match op {
            RowsOp::Embed { matrix, by } => self.embed(matrix, *by, step.write()),
            RowsOp::AddRow { added } => self.add_row(added, bufs),
            RowsOp::TakeRows => self.take_rows(bufs),
            RowsOp::Columns { first } => self.columns(*first, bufs),
            RowsOp::HeadColumns { first, n_heads } => self.head_columns(*first, *n_heads, bufs),
            RowsOp::Concat { a, b } => self.concat([*a, *b], step),
            RowsOp::Gain { gain } => self.gain(gain, bufs),
            RowsOp::Mix { dim } => self.mix(*dim, step),
            RowsOp::GaussianTopK { deviations } => self.gaussian_top_k(*deviations, bufs),
            RowsOp::Decay(weights) => self.decay(weights, bufs),
            RowsOp::Copy => self.columns(0, bufs),
            RowsOp::TopK => self.top_k(bufs),
        }
    }

    /// The rows of a matrix by token, position or type.
    fn embed(&mut self, matrix: &Matrix, by: EmbedBy, out: Buf) -> Result<(), BackendError> {
        let ids = match by {
            EmbedBy::Token => self.inputs.tokens,
            EmbedBy::Position => self.inputs.positions,
            EmbedBy::TokenType => self.inputs.token_types,
        };
        let kernels = self.kernels;
        self.rows(out, &|row, values| {
            matrix.row(kernels, ids[row] as usize, values)
        })
    }

    /// Every row plus `added`.
    fn add_row(&mut self, added: &[f32], [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let (kernels, width) = (self.kernels, out.width);
        self.rows(out, &|row, to| {
            to.copy_from_slice(&values[row * width..(row + 1) * width]);
            (kernels.add)(to, added);
            Ok(())
        })
    }

    /// Every row, or every part of it as long as the gain, times the gain.
    fn gain(&mut self, gain: &[f32], [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let (kernels, width) = (self.kernels, out.width);
        self.rows(out, &|row, to| {
            to.copy_from_slice(&values[row * width..(row + 1) * width]);
            let parts = to.chunks_exact_mut(gain.len().max(1));
            parts.for_each(|part| (kernels.mul)(part, gain));
            Ok(())
        })
    }

    /// Linear combinations of the parts of `dim` values of every row.
    fn mix(&mut self, dim: usize, step: &Step<Buf>) -> Result<(), BackendError> {
        let [x, coefficients] = [step.read(0), step.read(1)];
        // SAFETY: allocation lets no step write what it reads.
        let (parts, factors) = unsafe { (self.frame.read(x), self.frame.read(coefficients)) };
        self.rows(step.write(), &|row, to| {
            let parts = &parts[row * x.width..][..x.width];
            mix(
                parts,
                &factors[row * coefficients.width..][..coefficients.width],
                dim,
                to,
            );
            Ok(())
        })
    }

    /// The rest of every row above a threshold of its own.
    fn gaussian_top_k(&mut self, deviations: f32, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let width = out.width;
        self.rows(out, &|row, to| {
            to.copy_from_slice(&values[row * width..(row + 1) * width]);
            gaussian_top_k(to, deviations);
            Ok(())
        })
    }

    /// The output rows of `x`.
    fn take_rows(&mut self, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let x = unsafe { self.frame.read(x) };
        let (wanted, width) = (self.inputs.output_rows, out.width);
        self.rows(out, &|row, values| {
            values.copy_from_slice(&x[wanted[row] as usize * width..][..width]);
            Ok(())
        })
    }

    /// The largest values of every row.
    fn top_k(&mut self, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let width = x.width;
        self.rows(out, &|row, to| {
            TopK::of(&values[row * width..(row + 1) * width], to);
            Ok(())
        })
    }

    /// Columns of every head of every row, from `first` on.
    fn head_columns(
        &mut self,
        first: usize,
        n_heads: usize,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let (width, len) = (x.width / n_heads, out.width / n_heads);
        self.rows(out, &|row, to| {
            let heads = values[row * x.width..][..x.width].chunks_exact(width.max(1));
            for (to, head) in to.chunks_exact_mut(len.max(1)).zip(heads) {
                to.copy_from_slice(&head[first..first + len]);
            }
            Ok(())
        })
    }

    /// Two operands next to each other, head by head.
    fn concat(&mut self, [a, b]: [usize; 2], step: &Step<Buf>) -> Result<(), BackendError> {
        let [x, y] = [step.read(0), step.read(1)];
        // SAFETY: allocation lets no step write what it reads.
        let (x_values, y_values) = unsafe { (self.frame.read(x), self.frame.read(y)) };
        self.rows(step.write(), &|row, to| {
            for (head, to) in to.chunks_exact_mut((a + b).max(1)).enumerate() {
                let (first, last) = to.split_at_mut(a);
                first.copy_from_slice(&x_values[row * x.width + head * a..][..a]);
                last.copy_from_slice(&y_values[row * y.width + head * b..][..b]);
            }
            Ok(())
        })
    }

    /// Decay factors `e^(a softplus(x + dt_bias))`.
    fn decay(&mut self, weights: &DecayWeights, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let (kernels, width) = (self.kernels, out.width);
        self.rows(out, &|row, to| {
            to.copy_from_slice(&values[row * width..][..to.len()]);
            (kernels.add)(to, &weights.dt_bias);
            (kernels.softplus)(to);
            (kernels.mul)(to, &weights.rates);
            (kernels.exp_sum)(to, 0.0);
            Ok(())
        })
    }

    /// Columns of every row, from `first` on.
    fn columns(&mut self, first: usize, [x, out]: [Buf; 2]) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let width = x.width;
        self.rows(out, &|row, to| {
            to.copy_from_slice(&values[row * width + first..][..to.len()]);
            Ok(())
        })
    }
}
