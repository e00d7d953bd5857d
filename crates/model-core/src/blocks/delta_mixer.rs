//! The mixer of a gated DeltaNet layer: projections, causal convolution over queries, keys and
//! values, gated delta rule, norm, gate, projection.
//!
//! Yang et al., arXiv 2412.06464. Does not know the layers around.

use kv_core::layers::RecurrentMemory;
use kv_graph::{
    Activation, DecaySpec, DeltaSpec, GraphBuilder, GraphError, Input, KeySharing, NodeId, NormGain,
};

use super::ssm::convolved;
use super::{ConvBias, LayerContext};

/// Added to the square of the length of queries and keys before they are divided by it.
const UNIT_EPS: f32 = 1e-6;

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaMixerBlock {
    /// Heads of values.
    pub n_heads: usize,
    /// Heads of queries and keys; divides `n_heads`.
    pub key_heads: usize,
    /// Values of one query or key head.
    pub k_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
    /// Width of the convolution.
    pub d_conv: usize,
    /// The value that heads share a key head.
    pub sharing: KeySharing,
    /// The source of learning rates and step sizes.
    pub rates: DeltaRates,
    /// Added to the mean square in the norm of outputs.
    pub norm_eps: f32,
}

/// The matrices of learning rates and step sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeltaRates {
    /// One each (Qwen 3.5).
    #[default]
    Separate,
    /// One for both: for each key head the rates of its value heads, then their step sizes
    /// (Qwen3-Next).
    ByKeyHead,
}

impl DeltaMixerBlock {
    /// The memory of the layer.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: self.d_conv.saturating_sub(1) * self.conv_channels(),
            state_row: self.channels() * self.k_dim,
        }
    }

    /// Values of all heads.
    fn channels(&self) -> usize {
        self.n_heads * self.v_dim
    }

    /// Values of all queries, and as many of all keys.
    fn keys(&self) -> usize {
        self.key_heads * self.k_dim
    }

    /// Queries, keys and values.
    fn conv_channels(&self) -> usize {
        2 * self.keys() + self.channels()
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
        let (keys, n_conv) = (self.keys(), self.conv_channels());
        let states = b.input(Input::States)?;
        let all = b.linear("ssm_qkv_in", x, "attn_qkv.weight", n_conv)?;
        let z = b.linear("ssm_z", x, "attn_gate.weight", self.channels())?;
        let [beta, dt] = self.rates(b, x)?;
        let all = convolved(b, at.layer, self.d_conv, ConvBias::None, [all, states])?;
        let q = b.columns("ssm_q", all, 0..keys)?;
        let k = b.columns("ssm_k", all, keys..2 * keys)?;
        let v = b.columns("ssm_v", all, 2 * keys..n_conv)?;
        let heads = UnitHeads {
            n_heads: self.key_heads,
            dim: self.k_dim,
        };
        let q = heads.normed(b, "ssm_q", q)?;
        let k = heads.unit(b, "ssm_k", k)?;
        let beta = b.activate("ssm_beta_sigmoid", Activation::Sigmoid, beta)?;
        let spec = DecaySpec {
            n_heads: self.n_heads,
            a: "ssm_a".to_owned(),
            dt_bias: "ssm_dt.bias".to_owned(),
        };
        let decay = b.decay("ssm_decay", dt, &spec, &[self.n_heads])?;
        let spec = DeltaSpec {
            n_heads: self.n_heads,
            key_heads: self.key_heads,
            k_dim: self.k_dim,
            sharing: self.sharing,
            scale: heads.query_scale(),
        };
        let operands = [q, k, v, decay, beta, states];
        let y = b.delta("ssm_delta", at.layer, spec, operands)?;
        let y = at.take_rows(b, "ssm_delta_rows", y)?;
        let z = at.take_rows(b, "ssm_z_rows", z)?;
        let y = normed_heads(b, y, [self.n_heads, self.v_dim], self.norm_eps)?;
        let gated = b.gate("ssm_gated", Activation::Silu, z, y)?;
        b.linear("ssm_out", gated, "ssm_out.weight", dim)
    }

    /// The arguments of the sigmoid that gives learning rates, and step sizes without their bias:
    /// `[tokens, heads]` each. `[tokens, heads]` each.
    fn rates(&self, b: &mut GraphBuilder, x: NodeId) -> Result<[NodeId; 2], GraphError> {
        let n_heads = self.n_heads;
        match self.rates {
            DeltaRates::Separate => {
                let beta = b.linear("ssm_beta", x, "ssm_beta.weight", n_heads)?;
                Ok([beta, b.linear("ssm_dt", x, "ssm_alpha.weight", n_heads)?])
            }
            DeltaRates::ByKeyHead => {
                let n = b.shape_of(x).first().copied().unwrap_or(0);
                let shared = n_heads / self.key_heads.max(1);
                let both = b.linear("ssm_ba", x, "ssm_ba.weight", 2 * n_heads)?;
                let both = b.reshape("ssm_ba_heads", both, &[n, self.key_heads, 2 * shared])?;
                let part = |b: &mut GraphBuilder, name: &str, first: usize| {
                    let of_keys =
                        b.columns(&format!("{name}_heads"), both, first..first + shared)?;
                    b.reshape(name, of_keys, &[n, n_heads])
                };
                let beta = part(b, "ssm_beta", 0)?;
                Ok([beta, part(b, "ssm_dt", shared)?])
            }
        }
    }
}

/// Queries or keys that are brought to one length, head by head.
#[derive(Clone, Copy)]
pub(super) struct UnitHeads {
    pub(super) n_heads: usize,
    pub(super) dim: usize,
}

impl UnitHeads {
    /// `x [tokens, heads * dim]` with heads of length 1.
    pub(super) fn unit(
        self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let x = self.normed(b, name, x)?;
        b.scale(&format!("{name}_unit"), x, self.inverse_root())
    }

    /// `x [tokens, heads * dim]` with heads of length `sqrt(dim)`.
    pub(super) fn normed(
        self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let n = b.shape_of(x).first().copied().unwrap_or(0);
        let shape = [n, self.n_heads, self.dim];
        let heads = b.reshape(&format!("{name}_heads"), x, &shape)?;
        // The mean of squares is their sum by the size of a head.
        let eps = UNIT_EPS / self.dim.max(1) as f32;
        let normed = b.rms_norm_with(&format!("{name}_norm"), heads, NormGain::None, eps)?;
        b.reshape(
            &format!("{name}_normed"),
            normed,
            &[n, self.n_heads * self.dim],
        )
    }

    /// The factor on outputs, `1 / sqrt(dim)`, times what makes up for queries of length
    /// `sqrt(dim)`.
    pub(super) fn query_scale(self) -> f32 {
        1.0 / self.dim.max(1) as f32
    }

    fn inverse_root(self) -> f32 {
        1.0 / (self.dim.max(1) as f32).sqrt()
    }
}

/// The norm of outputs, each head by itself: `y [rows, heads * dim]` in, the same shape out.
pub(super) fn normed_heads(
    b: &mut GraphBuilder,
    y: NodeId,
    [n_heads, dim]: [usize; 2],
    eps: f32,
) -> Result<NodeId, GraphError> {
    let n = b.shape_of(y).first().copied().unwrap_or(0);
    let heads = b.reshape("ssm_heads", y, &[n, n_heads, dim])?;
    let normed = b.rms_norm("ssm_norm", heads, "ssm_norm.weight", eps)?;
    b.reshape("ssm_normed", normed, &[n, n_heads * dim])
}
