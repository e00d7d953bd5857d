//! [`MAMBA`] and [`MAMBA2`]: layers that are a mixer each and nothing else.

use model_core::architecture::ModelError;
use model_core::blocks::{
    ConvBias, DecoderLayer, InnerNorms, LayerScale, Mixer, Residual, SsmMixer, SsmMixerBlock,
};
use model_core::hyperparameters::Hyperparameters;

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::read::{example_mamba2, mamba_mixer, mamba2_mixer};

/// The norms of step sizes, B and C: Falcon Mamba's, whose files say `mamba` too.
const INNER_NORMS: &str = "ssm.dt_b_c_rms";
/// The epsilon of these norms, where it is another number than in the other norms. Falcon Mamba was
/// trained with 1e-6 here and 1e-5 there. The key is ours: without it, as in llama.cpp, all norms
/// are alike.
const INNER_NORM_EPS: &str = "ssm.dt_b_c_rms_epsilon";

/// Mamba-1, and Falcon Mamba.
pub(crate) const MAMBA: MambaLike = MambaLike {
    name: "mamba",
    read: |hyper, weights| {
        let mixer = mamba_mixer(hyper, weights, 0, inner_norms(hyper)?)?;
        Ok(wired(hyper.n_layers()?, SsmMixer::Mamba(mixer)))
    },
    example: || {
        let mixer = SsmMixer::Mamba(SsmMixerBlock {
            d_inner: 1536,
            d_state: 16,
            d_conv: 4,
            dt_rank: 48,
            conv_bias: ConvBias::PerChannel,
            inner_norms: InnerNorms::None,
        });
        (EXAMPLE_SIZES, wired(2, mixer))
    },
};

/// Mamba-2.
pub(crate) const MAMBA2: MambaLike = MambaLike {
    name: "mamba2",
    read: |hyper, weights| {
        let mixer = mamba2_mixer(hyper, weights, 0)?;
        Ok(wired(hyper.n_layers()?, SsmMixer::Mamba2(mixer)))
    },
    example: || (EXAMPLE_SIZES, wired(2, example_mamba2(1536, 24))),
};

/// Those of the smallest published models.
const EXAMPLE_SIZES: ExampleSizes = ExampleSizes {
    vocab: 50_280,
    dim: 768,
    context_length: 2048,
};

/// Equal layers without feed-forward blocks.
fn wired(n_layers: usize, mixer: SsmMixer) -> WiredLayers {
    let layer = DecoderLayer {
        mixer: Mixer::Recurrent(mixer),
        feed_forward: None,
        scale: LayerScale::None,
        residual: Residual::Rows,
    };
    vec![layer; n_layers].into()
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
