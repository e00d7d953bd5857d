//! How a row of the table and a file make a model.
//!
//! Invariant: a setting that its row does not know is an error that names the key. Knows no
//! member.

use std::sync::Arc;

use kv_core::Window;
use kv_core::graph::PositionScale;
use kv_core::rope::{RopeScaling, RopeSpec};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, Decoder, DecoderLayer, DecoderModel, Mixer, Multipliers, Norm, NormKind,
    QkNorm, TOKEN_EMBEDDING,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters};

use crate::member::{
    EmbeddingScale, LayerWindows, LlamaLike, LogitScale, QueryScale, ResidualScale, RotatedLayers,
    ScoreScale, SoftCaps, WindowedRope,
};

/// What the attention of all layers has in common.
struct Shared {
    norm_eps: f32,
    /// Where the file names one.
    scale: Option<f32>,
    soft_cap: Option<f32>,
    qk_norm: QkNorm,
    query_scale: Option<PositionScale>,
}

impl LlamaLike {
    /// The attention of a layer; one that does not rotate has no norms of queries and keys.
    fn attention(
        &self,
        shared: &Shared,
        heads: HeadSizes,
        scale: f32,
        window: Window,
        rope: Option<RopeSpec>,
    ) -> AttentionBlock {
        let (qk_norm, query_scale) = match rope {
            Some(_) => (shared.qk_norm, None),
            None => (QkNorm::None, shared.query_scale),
        };
        AttentionBlock {
            scale,
            soft_cap: shared.soft_cap,
            weights: self.qkv,
            bias: self.bias,
            qk_norm,
            norm_eps: shared.norm_eps,
            rope,
            query_scale,
            sinks: self.sinks,
            window,
            ..heads.into()
        }
    }

    fn windows(&self, hyper: &Hyperparameters<'_>, n: usize) -> Result<Vec<Window>, ModelError> {
        match self.windows {
            LayerWindows::None => Ok(vec![Window::Full; n]),
            LayerWindows::Every => hyper.windows_if_named(n),
            LayerWindows::Sliding { pattern, .. } => hyper.windows(n, pattern),
            LayerWindows::Chunked { pattern, n_tokens } => {
                let n_tokens = match hyper.optional::<u32>("attention.chunk_size")? {
                    Some(0) => {
                        let reason = "0 is not possible; it must be at least 1".to_owned();
                        return Err(hyper.wrong("attention.chunk_size", reason));
                    }
                    own => own.unwrap_or(n_tokens),
                };
                let window = |layer| match pattern.is_windowed(layer) {
                    true => Window::Chunked(n_tokens),
                    false => Window::Full,
                };
                Ok((0..n).map(window).collect())
            }
        }
    }

    fn rotates(&self, layer: usize, window: Window) -> bool {
        match self.rotated {
            RotatedLayers::All | RotatedLayers::IfTrained => true,
            RotatedLayers::Windowed => window != Window::Full,
            RotatedLayers::AllButEvery(n) => !(layer + 1).is_multiple_of(n),
        }
    }

    /// The rotation in a layer with this window.
    fn rope_of(
        &self,
        hyper: &Hyperparameters<'_>,
        window: Window,
        k_dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<RopeSpec, ModelError> {
        let rope = hyper.rope(self.rope, k_dim, weights)?;
        match self.windows {
            LayerWindows::Sliding {
                rope: WindowedRope::Own(base),
                ..
            } if window != Window::Full => Ok(RopeSpec {
                base: hyper.rope_base("rope.freq_base_swa")?.unwrap_or(base),
                scaling: RopeScaling::None,
                factors: None,
                ..rope
            }),
            _ => Ok(rope),
        }
    }

    fn shared(&self, hyper: &Hyperparameters<'_>) -> Result<Shared, ModelError> {
        let n_experts = hyper.optional::<u32>("expert_count")?;
        let without =
            self.qk_norm_unless_experts.is_some() && n_experts == self.qk_norm_unless_experts;
        let query_scale = match self.query_scale {
            QueryScale::None => None,
            QueryScale::Tempered { every, strength } => Some(PositionScale {
                every: match hyper.optional::<u32>("attention.temperature_length")? {
                    None => every,
                    Some(_) => hyper.count("attention.temperature_length")? as u32,
                },
                strength: hyper
                    .positive("attention.temperature_scale")?
                    .map_or(strength, |s| s as f32),
            }),
        };
        Ok(Shared {
            norm_eps: match self.norm {
                NormKind::Rms => hyper.norm_eps()?,
                NormKind::Layer | NormKind::LayerWithBias => hyper.layer_norm_eps()?,
            },
            scale: hyper.positive("attention.scale")?.map(|s| s as f32),
            soft_cap: self.soft_cap(hyper, "attn_logit_softcapping")?,
            qk_norm: if without { QkNorm::None } else { self.qk_norm },
            query_scale,
        })
    }

    fn embedding_scale(
        &self,
        hyper: &Hyperparameters<'_>,
        dim: usize,
    ) -> Result<Option<f32>, ModelError> {
        let name = "embedding_scale";
        if self.embedding == EmbeddingScale::FromFile {
            return Ok(hyper.positive(name)?.map(|s| s as f32));
        }
        self.refuse_factor(hyper, name)?;
        Ok(self.own_embedding_scale(dim))
    }

    /// The factor that no file names.
    fn own_embedding_scale(&self, dim: usize) -> Option<f32> {
        match self.embedding {
            EmbeddingScale::One | EmbeddingScale::FromFile => None,
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

    fn logit_scale(&self, hyper: &Hyperparameters<'_>) -> Result<Option<f32>, ModelError> {
        let name = "logit_scale";
        if self.logits == LogitScale::One {
            return self.refuse_factor(hyper, name).map(|()| None);
        }
        match hyper.positive(name)?.map(|s| s as f32) {
            None => Err(hyper.wrong(name, "is missing; the model needs it".into())),
            Some(scale) if self.logits == LogitScale::DividedBy => Ok(Some(1.0 / scale)),
            scale => Ok(scale),
        }
    }

    /// A cap that the file names, where the member has caps.
    fn soft_cap(&self, hyper: &Hyperparameters<'_>, name: &str) -> Result<Option<f32>, ModelError> {
        let cap = hyper.optional::<f32>(name)?.filter(|&cap| cap != 0.0);
        match (self.soft_caps, cap) {
            (_, None) => Ok(None),
            (SoftCaps::None, Some(cap)) => {
                let reason = format!("{cap}; {} has no soft caps", self.name);
                Err(hyper.wrong(name, reason))
            }
            (SoftCaps::FromFile, Some(_)) => Ok(hyper.positive(name)?.map(|cap| cap as f32)),
        }
    }

    /// Nothing may ask for a factor that the member does not have.
    fn refuse_factor(&self, hyper: &Hyperparameters<'_>, name: &str) -> Result<(), ModelError> {
        match hyper.optional::<f32>(name)? {
            None | Some(0.0 | 1.0) => Ok(()),
            Some(factor) => {
                let reason = format!("{factor}; {} has no such factor", self.name);
                Err(hyper.wrong(name, reason))
            }
        }
    }

    fn residual_scale(&self, hyper: &Hyperparameters<'_>) -> Result<Option<f32>, ModelError> {
        let name = "residual_scale";
        match self.residual {
            ResidualScale::FromFile => Ok(hyper.positive(name)?.map(|s| s as f32)),
            ResidualScale::One => self.refuse_factor(hyper, name).map(|()| None),
        }
    }

    fn layers(
        &self,
        hyper: &Hyperparameters<'_>,
        dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<Vec<DecoderLayer>, ModelError> {
        let n_layers = hyper.n_layers()?;
        let shared = self.shared(hyper)?;
        let windows = self.windows(hyper, n_layers)?;
        let heads = hyper.heads(n_layers, dim)?;
        let feed_forwards = self.feed_forwards(hyper, n_layers, weights)?;
        let trained = hyper.optional::<bool>("rope.scaling.finetuned")?;
        let none = self.rotated == RotatedLayers::IfTrained && trained == Some(false);
        let layer = |(at, (heads, window)): (usize, (HeadSizes, Window))| {
            let rope = match !none && self.rotates(at, window) {
                true => Some(self.rope_of(hyper, window, heads.k_dim, weights)?),
                false => None,
            };
            let scale = shared
                .scale
                .unwrap_or_else(|| self.score_scale(n_layers, dim, heads));
            Ok(self.attention(&shared, heads, scale, window, rope))
        };
        let attentions = heads.into_iter().zip(windows).enumerate().map(layer);
        let together = attentions.zip(feed_forwards);
        let layers = together.map(|(attention, feed_forward)| {
            attention.map(|attention| DecoderLayer {
                mixer: Mixer::Attention(attention),
                feed_forward: Some(feed_forward),
            })
        });
        layers.collect()
    }

    fn norm(&self, eps: f32) -> Norm {
        Norm {
            kind: self.norm,
            eps,
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
        if hyper.optional::<bool>("attention.causal")? == Some(false) {
            let reason = "false is not supported: tokens of a decoder see no later ones";
            return Err(hyper.wrong("attention.causal", reason.to_owned()));
        }
        let dim = hyper.count("embedding_length")?;
        let decoder = Decoder {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            norm: self.norm(self.shared(&hyper)?.norm_eps),
            arrangement: self.arrangement,
            feed_forward_norm: self.feed_forward_norm,
            multipliers: Multipliers {
                embedding: self.embedding_scale(&hyper, dim)?,
                residual: self.residual_scale(&hyper)?,
                logits: self.logit_scale(&hyper)?,
            },
            output_weight: hyper.output_weight(weights)?,
            logit_cap: self.soft_cap(&hyper, "final_logit_softcapping")?,
            long_rope: hyper.long_rope(weights)?,
            layers: self.layers(&hyper, dim, weights)?,
        };
        let context_length = hyper.count("context_length")?;
        Ok(Arc::new(DecoderModel::new(
            self.name,
            decoder,
            context_length,
        )))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.typical()))
    }
}

impl LlamaLike {
    /// Two layers with settings of the usual size: the first of a pattern and the last.
    fn typical(&self) -> DecoderModel {
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
        let (first, base) = match self.windows {
            LayerWindows::None | LayerWindows::Every => (Window::Full, 500_000.0),
            LayerWindows::Sliding { rope, .. } => match rope {
                WindowedRope::Same => (Window::Sliding(1024), 500_000.0),
                WindowedRope::Own(base) => (Window::Sliding(1024), base),
            },
            LayerWindows::Chunked { n_tokens, .. } => (Window::Chunked(n_tokens), 500_000.0),
        };
        let last_rotates = matches!(self.rotated, RotatedLayers::All | RotatedLayers::IfTrained);
        let last = (Window::Full, last_rotates.then(|| rope(500_000.0)));
        let cap = |cap| (self.soft_caps == SoftCaps::FromFile).then_some(cap);
        let shared = Shared {
            norm_eps,
            scale: None,
            soft_cap: cap(50.0),
            qk_norm: self.qk_norm,
            query_scale: match self.query_scale {
                QueryScale::None => None,
                QueryScale::Tempered { every, strength } => Some(PositionScale { every, strength }),
            },
        };
        let scale = self.score_scale(2, dim, heads);
        let layers = [(first, Some(rope(base))), last].map(|(window, rope)| DecoderLayer {
            mixer: Mixer::Attention(self.attention(&shared, heads, scale, window, rope)),
            feed_forward: Some(self.example_feed_forward()),
        });
        let decoder = Decoder {
            vocab: 128_256,
            dim,
            norm: self.norm(norm_eps),
            arrangement: self.arrangement,
            feed_forward_norm: self.feed_forward_norm,
            multipliers: Multipliers {
                embedding: match self.embedding {
                    EmbeddingScale::FromFile => Some(12.0),
                    _ => self.own_embedding_scale(dim),
                },
                residual: (self.residual == ResidualScale::FromFile).then_some(0.22),
                logits: match self.logits {
                    LogitScale::One => None,
                    LogitScale::Times => Some(0.25),
                    LogitScale::DividedBy => Some(0.125),
                },
            },
            output_weight: TOKEN_EMBEDDING.to_owned(),
            logit_cap: cap(30.0),
            long_rope: None,
            layers: layers.into(),
        };
        DecoderModel::new(self.name, decoder, 8192)
    }
}
