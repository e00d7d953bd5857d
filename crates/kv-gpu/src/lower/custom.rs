//! Custom operations, which the host computes.

use kv_backend::{BackendError, CustomShape, RowKind};
use kv_graph::CustomSpec;

use super::{Lower, Result};
use crate::custom::{HostStep, States, Values};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Operand, Step};

impl<D: Device> Lower<'_, D> {
    /// Lowers a custom operation.
    pub(super) fn custom(&mut self, (id, node): NumberedNode<'_>, spec: &CustomSpec) -> Result<()> {
        let states = match spec.layer() {
            Some(layer) => {
                let states = self.context.layout.state(layer);
                Some(States {
                    place: self.rows(layer, RowKind::State)?,
                    len: states.ok_or(BackendError::NoRows { layer })?.row.state_row,
                })
            }
            None => None,
        };
        let weights = spec.weights.iter();
        let weights = weights.map(|name| self.host_weight(name, node));
        let weights = weights.collect::<Result<Vec<_>, _>>()?;
        let n_operands = node.operands.len() - spec.n_other_operands();
        let nodes = (0..n_operands).map(|at| self.operand_node(node, at));
        let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
        let widths: Vec<usize> = nodes.iter().map(|node| node.row_len()).collect();
        let shapes: Vec<&[usize]> = weights.iter().map(|weight| weight.shape()).collect();
        let shape = CustomShape {
            spec,
            widths: &widths,
            weights: &shapes,
            width: node.row_len(),
            n_state: states.as_ref().map_or(0, |states| states.len),
        };
        let host = &self.context.weights.custom;
        let op = host.ops.find(node, &shape)?;
        if !op.is_of_host() {
            host.report(self.context.shared.device.name(), spec);
        }
        let weights = weights.iter().map(|weight| host.floats(weight)).collect();
        let operands = nodes.iter().enumerate().map(|(at, operand)| {
            Ok(Values {
                // Values that are none have no place.
                place: match operand.n_values() {
                    0 => Operand::Inputs(0),
                    _ => self.operand(node, at)?,
                },
                len: operand.n_values(),
            })
        });
        let operands = operands.collect::<Result<Vec<_>>>()?;
        let result = Values {
            place: self.result(id),
            len: node.n_values(),
        };
        self.steps.push(Step::Host(Box::new(HostStep {
            op,
            spec: spec.clone(),
            node: node.name.clone(),
            operands,
            weights,
            n_rows: node.n_rows(),
            result,
            states,
        })));
        Ok(())
    }
}
