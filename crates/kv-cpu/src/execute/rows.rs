//! Steps that copy rows, whole or in part.

use kv_core::backend::BackendError;
use kv_core::graph::TopK;

use crate::matrix::Matrix;
use crate::plan::{EmbedBy, RowsOp, Step};
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
