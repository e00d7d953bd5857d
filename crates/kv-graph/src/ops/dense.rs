//! Matrices and rows: embedding, matrix multiplication, and choosing rows and columns.

use std::ops::Range;

use crate::op::Op;
use crate::spec::{OpResult, OpSpec, n_values};
use crate::{Affine, Claim, GraphBuilder, GraphError, NodeId, TableRow};

pub(crate) fn embed(weight: &String) -> OpSpec<'_> {
    let spec = OpSpec::new("embed", 1, |given| {
        match (given.shape(0), given.weight(0)) {
            (&[n], &[vocab, dim]) => Ok(OpResult::f32([n, dim]).weight([vocab, dim])),
            _ => Err("a list of tokens".into()),
        }
    });
    spec.weights_as("w", [weight])
}

pub(crate) fn linear<'a>(weight: &'a String, bias: Option<&'a String>) -> OpSpec<'a> {
    let spec = OpSpec::new("linear", 1, move |given| {
        let (&[n, n_in], n_out) = (given.shape(0), given.width()) else {
            return Err("[tokens, in]".into());
        };
        let result = OpResult::f32([n, n_out]).weight([n_out, n_in]);
        Ok(result.weight_if(bias, [n_out]))
    });
    spec.weights_as("w", [weight]).weights_as("b", bias)
}

pub(crate) fn reshape<'a>() -> OpSpec<'a> {
    OpSpec::new("reshape", 1, |given| {
        let (old, new) = (given.shape(0), given.result);
        let same = old.first() == new.first() && n_values(old) == n_values(new);
        if same {
            Ok(OpResult::f32(new))
        } else {
            Err(format!("as many values as {new:?} and the same rows"))
        }
    })
}

pub(crate) fn columns<'a>(first: usize) -> OpSpec<'a> {
    let spec = OpSpec::new("columns", 1, move |given| {
        let (len, end) = (given.width(), first.checked_add(given.width()));
        match (given.shape(0), end) {
            ([rest @ .., width], Some(end)) if !rest.is_empty() && end <= *width => {
                Ok(OpResult::f32([rest, &[len]].concat()))
            }
            _ => Err(format!("[n, .., at least {}]", first.saturating_add(len))),
        }
    });
    spec.setting("first", first)
}

pub(crate) fn add_row(weight: &String, row: usize) -> OpSpec<'_> {
    let spec = OpSpec::new("add_row", 1, move |given| {
        let n_rows = given.weight(0).first().copied().unwrap_or(0);
        match *given.shape(0) {
            [n, dim] if row < n_rows => Ok(OpResult::f32([n, dim]).weight([n_rows, dim])),
            _ => Err(format!("[n, dim] and a row below {n_rows} (it is {row})")),
        }
    });
    spec.weights_as("w", [weight]).setting("row", row)
}

pub(crate) fn take_rows<'a>() -> OpSpec<'a> {
    OpSpec::new("take_rows", 2, |given| {
        let [x, rows] = given.shapes();
        match (x, rows) {
            ([_, rest @ ..], &[n]) => Ok(OpResult::f32([&[n], rest].concat())),
            _ => Err("[n, ..], [rows]".into()),
        }
    })
}

impl GraphBuilder {
    /// Rows of the embedding matrix `weight` (`[vocab, dim]`) for each token.
    ///
    /// # Errors
    /// [`GraphError`] where the operand is no list of tokens.
    pub fn embed(
        &mut self,
        name: &str,
        tokens: NodeId,
        weight: &str,
        [vocab, dim]: [usize; 2],
    ) -> Result<NodeId, GraphError> {
        let weight = self.weight_name(weight);
        let claim = Claim {
            weights: &[&[vocab, dim]],
            ..Claim::default()
        };
        self.push(name, Op::Embed { weight }, &[tokens], claim)
    }

    /// `x W^T`, with `weight` of shape `[n_out, in]`, where `in` is the width of `x`.
    ///
    /// # Errors
    /// [`GraphError`] where `x` is no matrix.
    pub fn linear(
        &mut self,
        name: &str,
        x: NodeId,
        weight: &str,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        self.affine(name, x, Affine::new(weight), n_out)
    }

    /// `x W^T + b`, with a matrix `[n_out, in]` and a bias `[n_out]`.
    ///
    /// # Errors
    /// [`GraphError`] where `x` is no matrix.
    pub fn affine(
        &mut self,
        name: &str,
        x: NodeId,
        weights: Affine<'_>,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Linear {
            weight: self.weight_name(weights.weight),
            bias: self.optional_weight_name(weights.bias),
        };
        self.push(name, op, &[x], Claim::shape(&[n_out]))
    }

    /// The same values in another shape; the first dimension stays.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the number of values or of rows would change.
    pub fn reshape(
        &mut self,
        name: &str,
        x: NodeId,
        shape: &[usize],
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::Reshape, &[x], Claim::shape(shape))
    }

    /// Some columns of `x [n, .., width]`: of every row, or of every head.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` does not have them.
    pub fn columns(
        &mut self,
        name: &str,
        x: NodeId,
        columns: Range<usize>,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Columns {
            first: columns.start,
        };
        // A range that ends before it begins has no columns to give.
        let len = columns.end.checked_sub(columns.start).unwrap_or(usize::MAX);
        self.push(name, op, &[x], Claim::shape(&[len]))
    }

    /// Every row of `x [n, dim]` plus one row of a weight.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` is no matrix, or the weight has no such row.
    pub fn add_row(
        &mut self,
        name: &str,
        x: NodeId,
        table: TableRow<'_>,
    ) -> Result<NodeId, GraphError> {
        let op = Op::AddRow {
            weight: self.weight_name(table.weight),
            row: table.row,
        };
        let claim = Claim {
            weights: &[&[table.n_rows]],
            ..Claim::default()
        };
        self.push(name, op, &[x], claim)
    }

    /// The rows of `x` that `rows` names.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `rows` is no list.
    pub fn take_rows(&mut self, name: &str, x: NodeId, rows: NodeId) -> Result<NodeId, GraphError> {
        self.push(name, Op::TakeRows, &[x, rows], Claim::default())
    }
}
