//! Custom operations: values come to the host, are computed there and go back.
//!
//! Invariant: only the rows that groups store in change. Knows nothing of what is computed.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::Tensor;
use kv_backend::GraphInputs;
use kv_backend::{BackendError, CustomCall, CustomOp, CustomShape, CustomStates};
use kv_core::memory::StateGroup;
use kv_graph::{CustomSpec, Graph, Node};
use kv_rows::RowLayout;

use crate::error::OnDevice;
use crate::weights::Weights;

/// A custom operation with its weights on the host.
#[derive(Debug)]
pub(crate) struct Custom {
    op: Arc<dyn CustomOp>,
    weights: Vec<Arc<[f32]>>,
    n_state: usize,
}

impl Custom {
    /// Finds what `node` names.
    pub(crate) fn new(
        (graph, node): (&Graph, &Node),
        spec: &CustomSpec,
        (weights, layout): (&Weights, &RowLayout),
        loaded: &HashMap<String, Tensor>,
    ) -> Result<Self, BackendError> {
        let n_state = match spec.layer() {
            Some(layer) => {
                let states = layout.state(layer).ok_or(BackendError::NoRows { layer })?;
                states.row.state_row
            }
            None => 0,
        };
        let n_operands = node.operands.len() - spec.n_other_operands();
        let operands = node.operands.iter().take(n_operands);
        let widths = operands.map(|&id| graph.node(id).map_or(0, Node::row_len));
        let widths: Vec<usize> = widths.collect();
        let tensors: Vec<&Tensor> = spec.weights.iter().filter_map(|w| loaded.get(w)).collect();
        let shapes: Vec<&[usize]> = tensors.iter().map(|t| t.dims()).collect();
        let shape = CustomShape {
            spec,
            widths: &widths,
            weights: &shapes,
            width: node.row_len(),
            n_state,
        };
        let op = weights.custom.find(node, &shape)?;
        let values = tensors.iter().map(|t| t.flatten_all()?.to_vec1::<f32>());
        let values: Vec<Vec<f32>> = values.collect::<candle_core::Result<_>>().on_device()?;
        let weights = values.into_iter().map(Arc::from).collect();
        Ok(Self {
            op,
            weights,
            n_state,
        })
    }

    /// Computes `node`; `states` is `[n_states, n_state]` where it has some.
    pub(crate) fn run(
        &self,
        node: &Node,
        spec: &CustomSpec,
        operands: &[&Tensor],
        states: Option<&Tensor>,
        inputs: &GraphInputs<'_>,
    ) -> Result<Tensor, BackendError> {
        let groups = inputs.states;
        let host = |t: &&Tensor| t.flatten_all()?.to_vec1::<f32>();
        let values: Vec<Vec<f32>> = operands
            .iter()
            .map(host)
            .collect::<Result<_, _>>()
            .on_device()?;
        let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
        let call = CustomCall {
            op: &*self.op,
            spec,
            node: &node.name,
            operands: &values,
            weights: &self.weights,
            n_rows: node.n_rows(),
        };
        let mut out = vec![0.0; node.n_values()];
        match states {
            Some(tensor) => {
                let mut all = host(&tensor).on_device()?;
                let states = CustomStates {
                    values: &mut all,
                    n_state: self.n_state,
                };
                call.recur(groups, states, &mut out)?;
                self.store(tensor, groups, &all).on_device()?;
            }
            None => call.without_state(inputs, &mut out)?,
        }
        let device = operands
            .first()
            .map_or(&candle_core::Device::Cpu, |t| t.device());
        Tensor::from_vec(out, node.shape.as_slice(), device).on_device()
    }

    fn store(
        &self,
        tensor: &Tensor,
        groups: &[StateGroup],
        all: &[f32],
    ) -> candle_core::Result<()> {
        for store in groups.iter().flat_map(|group| &group.stores) {
            let at = store.to.as_usize();
            let row = &all[at * self.n_state..(at + 1) * self.n_state];
            let row = Tensor::from_slice(row, (1, self.n_state), tensor.device())?;
            tensor.slice_set(&row, 0, at)?;
        }
        Ok(())
    }
}
