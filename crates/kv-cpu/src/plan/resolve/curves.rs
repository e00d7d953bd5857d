//! Rows of tables, and norms other than the usual one.
//!
//! Knows nothing of other nodes.

use kv_core::backend::BackendError;
use kv_core::graph::{Input, Node, Op};

use super::{Resolver, Value, unsupported};
use crate::plan::{EmbedBy, Step};

impl<'a> Resolver<'a> {
    /// Rows of a matrix by token or by position.
    pub(super) fn embed(
        &mut self,
        node: &'a Node,
        weight: &'a str,
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let operand = node.operands.first().and_then(|&id| self.graph.node(id));
        let by = match operand.map(|o| &o.op) {
            Some(Op::Input(Input::Tokens)) => EmbedBy::Token,
            Some(Op::Input(Input::Positions)) => EmbedBy::Position,
            _ => return Err(unsupported(node)),
        };
        if node.n_rows() != self.graph.shape().n_tokens {
            return Err(unsupported(node));
        }
        let matrix = self.matrix(weight, node, None)?;
        let below = match by {
            EmbedBy::Token => &mut self.out.needs.tokens_below,
            EmbedBy::Position => &mut self.out.needs.positions_below,
        };
        *below = Some(below.map_or(matrix.n_rows(), |b| b.min(matrix.n_rows())));
        Ok(Step::Embed { matrix, by, out })
    }

    /// One row of a matrix for all rows.
    pub(super) fn add_row(
        &mut self,
        node: &'a Node,
        (weight, row): (&'a str, usize),
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let (rows, dim) = (self.vector(weight, node)?, node.row_len());
        let first = row.saturating_mul(dim);
        let added = rows.get(first..first.saturating_add(dim));
        let added = added.ok_or_else(|| unsupported(node))?.into();
        Ok(Step::AddRow { x, added, out })
    }

    pub(super) fn layer_norm(
        &mut self,
        node: &'a Node,
        (weight, bias): (&'a str, Option<&'a str>),
        (eps, out): (f32, Value),
    ) -> Result<Step<Value>, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let gain = self.vector(weight, node)?;
        let bias = bias.map(|b| self.vector(b, node)).transpose()?;
        let dim = node.shape.last().copied().unwrap_or(0);
        if gain.len() != dim || bias.as_ref().is_some_and(|b| b.len() != dim) {
            return Err(unsupported(node));
        }
        Ok(Step::LayerNorm {
            x,
            gain,
            bias,
            eps,
            out,
        })
    }
}
