//! Nemotron-H (arXiv 2504.03624): every layer is Mamba-2, attention without positions, or a
//! feed-forward block, one norm before each.
//!
//! Files tell by `attention.head_count_kv` and `feed_forward_length`, of which at most one is more
//! than 0 in a layer. Invariant: every layer of one kind has one size.

use kv_core::graph::{Activation, RouteGate, RouteSpec, RouteSum};
use kv_core::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{
    DecoderLayer, ExpertBias, ExpertChoice, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward,
    FeedForwardBlock, FeedForwardForm, LayerScale, Mixer, SharedExpert, SharedShare, SsmMixer,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::family::{MambaLike, Wired};
use crate::feed_forwards::n_used;
use crate::hybrids::{attention, example_heads, example_sizes};
use crate::read::{example_mamba2, mamba2_mixer};

/// With dense feed-forward blocks.
pub(crate) const NEMOTRON_H: MambaLike = MambaLike {
    name: "nemotron_h",
    read,
    example: || {
        let mixers = [
            Mixer::Recurrent(example_mamba2(7680, 120)),
            Mixer::Attention(attention(example_heads(32, 128), None, None)),
            Mixer::FeedForward(dense(12_288)),
        ];
        (example_sizes(4096), wired(mixers.into()))
    },
};

/// With mixtures of experts (Nemotron 3 Nano).
pub(crate) const NEMOTRON_H_MOE: MambaLike = MambaLike {
    name: "nemotron_h_moe",
    read,
    example: || {
        let experts = ExpertsBlock {
            shared: Some(shared(3712)),
            ..experts(128, 1856, 6)
        };
        let mixers = [
            Mixer::Recurrent(example_mamba2(4096, 64)),
            Mixer::Attention(attention(example_heads(32, 128), None, None)),
            Mixer::FeedForward(FeedForward::Experts(experts)),
        ];
        (example_sizes(2688), wired(mixers.into()))
    },
};

const ACTIVATION: Activation = Activation::ReluSquared;

fn dense(hidden: usize) -> FeedForward {
    FeedForward::Dense(FeedForwardBlock {
        hidden,
        activation: ACTIVATION,
        form: FeedForwardForm::Plain,
    })
}

fn shared(hidden: usize) -> SharedExpert {
    SharedExpert {
        hidden,
        activation: ACTIVATION,
        form: FeedForwardForm::Plain,
        share: SharedShare::Whole,
    }
}

/// A mixture without a shared expert.
fn experts(n_experts: usize, hidden: usize, n_used: usize) -> ExpertsBlock {
    ExpertsBlock {
        n_experts,
        hidden,
        gate: ExpertGate::Ungated(ACTIVATION),
        bias: ExpertBias::None,
        route: RouteSpec {
            sum: RouteSum::One,
            ..RouteSpec::plain(n_used, RouteGate::Sigmoid)
        },
        choice: ExpertChoice::Biased,
        scaling: ExpertScaling::Outputs,
        shared: None,
    }
}

fn wired(mixers: Vec<Mixer>) -> Wired {
    let layer = |mixer| DecoderLayer {
        mixer,
        feed_forward: None,
        scale: LayerScale::None,
    };
    mixers.into_iter().map(layer).collect::<Vec<_>>().into()
}

fn read(hyper: &Hyperparameters<'_>, weights: &dyn WeightSource) -> Result<Wired, ModelError> {
    let (n_layers, dim) = (hyper.n_layers()?, hyper.count("embedding_length")?);
    let hidden = hyper.numbers("feed_forward_length", n_layers)?;
    let heads = hyper.heads_where_any(n_layers, dim)?.into_iter();
    let mixers = heads.zip(hidden).enumerate().map(|(layer, of)| match of {
        (None, 0) => {
            let ssm = mamba2_mixer(hyper, weights, layer)?;
            Ok(Mixer::Recurrent(SsmMixer::Mamba2(ssm)))
        }
        (Some(heads), 0) => Ok(Mixer::Attention(attention(heads, None, None))),
        (None, hidden) => {
            let block = feed_forward(hyper, weights, layer, hidden as usize)?;
            Ok(Mixer::FeedForward(block))
        }
        (Some(_), hidden) => {
            let reason = format!("layer {layer} has heads, and {hidden} is not 0");
            Err(hyper.wrong("feed_forward_length", reason))
        }
    });
    Ok(wired(mixers.collect::<Result<_, ModelError>>()?))
}

/// The block of a layer: a mixture where there is a router.
fn feed_forward(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    layer: usize,
    hidden: usize,
) -> Result<FeedForward, ModelError> {
    let tensor = |what: &str| optional_weight(weights, &format!("blk.{layer}.{what}.weight"));
    let (router, up) = (tensor("ffn_gate_inp")?, tensor("ffn_up")?);
    if router.is_none() {
        return match up {
            Some(_) => Ok(dense(hidden)),
            None => {
                let reason =
                    format!("{hidden}, but layer {layer} has neither 'ffn_up' nor a router");
                Err(hyper.wrong("feed_forward_length", reason))
            }
        };
    }
    let key = "expert_group_count";
    if let Some(n @ 2..) = hyper.optional::<u32>(key)? {
        return Err(hyper.wrong(key, format!("{n} groups of experts are not supported")));
    }
    let hidden = match hyper.optional::<u32>("expert_feed_forward_length")? {
        None => hidden,
        Some(_) => hyper.count("expert_feed_forward_length")?,
    };
    let block = experts(hyper.count("expert_count")?, hidden, n_used(hyper)?);
    let scale = hyper.positive("expert_weights_scale")?;
    let shared_hidden = tensor("ffn_up_shexp")?.and_then(|up| up.shape().first().copied());
    Ok(FeedForward::Experts(ExpertsBlock {
        route: RouteSpec {
            sum: match hyper.optional::<bool>("expert_weights_norm")? {
                Some(false) => RouteSum::Free,
                None | Some(true) => RouteSum::One,
            },
            scale: scale.map_or(1.0, |scale| scale as f32),
            ..block.route
        },
        shared: shared_hidden.map(shared),
        ..block
    }))
}
