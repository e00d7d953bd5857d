//! Lowers embeddings, and the choice of rows and columns.

use std::sync::Arc;

use kv_backend::{BackendError, StepKind};
use kv_graph::{DecaySpec, Input, Node, Op};

use super::{Call, Lowering, Value, unsupported};
use crate::matrix::Matrix;
use crate::plan::{DecayWeights, StepOp};

/// An operation that copies rows, whole or in part.
#[derive(Clone, Debug)]
pub(crate) enum RowsOp {
    /// Rows of a matrix. No operands.
    Embed { matrix: Arc<Matrix>, by: EmbedBy },
    /// `x + added`, row by row. `(x)`.
    AddRow { added: Arc<[f32]> },
    /// The output rows. `(x)`.
    TakeRows,
    /// Columns of every row, from `first` on. `(x)`.
    Columns { first: usize },
    /// The same of each of the `n_heads` heads of every row. `(x)`.
    HeadColumns { first: usize, n_heads: usize },
    /// Of each row, or of each of its heads, `a` values of one operand, then `b` of the other.
    /// `(a, b)`.
    Concat { a: usize, b: usize },
    /// `x` times the gain, which is as long as a row or a part of it. `(x)`.
    Gain { gain: Arc<[f32]> },
    /// Linear combinations of parts of `dim` values. `(x, coefficients)`.
    Mix { dim: usize },
    /// The rest of every row above so many deviations from its mean. `(x)`.
    GaussianTopK { deviations: f32 },
    /// Decay factors from step sizes. `(x)`.
    Decay(Arc<DecayWeights>),
    /// All rows. `(x)`.
    Copy,
    /// The largest values of every row. `(x)`.
    TopK,
}

/// The number that selects the row of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmbedBy {
    /// The token.
    Token,
    /// Its position.
    Position,
    /// Its type.
    TokenType,
}

impl RowsOp {
    /// The kind that profiles count it as.
    pub(crate) fn kind(&self) -> StepKind {
        match self {
            Self::Embed { .. } => StepKind::Embedding,
            _ => StepKind::Elementwise,
        }
    }
}

/// An operation and the values that it reads.
type RowsCall = (RowsOp, Vec<Value>);

impl<'a> Lowering<'a> {
    pub(super) fn rows(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        let call = match &node.op {
            Op::Embed { weight } => self.embed(node, weight),
            Op::AddRow { weight, row } => self.add_row(node, weight, *row),
            Op::Gain { weight } => self.gain(node, weight),
            Op::Mix => self.mix(node),
            Op::GaussianTopK { deviations } => self.gaussian_top_k(node, *deviations),
            Op::Columns { first } => self.columns(node, *first),
            Op::Concat => self.concat(node),
            Op::Decay { decay } => self.decay(node, decay),
            Op::TakeRows => self.take_rows(node),
            Op::TopK { .. } => Ok((RowsOp::TopK, vec![self.operand(node, 0)?])),
            _ => return Ok(None),
        };
        call.map(|(op, reads)| Some((StepOp::Rows(op), reads)))
    }

    /// Rows of a matrix by token, by position or by type.
    fn embed(&mut self, node: &'a Node, weight: &'a str) -> Result<RowsCall, BackendError> {
        let operand = node.operands.first().and_then(|&id| self.graph.node(id));
        let by = match operand.map(|o| &o.op) {
            Some(Op::Input(Input::Tokens)) => EmbedBy::Token,
            Some(Op::Input(Input::Positions)) => EmbedBy::Position,
            Some(Op::Input(Input::TokenTypes)) => EmbedBy::TokenType,
            _ => return Err(unsupported(node)),
        };
        if node.n_rows() != self.graph.shape().n_tokens {
            return Err(unsupported(node));
        }
        let matrix = self.matrix(weight, node, None)?;
        let below = match by {
            EmbedBy::Token => &mut self.needs.tokens_below,
            EmbedBy::Position => &mut self.needs.positions_below,
            EmbedBy::TokenType => &mut self.needs.types_below,
        };
        *below = Some(below.map_or(matrix.n_rows(), |b| b.min(matrix.n_rows())));
        Ok((RowsOp::Embed { matrix, by }, Vec::new()))
    }

    /// One row of a matrix for all rows.
    fn add_row(
        &mut self,
        node: &'a Node,
        weight: &'a str,
        row: usize,
    ) -> Result<RowsCall, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let (rows, dim) = (self.vector(weight, node)?, node.row_len());
        let first = row.saturating_mul(dim);
        let added = rows.get(first..first.saturating_add(dim));
        let added = added.ok_or_else(|| unsupported(node))?.into();
        Ok((RowsOp::AddRow { added }, vec![x]))
    }

    /// Rows times a weight of `[dim]`, `[groups, dim]` or `[1]`.
    fn gain(&mut self, node: &'a Node, weight: &'a str) -> Result<RowsCall, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let gain = self.vector(weight, node)?;
        let dim = node.shape.last().copied().unwrap_or(0);
        let gain: Arc<[f32]> = match *gain {
            [one] => vec![one; dim].into(),
            _ => gain,
        };
        if gain.len() == dim || gain.len() == node.row_len() {
            Ok((RowsOp::Gain { gain }, vec![x]))
        } else {
            Err(unsupported(node))
        }
    }

    /// Linear combinations of the parts of a row.
    fn mix(&self, node: &Node) -> Result<RowsCall, BackendError> {
        let operands = [self.operand(node, 0)?, self.operand(node, 1)?];
        let [x, coefficients] = operands.map(|operand| operand.shape(self.graph));
        let &[n, outputs, dim] = &*node.shape else {
            return Err(unsupported(node));
        };
        let inputs = x.1 / dim.max(1);
        let fits = x == (n, inputs * dim) && coefficients == (n, outputs * inputs) && inputs > 0;
        if fits {
            Ok((RowsOp::Mix { dim }, operands.to_vec()))
        } else {
            Err(unsupported(node))
        }
    }

    fn gaussian_top_k(&self, node: &Node, deviations: f32) -> Result<RowsCall, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        Ok((RowsOp::GaussianTopK { deviations }, vec![x]))
    }

    fn columns(&self, node: &Node, first: usize) -> Result<RowsCall, BackendError> {
        let x = self.operand(node, 0)?;
        let (rows, width) = x.shape(self.graph);
        let n_heads = heads_of(node).max(1);
        let len = node.shape.last().copied().unwrap_or(0);
        if rows != node.n_rows() || first.saturating_add(len) > width / n_heads {
            return Err(unsupported(node));
        }
        let op = match n_heads {
            1 => RowsOp::Columns { first },
            _ => RowsOp::HeadColumns { first, n_heads },
        };
        Ok((op, vec![x]))
    }

    /// Two operands next to each other.
    fn concat(&self, node: &Node) -> Result<RowsCall, BackendError> {
        let operands = [self.operand(node, 0)?, self.operand(node, 1)?];
        let heads = heads_of(node);
        let [a, b] = operands.map(|operand| operand.shape(self.graph));
        let fits = a.0 == node.n_rows() && b.0 == node.n_rows() && a.1 + b.1 == node.row_len();
        if fits && heads > 0 && a.1.is_multiple_of(heads) {
            let (a, b) = (a.1 / heads, b.1 / heads);
            Ok((RowsOp::Concat { a, b }, operands.to_vec()))
        } else {
            Err(unsupported(node))
        }
    }

    fn decay(&mut self, node: &'a Node, decay: &'a DecaySpec) -> Result<RowsCall, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let (rates, dt_bias) = (
            self.vector(&decay.a, node)?,
            self.vector(&decay.dt_bias, node)?,
        );
        let per_head = node.row_len() / rates.len().max(1);
        let rates = rates.iter().flat_map(|&a| std::iter::repeat_n(a, per_head));
        let weights = DecayWeights {
            rates: rates.collect(),
            dt_bias,
        };
        if [weights.rates.len(), weights.dt_bias.len()] == [node.row_len(); 2] {
            Ok((RowsOp::Decay(Arc::new(weights)), vec![x]))
        } else {
            Err(unsupported(node))
        }
    }

    fn take_rows(&self, node: &Node) -> Result<RowsCall, BackendError> {
        self.operand_input(node, 1, |i| matches!(i, Input::OutputRows))?;
        let x = self.operand(node, 0)?;
        let shape = self.graph.shape();
        let fits = x.shape(self.graph) == (shape.n_tokens, node.row_len())
            && node.n_rows() == shape.n_outputs;
        if fits {
            Ok((RowsOp::TakeRows, vec![x]))
        } else {
            Err(unsupported(node))
        }
    }
}

/// Heads of a row of a node: 1 where it has none.
fn heads_of(node: &Node) -> usize {
    match &*node.shape {
        [_, heads @ .., _] => heads.iter().product(),
        _ => 1,
    }
}
