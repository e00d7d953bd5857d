//! The gated feed-forward block: `down(activation(gate(x)) * up(x))`.
//!
//! Shazeer, arXiv 2002.05202. Knows nothing of the layers around.

use kv_core::LayerIdx;
use kv_core::graph::{Activation, GraphBuilder, GraphError, NodeId};

/// Settings of one feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedForwardBlock {
    /// Width between the matrices.
    pub hidden: usize,
    /// Applied to the gate.
    pub activation: Activation,
}

impl FeedForwardBlock {
    /// Adds the block: `x [rows, dim]` in, the same shape out.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let weight = |what: &str| format!("blk.{layer}.ffn_{what}.weight");
        let gate = b.linear(
            &format!("ffn_gate-{layer}"),
            x,
            &weight("gate"),
            self.hidden,
        )?;
        let up = b.linear(&format!("ffn_up-{layer}"), x, &weight("up"), self.hidden)?;
        let gated = b.gate(&format!("ffn_gate_par-{layer}"), self.activation, gate, up)?;
        b.linear(&format!("ffn_out-{layer}"), gated, &weight("down"), dim)
    }
}
