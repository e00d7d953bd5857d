//! The mixer of a Mamba-2 layer: one projection for everything, causal convolution over input, B and
//! C, scan head by head, gate, norm, projection.
//!
//! Dao and Gu, arXiv 2405.21060. Knows nothing of the layers around.

use kv_core::LayerIdx;
use kv_core::graph::{GraphBuilder, GraphError, HeadScanSpec, Input, NodeId, NormGain};
use kv_core::layers::RecurrentMemory;

use super::ConvBias;
use super::ssm::{convolved, gated};

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ssm2MixerBlock {
    /// Channels of the scan.
    pub d_inner: usize,
    /// Values of the state of one channel.
    pub d_state: usize,
    /// Width of the convolution.
    pub d_conv: usize,
    /// Heads that the channels are divided into.
    pub n_heads: usize,
    /// Groups of heads that share B and C.
    pub n_groups: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: ConvBias,
    /// The norm behind the gate.
    pub gated_norm: GatedNorm,
}

/// Whether what leaves the gate is normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GatedNorm {
    /// It is not.
    None,
    /// The channels of each group of heads by themselves.
    PerGroup {
        /// Added to the mean square.
        eps: f32,
    },
}

impl Ssm2MixerBlock {
    /// What the layer remembers.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: self.d_conv.saturating_sub(1) * self.conv_channels(),
            state_row: self.d_inner * self.d_state,
        }
    }

    /// Values of B, and as many of C: `[groups, d_state]`.
    fn narrow(&self) -> usize {
        self.n_groups * self.d_state
    }

    /// Input, B and C.
    fn conv_channels(&self) -> usize {
        self.d_inner + 2 * self.narrow()
    }

    /// Adds the block: `x [tokens, dim]` in, `[rows, dim]` out, where `rows` are those of `wanted`, or
    /// else all.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        x: NodeId,
        wanted: Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        let (d_inner, n_conv) = (self.d_inner, self.conv_channels());
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let name = |what: &str| format!("{what}-{layer}");
        let weight = |what: &str| format!("blk.{layer}.{what}");
        let states = b.input(Input::States)?;
        let n_all = d_inner + n_conv + self.n_heads;
        let all = b.linear(&name("ssm_in"), x, &weight("ssm_in.weight"), n_all)?;
        let z = b.columns(&name("ssm_z"), all, 0..d_inner)?;
        let x = b.columns(&name("ssm_xBC_in"), all, d_inner..d_inner + n_conv)?;
        let dt = b.columns(&name("ssm_dt"), all, d_inner + n_conv..n_all)?;
        let all = convolved(b, layer, (self.d_conv, self.conv_bias), [x, states])?;
        let x = b.columns(&name("ssm_x"), all, 0..d_inner)?;
        let middle = d_inner + self.narrow();
        let into = b.columns(&name("ssm_B"), all, d_inner..middle)?;
        let out_of = b.columns(&name("ssm_C"), all, middle..n_conv)?;
        let scan = HeadScanSpec {
            n_heads: self.n_heads,
            n_groups: self.n_groups,
            d_state: self.d_state,
            a: weight("ssm_a"),
            d: weight("ssm_d"),
            dt_bias: weight("ssm_dt.bias"),
        };
        let operands = [x, dt, into, out_of, states];
        let y = b.scan_heads(&name("ssm_scan"), layer, &scan, operands)?;
        let gated = gated(b, layer, [y, z], wanted)?;
        let normed = self.norm(b, layer, gated)?;
        b.linear(&name("ssm_out"), normed, &weight("ssm_out.weight"), dim)
    }

    fn norm(&self, b: &mut GraphBuilder, layer: LayerIdx, x: NodeId) -> Result<NodeId, GraphError> {
        let GatedNorm::PerGroup { eps } = self.gated_norm else {
            return Ok(x);
        };
        let name = |what: &str| format!("{what}-{layer}");
        let rows = b.shape_of(x).first().copied().unwrap_or(0);
        let width = self.d_inner / self.n_groups.max(1);
        let gain = format!("blk.{layer}.ssm_norm.weight");
        let groups = b.reshape(&name("ssm_groups"), x, &[rows, self.n_groups, width])?;
        let gain = NormGain::PerGroup(&gain);
        let normed = b.rms_norm_with(&name("ssm_norm"), groups, gain, eps)?;
        b.reshape(&name("ssm_normed"), normed, &[rows, self.d_inner])
    }
}
