//! The blocks that architectures share, each once, configured by data.
//!
//! A block is a struct of settings and a function that adds its nodes to a graph. Weight names are
//! those of GGUF files. Knows no architecture by name.

mod attention;
mod decoder;
mod decoder_model;
mod experts;
mod feed_forward;
mod long_rope;
mod mixer;
mod norm;
mod ssm;
mod ssm2_mixer;
mod ssm_mixer;

pub use attention::{AttentionBlock, QkNorm, QkvBias, QkvWeights, Sinks};
pub use decoder::{Arrangement, Decoder, DecoderLayer, Multipliers, OUTPUT, TOKEN_EMBEDDING};
pub use decoder_model::DecoderModel;
pub use experts::{ExpertBias, ExpertGate, ExpertsBlock, SharedExpert, Weighed};
pub use feed_forward::{FeedForward, FeedForwardBlock, FeedForwardForm};
pub use long_rope::LongRope;
pub use mixer::Mixer;
pub use norm::{Norm, NormKind};
pub use ssm::SsmMixer;
pub use ssm_mixer::{ConvBias, InnerNorms, SsmMixerBlock};
pub use ssm2_mixer::{GatedNorm, Ssm2MixerBlock};
