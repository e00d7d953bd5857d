//! [`Architecture::example`] of an encoder: two layers of the usual size, the first of a pattern
//! and the last.
//!
//! [`Architecture::example`]: model_core::architecture::Architecture::example

use kv_core::{LayerIdx, Window};
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::{Alibi, DistanceBuckets, RouteGate, RouteSpec};
use model_core::blocks::{
    AttentionBlock, ExpertBias, ExpertChoice, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward,
    FeedForwardBlock, FeedForwardForm, Norm, NormKind, QkNorm, QkvWeights, RELATIVE_BIAS,
    RelativeAttention,
};
use model_core::hyperparameters::HeadSizes;

use crate::encoder::{Encoder, EncoderInput, EncoderLayer};
use crate::member::{
    EmbeddingScale, EncoderLike, EncoderWindows, LayerSharing, Mixtures, Positions,
};
use crate::model::EncoderModel;

/// Width of typical layers.
const DIM: usize = 768;

fn rope(style: RopeStyle, base: f64) -> RopeSpec {
    RopeSpec {
        style,
        n_rot: 64,
        base,
        scaling: RopeScaling::None,
        factors: None,
    }
}

impl EncoderLike {
    /// Two layers of the size of BERT base.
    pub(crate) fn typical(&self) -> EncoderModel {
        let learnt = matches!(
            self.positions,
            Positions::Learnt | Positions::LearntWithBiases { .. }
        );
        let input_dim = match self.sharing {
            LayerSharing::None => DIM,
            LayerSharing::Groups => 128,
        };
        let last = match self.windows {
            EncoderWindows::None => Window::Full,
            EncoderWindows::Symmetric { .. } => Window::Symmetric(128),
        };
        let eps = self.typical_eps();
        let context_length = if learnt { 512 } else { 8192 };
        let encoder = Encoder {
            vocab: if learnt { 30_522 } else { 50_368 },
            dim: DIM,
            input: EncoderInput {
                dim: input_dim,
                positions: learnt.then_some(context_length),
                token_types: (self.norm == NormKind::LayerWithBias).then_some(2),
                scale: match self.embedding {
                    EmbeddingScale::One => None,
                    EmbeddingScale::SqrtDim => Some((DIM as f32).sqrt()),
                },
                norm: self.input_norm,
            },
            norm: Norm {
                kind: self.norm,
                eps,
            },
            norms: self.norms,
            output_norm: self.output_norm,
            layers: vec![
                EncoderLayer {
                    weights: LayerIdx(0),
                    ..self.typical_layer(Window::Full)
                },
                EncoderLayer {
                    weights: match self.sharing {
                        LayerSharing::None => LayerIdx(1),
                        LayerSharing::Groups => LayerIdx(0),
                    },
                    feed_forward: self.last_feed_forward(),
                    ..self.typical_layer(last)
                },
            ],
            dense: Vec::new(),
            head: None,
        };
        EncoderModel::new(self.name, encoder, context_length)
    }

    fn typical_eps(&self) -> f32 {
        match self.norm {
            NormKind::LayerWithBias => 1e-12,
            NormKind::Layer | NormKind::LayerPlain | NormKind::Rms => 1e-5,
        }
    }

    /// The feed-forward block of every layer, but for those with experts.
    fn dense(&self) -> FeedForwardBlock {
        FeedForwardBlock {
            hidden: match self.feed_forward {
                FeedForwardForm::FusedGate => 1152,
                _ => 3072,
            },
            activation: self.activation,
            form: self.feed_forward,
        }
    }

    fn last_feed_forward(&self) -> FeedForward {
        let dense = self.dense();
        match self.mixtures {
            Mixtures::None => FeedForward::Dense(dense),
            Mixtures::EveryFew => FeedForward::Experts(ExpertsBlock {
                n_experts: 8,
                hidden: dense.hidden,
                gate: ExpertGate::Ungated(dense.activation),
                bias: ExpertBias::Sum,
                route: RouteSpec::plain(2, RouteGate::Softmax),
                choice: ExpertChoice::Scores,
                scaling: ExpertScaling::Outputs,
                shared: None,
            }),
        }
    }

    fn typical_layer(&self, window: Window) -> EncoderLayer {
        let heads = HeadSizes {
            n_heads: 12,
            kv_heads: 12,
            k_dim: 64,
            v_dim: 64,
        };
        EncoderLayer {
            attention: AttentionBlock {
                weights: match self.positions {
                    Positions::Rotated(RopeStyle::Norm) => QkvWeights::Fused,
                    Positions::Rotated(_) if self.norm != NormKind::Rms => QkvWeights::Fused,
                    _ => QkvWeights::Separate,
                },
                bias: self.bias,
                qk_norm: self.qk_norm,
                norm_eps: match self.qk_norm {
                    QkNorm::None => 0.0,
                    _ => self.typical_eps(),
                },
                rope: match self.positions {
                    Positions::Rotated(style) if window == Window::Full => {
                        Some(rope(style, 160_000.0))
                    }
                    Positions::Rotated(style) => Some(rope(style, 10_000.0)),
                    _ => None,
                },
                alibi: match self.positions {
                    Positions::Biases(largest) => Some(Alibi::new(largest)),
                    _ => None,
                },
                relative: match self.positions {
                    Positions::LearntWithBiases { max_distance } => RelativeAttention::Biases {
                        buckets: DistanceBuckets::Halves {
                            n: 32,
                            max_distance,
                        },
                        weight: RELATIVE_BIAS,
                    },
                    Positions::Disentangled => {
                        RelativeAttention::Disentangled(DistanceBuckets::Signed {
                            span: 256,
                            max_distance: 512,
                        })
                    }
                    _ => RelativeAttention::None,
                },
                window,
                ..heads.into()
            },
            feed_forward: FeedForward::Dense(self.dense()),
            weights: LayerIdx(0),
        }
    }
}
