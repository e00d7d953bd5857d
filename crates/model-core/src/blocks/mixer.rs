//! [`Mixer`]: what mixes the tokens of a sequence in one layer: attention, a recurrence, or both in
//! parallel.
//!
//! Does not know the layers around.

use kv_backend::CustomOps;
use kv_core::layers::LayerMemory;
use kv_graph::rope::RopeSpec;
use kv_graph::{GraphBuilder, GraphError, NodeId};

use super::{
    AttentionBlock, FeedForward, LatentAttentionBlock, LayerContext, Norm, SharedBlock, SsmMixer,
};

/// The part of a layer that mixes the tokens of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Attention.
    Attention(AttentionBlock),
    /// Attention within the ubatch, which remembers nothing: every token sees every other of its
    /// sequence.
    WithinBatch(AttentionBlock),
    /// Attention over latents.
    Latent(LatentAttentionBlock),
    /// A recurrence.
    Recurrent(SsmMixer),
    /// Both, of the same rows, added (Falcon-H1, arXiv 2507.22448).
    Both(AttentionBlock, SsmMixer),
    /// A recurrence, over what a block that layers share adds to the rows.
    Shared(Box<SharedBlock>, SsmMixer),
    /// None: a feed-forward block has the layer for itself (Nemotron-H, arXiv 2504.03624).
    FeedForward(FeedForward),
}

impl Mixer {
    /// The memory of a layer with this mixer.
    pub fn memory(&self) -> LayerMemory {
        match self {
            Self::Attention(attention) => match attention.rows_of {
                Some(owner) => LayerMemory::SharedWith(owner.layer()),
                None => LayerMemory::Attention(attention.memory()),
            },
            Self::Latent(latent) => LayerMemory::Latent(latent.memory()),
            Self::Recurrent(ssm) => LayerMemory::Recurrent(ssm.memory()),
            Self::Both(attention, ssm) => LayerMemory::Both(attention.memory(), ssm.memory()),
            Self::Shared(block, ssm) => LayerMemory::Both(block.attention.memory(), ssm.memory()),
            Self::WithinBatch(_) | Self::FeedForward(_) => LayerMemory::Nothing,
        }
    }

    /// The custom operations of its nodes.
    pub(super) fn custom_ops(&self) -> CustomOps {
        match self {
            Self::Recurrent(ssm) | Self::Both(_, ssm) | Self::Shared(_, ssm) => ssm.custom_ops(),
            _ => CustomOps::new(),
        }
    }

    /// The keys that its indexer remembers, where it has one.
    pub(super) fn index_memory(&self) -> Option<LayerMemory> {
        let Self::Latent(latent) = self else {
            return None;
        };
        let indexer = latent.indexer.as_ref()?;
        Some(LayerMemory::Latent(indexer.memory(latent.window)))
    }

    /// Its attention, where it has one.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionBlock> {
        match self {
            Self::Attention(attention)
            | Self::WithinBatch(attention)
            | Self::Both(attention, _) => Some(attention),
            Self::Shared(block, _) => Some(&mut block.attention),
            Self::Latent(_) | Self::Recurrent(_) | Self::FeedForward(_) => None,
        }
    }

    /// The rotation of its attention, where it has one.
    pub(super) fn rope_mut(&mut self) -> Option<&mut RopeSpec> {
        match self {
            Self::Latent(latent) => latent.rope.as_mut(),
            _ => self.attention_mut()?.rope.as_mut(),
        }
    }

    /// The input of the norm before the mixer: the rows `x` before the layer, and those that a
    /// shared block adds to them, which reads the rows `first` before the first layer, too.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub(super) fn input(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        norm: Norm,
        [x, first]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        match self {
            Self::Shared(block, _) => block.build(b, at, norm, [x, first]),
            _ => Ok(x),
        }
    }

    /// Adds the mixer: `x [tokens, dim]` in, `[rows, dim]` out, where `rows` are the layer's output
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
            Self::Attention(attention) => attention.build(b, at, x),
            Self::WithinBatch(attention) => attention.build_in_batch(b, at, x),
            Self::Latent(latent) => latent.build(b, at, x),
            Self::Recurrent(ssm) | Self::Shared(_, ssm) => ssm.build(b, at, x),
            Self::Both(attention, ssm) => {
                let attended = attention.build(b, at, x)?;
                let recurred = ssm.build(b, at, x)?;
                b.add("mixed", recurred, attended)
            }
            Self::FeedForward(block) => {
                let x = at.take_rows(b, "ffn_rows", x)?;
                block.build(b, x, x)
            }
        }
    }
}
