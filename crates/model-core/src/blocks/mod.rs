//! The blocks that architectures share, each once, configured by data.
//!
//! A block is a struct of settings and a function that adds its nodes to a graph, in the
//! [scope](kv_graph::GraphBuilder::scope) of its layer. Weight names are those of GGUF files.
//! Knows no architecture by name.

mod adapter;
mod alt_up;
mod attention;
mod attention_output;
mod decoder;
mod decoder_model;
mod delta_mixer;
mod dense_and_experts;
mod draft_head;
mod experts;
mod feed_forward;
mod fused_head;
mod indexer;
mod kda_mixer;
mod latent_attention;
mod laurel;
mod lightning;
mod long_rope;
mod mixer;
mod mlstm;
mod norm;
mod per_layer_inputs;
mod residual;
mod rg_lru;
mod rows_of;
mod shared_block;
mod sharing_head;
mod short_conv;
mod ssm;
mod ssm2_mixer;
mod ssm_mixer;
mod xielu;

use kv_core::{LayerIdx, PartIdx};
use kv_graph::{GraphBuilder, GraphError, NodeId};

pub use adapter::Adapter;
pub use alt_up::AltUp;
pub use attention::{
    AttentionBlock, AttentionValues, QkNorm, QkvBias, QkvWeights, RELATIVE_BIAS, RelativeAttention,
    Sinks,
};
pub use attention_output::{OutputGate, OutputName, OutputNorm};
pub use decoder::{
    Arrangement, Decoder, DecoderInput, DecoderLayer, DecoderRows, LastNorm, LayerScale,
    Multipliers, OUTPUT, OUTPUT_BIAS, POSITION_EMBEDDING, TOKEN_EMBEDDING,
};
pub use decoder_model::DecoderModel;
pub use delta_mixer::{DeltaMixerBlock, DeltaRates};
pub use dense_and_experts::DenseAndExperts;
pub use draft_head::{DraftHead, DraftInput};
pub use experts::{
    ExpertBias, ExpertChoice, ExpertGate, ExpertScaling, ExpertsBlock, SharedExpert, SharedShare,
};
pub use feed_forward::{FeedForward, FeedForwardBlock, FeedForwardForm};
pub use fused_head::{BeforeFusion, FusedHead, HeadResidual, OWN_HEAD};
pub use indexer::IndexerBlock;
pub use kda_mixer::KdaMixerBlock;
pub use latent_attention::LatentAttentionBlock;
pub use laurel::Laurel;
pub use lightning::LightningBlock;
pub use long_rope::LongRope;
pub use mixer::Mixer;
pub use mlstm::MLstmBlock;
pub use norm::{Norm, NormKind};
pub use per_layer_inputs::{PER_LAYER_EMBEDDING, PerLayerInputs};
pub use residual::{Residual, ResidualFactors};
pub use rg_lru::RgLruBlock;
pub use rows_of::RowsOf;
pub use shared_block::SharedBlock;
pub use sharing_head::{SharingHead, TokenGroups};
pub use short_conv::{ShortConvBias, ShortConvBlock};
pub use ssm::SsmMixer;
pub use ssm_mixer::{ConvBias, InnerNorms, SsmMixerBlock};
pub use ssm2_mixer::{GatedNorm, Ssm2MixerBlock, TimeSteps};
pub use xielu::Xielu;

/// The layer that blocks are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerContext {
    /// Its number.
    pub layer: LayerIdx,
    /// The layer of the memory that has the keys of its indexer, where it has one.
    pub index_layer: LayerIdx,
    /// The part of the memory that it attends over.
    pub part: PartIdx,
    /// The rows that pass through what follows the mixer, where not all do.
    pub output_rows: Option<NodeId>,
}

impl LayerContext {
    /// The output rows of `x`, in a node of this name; all of them where all pass.
    ///
    /// # Errors
    /// [`GraphError`] where the node cannot be added.
    pub fn take_rows(
        self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.output_rows {
            Some(rows) => b.take_rows(name, x, rows),
            None => Ok(x),
        }
    }
}
