//! xLSTM (Beck et al., arXiv 2503.13427): matrix LSTMs and gated feed-forward blocks.
//!
//! GGUF has no such architecture: its keys are ours.

use kv_graph::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::{MLstmBlock, Mixer, SsmMixer};
use model_core::hyperparameters::Hyperparameters;

use crate::family::{ExampleSizes, MambaLike, WiredLayers};
use crate::feed_forwards::dense;
use crate::hybrids::layers;

/// xLSTM.
pub(crate) const XLSTM: MambaLike = MambaLike {
    name: "xlstm",
    read,
    example,
};

fn read(hyper: &Hyperparameters<'_>, _: &dyn WeightSource) -> Result<WiredLayers, ModelError> {
    let n_layers = hyper.n_layers()?;
    let positive = |key: &str| match hyper.positive(key)? {
        Some(x) => Ok(x as f32),
        None => Err(hyper.wrong(key, "is missing; the model needs it".to_owned())),
    };
    let block = MLstmBlock {
        n_heads: hyper.count("mlstm.head_count")?,
        k_dim: hyper.count("mlstm.key_length")?,
        v_dim: hyper.count("mlstm.value_length")?,
        gate_cap: positive("mlstm.gate_softcapping")?,
        eps: positive("mlstm.epsilon")?,
        norm_eps: hyper.norm_eps()?,
    };
    let cap = positive("final_logit_softcapping")?;
    let hidden = hyper.count("feed_forward_length")?;
    Ok(wired(n_layers, block, hidden, cap))
}

fn wired(n_layers: usize, block: MLstmBlock, hidden: usize, logit_cap: f32) -> WiredLayers {
    let mixers = vec![Mixer::Recurrent(SsmMixer::MLstm(block)); n_layers];
    let layers = layers(mixers, vec![dense(hidden); n_layers]);
    WiredLayers {
        logit_cap: Some(logit_cap),
        ..layers.into()
    }
}

/// Two layers of the published sizes.
fn example() -> (ExampleSizes, WiredLayers) {
    let block = MLstmBlock {
        n_heads: 8,
        k_dim: 256,
        v_dim: 512,
        gate_cap: 15.0,
        eps: 1e-6,
        norm_eps: 1e-6,
    };
    let sizes = ExampleSizes {
        vocab: 50_304,
        dim: 4096,
        context_length: 1 << 20,
    };
    (sizes, wired(2, block, 10_944, 30.0))
}
