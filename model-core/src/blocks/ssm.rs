//! [`SsmMixer`]: the mixer of a recurrent layer, of either kind.
//!
//! Knows nothing of the layers around.

use kv_core::LayerIdx;
use kv_core::graph::{GraphBuilder, GraphError, NodeId};
use kv_core::layers::RecurrentMemory;

use super::{Ssm2MixerBlock, SsmMixerBlock};

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
