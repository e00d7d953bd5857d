//! Hybrids: models in which some layers attend and others are recurrent, or all do both.
//!
//! Files tell by `attention.head_count_kv`: a layer without key/value heads is recurrent.
//! Invariant: every layer of one kind has one size.

use kv_graph::RouteSum;
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, ConvBias, DecoderLayer, FeedForward, InnerNorms, LayerScale, Mixer,
    Multipliers, Residual, SsmMixer, SsmMixerBlock,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters};

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::feed_forwards::{Routing, dense, feed_forwards};
use crate::read::{example_mamba2, mamba_mixer, mamba2_mixer};

/// Jamba (arXiv 2403.19887): Mamba, now and then attention without positions, and mixtures of
/// experts.
pub(crate) const JAMBA: MambaLike = MambaLike {
    name: "jamba",
    read: jamba,
    example: || {
        let ssm = SsmMixer::Mamba(SsmMixerBlock {
            d_inner: 5120,
            d_state: 16,
            d_conv: 4,
            dt_rank: 160,
            conv_bias: ConvBias::PerChannel,
            inner_norms: InnerNorms::WithGains { eps: 1e-6 },
        });
        let mixers = vec![
            Mixer::Recurrent(ssm),
            Mixer::Attention(attention(example_heads(20, 128), None, None)),
        ];
        let layers = layers(mixers, vec![dense(8192); 2]);
        (example_sizes(2560), layers.into())
    },
};

/// Mamba-2 and now and then attention, as in Bamba and Granite 4, with or without experts,
/// positions and multipliers.
pub(crate) const GRANITE_HYBRID: MambaLike = MambaLike {
    name: "granitehybrid",
    read: granite_hybrid,
    example: || {
        let mixers = vec![
            Mixer::Recurrent(example_mamba2(3072, 48)),
            Mixer::Attention(attention(example_heads(12, 128), Some(1.0 / 128.0), None)),
        ];
        let wired = WiredLayers {
            multipliers: Multipliers {
                embedding: Some(12.0),
                residual: Some(0.22),
                logits: Some(1.0 / 6.0),
            },
            ..layers(mixers, vec![dense(4096); 2]).into()
        };
        (example_sizes(1536), wired)
    },
};

/// Falcon-H1 (arXiv 2507.22448): parallel attention and Mamba-2 in every layer. Its multipliers
/// are in the weights of a file.
pub(crate) const FALCON_H1: MambaLike = MambaLike {
    name: "falcon-h1",
    read: falcon_h1,
    example: || {
        let rope = RopeSpec {
            style: RopeStyle::Neox,
            n_rot: 64,
            base: 1e11,
            scaling: RopeScaling::None,
            factors: None,
        };
        let attention = attention(example_heads(8, 64), None, Some(rope));
        let mixer = Mixer::Both(attention, example_mamba2(1536, 24));
        let layers = layers(vec![mixer; 2], vec![dense(2048); 2]);
        (example_sizes(1024), falcon_wired(layers))
    },
};

/// Probabilities as weights.
const FREE: Routing = Routing {
    sum: RouteSum::Free,
    ..Routing::SOFTMAX
};

/// Attention of these heads, biases and norms as none of the hybrids has them.
pub(crate) fn attention(
    heads: HeadSizes,
    scale: Option<f32>,
    rope: Option<RopeSpec>,
) -> AttentionBlock {
    let block = AttentionBlock::from(heads);
    AttentionBlock {
        scale: scale.unwrap_or(block.scale),
        rope,
        ..block
    }
}

/// The recurrent and the attending layers of a model.
pub(crate) struct Kinds<'a> {
    pub(crate) recurrent: &'a dyn Fn(usize) -> Result<SsmMixer, ModelError>,
    pub(crate) attending: &'a dyn Fn(HeadSizes) -> Result<AttentionBlock, ModelError>,
}

/// The mixers of all layers, of which each either attends or is recurrent.
pub(crate) fn mixers(
    hyper: &Hyperparameters<'_>,
    kinds: &Kinds<'_>,
) -> Result<Vec<Mixer>, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let heads = hyper.heads_where_any(n_layers, dim)?.into_iter();
    let mixers = heads.enumerate().map(|(layer, heads)| match heads {
        None => (kinds.recurrent)(layer).map(Mixer::Recurrent),
        Some(heads) => (kinds.attending)(heads).map(Mixer::Attention),
    });
    mixers.collect()
}

pub(crate) fn layers(mixers: Vec<Mixer>, feed_forwards: Vec<FeedForward>) -> Vec<DecoderLayer> {
    let layers = mixers.into_iter().zip(feed_forwards);
    let layer = |(mixer, feed_forward)| DecoderLayer {
        mixer,
        feed_forward: Some(feed_forward),
        scale: LayerScale::None,
        residual: Residual::Rows,
    };
    layers.map(layer).collect()
}

fn jamba(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let norms = InnerNorms::WithGains {
        eps: hyper.norm_eps()?,
    };
    let kinds = Kinds {
        recurrent: &|layer| mamba_mixer(hyper, weights, layer, norms).map(SsmMixer::Mamba),
        attending: &|heads| Ok(attention(heads, None, None)),
    };
    let fed = feed_forwards(hyper, weights, FREE)?;
    Ok(layers(mixers(hyper, &kinds)?, fed).into())
}

fn granite_hybrid(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let factor = |name| Ok::<_, ModelError>(hyper.positive(name)?.map(|f| f as f32));
    let scale = factor("attention.scale")?;
    // Whether positions rotate: the only thing that this key says here.
    let rotates = hyper.optional("rope.scaling.finetuned")?.unwrap_or(true);
    let rope = |heads: HeadSizes| {
        if rotates {
            hyper.rope(RopeStyle::Norm, heads.k_dim, weights).map(Some)
        } else {
            Ok(None)
        }
    };
    let kinds = Kinds {
        recurrent: &|layer| mamba2_mixer(hyper, weights, layer).map(SsmMixer::Mamba2),
        attending: &|heads| Ok(attention(heads, scale, rope(heads)?)),
    };
    let mixers = mixers(hyper, &kinds)?;
    let fed = feed_forwards(hyper, weights, Routing::SOFTMAX)?;
    Ok(WiredLayers {
        multipliers: Multipliers {
            embedding: factor("embedding_scale")?,
            residual: factor("residual_scale")?,
            logits: factor("logit_scale")?.map(|scale| 1.0 / scale),
        },
        ..layers(mixers, fed).into()
    })
}

fn falcon_h1(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let scale = hyper.positive("attention.scale")?.map(|scale| scale as f32);
    let heads = hyper.heads(n_layers, dim)?.into_iter().enumerate();
    let mixers = heads.map(|(layer, heads)| {
        let rope = hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?;
        let ssm = mamba2_mixer(hyper, weights, layer)?;
        let attention = attention(heads, scale, Some(rope));
        Ok(Mixer::Both(attention, SsmMixer::Mamba2(ssm)))
    });
    let mixers = mixers.collect::<Result<_, ModelError>>()?;
    let fed = feed_forwards(hyper, weights, Routing::SOFTMAX)?;
    Ok(falcon_wired(layers(mixers, fed)))
}

/// The name of one gain has no ending in these files.
fn falcon_wired(layers: Vec<DecoderLayer>) -> WiredLayers {
    WiredLayers {
        ffn_norm: "ffn_norm",
        ..layers.into()
    }
}

pub(crate) fn example_sizes(dim: usize) -> ExampleSizes {
    ExampleSizes {
        vocab: 65_536,
        dim,
        context_length: 131_072,
    }
}

pub(crate) fn example_heads(n_heads: usize, dim: usize) -> HeadSizes {
    HeadSizes {
        n_heads,
        kv_heads: n_heads / 4,
        k_dim: dim,
        v_dim: dim,
    }
}
