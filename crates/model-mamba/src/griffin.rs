//! RecurrentGemma (arXiv 2404.07839): gated linear recurrences and local attention, as in Griffin
//! (De et al., arXiv 2402.19427).
//!
//! Files tell by `attention.head_count_kv`: a layer without key/value heads is recurrent. GGUF has
//! no such architecture: its keys are ours.

use kv_core::Window;
use kv_graph::Activation;
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, FeedForward, FeedForwardBlock, FeedForwardForm, Mixer, Multipliers, QkvBias,
    RgLruBlock, SsmMixer,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::hybrids::{Kinds, example_heads, layers, mixers};

/// RecurrentGemma.
pub(crate) const RECURRENT_GEMMA: MambaLike = MambaLike {
    name: "recurrentgemma",
    read,
    example,
};

const ACTIVATION: Activation = Activation::GeluTanh;

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let lru = recurrence(hyper)?;
    let window = Window::Sliding(hyper.count("attention.sliding_window")? as u32);
    let has_bias = |layer: usize| {
        let bias = optional_weight(weights, &format!("blk.{layer}.attn_q.bias"))?;
        Ok::<_, ModelError>(bias.is_some())
    };
    let mut bias = QkvBias::Output;
    for layer in 0..n_layers {
        if has_bias(layer)? {
            bias = QkvBias::All;
        }
    }
    let kinds = Kinds {
        recurrent: &|_| Ok(SsmMixer::RgLru(lru)),
        attending: &|heads| {
            let rope = hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?;
            Ok(AttentionBlock {
                bias,
                ..attention(heads, rope, window)
            })
        },
    };
    let hidden = hyper.count("feed_forward_length")?;
    let wired = wired(mixers(hyper, &kinds)?, hidden, dim);
    Ok(WiredLayers {
        logit_cap: hyper
            .positive("final_logit_softcapping")?
            .map(|cap| cap as f32),
        ..wired
    })
}

fn recurrence(hyper: &Hyperparameters<'_>) -> Result<RgLruBlock, ModelError> {
    let heads = "rg_lru.head_count";
    let (channels, n_heads) = (hyper.count("rg_lru.width")?, hyper.count(heads)?);
    if !channels.is_multiple_of(n_heads) {
        let reason = format!("{n_heads} heads do not divide {channels} channels");
        return Err(hyper.wrong(heads, reason));
    }
    Ok(RgLruBlock {
        channels,
        n_heads,
        d_conv: hyper.count("ssm.conv_kernel")?,
        activation: ACTIVATION,
    })
}

fn attention(heads: HeadSizes, rope: RopeSpec, window: Window) -> AttentionBlock {
    AttentionBlock {
        bias: QkvBias::Output,
        rope: Some(rope),
        window,
        ..heads.into()
    }
}

fn wired(mixers: Vec<Mixer>, hidden: usize, dim: usize) -> WiredLayers {
    let feed_forward = FeedForward::Dense(FeedForwardBlock {
        hidden,
        activation: ACTIVATION,
        form: FeedForwardForm::GatedWithBias,
    });
    let feed_forwards = vec![feed_forward; mixers.len()];
    WiredLayers {
        multipliers: Multipliers {
            embedding: Some(embedding_scale(dim)),
            ..Multipliers::default()
        },
        ..layers(mixers, feed_forwards).into()
    }
}

/// The root of the width, which the reference rounds to bfloat16 whatever it computes in.
fn embedding_scale(dim: usize) -> f32 {
    let bits = (dim as f32).sqrt().to_bits();
    let even = bits >> 16 & 1;
    f32::from_bits((bits + 0x7fff + even) & 0xffff_0000)
}

/// Two layers of the smallest published sizes.
fn example() -> (ExampleSizes, WiredLayers) {
    let lru = RgLruBlock {
        channels: 2560,
        n_heads: 10,
        d_conv: 4,
        activation: ACTIVATION,
    };
    let rope = RopeSpec {
        style: RopeStyle::Neox,
        n_rot: 128,
        base: 1e4,
        scaling: RopeScaling::None,
        factors: None,
    };
    let heads = HeadSizes {
        kv_heads: 1,
        ..example_heads(10, 256)
    };
    let mixers = vec![
        Mixer::Recurrent(SsmMixer::RgLru(lru)),
        Mixer::Attention(attention(heads, rope, Window::Sliding(2048))),
    ];
    let sizes = ExampleSizes {
        vocab: 256_000,
        dim: 2560,
        context_length: 8192,
    };
    let wired = WiredLayers {
        logit_cap: Some(30.0),
        ..wired(mixers, 7680, sizes.dim)
    };
    (sizes, wired)
}
