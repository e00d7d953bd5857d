//! How a row of the table and a file make a model.
//!
//! Invariant: a setting that encoders do not support is an error that names the key. Knows no
//! encoder.

use std::sync::Arc;

use kv_core::{LayerIdx, Window};
use kv_graph::rope::RopeSpec;
use kv_graph::weights::WeightSource;
use kv_graph::{Alibi, DistanceBuckets, RouteGate, RouteSpec};
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, ExpertBias, ExpertChoice, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward,
    FeedForwardBlock, FeedForwardForm, Norm, NormKind, QkvWeights, RELATIVE_BIAS,
    RelativeAttention,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::encoder::{DENSE, Encoder, EncoderInput, EncoderLayer, TOKEN_TYPES};
use crate::head::ScoreHead;
use crate::member::{
    EmbeddingScale, EncoderLike, EncoderWindows, LayerSharing, Mixtures, Positions, WindowedBase,
};
use crate::model::EncoderModel;

/// Key of the number of groups of layers that share weights.
pub(crate) const LAYER_GROUPS: &str = "layer_group_count";
/// Key of the number of layers in a group, where that is not 1.
pub(crate) const LAYER_GROUP_LENGTH: &str = "layer_group_length";
/// Key of the distance at which the last bucket of distances begins.
pub(crate) const MAX_DISTANCE: &str = "relative_max_distance";
/// Key of the width of embeddings, where it is not that of layers.
pub(crate) const INPUT_LENGTH: &str = "input_embedding_length";

impl EncoderLike {
    fn norm_eps(&self, hyper: &Hyperparameters<'_>) -> Result<f32, ModelError> {
        match self.norm {
            NormKind::Rms => hyper.norm_eps(),
            NormKind::Layer | NormKind::LayerWithBias | NormKind::LayerPlain => {
                hyper.layer_norm_eps()
            }
        }
    }

    /// The windows of the layers: a window reaches half its width to either side.
    fn windows(
        &self,
        hyper: &Hyperparameters<'_>,
        n_layers: usize,
    ) -> Result<Vec<Window>, ModelError> {
        let EncoderWindows::Symmetric { pattern, .. } = self.windows else {
            return Ok(vec![Window::Full; n_layers]);
        };
        let windows = hyper.windows(n_layers, pattern)?.into_iter();
        let symmetric = windows.map(|window| match window.width() {
            Some(width) => Window::Symmetric(width),
            None => Window::Full,
        });
        Ok(symmetric.collect())
    }

    /// The rotation of layers that see everything and of those that see a window.
    fn ropes(
        &self,
        hyper: &Hyperparameters<'_>,
        k_dim: usize,
        weights: &dyn WeightSource,
    ) -> Result<Option<[RopeSpec; 2]>, ModelError> {
        let Positions::Rotated(style) = self.positions else {
            return Ok(None);
        };
        let rope = hyper.rope(style, k_dim, weights)?;
        let usual = match self.windows {
            EncoderWindows::Symmetric {
                base: WindowedBase::Own(base),
                ..
            } => base,
            EncoderWindows::Symmetric { .. } | EncoderWindows::None => rope.base,
        };
        let windowed = RopeSpec {
            base: hyper.rope_base("rope.freq_base_swa")?.unwrap_or(usual),
            ..rope.clone()
        };
        Ok(Some([rope, windowed]))
    }

    /// The bias on scores by distance, in the buckets that the file has something for.
    fn relative(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<RelativeAttention, ModelError> {
        let dimension = |name: &str, at: usize| -> Result<usize, ModelError> {
            let missing = |_| ModelError::MissingTensor {
                name: name.to_owned(),
                shape: Vec::new(),
            };
            let info = weights.describe(name).map_err(missing)?;
            Ok(info.shape.get(at).copied().unwrap_or(0))
        };
        match self.positions {
            Positions::LearntWithBiases { max_distance } => {
                let n = dimension(RELATIVE_BIAS, 0)?;
                let buckets = DistanceBuckets::Halves { n, max_distance };
                let weight = RELATIVE_BIAS;
                Ok(RelativeAttention::Biases { buckets, weight })
            }
            Positions::Disentangled => {
                let span = dimension("blk.0.attn_rel_k.weight", 1)? / 2;
                let buckets = match hyper.optional::<u32>(MAX_DISTANCE)? {
                    None => DistanceBuckets::Single { span },
                    Some(_) => DistanceBuckets::Signed {
                        span,
                        max_distance: hyper.count(MAX_DISTANCE)?,
                    },
                };
                if !buckets.is_sound() {
                    let reason = format!("it does not fit {span} buckets of either direction");
                    return Err(hyper.wrong(MAX_DISTANCE, reason));
                }
                Ok(RelativeAttention::Disentangled(buckets))
            }
            Positions::Learnt | Positions::Rotated(_) | Positions::Biases(_) => {
                Ok(RelativeAttention::None)
            }
        }
    }

    /// The layer whose weights each layer computes with. A group is computed as a whole, as often
    /// as there are layers for it.
    fn weights_of(
        &self,
        hyper: &Hyperparameters<'_>,
        n_layers: usize,
    ) -> Result<Vec<LayerIdx>, ModelError> {
        if self.sharing == LayerSharing::None {
            return Ok((0..n_layers as u32).map(LayerIdx).collect());
        }
        let len = match hyper.optional::<u32>(LAYER_GROUP_LENGTH)? {
            None => 1,
            Some(_) => hyper.count(LAYER_GROUP_LENGTH)?,
        };
        if !n_layers.is_multiple_of(len) {
            let reason = format!("{n_layers} layers are no whole number of groups of {len}");
            return Err(hyper.wrong(LAYER_GROUP_LENGTH, reason));
        }
        let (n_groups, n_computed) = (hyper.count(LAYER_GROUPS)?, n_layers / len);
        if n_groups > n_computed {
            let reason = format!("{n_groups} groups of {len} in {n_layers} layers");
            return Err(hyper.wrong(LAYER_GROUPS, reason));
        }
        let group = |at: usize| at / len * n_groups / n_computed;
        let layers = (0..n_layers).map(|at| group(at) * len + at % len);
        Ok(layers.map(|at| LayerIdx(at as u32)).collect())
    }

    fn layers(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Vec<EncoderLayer>, ModelError> {
        let (n_layers, heads) = heads(hyper)?;
        let ropes = self.ropes(hyper, heads.k_dim, weights)?;
        let qkv = qkv_weights(weights)?;
        let feed_forward = self.feed_forwards(hyper, n_layers, weights)?;
        let windows = self.windows(hyper, n_layers)?.into_iter();
        let layers = windows.zip(self.weights_of(hyper, n_layers)?);
        let alibi = match self.positions {
            Positions::Biases(largest) => Some(Alibi::new(largest)),
            _ => None,
        };
        let relative = self.relative(hyper, weights)?;
        let usual = AttentionBlock::from(heads);
        let scale = hyper.positive("attention.scale")?.map(|scale| scale as f32);
        let norm_eps = self.norm_eps(hyper)?;
        let layer = |((window, weights), feed_forward)| EncoderLayer {
            attention: AttentionBlock {
                scale: scale.unwrap_or(usual.scale),
                weights: qkv,
                bias: self.bias,
                qk_norm: self.qk_norm,
                norm_eps,
                rope: ropes.as_ref().map(|[full, windowed]| match window {
                    Window::Full => full.clone(),
                    _ => windowed.clone(),
                }),
                alibi,
                relative,
                window,
                ..usual.clone()
            },
            feed_forward,
            weights,
        };
        Ok(layers.zip(feed_forward).map(layer).collect())
    }

    /// The feed-forward blocks or mixtures of all layers.
    fn feed_forwards(
        &self,
        hyper: &Hyperparameters<'_>,
        n_layers: usize,
        weights: &dyn WeightSource,
    ) -> Result<Vec<FeedForward>, ModelError> {
        let has_gate = optional_weight(weights, "blk.0.ffn_gate.weight")?.is_some();
        let dense = FeedForwardBlock {
            hidden: hyper.count("feed_forward_length")?,
            activation: hyper.activation(self.activation)?,
            form: match self.feed_forward {
                // Files have gates in either way.
                FeedForwardForm::GatedDownBias if !has_gate => FeedForwardForm::FusedGateDownBias,
                form => form,
            },
        };
        let key = "expert_count";
        let Some(_) = hyper.optional::<u32>(key)?.filter(|&n| n > 0) else {
            return match self.mixtures {
                Mixtures::None => Ok(vec![FeedForward::Dense(dense); n_layers]),
                Mixtures::EveryFew => Err(hyper.wrong(key, "it has to be there".to_owned())),
            };
        };
        if self.mixtures == Mixtures::None {
            return Err(hyper.wrong(key, "experts are not supported".to_owned()));
        }
        let experts = ExpertsBlock {
            n_experts: hyper.count(key)?,
            hidden: dense.hidden,
            gate: ExpertGate::Ungated(dense.activation),
            bias: match optional_weight(weights, "blk.1.ffn_exps_sum.bias")? {
                Some(_) => ExpertBias::Sum,
                None => ExpertBias::None,
            },
            route: RouteSpec::plain(hyper.count("expert_used_count")?, RouteGate::Softmax),
            choice: ExpertChoice::Scores,
            scaling: ExpertScaling::Outputs,
            shared: None,
        };
        let every = hyper.count("moe_every_n_layers")?;
        let of_layer = |at: usize| {
            if every > 1 && at % every == 1 {
                FeedForward::Experts(experts)
            } else {
                FeedForward::Dense(dense)
            }
        };
        Ok((0..n_layers).map(of_layer).collect())
    }

    fn encoder(
        &self,
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Encoder, ModelError> {
        let dim = hyper.count("embedding_length")?;
        let input_dim = match hyper.optional::<u32>(INPUT_LENGTH)? {
            None => dim,
            Some(_) => hyper.count(INPUT_LENGTH)?,
        };
        let positions = match self.positions {
            Positions::Learnt | Positions::LearntWithBiases { .. } => {
                Some(hyper.count("context_length")?)
            }
            Positions::Rotated(_) | Positions::Biases(_) | Positions::Disentangled => None,
        };
        Ok(Encoder {
            vocab: hyper.vocab(weights, input_dim)?,
            dim,
            input: EncoderInput {
                dim: input_dim,
                positions,
                token_types: token_types(weights, input_dim)?,
                scale: match self.embedding {
                    EmbeddingScale::One => None,
                    EmbeddingScale::SqrtDim => Some((dim as f32).sqrt()),
                },
                norm: self.input_norm,
            },
            norm: Norm {
                kind: self.norm,
                eps: self.norm_eps(hyper)?,
            },
            norms: self.norms,
            output_norm: self.output_norm,
            layers: self.layers(hyper, weights)?,
            dense: dense_widths(weights, dim)?,
            head: ScoreHead::read(hyper, weights, self.head)?,
        })
    }
}

impl Architecture for EncoderLike {
    fn name(&self) -> &'static str {
        self.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name);
        refuse_causal(&hyper)?;
        let encoder = self.encoder(&hyper, weights)?;
        let context_length = hyper.count("context_length")?;
        Ok(Arc::new(EncoderModel::new(
            self.name,
            encoder,
            context_length,
        )))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.typical()))
    }
}

/// The heads of all layers, which are alike, and how many layers there are.
fn heads(hyper: &Hyperparameters<'_>) -> Result<(usize, HeadSizes), ModelError> {
    let n_layers = hyper.n_layers()?;
    let heads = hyper.heads(n_layers, hyper.count("embedding_length")?)?;
    match heads.split_first() {
        Some((first, rest)) if rest.iter().all(|other| other == first) => Ok((n_layers, *first)),
        _ => {
            let reason = "the layers of an encoder have as many heads each".to_owned();
            Err(hyper.wrong("attention.head_count", reason))
        }
    }
}

/// The matrices of queries, keys and values in the file: one, or three.
fn qkv_weights(weights: &dyn WeightSource) -> Result<QkvWeights, ModelError> {
    Ok(match optional_weight(weights, "blk.0.attn_qkv.weight")? {
        Some(_) => QkvWeights::Fused,
        None => QkvWeights::Separate,
    })
}

/// Rows of the matrix of parts of texts, where there is one; its width is checked with all others.
fn token_types(weights: &dyn WeightSource, dim: usize) -> Result<Option<usize>, ModelError> {
    let Some(weight) = optional_weight(weights, TOKEN_TYPES)? else {
        return Ok(None);
    };
    match weight.shape[..] {
        [n_types, _] if n_types > 0 => Ok(Some(n_types)),
        ref got => Err(ModelError::TensorShape {
            name: TOKEN_TYPES.to_owned(),
            wanted: vec![2, dim],
            got: got.to_vec(),
        }),
    }
}

/// Widths of the rows that dense modules make, the last of which is that of vectors.
fn dense_widths(weights: &dyn WeightSource, dim: usize) -> Result<Vec<usize>, ModelError> {
    let mut widths = Vec::new();
    for (at, name) in DENSE.iter().enumerate() {
        let Some(weight) = optional_weight(weights, name)? else {
            continue;
        };
        let input = widths.last().copied().unwrap_or(dim);
        match weight.shape[..] {
            [width, _] if widths.len() == at => widths.push(width),
            ref got => {
                return Err(ModelError::TensorShape {
                    name: (*name).to_owned(),
                    wanted: vec![dim, input],
                    got: got.to_vec(),
                });
            }
        }
    }
    match widths.last() {
        Some(&width) if width != dim => Err(ModelError::TensorShape {
            name: DENSE[widths.len() - 1].to_owned(),
            wanted: vec![dim, dim],
            got: vec![width],
        }),
        _ => Ok(widths),
    }
}

/// Tokens of an encoder see later ones.
pub(crate) fn refuse_causal(hyper: &Hyperparameters<'_>) -> Result<(), ModelError> {
    match hyper.optional::<bool>("attention.causal")? {
        Some(true) => {
            let reason = "true is not supported: tokens of an encoder see later ones".to_owned();
            Err(hyper.wrong("attention.causal", reason))
        }
        _ => Ok(()),
    }
}
