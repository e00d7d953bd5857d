//! The mixer of a Mamba-2 layer: one projection for everything, causal convolution over input, B
//! and C, scan by heads, gate, norm, projection.
//!
//! Dao and Gu, arXiv 2405.21060. Does not know the layers around.

use kv_core::layers::RecurrentMemory;
use kv_graph::{
    Activation, GraphBuilder, GraphError, HeadScanSpec, Input, NodeId, NormGain, TableRow,
};

use super::ssm::{convolved, gated};
use super::{ConvBias, LayerContext};

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
    /// The bias of the convolution.
    pub conv_bias: ConvBias,
    /// The norm after the gate.
    pub gated_norm: GatedNorm,
    /// The lower bound of time steps.
    pub time_steps: TimeSteps,
}

/// The lower bound of the time steps of a mixer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeSteps {
    /// As short as they come out.
    #[default]
    Free,
    /// At least the softplus of `ssm_dt.bias` (Zamba2): `ssm_dt_floor.weight [1, heads]` is their
    /// own bias less that one, and what is below 0 with it becomes 0.
    WithFloor,
}

/// The norm behind the gate.
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
    /// The memory of the layer.
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
        let (d_inner, n_conv) = (self.d_inner, self.conv_channels());
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let states = b.input(Input::States)?;
        let n_all = d_inner + n_conv + self.n_heads;
        let all = b.linear("ssm_in", x, "ssm_in.weight", n_all)?;
        let z = b.columns("ssm_z", all, 0..d_inner)?;
        let x = b.columns("ssm_xBC_in", all, d_inner..d_inner + n_conv)?;
        let dt = b.columns("ssm_dt", all, d_inner + n_conv..n_all)?;
        let dt = self.floored(b, dt)?;
        let all = convolved(b, at.layer, self.d_conv, self.conv_bias, [x, states])?;
        let x = b.columns("ssm_x", all, 0..d_inner)?;
        let middle = d_inner + self.narrow();
        let into = b.columns("ssm_B", all, d_inner..middle)?;
        let out_of = b.columns("ssm_C", all, middle..n_conv)?;
        let scan = HeadScanSpec {
            n_heads: self.n_heads,
            n_groups: self.n_groups,
            d_state: self.d_state,
            a: "ssm_a".to_owned(),
            d: "ssm_d".to_owned(),
            dt_bias: "ssm_dt.bias".to_owned(),
        };
        let operands = [x, dt, into, out_of, states];
        let y = b.scan_heads("ssm_scan", at.layer, &scan, operands)?;
        let gated = gated(b, at, [y, z])?;
        let normed = self.norm(b, gated)?;
        b.linear("ssm_out", normed, "ssm_out.weight", dim)
    }

    /// Time steps before their bias and their softplus.
    fn floored(&self, b: &mut GraphBuilder, dt: NodeId) -> Result<NodeId, GraphError> {
        match self.time_steps {
            TimeSteps::Free => Ok(dt),
            TimeSteps::WithFloor => {
                let bias = TableRow {
                    weight: "ssm_dt_floor.weight",
                    n_rows: 1,
                    row: 0,
                };
                let above = b.add_row("ssm_dt_above", dt, bias)?;
                b.activate("ssm_dt_floored", Activation::Relu, above)
            }
        }
    }

    fn norm(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let GatedNorm::PerGroup { eps } = self.gated_norm else {
            return Ok(x);
        };
        let rows = b.shape_of(x).first().copied().unwrap_or(0);
        let width = self.d_inner / self.n_groups.max(1);
        let groups = b.reshape("ssm_groups", x, &[rows, self.n_groups, width])?;
        let gain = NormGain::PerGroup("ssm_norm.weight");
        let normed = b.rms_norm_with("ssm_norm", groups, gain, eps)?;
        b.reshape("ssm_normed", normed, &[rows, self.d_inner])
    }
}
