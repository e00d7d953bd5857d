//! [`Mixer`]: what lets the rows of a sequence see each other in one layer: attention, a recurrence, or
//! both beside each other.
//!
//! Knows nothing of the layers around.

use kv_core::graph::{GraphBuilder, GraphError, NodeId};
use kv_core::layers::LayerMemory;
use kv_core::{LayerIdx, PartIdx};

use super::{AttentionBlock, SsmMixer};

/// What lets the rows of a sequence see each other in one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Attention.
    Attention(AttentionBlock),
    /// A recurrence.
    Recurrent(SsmMixer),
    /// Both, of the same rows, added (Falcon-H1, arXiv 2507.22448).
    Both(AttentionBlock, SsmMixer),
}

impl Mixer {
    /// What a layer with this mixer remembers.
    pub fn memory(&self) -> LayerMemory {
        match self {
            Self::Attention(attention) => LayerMemory::Attention(attention.memory()),
            Self::Recurrent(ssm) => LayerMemory::Recurrent(ssm.memory()),
            Self::Both(attention, ssm) => LayerMemory::Both(attention.memory(), ssm.memory()),
        }
    }

    /// Its attention, where it has one.
    pub(super) fn attention_mut(&mut self) -> Option<&mut AttentionBlock> {
        match self {
            Self::Attention(attention) | Self::Both(attention, _) => Some(attention),
            Self::Recurrent(_) => None,
        }
    }

    /// Adds the mixer: `x [tokens, dim]` in, `[rows, dim]` out, where `rows` are those of `wanted`, or
    /// else all.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        (layer, part): (LayerIdx, PartIdx),
        x: NodeId,
        wanted: Option<NodeId>,
    ) -> Result<NodeId, GraphError> {
        match self {
            Self::Attention(attention) => attention.build(b, (layer, part), x, wanted),
            Self::Recurrent(ssm) => ssm.build(b, layer, x, wanted),
            Self::Both(attention, ssm) => {
                let attended = attention.build(b, (layer, part), x, wanted)?;
                let recurred = ssm.build(b, layer, x, wanted)?;
                b.add(&format!("mixed-{layer}"), recurred, attended)
            }
        }
    }
}
