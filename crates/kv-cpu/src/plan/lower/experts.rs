//! Lowers mixtures of experts, and heads that have a matrix each: one weight becomes a matrix for
//! each of them.

use std::sync::Arc;

use kv_backend::{BackendError, StepKind};
use kv_graph::weights::Weight;
use kv_graph::{Node, Op, RouteSpec};

use super::{Call, Lowering, Value, unsupported};
use crate::execute::{ExpertMatrices, Experts, ReadExperts};
use crate::matrix::Matrix;
use crate::plan::StepOp;

/// An operation of a mixture of experts.
#[derive(Clone, Debug)]
pub(crate) enum ExpertsOp {
    /// The route of every row. `(logits)`.
    Route {
        spec: RouteSpec,
        /// Added to scores to choose by, `[experts]`.
        bias: Option<Arc<[f32]>>,
        /// Multiplied with finished weights, `[experts]`.
        gain: Option<Arc<[f32]>>,
    },
    /// Each slot's matrix applied to its row. `(x, routes)`.
    Linear {
        experts: Arc<Experts>,
        n_used: usize,
    },
    /// Each head's matrix applied to it. `(x)`.
    Heads(Arc<Experts>),
    /// Each slot times its weight. `(x, routes)`.
    Scale { n_used: usize },
    /// The sum of each row's slots. `(x)`.
    Sum,
}

impl ExpertsOp {
    /// The matrices that it multiplies with, and how many of them a row goes through.
    pub(crate) fn matrices(&self) -> Option<(&Experts, usize)> {
        match self {
            Self::Linear { experts, n_used } => Some((experts, *n_used)),
            Self::Heads(heads) => Some((heads, heads.len())),
            Self::Route { .. } | Self::Scale { .. } | Self::Sum => None,
        }
    }

    /// The kind of step, and the bytes of the matrices that it reads; those of experts are not
    /// counted, as only some of them are read.
    pub(crate) fn kind_and_weight_bytes(&self) -> (StepKind, usize) {
        match self {
            Self::Heads(heads) => (StepKind::Matmul, heads.stored_bytes()),
            _ => (StepKind::Experts, 0),
        }
    }
}

/// An operation and the values that it reads.
type ExpertsCall = (ExpertsOp, Vec<Value>);

impl<'a> Lowering<'a> {
    pub(super) fn experts(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        let call = match &node.op {
            Op::Route { spec, bias, gain } => {
                self.route(node, *spec, [bias.as_deref(), gain.as_deref()])
            }
            Op::ExpertLinear { weight, bias } => self.expert_linear(node, weight, bias.as_deref()),
            Op::HeadLinear { weight } => self.head_linear(node, weight),
            Op::ExpertScale => self.expert_scale(node),
            Op::ExpertSum => self.expert_sum(node),
            _ => return Ok(None),
        };
        call.map(|(op, reads)| Some((StepOp::Experts(op), reads)))
    }

    fn route(
        &mut self,
        node: &'a Node,
        spec: RouteSpec,
        bias_gain: [Option<&'a str>; 2],
    ) -> Result<ExpertsCall, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let mut vector = |name: Option<&'a str>| name.map(|n| self.vector(n, node)).transpose();
        let [bias, gain] = bias_gain;
        let (bias, gain) = (vector(bias)?, vector(gain)?);
        Ok((ExpertsOp::Route { spec, bias, gain }, vec![x]))
    }

    fn expert_linear(
        &mut self,
        node: &'a Node,
        weight: &'a str,
        bias: Option<&'a str>,
    ) -> Result<ExpertsCall, BackendError> {
        let (x, routes, n_used) = self.slots(node)?;
        let &[_, _, n_out] = &*node.shape else {
            return Err(unsupported(node));
        };
        let n_experts = routes.shape(self.graph).1;
        let whole = self.weight(weight, node)?;
        let width = x.shape(self.graph).1;
        let n_in = whole.n_columns();
        let fits = whole.shape() == [n_experts, n_out, n_in]
            && n_experts > 0
            && [n_in, n_used * n_in].contains(&width);
        if !fits {
            return Err(unsupported(node));
        }
        let matrices = match self.weights.expert_stack(weight) {
            Some((store, stack)) => ExpertMatrices::Read(ReadExperts {
                store,
                stack,
                n_experts,
                first: self.expert(&whole, 0)?,
            }),
            None => self.matrices(&whole, [n_experts, n_out])?,
        };
        let bias = bias.map(|b| self.vector(b, node)).transpose()?;
        if bias.as_ref().is_some_and(|b| b.len() != n_experts * n_out) {
            return Err(unsupported(node));
        }
        let experts = Arc::new(Experts { matrices, bias });
        Ok((ExpertsOp::Linear { experts, n_used }, vec![x, routes]))
    }

    /// Each head of `x` times its matrix.
    fn head_linear(
        &mut self,
        node: &'a Node,
        weight: &'a str,
    ) -> Result<ExpertsCall, BackendError> {
        let x = self.operand(node, 0)?;
        let &[n, heads, n_out] = &*node.shape else {
            return Err(unsupported(node));
        };
        let whole = self.weight(weight, node)?;
        let n_in = whole.n_columns();
        let fits = whole.shape() == [heads, n_out, n_in] && heads > 0;
        if !fits || x.shape(self.graph) != (n, heads * n_in) {
            return Err(unsupported(node));
        }
        let matrices = self.matrices(&whole, [heads, n_out])?;
        let experts = Experts {
            matrices,
            bias: None,
        };
        Ok((ExpertsOp::Heads(Arc::new(experts)), vec![x]))
    }

    /// The matrices of a weight of `n` of them with `n_out` rows each.
    fn matrices(
        &self,
        whole: &Weight,
        [n, n_out]: [usize; 2],
    ) -> Result<ExpertMatrices, BackendError> {
        let packed = self.weights.packed(whole.name());
        let matrices = (0..n).map(|at| {
            let rows = at * n_out..(at + 1) * n_out;
            let packed = packed.as_ref().and_then(|p| p.part(rows));
            Ok(self.expert(whole, at)?.with_packed(packed))
        });
        matrices.collect::<Result<_, _>>().map(ExpertMatrices::Held)
    }

    /// The matrix of one expert: a part of the weight's bytes, not a copy.
    fn expert(&self, whole: &Weight, expert: usize) -> Result<Matrix, BackendError> {
        let &[n_experts, n_out, n_in] = whole.shape() else {
            return Err(BackendError::WeightShape {
                name: whole.name().to_owned(),
                wanted: vec![0, whole.n_rows(), whole.n_columns()],
                got: whole.shape().to_vec(),
            });
        };
        let len = whole.bytes().len() / n_experts.max(1);
        let bytes = whole.bytes().slice(expert * len..(expert + 1) * len);
        let shape = vec![n_out, n_in];
        let bytes = bytes.unwrap_or_else(|| Vec::new().into());
        let weight = Weight::new(whole.name(), shape, whole.format(), bytes);
        let weight = weight.map_err(BackendError::Weight)?;
        let activations = self.weights.activations_for(weight.format());
        Matrix::with_activations(weight, activations)
    }

    fn expert_scale(&self, node: &Node) -> Result<ExpertsCall, BackendError> {
        let (x, routes, n_used) = self.slots(node)?;
        let width = x.shape(self.graph).1;
        let dim = node.shape.last().copied().unwrap_or(0);
        if [dim, n_used * dim].contains(&width) {
            Ok((ExpertsOp::Scale { n_used }, vec![x, routes]))
        } else {
            Err(unsupported(node))
        }
    }

    fn expert_sum(&self, node: &Node) -> Result<ExpertsCall, BackendError> {
        let x = self.operand(node, 0)?;
        let (rows, width) = x.shape(self.graph);
        if rows == node.n_rows() && width.is_multiple_of(node.row_len().max(1)) {
            Ok((ExpertsOp::Sum, vec![x]))
        } else {
            Err(unsupported(node))
        }
    }

    /// Input and route of an operation over slots, and how many slots a row has.
    fn slots(&self, node: &Node) -> Result<(Value, Value, usize), BackendError> {
        let (x, routes) = (self.operand(node, 0)?, self.operand(node, 1)?);
        let route = node.operands.get(1).and_then(|&id| self.graph.node(id));
        let spec = match route.map(|r| &r.op) {
            Some(Op::Route { spec, .. }) => *spec,
            _ => return Err(unsupported(node)),
        };
        let rows = [x, routes].map(|value| value.shape(self.graph).0);
        if rows != [node.n_rows(); 2] || node.shape.get(1) != Some(&spec.n_used) {
            return Err(unsupported(node));
        }
        Ok((x, routes, spec.n_used))
    }
}
