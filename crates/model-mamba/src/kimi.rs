//! [`KIMI_LINEAR`]: Kimi Delta Attention, and now and then attention over latents without positions
//! (arXiv 2510.26692).
//!
//! Files tell by `attention.head_count_kv`: a layer without key/value heads is recurrent.

use kv_graph::weights::WeightSource;
use kv_graph::{Activation, RouteSpec};
use model_core::architecture::ModelError;
use model_core::blocks::{
    ExpertBias, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward, FeedForwardForm,
    KdaMixerBlock, LatentAttentionBlock, Mixer, SharedExpert, SharedShare, SsmMixer,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::feed_forwards::{Routing, dense, feed_forwards};
use crate::hybrids::layers;

/// Kimi Linear.
pub(crate) const KIMI_LINEAR: MambaLike = MambaLike {
    name: "kimi-linear",
    read,
    example,
};

/// Key of the heads of delta rules, where they are not as many as those of the attention.
pub(crate) const KDA_HEADS: &str = "kda.head_count";

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let head_dim = hyper.count("kda.head_dim")?;
    let kda = |layer: usize| {
        // The rank is that of the file; transformers has the size of a head.
        let low = optional_weight(weights, &format!("blk.{layer}.ssm_f_a.weight"))?;
        let rank = low.and_then(|low| low.shape.first().copied());
        Ok::<_, ModelError>(KdaMixerBlock {
            n_heads: match hyper.optional::<u32>(KDA_HEADS)? {
                None => hyper.count("attention.head_count")?,
                Some(_) => hyper.count(KDA_HEADS)?,
            },
            head_dim,
            d_conv: hyper.count("ssm.conv_kernel")?,
            rank: rank.unwrap_or(head_dim),
            norm_eps: hyper.norm_eps()?,
        })
    };
    let mixers = hyper.heads_where_any(n_layers, dim)?.into_iter();
    let mixers = mixers.enumerate().map(|(layer, heads)| match heads {
        None => kda(layer).map(|kda| Mixer::Recurrent(SsmMixer::Kda(kda))),
        Some(_) => latent_attention(hyper).map(Mixer::Latent),
    });
    let mixers = mixers.collect::<Result<_, _>>()?;
    Ok(layers(
        mixers,
        feed_forwards(hyper, weights, Routing::BIASED_SIGMOID)?,
    )
    .into())
}

/// The attention of the other layers, which does not rotate.
fn latent_attention(hyper: &Hyperparameters<'_>) -> Result<LatentAttentionBlock, ModelError> {
    let key = "attention.q_lora_rank";
    if let Some(rank) = hyper.optional::<u32>(key)?.filter(|&rank| rank > 0) {
        return Err(hyper.wrong(
            key,
            format!("{rank}; queries of two matrices are not supported"),
        ));
    }
    let k_dim = hyper.count("attention.key_length_mla")?;
    let shared_dim = hyper.count("rope.dimension_count")?;
    let Some(plain_dim) = k_dim.checked_sub(shared_dim).filter(|&n| n > 0) else {
        let reason = format!("{shared_dim} shared values of {k_dim}; some must not be shared");
        return Err(hyper.wrong("rope.dimension_count", reason));
    };
    let rank = hyper.count("attention.kv_lora_rank")?;
    let key = "attention.key_length";
    let wanted = rank + shared_dim;
    if let Some(found) = hyper
        .optional::<u32>(key)?
        .filter(|&n| n as usize != wanted)
    {
        let reason = format!("{found}; with these latents it must be {wanted}");
        return Err(hyper.wrong(key, reason));
    }
    Ok(LatentAttentionBlock {
        n_heads: hyper.count("attention.head_count")?,
        plain_dim,
        shared_dim,
        v_dim: hyper.count("attention.value_length_mla")?,
        rank,
        scale: 1.0 / (k_dim as f32).sqrt(),
        norm_eps: hyper.norm_eps()?,
        ..LatentAttentionBlock::default()
    })
}

/// Two layers of the published sizes.
fn example() -> (ExampleSizes, WiredLayers) {
    let kda = KdaMixerBlock {
        n_heads: 32,
        head_dim: 128,
        d_conv: 4,
        rank: 128,
        norm_eps: 1e-5,
    };
    let latent = LatentAttentionBlock {
        n_heads: 32,
        plain_dim: 128,
        shared_dim: 64,
        v_dim: 128,
        rank: 512,
        scale: 1.0 / 192f32.sqrt(),
        norm_eps: 1e-5,
        ..LatentAttentionBlock::default()
    };
    let mixers = vec![Mixer::Recurrent(SsmMixer::Kda(kda)), Mixer::Latent(latent)];
    let activation = Activation::Silu;
    let mixture = FeedForward::Experts(ExpertsBlock {
        n_experts: 256,
        hidden: 1024,
        gate: ExpertGate::Activation(activation),
        bias: ExpertBias::None,
        route: RouteSpec {
            sum: Routing::BIASED_SIGMOID.sum,
            scale: 2.446,
            ..RouteSpec::plain(8, Routing::BIASED_SIGMOID.gate)
        },
        choice: Routing::BIASED_SIGMOID.choice,
        scaling: ExpertScaling::Outputs,
        shared: Some(SharedExpert {
            hidden: 1024,
            activation,
            form: FeedForwardForm::Gated,
            share: SharedShare::Whole,
        }),
    });
    let sizes = ExampleSizes {
        vocab: 163_840,
        dim: 2304,
        context_length: 1_048_576,
    };
    (sizes, layers(mixers, vec![dense(9216), mixture]).into())
}
