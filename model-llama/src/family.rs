//! [`FAMILY`]: the members, one row each, and how a row and a file make a model.

use std::sync::Arc;

use kv_core::Window;
use kv_core::graph::Activation;
use kv_core::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, Decoder, DecoderLayer, FeedForwardBlock, PostNorms, QkNorm, QkvBias,
    TOKEN_EMBEDDING,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};
use model_core::windows::{FullLayer, WindowPattern};

use crate::LlamaModel;

/// The output matrix of models that do not reuse the embedding matrix.
const OUTPUT: &str = "output.weight";

/// No layer sees everything.
const EVERY: WindowPattern = WindowPattern {
    period: 0,
    full: FullLayer::Last,
};

/// What sets one member of the family apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// How queries and keys rotate. The rows of `llama` files are arranged for
    /// [`RopeStyle::Norm`].
    pub rope: RopeStyle,
    /// Which projections have a bias.
    pub bias: QkvBias,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Norms behind the blocks.
    pub post_norms: PostNorms,
    /// Applied to the gate of the feed-forward block.
    pub activation: Activation,
    /// Factor on the embeddings.
    pub embedding: EmbeddingScale,
    /// Factor on the attention scores, where the file names none.
    pub scores: ScoreScale,
    /// Layers that see a window.
    pub windows: LayerWindows,
}

/// Factor on the embeddings of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingScale {
    /// 1.
    #[default]
    One,
    /// Square root of the width (Gemma).
    SqrtDim,
}

/// Factor on the attention scores of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoreScale {
    /// `1 / sqrt(k_dim)`.
    #[default]
    KeyDim,
    /// As that, but `1 / sqrt(dim / n_heads)` for a model of this many layers: the largest Gemma 3
    /// was trained with another factor, and only its number of layers tells.
    KeyDimUnlessLayers(usize),
}

/// Which layers of a model see a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LayerWindows {
    /// None, whatever the file says.
    #[default]
    None,
    /// All of them, where the file names a window (Mistral; its GGUF files, which call themselves
    /// `llama`, never do).
    Every,
    /// Those that the file names, or else the pattern.
    Sliding {
        /// Where the file does not say which layers are windowed.
        pattern: WindowPattern,
        /// Base of the rotation in windowed layers, where the file names none. It is not stretched:
        /// no distance in a window is beyond what the model was trained with.
        rope_base: f64,
    },
}

/// The first member, which the others differ from.
const LLAMA: LlamaLike = LlamaLike {
    name: "llama",
    rope: RopeStyle::Norm,
    bias: QkvBias::None,
    qk_norm: QkNorm::None,
    post_norms: PostNorms::None,
    activation: Activation::Silu,
    embedding: EmbeddingScale::One,
    scores: ScoreScale::KeyDim,
    windows: LayerWindows::Every,
};

/// All members.
pub const FAMILY: [LlamaLike; 3] = [
    LLAMA,
    LlamaLike {
        name: "qwen2",
        rope: RopeStyle::Neox,
        bias: QkvBias::Qkv,
        windows: LayerWindows::None,
        ..LLAMA
    },
    LlamaLike {
        name: "gemma3",
        rope: RopeStyle::Neox,
        qk_norm: QkNorm::PerHead,
        post_norms: PostNorms::Both,
        activation: Activation::GeluTanh,
        embedding: EmbeddingScale::SqrtDim,
        scores: ScoreScale::KeyDimUnlessLayers(62),
        windows: LayerWindows::Sliding {
            pattern: WindowPattern {
                period: 6,
                full: FullLayer::Last,
            },
            rope_base: 10_000.0,
        },
        ..LLAMA
    },
];

/// What layers of one model have in common.
struct Common {
    hidden: usize,
    norm_eps: f32,
    scale: f32,
}

impl LlamaLike {
    fn layer(
        &self,
        common: &Common,
        heads: HeadSizes,
        (window, rope): (Window, RopeSpec),
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
                rope,
                window,
            },
            feed_forward: FeedForwardBlock {
                hidden: common.hidden,
                activation: self.activation,
            },
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
        refuse_experts(&hyper)?;
        refuse_soft_caps(&hyper)?;
        let n_layers = hyper.n_layers()?;
        let dim = hyper.count("embedding_length")?;
        let (hidden, norm_eps) = (hyper.count("feed_forward_length")?, hyper.norm_eps()?);
        let scale = hyper.positive("attention.scale")?.map(|s| s as f32);
        let windows = self.windows(&hyper, n_layers)?;
        let heads = hyper.heads(n_layers, dim)?;
        let layers = heads.into_iter().zip(windows).map(|(heads, window)| {
            let common = Common {
                hidden,
                norm_eps,
                scale: scale.unwrap_or_else(|| self.score_scale(n_layers, dim, heads)),
            };
            let rope = self.rope_of(&hyper, window, (heads.k_dim, weights))?;
            Ok(self.layer(&common, heads, (window, rope)))
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
        let common = Common {
            hidden: 8192,
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
                .map(|layer| self.layer(&common, heads, layer))
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
