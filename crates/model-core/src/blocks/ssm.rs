//! [`SsmMixer`]: the mixer of a recurrent layer, of any kind, and what kinds share.
//!
//! Does not know the layers around.

use kv_backend::CustomOps;
use kv_core::LayerIdx;
use kv_core::layers::RecurrentMemory;
use kv_graph::{Activation, ConvSpec, GraphBuilder, GraphError, NodeId};

use super::mlstm::MLstm;
use super::rg_lru::RgLru;
use super::{
    ConvBias, DeltaMixerBlock, KdaMixerBlock, LayerContext, LightningBlock, MLstmBlock, RgLruBlock,
    ShortConvBlock, Ssm2MixerBlock, SsmMixerBlock,
};

/// The mixer of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SsmMixer {
    /// As in Mamba.
    Mamba(SsmMixerBlock),
    /// As in Mamba-2.
    Mamba2(Ssm2MixerBlock),
    /// As in gated DeltaNet.
    Delta(DeltaMixerBlock),
    /// As in Kimi Delta Attention.
    Kda(KdaMixerBlock),
    /// A short convolution and nothing more.
    ShortConv(ShortConvBlock),
    /// As in Griffin.
    RgLru(RgLruBlock),
    /// As in xLSTM.
    MLstm(MLstmBlock),
    /// Lightning attention.
    Lightning(LightningBlock),
}

impl SsmMixer {
    /// The memory of the layer.
    pub fn memory(&self) -> RecurrentMemory {
        match self {
            Self::Mamba(block) => block.memory(),
            Self::Mamba2(block) => block.memory(),
            Self::Delta(block) => block.memory(),
            Self::Kda(block) => block.memory(),
            Self::ShortConv(block) => block.memory(),
            Self::RgLru(block) => block.memory(),
            Self::MLstm(block) => block.memory(),
            Self::Lightning(block) => block.memory(),
        }
    }

    /// The custom operations of its nodes.
    pub(super) fn custom_ops(&self) -> CustomOps {
        match self {
            Self::RgLru(_) => CustomOps::new().with(RgLru),
            Self::MLstm(_) => CustomOps::new().with(MLstm),
            _ => CustomOps::new(),
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
        match self {
            Self::Mamba(block) => block.build(b, at, x),
            Self::Mamba2(block) => block.build(b, at, x),
            Self::Delta(block) => block.build(b, at, x),
            Self::Kda(block) => block.build(b, at, x),
            Self::ShortConv(block) => block.build(b, at, x),
            Self::RgLru(block) => block.build(b, at, x),
            Self::MLstm(block) => block.build(b, at, x),
            Self::Lightning(block) => block.build(b, at, x),
        }
    }
}

/// The causal convolution over the rows of a sequence, and its activation.
pub(super) fn convolved(
    b: &mut GraphBuilder,
    layer: LayerIdx,
    width: usize,
    bias: ConvBias,
    operands: [NodeId; 2],
) -> Result<NodeId, GraphError> {
    let conv = ConvSpec {
        width,
        weight: "ssm_conv1d.weight".to_owned(),
        further: Vec::new(),
        bias: match bias {
            ConvBias::None => None,
            ConvBias::PerChannel => Some("ssm_conv1d.bias".to_owned()),
        },
    };
    let x = b.conv("ssm_conv", layer, &conv, operands)?;
    b.activate("ssm_conv_silu", Activation::Silu, x)
}

/// The output rows of the scan's result `y`, gated by `z`.
pub(super) fn gated(
    b: &mut GraphBuilder,
    at: LayerContext,
    [y, z]: [NodeId; 2],
) -> Result<NodeId, GraphError> {
    let y = at.take_rows(b, "ssm_scan_rows", y)?;
    let z = at.take_rows(b, "ssm_z_rows", z)?;
    b.gate("ssm_gated", Activation::Silu, z, y)
}
