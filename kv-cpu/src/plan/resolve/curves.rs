//! Norms other than the usual one.
//!
//! Knows nothing of other nodes.

use kv_core::backend::BackendError;
use kv_core::graph::Node;

use super::{Resolver, Value, unsupported};
use crate::plan::Step;

impl<'a> Resolver<'a> {
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
