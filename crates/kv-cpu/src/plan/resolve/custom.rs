//! The nodes of custom operations: implementation, weights and state.
//!
//! Knows nothing of what they compute.

use std::sync::Arc;

use kv_core::backend::{BackendError, CustomShape};
use kv_core::graph::{CustomSpec, Input, Node};

use super::{Resolver, Value, unsupported};
use crate::plan::{CustomStep, Step};

impl<'a> Resolver<'a> {
    pub(super) fn custom(
        &mut self,
        node: &'a Node,
        spec: &'a CustomSpec,
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let n_operands = node.operands.len() - usize::from(spec.layer.is_some());
        let inputs = (0..n_operands).map(|at| self.operand(node, at));
        let inputs: Vec<Value> = inputs.collect::<Result<_, _>>()?;
        let shapes: Vec<(usize, usize)> = inputs.iter().map(|v| v.shape(self.graph)).collect();
        if shapes.iter().any(|&(rows, _)| rows != node.n_rows()) {
            return Err(unsupported(node));
        }
        let state = match spec.layer {
            Some(layer) => {
                self.operand_input(node, n_operands, |i| matches!(i, Input::States))?;
                let (at, row) = self.state(layer)?;
                Some((at, row.state_row))
            }
            None => None,
        };
        let weights = spec.weights.iter().map(|name| self.vector(name, node));
        let weights = weights.collect::<Result<_, _>>()?;
        let widths: Vec<usize> = shapes.iter().map(|&(_, width)| width).collect();
        let declared = |name: &String| {
            let used = self.graph.weights().iter().find(|w| w.name == *name);
            used.map_or(&[][..], |w| &w.shape)
        };
        let weight_shapes: Vec<&[usize]> = spec.weights.iter().map(declared).collect();
        let shape = CustomShape {
            spec,
            widths: &widths,
            weights: &weight_shapes,
            width: node.row_len(),
            n_state: state.map_or(0, |(_, n)| n),
        };
        let call = CustomStep {
            op: self.weights.custom.find(node, &shape)?,
            spec: spec.clone(),
            node: node.name.clone(),
            weights,
            state,
        };
        let call = Arc::new(call);
        Ok(Step::Custom { call, inputs, out })
    }
}
