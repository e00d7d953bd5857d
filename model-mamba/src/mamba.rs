//! [`Mamba`] and [`Mamba2`]: from a file's metadata to a model.

use std::sync::Arc;

use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    ConvBias, DecoderLayer, GatedNorm, InnerNorms, Mixer, Ssm2MixerBlock, SsmMixer, SsmMixerBlock,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::Hyperparameters;

use crate::read::{ExampleSizes, Wiring, build, build_example, mamba_mixer, mamba2_mixer};

/// Whether step sizes, B and C are normed: Falcon Mamba, whose files say `mamba` too.
const INNER_NORMS: &str = "ssm.dt_b_c_rms";
/// What these norms add to the mean square, where that is another number than in the other norms.
/// Falcon Mamba was trained with 1e-6 here and 1e-5 there. The key is ours: without it, as in
/// llama.cpp, all norms are alike.
const INNER_NORM_EPS: &str = "ssm.dt_b_c_rms_epsilon";

/// The architecture `mamba`: Mamba-1, and Falcon Mamba.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mamba;

/// The architecture `mamba2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mamba2;

impl Architecture for Mamba {
    fn name(&self) -> &'static str {
        "mamba"
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name());
        let norms = inner_norms(&hyper)?;
        let mixer = SsmMixer::Mamba(mamba_mixer(&hyper, (weights, 0), norms)?);
        model(self.name(), &hyper, weights, mixer)
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let mixer = SsmMixer::Mamba(SsmMixerBlock {
            d_inner: 1536,
            d_state: 16,
            d_conv: 4,
            dt_rank: 48,
            conv_bias: ConvBias::PerChannel,
            inner_norms: InnerNorms::None,
        });
        Ok(example(self.name(), mixer))
    }
}

impl Architecture for Mamba2 {
    fn name(&self) -> &'static str {
        "mamba2"
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name());
        let mixer = SsmMixer::Mamba2(mamba2_mixer(&hyper, (weights, 0))?);
        model(self.name(), &hyper, weights, mixer)
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let mixer = SsmMixer::Mamba2(Ssm2MixerBlock {
            d_inner: 1536,
            d_state: 128,
            d_conv: 4,
            n_heads: 24,
            n_groups: 1,
            conv_bias: ConvBias::PerChannel,
            gated_norm: GatedNorm::PerGroup { eps: 1e-5 },
        });
        Ok(example(self.name(), mixer))
    }
}

/// A model of equal layers without feed-forward blocks.
fn model(
    name: &'static str,
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    mixer: SsmMixer,
) -> Result<Arc<dyn Model>, ModelError> {
    let layers = vec![layer(mixer); hyper.n_layers()?];
    build(name, (hyper, weights), layers, Wiring::default())
}

/// Two layers of the smallest published models.
fn example(name: &'static str, mixer: SsmMixer) -> Arc<dyn Model> {
    let sizes = ExampleSizes {
        vocab: 50_280,
        dim: 768,
        context_length: 2048,
    };
    build_example(name, sizes, vec![layer(mixer); 2], Wiring::default())
}

fn layer(mixer: SsmMixer) -> DecoderLayer {
    DecoderLayer {
        mixer: Mixer::Recurrent(mixer),
        feed_forward: None,
    }
}

fn inner_norms(hyper: &Hyperparameters<'_>) -> Result<InnerNorms, ModelError> {
    if hyper.optional(INNER_NORMS)? != Some(true) {
        return Ok(InnerNorms::None);
    }
    let eps = hyper.positive(INNER_NORM_EPS)?.map(|eps| eps as f32);
    Ok(InnerNorms::Plain {
        eps: eps.map_or_else(|| hyper.norm_eps(), Ok)?,
    })
}
