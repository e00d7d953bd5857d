//! Nemotron-H (arXiv 2504.03624): every layer is Mamba-2, attention without positions, or a
//! feed-forward block, one norm before each.
//!
//! Files tell by `attention.head_count_kv` and `feed_forward_length`, of which at most one is more
//! than 0 in a layer. Invariant: every layer of one kind has one size.

use kv_graph::weights::WeightSource;
use kv_graph::{Activation, RouteSpec};
use model_core::architecture::ModelError;
use model_core::blocks::{
    DecoderLayer, ExpertBias, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward,
    FeedForwardBlock, FeedForwardForm, LayerScale, Mixer, Residual, SharedExpert, SharedShare,
    SsmMixer,
};
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::family::{MambaLike, WiredLayers};
use crate::feed_forwards::{Routing, experts};
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
        let Routing { gate, sum, choice } = Routing::BIASED_SIGMOID;
        let experts = ExpertsBlock {
            n_experts: 128,
            hidden: 1856,
            gate: ExpertGate::Ungated(ACTIVATION),
            bias: ExpertBias::None,
            route: RouteSpec {
                sum,
                ..RouteSpec::plain(6, gate)
            },
            choice,
            scaling: ExpertScaling::Outputs,
            shared: Some(shared(3712)),
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

fn wired(mixers: Vec<Mixer>) -> WiredLayers {
    let layer = |mixer| DecoderLayer {
        mixer,
        feed_forward: None,
        scale: LayerScale::None,
        residual: Residual::Rows,
    };
    mixers.into_iter().map(layer).collect::<Vec<_>>().into()
}

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
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
    let shared_hidden = tensor("ffn_up_shexp")?.and_then(|up| up.shape.first().copied());
    Ok(FeedForward::Experts(ExpertsBlock {
        gate: ExpertGate::Ungated(ACTIVATION),
        shared: shared_hidden.map(shared),
        ..experts(hyper, Routing::BIASED_SIGMOID)?
    }))
}
