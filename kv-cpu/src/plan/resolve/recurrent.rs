//! The nodes of recurrent layers: their weights, and the states that the layout has for them.
//!
//! Knows nothing of other nodes.

use std::sync::Arc;

use kv_core::LayerIdx;
use kv_core::backend::BackendError;
use kv_core::graph::{ConvSpec, Input, Node, ScanSpec};
use kv_core::layers::RecurrentMemory;

use super::{Resolver, Value, unsupported};
use crate::plan::{ConvKernel, ScanWeights, Step};

fn other_state(layer: LayerIdx, what: &str, wanted: usize, got: usize) -> BackendError {
    BackendError::RowShape {
        layer,
        wanted: format!("{wanted} values of {what} state"),
        got: format!("{got}"),
    }
}

impl<'a> Resolver<'a> {
    pub(super) fn conv(
        &mut self,
        node: &'a Node,
        (layer, conv): (LayerIdx, &'a ConvSpec),
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let (x, channels, width) = (self.operand(node, 0)?, node.row_len(), conv.width);
        self.operand_input(node, 1, |i| matches!(i, Input::States))?;
        self.whole_ubatch(node, x, channels)?;
        let (at, row) = self.state(layer)?;
        let wanted = width.saturating_sub(1) * channels;
        if row.conv_row != wanted {
            return Err(other_state(layer, "convolution", wanted, row.conv_row));
        }
        let weight = self.vector(&conv.weight, node)?;
        let bias = conv.bias.as_ref().map(|b| self.vector(b, node));
        // Tap by tap, so that a kernel walks along the channels.
        let taps = (0..width).flat_map(|k| weight.iter().skip(k).step_by(width.max(1)));
        let kernel = ConvKernel {
            taps: taps.copied().collect(),
            width,
            bias: bias.transpose()?,
        };
        Ok(Step::Conv {
            layer: at,
            kernel: Arc::new(kernel),
            x,
            out,
        })
    }

    pub(super) fn scan(
        &mut self,
        node: &'a Node,
        (layer, scan): (LayerIdx, &'a ScanSpec),
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let (channels, d_state) = (node.row_len(), scan.d_state);
        let mut inputs = [out; 4];
        for (at, (input, width)) in inputs
            .iter_mut()
            .zip([channels, channels, d_state, d_state])
            .enumerate()
        {
            *input = self.operand(node, at)?;
            self.whole_ubatch(node, *input, width)?;
        }
        self.operand_input(node, 4, |i| matches!(i, Input::States))?;
        let (at, row) = self.state(layer)?;
        let wanted = channels * d_state;
        if row.state_row != wanted {
            return Err(other_state(layer, "scan", wanted, row.state_row));
        }
        let weights = ScanWeights {
            d_state,
            a: self.vector(&scan.a, node)?,
            d: self.vector(&scan.d, node)?,
        };
        Ok(Step::Scan {
            layer: at,
            weights: Arc::new(weights),
            inputs,
            out,
        })
    }

    /// An operand must have a row of this width for each token.
    fn whole_ubatch(&self, node: &Node, x: Value, width: usize) -> Result<(), BackendError> {
        if x.shape(self.graph) == (self.graph.shape().n_tokens, width) {
            Ok(())
        } else {
            Err(unsupported(node))
        }
    }

    pub(super) fn state(&self, layer: LayerIdx) -> Result<(usize, RecurrentMemory), BackendError> {
        let mut states = self.layout.states().iter().enumerate();
        let found = states.find(|(_, s)| s.layer == layer);
        found
            .map(|(at, s)| (at, s.row))
            .ok_or(BackendError::NoRows { layer })
    }
}
