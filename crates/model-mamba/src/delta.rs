//! Hybrids of gated DeltaNet (Yang et al., arXiv 2412.06464) and gated attention: Qwen3-Next and
//! Qwen 3.5.
//!
//! Invariant: a layer is recurrent where the file says so, or else every one but the last of a
//! period. Every layer of one kind has one size.

use kv_graph::rope::{RopeScaling, RopeSections, RopeSpec, RopeStyle, SectionOrder};
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, KeySharing, RouteSpec};
use model_core::architecture::ModelError;
use model_core::blocks::{
    AttentionBlock, DeltaMixerBlock, DeltaRates, ExpertBias, ExpertChoice, ExpertGate,
    ExpertScaling, ExpertsBlock, FeedForward, FeedForwardForm, Mixer, OutputGate, QkNorm,
    SharedExpert, SharedShare, SsmMixer,
};
use model_core::hyperparameters::{HeadSizes, Hyperparameters};

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::feed_forwards::{Routing, dense, feed_forwards};
use crate::hybrids::{example_heads, layers};

/// The layout of a mixer in the files of an architecture.
#[derive(Clone, Copy)]
struct Layout {
    sharing: KeySharing,
    rates: DeltaRates,
}

const NEXT: Layout = Layout {
    sharing: KeySharing::Neighbours,
    rates: DeltaRates::ByKeyHead,
};

const LATER: Layout = Layout {
    sharing: KeySharing::Interleaved,
    rates: DeltaRates::Separate,
};

/// Qwen3-Next: mixtures of experts with a gated shared expert.
pub(crate) const QWEN3_NEXT: MambaLike = MambaLike {
    name: "qwen3next",
    read: |hyper, weights| read(hyper, weights, NEXT),
    example: || example(NEXT, example_mixture()),
};

/// Qwen 3.5.
pub(crate) const QWEN35: MambaLike = MambaLike {
    name: "qwen35",
    read: |hyper, weights| read(hyper, weights, LATER),
    example: || example(LATER, dense(6144)),
};

/// The same with mixtures of experts.
pub(crate) const QWEN35_MOE: MambaLike = MambaLike {
    name: "qwen35moe",
    read: |hyper, weights| read(hyper, weights, LATER),
    example: || example(LATER, example_mixture()),
};

/// The norm before the feed-forward block, as the files call it.
const FFN_NORM: &str = "post_attention_norm.weight";

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    layout: Layout,
) -> Result<WiredLayers, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let delta = delta_mixer(hyper, layout)?;
    let heads = hyper.heads(n_layers, dim)?;
    let mut mixers = Vec::with_capacity(n_layers);
    for (heads, is_recurrent) in heads.into_iter().zip(recurrent_layers(hyper, n_layers)?) {
        mixers.push(if is_recurrent {
            Mixer::Recurrent(SsmMixer::Delta(delta))
        } else {
            let rope = hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?;
            let sections = sections(hyper, rope.n_rot)?;
            Mixer::Attention(AttentionBlock {
                sections,
                ..gated_attention(hyper, heads, rope)?
            })
        });
    }
    let layers = layers(mixers, feed_forwards(hyper, weights, Routing::SOFTMAX)?);
    Ok(wired(layers.into()))
}

fn wired(wired: WiredLayers) -> WiredLayers {
    WiredLayers {
        ffn_norm: FFN_NORM,
        ..wired
    }
}

/// The layers that are recurrent; none of those behind the decoder's last, which files may leave
/// out of the list.
fn recurrent_layers(hyper: &Hyperparameters<'_>, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    let key = "attention.recurrent_layers";
    let n_own = n_layers - hyper.n_layers_behind(n_layers)?;
    let flags = match hyper.optional_flags(key, n_own) {
        Err(_) if n_own < n_layers => hyper.optional_flags(key, n_layers),
        flags => flags,
    };
    if let Some(flags) = flags? {
        let own = flags.into_iter().take(n_own);
        return Ok(own.chain(vec![false; n_layers - n_own]).collect());
    }
    let key = "full_attention_interval";
    let period = match hyper.optional::<u32>(key)? {
        None => 4,
        Some(_) => hyper.count(key)?,
    };
    let is_recurrent = |layer: usize| layer < n_own && !(layer + 1).is_multiple_of(period);
    Ok((0..n_layers).map(is_recurrent).collect())
}

/// The pairs that rotate with rows and columns of images, where the file names any.
fn sections(hyper: &Hyperparameters<'_>, n_rot: usize) -> Result<Option<RopeSections>, ModelError> {
    if hyper.has("rope.dimension_sections") {
        hyper
            .rope_sections(SectionOrder::Interleaved, n_rot)
            .map(Some)
    } else {
        Ok(None)
    }
}

/// The mixer of recurrent layers: files count value heads as `ssm.time_step_rank`, and key heads as
/// groups of them.
fn delta_mixer(hyper: &Hyperparameters<'_>, layout: Layout) -> Result<DeltaMixerBlock, ModelError> {
    let (heads, groups) = ("ssm.time_step_rank", "ssm.group_count");
    let channels = hyper.count("ssm.inner_size")?;
    let (n_heads, key_heads) = (hyper.count(heads)?, hyper.count(groups)?);
    if !channels.is_multiple_of(n_heads) {
        let reason = format!("{n_heads} heads do not divide {channels} channels");
        return Err(hyper.wrong(heads, reason));
    }
    if !n_heads.is_multiple_of(key_heads) {
        let reason = format!("{key_heads} key heads do not divide {n_heads} value heads");
        return Err(hyper.wrong(groups, reason));
    }
    Ok(DeltaMixerBlock {
        n_heads,
        key_heads,
        k_dim: hyper.count("ssm.state_size")?,
        v_dim: channels / n_heads,
        d_conv: hyper.count("ssm.conv_kernel")?,
        sharing: layout.sharing,
        rates: layout.rates,
        norm_eps: hyper.norm_eps()?,
    })
}

/// Attention whose queries and keys are normed and whose outputs are gated.
fn gated_attention(
    hyper: &Hyperparameters<'_>,
    heads: HeadSizes,
    rope: RopeSpec,
) -> Result<AttentionBlock, ModelError> {
    if heads.k_dim != heads.v_dim {
        let reason = format!(
            "{}; gated values must be as wide as keys ({})",
            heads.v_dim, heads.k_dim
        );
        return Err(hyper.wrong("attention.value_length", reason));
    }
    Ok(AttentionBlock {
        qk_norm: QkNorm::PerHead,
        norm_eps: hyper.norm_eps()?,
        rope: Some(rope),
        output_gate: OutputGate::WithQueries,
        ..heads.into()
    })
}

/// Two layers of the smallest published sizes.
fn example(layout: Layout, feed_forward: FeedForward) -> (ExampleSizes, WiredLayers) {
    let delta = DeltaMixerBlock {
        n_heads: 32,
        key_heads: 16,
        k_dim: 128,
        v_dim: 128,
        d_conv: 4,
        sharing: layout.sharing,
        rates: layout.rates,
        norm_eps: 1e-6,
    };
    let attention = AttentionBlock {
        qk_norm: QkNorm::PerHead,
        norm_eps: 1e-6,
        rope: Some(RopeSpec {
            style: RopeStyle::Neox,
            n_rot: 64,
            base: 1e7,
            scaling: RopeScaling::None,
            factors: None,
        }),
        output_gate: OutputGate::WithQueries,
        ..example_heads(16, 256).into()
    };
    let mixers = vec![
        Mixer::Recurrent(SsmMixer::Delta(delta)),
        Mixer::Attention(attention),
    ];
    let sizes = ExampleSizes {
        vocab: 151_936,
        dim: 2048,
        context_length: 262_144,
    };
    (sizes, wired(layers(mixers, vec![feed_forward; 2]).into()))
}

fn example_mixture() -> FeedForward {
    let activation = Activation::Silu;
    FeedForward::Experts(ExpertsBlock {
        n_experts: 512,
        hidden: 512,
        gate: ExpertGate::Activation(activation),
        bias: ExpertBias::None,
        route: RouteSpec {
            sum: Routing::SOFTMAX.sum,
            ..RouteSpec::plain(10, Routing::SOFTMAX.gate)
        },
        choice: ExpertChoice::Scores,
        scaling: ExpertScaling::Outputs,
        shared: Some(SharedExpert {
            hidden: 512,
            activation,
            form: FeedForwardForm::Gated,
            share: SharedShare::Routed,
        }),
    })
}
