//! Hybrids of short convolutions and attention: LFM2 (arXiv 2511.23404) and its mixture of experts.
//!
//! Files tell by `attention.head_count_kv`: a layer without key/value heads is a convolution.

use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, RouteSpec};
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, ExpertBias, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward, LastNorm,
    Mixer, QkNorm, ShortConvBias, ShortConvBlock, SsmMixer,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::feed_forwards::{Routing, dense, feed_forwards};
use crate::hybrids::{Kinds, example_heads, layers, mixers};

/// LFM2.
pub(crate) const LFM2: MambaLike = MambaLike {
    name: "lfm2",
    read,
    example: || example(vec![dense(4608); 2]),
};

/// The same with mixtures of experts behind the first layers.
pub(crate) const LFM2_MOE: MambaLike = MambaLike {
    name: "lfm2moe",
    read,
    example: || example(vec![dense(7168), example_mixture()]),
};

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let conv = |layer: usize| {
        let bias = optional_weight(weights, &format!("blk.{layer}.shortconv.conv.bias"))?;
        Ok(SsmMixer::ShortConv(ShortConvBlock {
            channels: hyper.count("embedding_length")?,
            width: hyper.count("shortconv.l_cache")?,
            bias: match bias {
                None => ShortConvBias::None,
                Some(_) => ShortConvBias::All,
            },
        }))
    };
    let eps = hyper.norm_eps()?;
    let kinds = Kinds {
        recurrent: &conv,
        attending: &|heads| {
            let rope = hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?;
            Ok(attention(heads, eps, rope))
        },
    };
    let fed = feed_forwards(hyper, weights, Routing::BIASED_SIGMOID)?;
    Ok(wired(layers(mixers(hyper, &kinds)?, fed).into()))
}

/// Attention whose queries and keys are normed.
fn attention(heads: HeadSizes, norm_eps: f32, rope: RopeSpec) -> AttentionBlock {
    AttentionBlock {
        qk_norm: QkNorm::PerHead,
        norm_eps,
        rope: Some(rope),
        ..heads.into()
    }
}

fn wired(wired: WiredLayers) -> WiredLayers {
    WiredLayers {
        last_norm: LastNorm::Embedding,
        ..wired
    }
}

/// Two layers of the smallest published sizes.
fn example(feed_forwards: Vec<FeedForward>) -> (ExampleSizes, WiredLayers) {
    let conv = ShortConvBlock {
        channels: 1024,
        width: 3,
        bias: ShortConvBias::None,
    };
    let rope = RopeSpec {
        style: RopeStyle::Neox,
        n_rot: 64,
        base: 1e6,
        scaling: RopeScaling::None,
        factors: None,
    };
    let mixers = vec![
        Mixer::Recurrent(SsmMixer::ShortConv(conv)),
        Mixer::Attention(attention(example_heads(16, 64), 1e-5, rope)),
    ];
    let sizes = ExampleSizes {
        vocab: 65_536,
        dim: 1024,
        context_length: 128_000,
    };
    (sizes, wired(layers(mixers, feed_forwards).into()))
}

fn example_mixture() -> FeedForward {
    FeedForward::Experts(ExpertsBlock {
        n_experts: 32,
        hidden: 1792,
        gate: ExpertGate::Activation(Activation::Silu),
        bias: ExpertBias::None,
        route: RouteSpec {
            sum: Routing::BIASED_SIGMOID.sum,
            ..RouteSpec::plain(4, Routing::BIASED_SIGMOID.gate)
        },
        choice: Routing::BIASED_SIGMOID.choice,
        scaling: ExpertScaling::Outputs,
        shared: None,
    })
}
