//! [`FAMILY`]: the members, one row each, and how a row and a file make a model.

use std::sync::Arc;

use kv_core::Window;
use kv_core::graph::Activation;
use kv_core::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, Decoder, DecoderLayer, FeedForwardBlock, QkvBias, TOKEN_EMBEDDING,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::LlamaModel;

/// The output matrix of models that do not reuse the embedding matrix.
const OUTPUT: &str = "output.weight";

/// What sets one member of the family apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlamaLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// How queries and keys rotate. The rows of `llama` files are arranged for
    /// [`RopeStyle::Norm`].
    pub rope: RopeStyle,
    /// Which projections have a bias.
    pub bias: QkvBias,
}

/// All members.
pub const FAMILY: [LlamaLike; 2] = [
    LlamaLike {
        name: "llama",
        rope: RopeStyle::Norm,
        bias: QkvBias::None,
    },
    LlamaLike {
        name: "qwen2",
        rope: RopeStyle::Neox,
        bias: QkvBias::Qkv,
    },
];

impl LlamaLike {
    fn layer(&self, heads: HeadSizes, rope: RopeSpec, hidden: usize) -> DecoderLayer {
        let HeadSizes {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
        } = heads;
        let scale = 1.0 / (k_dim as f32).sqrt();
        let (bias, window) = (self.bias, Window::Full);
        DecoderLayer {
            attention: AttentionBlock {
                n_heads,
                kv_heads,
                k_dim,
                v_dim,
                scale,
                bias,
                rope,
                window,
            },
            feed_forward: FeedForwardBlock {
                hidden,
                activation: Activation::Silu,
            },
        }
    }
}

impl Architecture for LlamaLike {
    fn name(&self) -> &'static str {
        self.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name);
        refuse_experts(&hyper)?;
        let n_layers = hyper.n_layers()?;
        let dim = hyper.count("embedding_length")?;
        let hidden = hyper.count("feed_forward_length")?;
        let layers = hyper.heads(n_layers, dim)?.into_iter().map(|heads| {
            Ok(self.layer(heads, hyper.rope(self.rope, heads.k_dim, weights)?, hidden))
        });
        let tied = optional_weight(weights, OUTPUT)?.is_none();
        let decoder = Decoder {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            norm_eps: hyper.norm_eps()?,
            output_weight: if tied { TOKEN_EMBEDDING } else { OUTPUT }.to_owned(),
            layers: layers.collect::<Result<_, ModelError>>()?,
        };
        Ok(Arc::new(LlamaModel::new(
            self.name,
            decoder,
            hyper.count("context_length")?,
        )))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let heads = HeadSizes {
            n_heads: 32,
            kv_heads: 8,
            k_dim: 64,
            v_dim: 64,
        };
        let scaling = RopeScaling::None;
        let rope = RopeSpec {
            style: self.rope,
            n_rot: 64,
            base: 500_000.0,
            scaling,
            factors: None,
        };
        let decoder = Decoder {
            vocab: 128_256,
            dim: 2048,
            norm_eps: 1e-5,
            output_weight: TOKEN_EMBEDDING.to_owned(),
            layers: vec![self.layer(heads, rope, 8192); 2],
        };
        Ok(Arc::new(LlamaModel::new(self.name, decoder, 8192)))
    }
}

/// Mixtral files call themselves `llama` too; their experts are not wired yet.
fn refuse_experts(hyper: &Hyperparameters<'_>) -> Result<(), ModelError> {
    match hyper.optional::<u32>("expert_count")? {
        None | Some(0) => Ok(()),
        Some(n) => {
            let reason = format!("{n} experts; mixtures of experts are not supported yet");
            Err(hyper.wrong("expert_count", reason))
        }
    }
}
