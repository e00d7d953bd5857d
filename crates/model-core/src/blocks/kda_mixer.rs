//! The mixer of a Kimi Delta Attention layer: a gated delta rule each key value of which decays by
//! itself, over convolved queries, keys and values; norm, gate, projection.
//!
//! Kimi Linear, arXiv 2510.26692. Does not know the layers around.

use kv_core::layers::RecurrentMemory;
use kv_graph::{
    Activation, ConvKernels, DecaySpec, DeltaSpec, GraphBuilder, GraphError, Input, KeySharing,
    NodeId,
};

use super::LayerContext;
use super::delta_mixer::{UnitHeads, normed_heads};

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KdaMixerBlock {
    /// Heads of queries, keys and values.
    pub n_heads: usize,
    /// Values of one head of each.
    pub head_dim: usize,
    /// Width of the convolutions.
    pub d_conv: usize,
    /// Values between the two matrices of step sizes, and between those of the gate.
    pub rank: usize,
    /// Added to the mean square in the norm of outputs.
    pub norm_eps: f32,
}

impl KdaMixerBlock {
    /// The memory of the layer.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            // A size that no tensor has is refused later, with its tensor.
            conv_row: (self.d_conv.saturating_sub(1) * 3).saturating_mul(self.channels()),
            state_row: self.channels().saturating_mul(self.head_dim),
        }
    }

    /// Values of all heads.
    fn channels(&self) -> usize {
        self.n_heads * self.head_dim
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
        let states = b.input(Input::States)?;
        let [q, k, v] = self.convolved(b, at, x, states)?;
        let heads = UnitHeads {
            n_heads: self.n_heads,
            dim: self.head_dim,
        };
        let q = heads.normed(b, "ssm_q", q)?;
        let k = heads.unit(b, "ssm_k", k)?;
        let dt = self.through_rank(b, "ssm_f", x)?;
        let spec = DecaySpec {
            n_heads: self.n_heads,
            a: "ssm_a".to_owned(),
            dt_bias: "ssm_dt.bias".to_owned(),
        };
        let decay = b.decay("ssm_decay", dt, &spec, &[1, 1, self.n_heads, 1])?;
        let beta = b.linear("ssm_beta", x, "ssm_beta.weight", self.n_heads)?;
        let beta = b.activate("ssm_beta_sigmoid", Activation::Sigmoid, beta)?;
        let spec = DeltaSpec {
            n_heads: self.n_heads,
            key_heads: self.n_heads,
            k_dim: self.head_dim,
            sharing: KeySharing::Neighbours,
            scale: heads.query_scale(),
        };
        let y = b.delta("ssm_delta", at.layer, spec, [q, k, v, decay, beta, states])?;
        let y = at.take_rows(b, "ssm_delta_rows", y)?;
        let x = at.take_rows(b, "ssm_x_rows", x)?;
        let z = self.through_rank(b, "ssm_g", x)?;
        let y = normed_heads(b, y, [self.n_heads, self.head_dim], self.norm_eps)?;
        let gated = b.gate("ssm_gated", Activation::Sigmoid, z, y)?;
        b.linear("ssm_out", gated, "attn_output.weight", dim)
    }

    /// Queries, keys and values after their convolutions, which are one over all channels.
    fn convolved(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        x: NodeId,
        states: NodeId,
    ) -> Result<[NodeId; 3], GraphError> {
        let n = self.channels();
        let q = b.linear("ssm_q_in", x, "attn_q.weight", n)?;
        let k = b.linear("ssm_k_in", x, "attn_k.weight", n)?;
        let v = b.linear("ssm_v_in", x, "attn_v.weight", n)?;
        let qk = b.concat("ssm_qk_in", q, k)?;
        let all = b.concat("ssm_qkv_in", qk, v)?;
        let kernels = ConvKernels {
            width: self.d_conv,
            weights: ["q", "k", "v"].map(|what| format!("ssm_conv1d_{what}.weight")),
            shape: vec![1, n, 1, self.d_conv],
        };
        let all = b.conv_joined("ssm_conv", at.layer, &kernels, [all, states])?;
        let all = b.activate("ssm_conv_silu", Activation::Silu, all)?;
        Ok([
            b.columns("ssm_q", all, 0..n)?,
            b.columns("ssm_k", all, n..2 * n)?,
            b.columns("ssm_v", all, 2 * n..3 * n)?,
        ])
    }

    /// `x` through the two matrices of this name.
    fn through_rank(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let low = b.linear(
            &format!("{name}_low"),
            x,
            &format!("{name}_a.weight"),
            self.rank,
        )?;
        b.linear(name, low, &format!("{name}_b.weight"), self.channels())
    }
}
