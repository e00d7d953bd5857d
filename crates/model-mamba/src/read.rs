//! What architectures have in common: mixers from a file's metadata.
//!
//! Invariant: heads and groups divide. Knows no architecture by name.

use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    ConvBias, GatedNorm, InnerNorms, Ssm2MixerBlock, SsmMixer, SsmMixerBlock, TimeSteps,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

/// A mixer of Mamba-2 with usual settings.
pub(crate) fn example_mamba2(d_inner: usize, n_heads: usize) -> SsmMixer {
    SsmMixer::Mamba2(example_mamba2_block(d_inner, n_heads))
}

/// Its settings.
pub(crate) fn example_mamba2_block(d_inner: usize, n_heads: usize) -> Ssm2MixerBlock {
    Ssm2MixerBlock {
        d_inner,
        d_state: 128,
        d_conv: 4,
        n_heads,
        n_groups: 1,
        conv_bias: ConvBias::PerChannel,
        gated_norm: GatedNorm::PerGroup { eps: 1e-5 },
        time_steps: TimeSteps::Free,
    }
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
        gated_norm: if has_norm {
            GatedNorm::PerGroup {
                eps: hyper.norm_eps()?,
            }
        } else {
            GatedNorm::None
        },
        time_steps: TimeSteps::Free,
    })
}

fn conv_bias(weights: &dyn WeightSource, layer: usize) -> Result<ConvBias, ModelError> {
    let bias = optional_weight(weights, &format!("blk.{layer}.ssm_conv1d.bias"))?;
    Ok(match bias {
        Some(_) => ConvBias::PerChannel,
        None => ConvBias::None,
    })
}
