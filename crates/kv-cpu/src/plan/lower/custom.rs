//! Lowers custom operations: finds implementation, weights and state.
//!
//! Does not know what they compute.

use std::sync::Arc;

use kv_backend::{BackendError, CustomOp, CustomShape};
use kv_graph::{CustomSpec, Input, Node, Op};

use super::{Call, Lowering, Value, unsupported};
use crate::plan::StepOp;

/// A custom operation with its weights.
#[derive(Debug)]
pub(crate) struct CustomStep {
    pub(crate) op: Arc<dyn CustomOp>,
    pub(crate) spec: CustomSpec,
    pub(crate) node: String,
    pub(crate) weights: Vec<Arc<[f32]>>,
    pub(crate) state: Option<CustomState>,
}

/// The state of a custom operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CustomState {
    /// Index of the recurrent layer in the layout.
    pub(crate) layer: usize,
    pub(crate) n_values: usize,
}

impl<'a> Lowering<'a> {
    pub(super) fn custom(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        match &node.op {
            Op::Custom { custom } => self.custom_call(node, custom).map(Some),
            _ => Ok(None),
        }
    }

    fn custom_call(&mut self, node: &'a Node, spec: &'a CustomSpec) -> Result<Call, BackendError> {
        let n_operands = node.operands.len() - spec.n_other_operands();
        let inputs = (0..n_operands).map(|at| self.operand(node, at));
        let inputs: Vec<Value> = inputs.collect::<Result<_, _>>()?;
        let shapes: Vec<(usize, usize)> = inputs.iter().map(|v| v.shape(self.graph)).collect();
        if shapes.iter().any(|&(rows, _)| rows != node.n_rows()) {
            return Err(unsupported(node));
        }
        let state = match spec.layer() {
            Some(layer) => {
                self.operand_input(node, n_operands, |i| matches!(i, Input::States))?;
                let (layer, states) = self.state(layer)?;
                Some(CustomState {
                    layer,
                    n_values: states.row.state_row,
                })
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
            n_state: state.map_or(0, |state| state.n_values),
        };
        let call = CustomStep {
            op: self.weights.custom.find(node, &shape)?,
            spec: spec.clone(),
            node: node.name.clone(),
            weights,
            state,
        };
        Ok((StepOp::Custom(Arc::new(call)), inputs))
    }
}
