//! [`SsmMixer`]: the mixer of a recurrent layer, of either kind, and what both kinds do alike.
//!
//! Knows nothing of the layers around.

use kv_core::LayerIdx;
use kv_core::graph::{Activation, ConvSpec, GraphBuilder, GraphError, NodeId};
use kv_core::layers::RecurrentMemory;

use super::{ConvBias, Ssm2MixerBlock, SsmMixerBlock};

/// The mixer of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SsmMixer {
    /// As in Mamba.
    Mamba(SsmMixerBlock),
    /// As in Mamba-2.
    Mamba2(Ssm2MixerBlock),
}

impl SsmMixer {
    /// What the layer remembers.
    pub fn memory(&self) -> RecurrentMemory {
        match self {
            Self::Mamba(block) => block.memory(),
            Self::Mamba2(block) => block.memory(),
        }
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
        match self {
            Self::Mamba(block) => block.build(b, layer, x, wanted),
            Self::Mamba2(block) => block.build(b, layer, x, wanted),
        }
    }
}

/// The causal convolution over the rows of a sequence, and its activation.
pub(super) fn convolved(
    b: &mut GraphBuilder,
    layer: LayerIdx,
    (width, bias): (usize, ConvBias),
    operands: [NodeId; 2],
) -> Result<NodeId, GraphError> {
    let conv = ConvSpec {
        width,
        weight: format!("blk.{layer}.ssm_conv1d.weight"),
        bias: match bias {
            ConvBias::None => None,
            ConvBias::PerChannel => Some(format!("blk.{layer}.ssm_conv1d.bias")),
        },
    };
    let x = b.conv(&format!("ssm_conv-{layer}"), layer, &conv, operands)?;
    b.activate(&format!("ssm_conv_silu-{layer}"), Activation::Silu, x)
}

/// The wanted rows of what the scan gave, `y`, behind the gate `z`.
pub(super) fn gated(
    b: &mut GraphBuilder,
    layer: LayerIdx,
    [y, z]: [NodeId; 2],
    wanted: Option<NodeId>,
) -> Result<NodeId, GraphError> {
    let (y, z) = match wanted {
        Some(rows) => (
            b.take_rows(&format!("ssm_scan_rows-{layer}"), y, rows)?,
            b.take_rows(&format!("ssm_z_rows-{layer}"), z, rows)?,
        ),
        None => (y, z),
    };
    b.gate(&format!("ssm_gated-{layer}"), Activation::Silu, z, y)
}
