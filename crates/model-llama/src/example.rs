//! [`Architecture::example`] of a member: two layers with settings of the usual size.
//!
//! [`Architecture::example`]: model_core::architecture::Architecture::example

use kv_core::Window;
use kv_graph::rope::{RopeScaling, RopeSections, RopeSpec};
use kv_graph::{IndexSpec, PositionScale};
use model_core::blocks::{
    Arrangement, AttentionBlock, AttentionValues, Decoder, DecoderInput, DecoderLayer,
    DecoderModel, DecoderRows, IndexerBlock, LastNorm, LatentAttentionBlock, LayerScale, Mixer,
    Multipliers, PerLayerInputs, QkvBias, Residual, TOKEN_EMBEDDING,
};
use model_core::hyperparameters::HeadSizes;

use crate::attention::{AttentionTraits, Rotation};
use crate::member::{
    AttentionForm, Biases, EmbeddingNorm, EmbeddingScale, LayerWindows, LlamaLike, LogitScale,
    Parallel, PerLayer, Positions, QkvClamp, QueryScale, ResidualScale, RotatedLayers, SoftCaps,
    ValueForm, WindowedRope,
};

impl LlamaLike {
    /// Two layers with settings of the usual size: the first of a pattern and the last.
    pub(crate) fn typical(&self) -> DecoderModel {
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
            LayerWindows::None | LayerWindows::IfNamed { .. } => (Window::Full, 500_000.0),
            LayerWindows::Sliding { rope, .. } => match rope {
                WindowedRope::Same | WindowedRope::Unstretched => {
                    (Window::Sliding(1024), 500_000.0)
                }
                WindowedRope::Own(base) => (Window::Sliding(1024), base),
            },
            LayerWindows::Chunked { n_tokens, .. } => (Window::Chunked(n_tokens), 500_000.0),
        };
        let unrotated = matches!(
            self.rotated,
            RotatedLayers::None | RotatedLayers::Windowed | RotatedLayers::AllButEvery(_)
        );
        let last = (Window::Full, (!unrotated).then(|| rope(500_000.0)));
        let shared = self.typical_shared(norm_eps);
        let scale = self.score_scale(2, dim, heads);
        let none = self.rotated == RotatedLayers::None || shared.max_bias.is_some();
        let first = (first, (!none).then(|| rope(base)));
        let mixer = |window, rope| match self.attention {
            AttentionForm::KeysAndValues => {
                let rotation = Rotation {
                    rope,
                    sections: self.sections.of_all().map(|order| RopeSections {
                        pairs: [16, 8, 8],
                        order,
                    }),
                };
                let block = AttentionBlock {
                    values: match self.values {
                        ValueForm::Projected | ValueForm::ScaledIfNamed => {
                            AttentionValues::Projected
                        }
                        ValueForm::Normed | ValueForm::NormedOrKeys => AttentionValues::Normed,
                    },
                    ..self.attention_block(&shared, heads, scale, window, rotation)
                };
                self.sight.mixer(block)
            }
            AttentionForm::Latents => Mixer::Latent(LatentAttentionBlock {
                query_scale: shared.query_scale,
                ..typical_latents(norm_eps, window, rope)
            }),
            AttentionForm::IndexedLatents { rope: style } => Mixer::Latent(LatentAttentionBlock {
                indexer: Some(typical_indexer(
                    rope.clone().map(|rope| RopeSpec { style, ..rope }),
                )),
                ..typical_latents(norm_eps, window, rope)
            }),
        };
        let layers = [first, last].map(|(window, rope)| DecoderLayer {
            mixer: mixer(window, rope),
            feed_forward: Some(self.example_feed_forward()),
            scale: match self.per_layer {
                PerLayer::Nothing => LayerScale::None,
                PerLayer::InputsAndScales => LayerScale::Learnt,
            },
            residual: Residual::Rows,
        });
        let decoder = Decoder {
            vocab: 128_256,
            dim,
            embedding_dim: None,
            norm: self.norm(norm_eps),
            per_layer_inputs: (self.per_layer != PerLayer::Nothing).then(|| PerLayerInputs {
                vocab: 128_256,
                n_layers: 2,
                dim: 256,
                activation: self.activation,
                norm: self.norm(norm_eps),
            }),
            rows: DecoderRows::OfTokens,
            deep_rows: 0,
            input: match (self.embedding_norm, self.positions) {
                (EmbeddingNorm::Normed, _) => DecoderInput::Normed,
                (_, Positions::Learnt) => DecoderInput::Positions(8192),
                _ => DecoderInput::Tokens,
            },
            arrangement: match self.parallel {
                Parallel::AsArranged => self.arrangement,
                Parallel::WithoutSecondNorm => Arrangement::Parallel,
                Parallel::IfNamed => Arrangement::ParallelTwoNorms,
            },
            feed_forward_norm: self.feed_forward_norm,
            last_norm: LastNorm::Output,
            multipliers: self.typical_multipliers(dim),
            output_weight: TOKEN_EMBEDDING.to_owned(),
            output_bias: None,
            logit_cap: (self.soft_caps != SoftCaps::None).then_some(30.0),
            long_rope: None,
            layers: layers.into(),
            draft_head: None,
        };
        DecoderModel::new(self.name, decoder, 8192)
    }

    /// Factors of the usual size.
    fn typical_multipliers(&self, dim: usize) -> Multipliers {
        Multipliers {
            embedding: match self.embedding {
                EmbeddingScale::FromFile | EmbeddingScale::FromFileOr(_) => Some(12.0),
                _ => self.own_embedding_scale(dim),
            },
            residual: (self.residual != ResidualScale::One).then_some(0.22),
            logits: match self.logits {
                LogitScale::One => None,
                LogitScale::Times => Some(0.25),
                LogitScale::DividedBy | LogitScale::DividedByOrWidth(_) => Some(0.125),
            },
        }
    }

    /// The attention that both layers share.
    fn typical_shared(&self, norm_eps: f32) -> AttentionTraits {
        AttentionTraits {
            norm_eps,
            scale: None,
            weights: self.qkv,
            soft_cap: (self.soft_caps == SoftCaps::FromFile).then_some(50.0),
            bias: match self.bias {
                Biases::Of(bias) => bias,
                Biases::AsInFile => QkvBias::Qkv,
            },
            qk_norm: self.qk_norm,
            query_scale: match self.query_scale {
                QueryScale::None => None,
                QueryScale::Tempered { every, strength } => Some(PositionScale {
                    every,
                    strength,
                    offset: 1,
                }),
                QueryScale::Stretched => Some(PositionScale {
                    every: 16_384,
                    strength: 0.1,
                    offset: 0,
                }),
            },
            rotated: self.rotated,
            clamp: (self.clamp == QkvClamp::IfNamed).then_some(8.0),
            max_bias: match self.positions {
                Positions::Biases(usual) => Some(usual),
                Positions::BiasesIfNamed => Some(8.0),
                _ => None,
            },
        }
    }
}

/// Latent attention with the sizes of DeepSeek-V2's heads.
fn typical_latents(norm_eps: f32, window: Window, rope: Option<RopeSpec>) -> LatentAttentionBlock {
    LatentAttentionBlock {
        n_heads: 16,
        plain_dim: 128,
        shared_dim: 64,
        v_dim: 128,
        rank: 512,
        query_rank: Some(1536),
        scale: 1.0 / 192f32.sqrt(),
        norm_eps,
        rope,
        query_scale: None,
        window,
        indexer: None,
    }
}

/// An indexer with the sizes of DeepSeek-V3.2's.
fn typical_indexer(rope: Option<RopeSpec>) -> IndexerBlock {
    IndexerBlock {
        index: IndexSpec {
            n_heads: 64,
            dim: 128,
            top_k: 2048,
        },
        rope,
        norm_eps: 1e-6,
    }
}
