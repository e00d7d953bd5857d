//! What architectures have in common: mixers and feed-forward blocks from a file's metadata.
//!
//! Invariant: heads and groups divide. Knows no architecture by name.

use kv_core::graph::{Activation, RouteGate, RouteSpec, RouteSum};
use kv_core::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    ConvBias, ExpertBias, ExpertChoice, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward,
    FeedForwardBlock, FeedForwardForm, GatedNorm, InnerNorms, SharedExpert, SharedShare,
    Ssm2MixerBlock, SsmMixer, SsmMixerBlock,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

/// A mixer of Mamba-2 with usual settings.
pub(crate) fn example_mamba2(d_inner: usize, n_heads: usize) -> SsmMixer {
    SsmMixer::Mamba2(Ssm2MixerBlock {
        d_inner,
        d_state: 128,
        d_conv: 4,
        n_heads,
        n_groups: 1,
        conv_bias: ConvBias::PerChannel,
        gated_norm: GatedNorm::PerGroup { eps: 1e-5 },
    })
}

/// The mixer of Mamba; `layer` is one that has it.
pub(crate) fn mamba_mixer(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    layer: usize,
    inner_norms: InnerNorms,
) -> Result<SsmMixerBlock, ModelError> {
    Ok(SsmMixerBlock {
        d_inner: hyper.count("ssm.inner_size")?,
        d_state: hyper.count("ssm.state_size")?,
        d_conv: hyper.count("ssm.conv_kernel")?,
        dt_rank: hyper.count("ssm.time_step_rank")?,
        conv_bias: conv_bias(weights, layer)?,
        inner_norms,
    })
}

/// The mixer of Mamba-2, whose heads files count as `ssm.time_step_rank`; `layer` is one that has
/// it.
pub(crate) fn mamba2_mixer(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    layer: usize,
) -> Result<Ssm2MixerBlock, ModelError> {
    let (heads, groups) = ("ssm.time_step_rank", "ssm.group_count");
    let d_inner = hyper.count("ssm.inner_size")?;
    let (n_heads, n_groups) = (hyper.count(heads)?, hyper.count(groups)?);
    if !d_inner.is_multiple_of(n_heads) {
        return Err(hyper.wrong(
            heads,
            format!("{n_heads} heads do not divide {d_inner} channels"),
        ));
    }
    if !n_heads.is_multiple_of(n_groups) {
        return Err(hyper.wrong(
            groups,
            format!("{n_groups} groups do not divide {n_heads} heads"),
        ));
    }
    let has_norm = optional_weight(weights, &format!("blk.{layer}.ssm_norm.weight"))?.is_some();
    Ok(Ssm2MixerBlock {
        d_inner,
        d_state: hyper.count("ssm.state_size")?,
        d_conv: hyper.count("ssm.conv_kernel")?,
        n_heads,
        n_groups,
        conv_bias: conv_bias(weights, layer)?,
        gated_norm: match has_norm {
            true => GatedNorm::PerGroup {
                eps: hyper.norm_eps()?,
            },
            false => GatedNorm::None,
        },
    })
}

fn conv_bias(weights: &dyn WeightSource, layer: usize) -> Result<ConvBias, ModelError> {
    let bias = optional_weight(weights, &format!("blk.{layer}.ssm_conv1d.bias"))?;
    Ok(match bias {
        Some(_) => ConvBias::PerChannel,
        None => ConvBias::None,
    })
}

/// What follows the mixer of each layer: where the layer has a router, a mixture of experts, whose
/// weights are a softmax over all of them.
pub(crate) fn feed_forwards(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    sum: RouteSum,
) -> Result<Vec<FeedForward>, ModelError> {
    let hidden = hyper.count("feed_forward_length")?;
    let activation = Activation::Silu;
    let layer = |layer: usize| {
        let tensor = |what: &str| optional_weight(weights, &format!("blk.{layer}.{what}.weight"));
        if tensor("ffn_gate_inp")?.is_none() {
            let form = FeedForwardForm::Gated;
            let block = FeedForwardBlock {
                hidden,
                activation,
                form,
            };
            return Ok(FeedForward::Dense(block));
        }
        let shared = tensor("ffn_up_shexp")?.and_then(|up| up.shape().first().copied());
        Ok(FeedForward::Experts(ExpertsBlock {
            n_experts: hyper.count("expert_count")?,
            hidden,
            gate: ExpertGate::Activation(activation),
            bias: ExpertBias::None,
            route: RouteSpec {
                sum,
                ..RouteSpec::plain(n_used(hyper)?, RouteGate::Softmax)
            },
            choice: ExpertChoice::Scores,
            scaling: ExpertScaling::Outputs,
            shared: shared.map(|hidden| SharedExpert {
                hidden,
                activation,
                share: SharedShare::Whole,
            }),
        }))
    };
    (0..hyper.n_layers()?).map(layer).collect()
}

/// Experts that a row goes through.
fn n_used(hyper: &Hyperparameters<'_>) -> Result<usize, ModelError> {
    let (n_experts, key) = (hyper.count("expert_count")?, "expert_used_count");
    match hyper.count(key)? {
        n if n > n_experts => {
            Err(hyper.wrong(key, format!("{n} of {n_experts} experts are not possible")))
        }
        n => Ok(n),
    }
}
