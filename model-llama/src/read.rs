//! How a row of the table and a file make a model.
//!
//! Invariant: what a file asks for and its row does not know is refused by the key's name. Knows no
//! member.

use std::sync::Arc;

use kv_core::Window;
use kv_core::rope::{RopeScaling, RopeSpec};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{AttentionBlock, Decoder, DecoderLayer, FeedForward, TOKEN_EMBEDDING};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};
use model_core::windows::{FullLayer, WindowPattern};

use crate::LlamaModel;
use crate::member::{EmbeddingScale, LayerWindows, LlamaLike, ScoreScale};

/// The output matrix of models that do not reuse the embedding matrix.
const OUTPUT: &str = "output.weight";

/// No layer sees everything.
const EVERY: WindowPattern = WindowPattern {
    period: 0,
    full: FullLayer::Last,
};

/// What layers of one model have in common.
struct Common {
    norm_eps: f32,
    scale: f32,
}

impl LlamaLike {
    fn layer(
        &self,
        common: &Common,
        heads: HeadSizes,
        (window, rope): (Window, RopeSpec),
        feed_forward: FeedForward,
    ) -> DecoderLayer {
        let HeadSizes {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
        } = heads;
        DecoderLayer {
            attention: AttentionBlock {
                n_heads,
                kv_heads,
                k_dim,
                v_dim,
                scale: common.scale,
                bias: self.bias,
                qk_norm: self.qk_norm,
                norm_eps: common.norm_eps,
                rope: Some(rope),
                window,
            },
            feed_forward,
            post_norms: self.post_norms,
        }
    }

    fn windows(&self, hyper: &Hyperparameters<'_>, n: usize) -> Result<Vec<Window>, ModelError> {
        match self.windows {
            LayerWindows::None => Ok(vec![Window::Full; n]),
            LayerWindows::Every => hyper.windows(n, EVERY),
            LayerWindows::Sliding { pattern, .. } => hyper.windows(n, pattern),
        }
    }

    /// The rotation in a layer with this window.
    fn rope_of(
        &self,
        hyper: &Hyperparameters<'_>,
        window: Window,
        (k_dim, weights): (usize, &dyn WeightSource),
    ) -> Result<RopeSpec, ModelError> {
        let rope = hyper.rope(self.rope, k_dim, weights)?;
        match self.windows {
            LayerWindows::Sliding { rope_base, .. } if window != Window::Full => Ok(RopeSpec {
                base: hyper.rope_base("rope.freq_base_swa")?.unwrap_or(rope_base),
                scaling: RopeScaling::None,
                factors: None,
                ..rope
            }),
            _ => Ok(rope),
        }
    }

    fn embedding_scale(&self, dim: usize) -> Option<f32> {
        match self.embedding {
            EmbeddingScale::One => None,
            EmbeddingScale::SqrtDim => Some((dim as f32).sqrt()),
        }
    }

    fn score_scale(&self, n_layers: usize, dim: usize, heads: HeadSizes) -> f32 {
        let width = match self.scores {
            ScoreScale::KeyDimUnlessLayers(n) if n == n_layers => dim / heads.n_heads.max(1),
            _ => heads.k_dim,
        };
        1.0 / (width as f32).sqrt()
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
        refuse_soft_caps(&hyper)?;
        let n_layers = hyper.n_layers()?;
        let dim = hyper.count("embedding_length")?;
        let norm_eps = hyper.norm_eps()?;
        let scale = hyper.positive("attention.scale")?.map(|s| s as f32);
        let windows = self.windows(&hyper, n_layers)?;
        let heads = hyper.heads(n_layers, dim)?;
        let feed_forwards = self.feed_forwards(&hyper, n_layers, weights)?;
        let attentions = heads.into_iter().zip(windows).zip(feed_forwards);
        let layers = attentions.map(|((heads, window), feed_forward)| {
            let common = Common {
                norm_eps,
                scale: scale.unwrap_or_else(|| self.score_scale(n_layers, dim, heads)),
            };
            let rope = self.rope_of(&hyper, window, (heads.k_dim, weights))?;
            Ok(self.layer(&common, heads, (window, rope), feed_forward))
        });
        let tied = optional_weight(weights, OUTPUT)?.is_none();
        let decoder = Decoder {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            embedding_scale: self.embedding_scale(dim),
            norm_eps,
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
        let (dim, norm_eps) = (2048, 1e-5);
        let rope = |base| RopeSpec {
            style: self.rope,
            n_rot: 64,
            base,
            scaling: RopeScaling::None,
            factors: None,
        };
        let full = (Window::Full, rope(500_000.0));
        let first = match self.windows {
            LayerWindows::None | LayerWindows::Every => full.clone(),
            LayerWindows::Sliding { rope_base, .. } => (Window::Sliding(1024), rope(rope_base)),
        };
        let feed_forward = self.example_feed_forward();
        let common = Common {
            norm_eps,
            scale: self.score_scale(2, dim, heads),
        };
        let decoder = Decoder {
            vocab: 128_256,
            dim,
            embedding_scale: self.embedding_scale(dim),
            norm_eps,
            output_weight: TOKEN_EMBEDDING.to_owned(),
            layers: [first, full]
                .map(|layer| self.layer(&common, heads, layer, feed_forward))
                .into(),
        };
        Ok(Arc::new(LlamaModel::new(self.name, decoder, 8192)))
    }
}

/// No member computes them, so a file that asks for them would come out wrong.
fn refuse_soft_caps(hyper: &Hyperparameters<'_>) -> Result<(), ModelError> {
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = hyper.optional::<f32>(name)?.filter(|&cap| cap != 0.0) {
            let reason = format!("{cap}; soft caps are not supported yet");
            return Err(hyper.wrong(name, reason));
        }
    }
    Ok(())
}
