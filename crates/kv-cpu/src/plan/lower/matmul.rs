//! Lowers matrix multiplications, each to a step of its own.

use kv_backend::BackendError;
use kv_graph::{Node, Op};

use super::{Call, Lowering, unsupported};
use crate::plan::{Epilogue, MatMul, MatMulOutput, Prologue, StepOp};

impl<'a> Lowering<'a> {
    pub(super) fn matmul(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        match &node.op {
            Op::Linear { weight, bias } => self.linear(node, weight, bias.as_deref()).map(Some),
            _ => Ok(None),
        }
    }

    fn linear(
        &mut self,
        node: &'a Node,
        weight: &'a str,
        bias: Option<&'a str>,
    ) -> Result<Call, BackendError> {
        let x = self.operand(node, 0)?;
        let &[n, n_out] = &*node.shape else {
            return Err(unsupported(node));
        };
        let (rows, n_in) = x.shape(self.graph);
        if rows != n {
            return Err(unsupported(node));
        }
        let matrix = self.matrix(weight, node, Some([n_out, n_in]))?;
        let bias = bias.map(|b| self.vector(b, node)).transpose()?;
        if bias.as_ref().is_some_and(|b| b.len() != n_out) {
            return Err(unsupported(node));
        }
        let output = MatMulOutput {
            matrix,
            bias,
            epilogue: Epilogue::None,
        };
        let matmul = MatMul {
            prologue: Prologue::None,
            outputs: vec![output],
        };
        Ok((StepOp::MatMul(matmul), vec![x]))
    }
}
