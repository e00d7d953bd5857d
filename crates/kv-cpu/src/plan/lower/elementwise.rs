//! Lowers elementwise operations, which can work in place.

use kv_backend::BackendError;
use kv_graph::rope::{RopeSections, RopeSpec};
use kv_graph::{Activation, ClampedGate, Input, Node, Op, PositionScale};

use super::{Call, Lowering, unsupported};
use crate::plan::{RopeTable, StepOp};

/// An operation on each value, alone or with the value of another buffer at the same place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Elementwise {
    /// `x + other`.
    Add,
    /// `x * other`.
    Mul,
    /// `activation(x) * other`.
    Gate(Activation),
    Scale(f32),
    Activate(Activation),
    SoftCap(f32),
    /// Within this bound on either side of 0.
    Clamp(f32),
    /// The gate of gpt-oss, of `x` and `other`.
    ClampedGate(ClampedGate),
    /// A factor for each row by its position.
    ScaleByPosition(PositionScale),
    /// Rotation of heads of `dim` values by the angles of a table.
    Rope {
        table: usize,
        dim: usize,
    },
}

impl Elementwise {
    /// The operation of a node; `None` for other operations and for rotations, which need a table.
    fn of(op: &Op) -> Option<Self> {
        Some(match *op {
            Op::Add => Self::Add,
            Op::Mul => Self::Mul,
            Op::Gate { activation } => Self::Gate(activation),
            Op::Scale { factor } => Self::Scale(factor),
            Op::Activate { activation } => Self::Activate(activation),
            Op::SoftCap { cap } => Self::SoftCap(cap),
            Op::Clamp { limit } => Self::Clamp(limit),
            Op::ClampedGate { slope, limit } => Self::ClampedGate(ClampedGate { slope, limit }),
            Op::ScaleByPosition { scale } => Self::ScaleByPosition(scale),
            _ => return None,
        })
    }

    /// Buffers that it reads.
    fn n_reads(self) -> usize {
        match self {
            Self::Add | Self::Mul | Self::Gate(_) | Self::ClampedGate(_) => 2,
            Self::Scale(_)
            | Self::Activate(_)
            | Self::SoftCap(_)
            | Self::Clamp(_)
            | Self::ScaleByPosition(_)
            | Self::Rope { .. } => 1,
        }
    }
}

impl<'a> Lowering<'a> {
    pub(super) fn elementwise(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        match &node.op {
            Op::Rope { rope } => self.rope(node, rope, None).map(Some),
            Op::RopeSections { rope, sections } => self.rope(node, rope, Some(*sections)).map(Some),
            op => {
                let op = Elementwise::of(op);
                op.map(|op| self.elementwise_call(node, op)).transpose()
            }
        }
    }

    fn elementwise_call(&self, node: &Node, op: Elementwise) -> Result<Call, BackendError> {
        if let Elementwise::ScaleByPosition(_) = op {
            self.operand_input(node, 1, |i| matches!(i, Input::Positions))?;
        }
        let reads = (0..op.n_reads()).map(|at| {
            let value = self.operand(node, at)?;
            self.same_len(node, value).map(|()| value)
        });
        let reads = reads.collect::<Result<_, BackendError>>()?;
        Ok((StepOp::Elementwise(op), reads))
    }

    fn rope(
        &mut self,
        node: &'a Node,
        rope: &'a RopeSpec,
        sections: Option<RopeSections>,
    ) -> Result<Call, BackendError> {
        let wanted = match sections {
            None => Input::Positions,
            Some(_) => Input::Coordinates,
        };
        self.operand_input(node, 1, |i| *i == wanted)?;
        let &[n, _, dim] = &*node.shape else {
            return Err(unsupported(node));
        };
        if n != self.graph.shape().n_tokens || rope.n_rot > dim {
            return Err(unsupported(node));
        }
        let table = self.rope_table(node, rope, sections)?;
        self.elementwise_call(node, Elementwise::Rope { table, dim })
    }

    /// The table of a rotation, which all nodes with this rotation share.
    fn rope_table(
        &mut self,
        node: &'a Node,
        rope: &'a RopeSpec,
        sections: Option<RopeSections>,
    ) -> Result<usize, BackendError> {
        let is_it = |t: &RopeTable| t.spec == *rope && t.sections == sections;
        if let Some(at) = self.ropes.iter().position(is_it) {
            return Ok(at);
        }
        let factors = rope.factors.as_ref().map(|f| self.vector(f, node));
        let frequencies = rope.frequencies(factors.transpose()?.as_deref());
        self.ropes.push(RopeTable {
            spec: rope.clone(),
            sections,
            frequencies,
        });
        Ok(self.ropes.len() - 1)
    }
}
