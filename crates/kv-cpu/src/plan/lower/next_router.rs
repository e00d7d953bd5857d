//! Finds the router of the layer after a mixture, where the rows that a layer's router sees tell
//! what the next one will see: both norms of one residual stream.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_graph::{Node, NodeId, Op, RouteSpec};

use super::Lowering;
use crate::activations::ActivationKind;
use crate::execute::NextRouter;

/// A router that sees the rows of its experts.
#[derive(Clone, Copy)]
struct SeenRouter<'a> {
    route: NodeId,
    logits: &'a Node,
    weight: &'a str,
    spec: RouteSpec,
    bias: Option<&'a str>,
    /// The gain of the norm that makes its rows.
    gain: &'a str,
    dim: usize,
}

impl<'a> Lowering<'a> {
    /// The router that chooses after that of this product with experts.
    pub(super) fn next_router(
        &mut self,
        node: &'a Node,
    ) -> Result<Option<NextRouter>, BackendError> {
        let Some(this) = self.seen_router(node) else {
            return Ok(None);
        };
        let later = self.graph.nodes().iter().skip(this.route.as_usize() + 1);
        let mut later = later.filter_map(|later| match &later.op {
            Op::ExpertLinear { weight, .. } if later.operands.get(1) != Some(&this.route) => {
                let (_, stack) = self.weights.expert_stack(weight)?;
                Some((stack, later))
            }
            _ => None,
        });
        let Some((stack, next)) = later.next() else {
            return Ok(None);
        };
        let Some(next) = self.seen_router(next) else {
            return Ok(None);
        };
        let shape = [next.logits.row_len(), this.dim];
        let matrix = self.matrix(next.weight, next.logits, Some(shape))?;
        if matrix.activation_kind() != ActivationKind::F32 {
            return Ok(None);
        }
        let (ours, theirs) = (self.vector(this.gain, node)?, self.vector(next.gain, node)?);
        if ours.len() != this.dim || theirs.len() != this.dim {
            return Ok(None);
        }
        let by = |(theirs, ours): (&f32, &f32)| if *ours == 0.0 { 0.0 } else { theirs / ours };
        let gain: Arc<[f32]> = theirs.iter().zip(&*ours).map(by).collect();
        let is_plain = gain.iter().all(|&gain| gain == 1.0);
        let bias = next.bias.map(|b| self.vector(b, node)).transpose()?;
        Ok(Some(NextRouter {
            stack,
            matrix,
            spec: next.spec,
            bias,
            gain: Some(gain).filter(|_| !is_plain),
        }))
    }

    /// The router of a product with experts.
    fn seen_router(&self, experts: &'a Node) -> Option<SeenRouter<'a>> {
        let &[x, route, ..] = experts.operands.as_slice() else {
            return None;
        };
        let Op::Route { spec, bias, .. } = &self.graph.node(route)?.op else {
            return None;
        };
        let logits = *self.graph.node(route)?.operands.first()?;
        let logits = self.graph.node(logits)?;
        let rows = self.graph.node(x)?;
        let (weight, gain) = match (&logits.op, &rows.op) {
            (
                Op::Linear { weight, bias: None },
                Op::RmsNorm {
                    weight: Some(gain), ..
                },
            ) => (weight, gain),
            _ => return None,
        };
        (logits.operands.first() == Some(&x)).then_some(SeenRouter {
            route,
            logits,
            weight,
            spec: *spec,
            bias: bias.as_deref(),
            gain,
            dim: rows.row_len(),
        })
    }
}
