//! The mixer of a layer with lightning attention (Qin et al., arXiv 2401.04658; MiniMax-01, arXiv
//! 2501.08313): linear attention whose keys and values are summed with a decay that each head has,
//! a norm, and a gate on what comes out.
//!
//! It is the scan of Mamba-2 by heads where every time step is 1: keys are its B, queries its C.
//! Does not know the layers around.

use kv_core::layers::RecurrentMemory;
use kv_graph::{Activation, GraphBuilder, GraphError, HeadScanSpec, Input, NodeId};

use super::LayerContext;

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LightningBlock {
    /// Number of heads.
    pub n_heads: usize,
    /// Values of a query, of a key or of a value.
    pub dim: usize,
    /// Added to the mean square in the norm of outputs.
    pub norm_eps: f32,
}

impl LightningBlock {
    /// The memory of the layer: a matrix for each head.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: 0,
            // A size that no tensor has is refused later, with its tensor.
            state_row: self
                .n_heads
                .saturating_mul(self.dim.saturating_mul(self.dim)),
        }
    }

    /// Adds the block: `x [tokens, dim]` in, `[rows, dim]` out, where `rows` are the layer's output
    /// rows, or else all.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let width = self.n_heads * self.dim;
        let states = b.input(Input::States)?;
        let all = b.linear("lin_qkv_in", x, "attn_qkv.weight", 3 * width)?;
        let all = b.activate("lin_qkv", Activation::Silu, all)?;
        let q = b.columns("lin_q", all, 0..width)?;
        let k = b.columns("lin_k", all, width..2 * width)?;
        let v = b.columns("lin_v", all, 2 * width..3 * width)?;
        // Time steps are the softplus of their bias alone, which is 1.
        let any = b.columns("lin_q_first", all, 0..self.n_heads)?;
        let dt = b.scale("lin_dt", any, 0.0)?;
        let scan = HeadScanSpec {
            n_heads: self.n_heads,
            n_groups: self.n_heads,
            d_state: self.dim,
            a: "ssm_a".to_owned(),
            d: "ssm_d".to_owned(),
            dt_bias: "ssm_dt.bias".to_owned(),
        };
        let y = b.scan_heads("lin_scan", at.layer, &scan, [v, dt, k, q, states])?;
        let y = at.take_rows(b, "lin_scan_rows", y)?;
        let x = at.take_rows(b, "lin_x_rows", x)?;
        let gate = b.linear("lin_gate", x, "attn_gate.weight", width)?;
        let normed = b.rms_norm("lin_norm", y, "ssm_norm.weight", self.norm_eps)?;
        let gated = b.gate("lin_gated", Activation::Sigmoid, gate, normed)?;
        b.linear("lin_out", gated, "attn_output.weight", dim)
    }
}
