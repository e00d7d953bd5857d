//! Lowers norms.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_graph::{Node, Op};

use super::{Call, Lowering, Value, unsupported};
use crate::plan::StepOp;

/// A norm. `(x)`.
#[derive(Clone, Debug)]
pub(crate) enum NormOp {
    /// Of every `dim` values, with gains that begin again after the last.
    Rms {
        gain: Arc<[f32]>,
        dim: usize,
        eps: f32,
    },
    /// Of every `dim` values.
    Layer {
        gain: Option<Arc<[f32]>>,
        bias: Option<Arc<[f32]>>,
        dim: usize,
        eps: f32,
    },
}

impl<'a> Lowering<'a> {
    pub(super) fn norm(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        let (op, x) = match &node.op {
            Op::RmsNorm { weight, eps } => self.rms_norm(node, weight.as_deref(), *eps)?,
            Op::LayerNorm { weight, bias, eps } => self.layer_norm(node, [weight, bias], *eps)?,
            _ => return Ok(None),
        };
        Ok(Some((StepOp::Norm(op), vec![x])))
    }

    fn rms_norm(
        &mut self,
        node: &'a Node,
        weight: Option<&'a str>,
        eps: f32,
    ) -> Result<(NormOp, Value), BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let dim = node.shape.last().copied().unwrap_or(0);
        let gain = match weight {
            Some(weight) => self.vector(weight, node)?,
            None => vec![1.0; dim].into(),
        };
        let n_groups = gain.len() / dim.max(1);
        if dim == 0 || n_groups * dim != gain.len() || n_groups == 0 {
            return Err(unsupported(node));
        }
        if n_groups > 1 && node.row_len() != gain.len() {
            return Err(unsupported(node));
        }
        Ok((NormOp::Rms { gain, dim, eps }, x))
    }

    fn layer_norm(
        &mut self,
        node: &'a Node,
        weights: [&'a Option<String>; 2],
        eps: f32,
    ) -> Result<(NormOp, Value), BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        let dim = node.shape.last().copied().unwrap_or(0);
        let mut vector = |name: &'a Option<String>| {
            let vector = name.as_deref().map(|name| self.vector(name, node));
            match vector.transpose()? {
                Some(vector) if vector.len() != dim => Err(unsupported(node)),
                vector => Ok(vector),
            }
        };
        let [gain, bias] = weights;
        let (gain, bias) = (vector(gain)?, vector(bias)?);
        let op = NormOp::Layer {
            gain,
            bias,
            dim,
            eps,
        };
        Ok((op, x))
    }
}
