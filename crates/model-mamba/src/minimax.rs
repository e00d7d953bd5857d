//! MiniMax-Text-01 (arXiv 2501.08313): lightning attention, now and then attention, and mixtures of
//! experts; what blocks add to is normed.
//!
//! Files tell by `attention.head_count_kv`: a layer without key/value heads has lightning
//! attention. GGUF has no such architecture: its keys are ours.

use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, RouteSpec};
use model_core::architecture::ModelError;
use model_core::blocks::{
    DecoderLayer, ExpertBias, ExpertGate, ExpertScaling, ExpertsBlock, FeedForward, LayerScale,
    LightningBlock, Mixer, Residual, ResidualFactors, SsmMixer,
};
use model_core::hyperparameters::Hyperparameters;

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::feed_forwards::{Routing, feed_forwards};
use crate::hybrids::{Kinds, attention, example_heads, mixers};

/// MiniMax-Text-01.
pub(crate) const MINIMAX: MambaLike = MambaLike {
    name: "minimax",
    read,
    example,
};

/// The `eps` of the norm in lightning attention, whatever that of other norms is.
const NORM_EPS: f32 = 1e-6;

/// Factors on residuals, by what adds to them.
#[derive(Clone, Copy)]
struct Factors {
    lightning: ResidualFactors,
    attention: ResidualFactors,
    feed_forward: ResidualFactors,
}

impl Factors {
    fn layer(self, mixer: Mixer, feed_forward: FeedForward) -> DecoderLayer {
        let of_mixer = match mixer {
            Mixer::Recurrent(_) => self.lightning,
            _ => self.attention,
        };
        DecoderLayer {
            mixer,
            feed_forward: Some(feed_forward),
            scale: LayerScale::None,
            residual: Residual::Normed {
                mixer: of_mixer,
                feed_forward: self.feed_forward,
            },
        }
    }
}

fn read(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
) -> Result<WiredLayers, ModelError> {
    let factor = |key: String| {
        let factor = hyper.optional::<f32>(&key)?.unwrap_or(1.0);
        if factor.is_finite() {
            Ok(factor)
        } else {
            Err(hyper.wrong(&key, format!("{factor} is not possible")))
        }
    };
    let factors = |of: &str| {
        Ok::<_, ModelError>(ResidualFactors {
            residual: factor(format!("residual.{of}_alpha"))?,
            added: factor(format!("residual.{of}_beta"))?,
        })
    };
    let factors = Factors {
        lightning: factors("lightning")?,
        attention: factors("attention")?,
        feed_forward: factors("feed_forward")?,
    };
    let lightning = LightningBlock {
        n_heads: hyper.count("attention.head_count")?,
        dim: hyper.count("attention.key_length")?,
        norm_eps: NORM_EPS,
    };
    let kinds = Kinds {
        recurrent: &|_| Ok(SsmMixer::Lightning(lightning)),
        attending: &|heads| {
            let rope = hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?;
            Ok(attention(heads, None, Some(rope)))
        },
    };
    let mixers = mixers(hyper, &kinds)?.into_iter();
    let fed = feed_forwards(hyper, weights, Routing::SOFTMAX)?;
    let layers = mixers
        .zip(fed)
        .map(|(mixer, fed)| factors.layer(mixer, fed));
    Ok(layers.collect::<Vec<_>>().into())
}

/// Two layers of the published sizes.
fn example() -> (ExampleSizes, WiredLayers) {
    let lightning = LightningBlock {
        n_heads: 64,
        dim: 128,
        norm_eps: NORM_EPS,
    };
    let rope = RopeSpec {
        style: RopeStyle::Neox,
        n_rot: 128,
        base: 1e7,
        scaling: RopeScaling::None,
        factors: None,
    };
    let experts = FeedForward::Experts(ExpertsBlock {
        n_experts: 32,
        hidden: 9216,
        gate: ExpertGate::Activation(Activation::Silu),
        bias: ExpertBias::None,
        route: RouteSpec {
            sum: Routing::SOFTMAX.sum,
            ..RouteSpec::plain(2, Routing::SOFTMAX.gate)
        },
        choice: Routing::SOFTMAX.choice,
        scaling: ExpertScaling::Outputs,
        shared: None,
    });
    let of = |residual, added| ResidualFactors { residual, added };
    let factors = Factors {
        lightning: of(3.556, 1.0),
        attention: of(3.556, 1.0),
        feed_forward: of(3.556, 1.0),
    };
    let attending = attention(example_heads(64, 128), None, Some(rope));
    let layers = vec![
        factors.layer(Mixer::Recurrent(SsmMixer::Lightning(lightning)), experts),
        factors.layer(Mixer::Attention(attending), experts),
    ];
    let sizes = ExampleSizes {
        vocab: 200_064,
        dim: 6144,
        context_length: 1 << 20,
    };
    (sizes, layers.into())
}
