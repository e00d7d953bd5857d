//! The mixer of a Mamba layer: projection, causal convolution, selective scan, gate, projection.
//!
//! Gu and Dao, arXiv 2312.00752 (Mamba-1). Does not know the layers around.

use kv_core::layers::RecurrentMemory;
use kv_graph::{Affine, GraphBuilder, GraphError, Input, NodeId, NormGain, ScanSpec};

use super::LayerContext;
use super::ssm::{convolved, gated};

/// Settings of one mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsmMixerBlock {
    /// Channels of the convolution and the scan.
    pub d_inner: usize,
    /// Values of the state of one channel.
    pub d_state: usize,
    /// Width of the convolution.
    pub d_conv: usize,
    /// Values that step sizes are made from.
    pub dt_rank: usize,
    /// The bias of the convolution.
    pub conv_bias: ConvBias,
    /// Norms between the projection and the scan.
    pub inner_norms: InnerNorms,
}

/// RMS norms of what step sizes are made from, of B and of C.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum InnerNorms {
    /// There are none.
    #[default]
    None,
    /// Without gains (Falcon Mamba, arXiv 2410.05355).
    Plain {
        /// Added to the mean square.
        eps: f32,
    },
    /// With a gain each (Jamba, arXiv 2403.19887).
    WithGains {
        /// Added to the mean square.
        eps: f32,
    },
}

impl InnerNorms {
    /// Adds the norm of one of the three.
    fn build(
        self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        weight: &str,
    ) -> Result<NodeId, GraphError> {
        match self {
            Self::None => Ok(x),
            Self::Plain { eps } => b.rms_norm_with(name, x, NormGain::None, eps),
            Self::WithGains { eps } => b.rms_norm(name, x, weight, eps),
        }
    }
}

/// The bias of a mixer's convolution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConvBias {
    /// It has none.
    None,
    /// One value for each channel.
    #[default]
    PerChannel,
}

impl SsmMixerBlock {
    /// The memory of the layer.
    pub fn memory(&self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: self.d_conv.saturating_sub(1) * self.d_inner,
            state_row: self.d_inner * self.d_state,
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
        let Self {
            d_inner,
            d_state,
            d_conv,
            dt_rank,
            conv_bias,
            inner_norms,
        } = *self;
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let states = b.input(Input::States)?;
        let xz = b.linear("ssm_in", x, "ssm_in.weight", 2 * d_inner)?;
        let x = b.columns("ssm_x_in", xz, 0..d_inner)?;
        let z = b.columns("ssm_z", xz, d_inner..2 * d_inner)?;
        let x = convolved(b, at.layer, d_conv, conv_bias, [x, states])?;
        let n_projected = dt_rank + 2 * d_state;
        let projected = b.linear("ssm_x", x, "ssm_x.weight", n_projected)?;
        let dt = b.columns("ssm_dt_low", projected, 0..dt_rank)?;
        let into = b.columns("ssm_B", projected, dt_rank..dt_rank + d_state)?;
        let out_of = b.columns("ssm_C", projected, dt_rank + d_state..n_projected)?;
        let dt = inner_norms.build(b, "ssm_dt_normed", dt, "ssm_dt_norm.weight")?;
        let into = inner_norms.build(b, "ssm_B_normed", into, "ssm_b_norm.weight")?;
        let out_of = inner_norms.build(b, "ssm_C_normed", out_of, "ssm_c_norm.weight")?;
        let dt_weights = Affine::new("ssm_dt.weight").bias("ssm_dt.bias");
        let dt = b.affine("ssm_dt", dt, dt_weights, d_inner)?;
        let scan = ScanSpec {
            d_state,
            a: "ssm_a".to_owned(),
            d: "ssm_d".to_owned(),
        };
        let operands = [x, dt, into, out_of, states];
        let y = b.scan("ssm_scan", at.layer, &scan, operands)?;
        let gated = gated(b, at, [y, z])?;
        b.linear("ssm_out", gated, "ssm_out.weight", dim)
    }
}
