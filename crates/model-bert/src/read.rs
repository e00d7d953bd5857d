//! What encoders have in common in their metadata.
//!
//! Invariant: a setting that encoders do not support is an error that names the key.

use kv_core::graph::Activation;
use kv_core::weights::WeightSource;
use model_core::architecture::ModelError;
use model_core::blocks::QkvWeights;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};
use model_core::sentence::Pooling;

use crate::encoder::{HEAD_DENSE, HEAD_OUTPUT, HeadDense, ScoreHead};

/// Key of the activation's name.
pub(crate) const ACTIVATION: &str = "hidden_activation";

/// The names of activations, as `config.json` has them. Where a GGUF file has none, it is the
/// first.
pub(crate) const ACTIVATIONS: &[(&str, Activation)] = &[
    ("gelu", Activation::GeluErf),
    ("gelu_python", Activation::GeluErf),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
];

/// The activation that the file names.
pub(crate) fn activation(hyper: &Hyperparameters<'_>) -> Result<Activation, ModelError> {
    let Some(name) = hyper.optional::<&str>(ACTIVATION)? else {
        return Ok(Activation::GeluErf);
    };
    let found = ACTIVATIONS.iter().find(|(known, _)| *known == name);
    found.map(|(_, activation)| *activation).ok_or_else(|| {
        let known: Vec<_> = ACTIVATIONS.iter().map(|(name, _)| *name).collect();
        let known = known.join(", ");
        hyper.wrong(ACTIVATION, format!("'{name}' is not one of: {known}"))
    })
}

/// The heads of all layers, which are alike, and how many layers there are.
pub(crate) fn heads(
    hyper: &Hyperparameters<'_>,
    dim: usize,
) -> Result<(usize, HeadSizes), ModelError> {
    let n_layers = hyper.n_layers()?;
    let heads = hyper.heads(n_layers, dim)?;
    match heads.split_first() {
        Some((first, rest)) if rest.iter().all(|other| other == first) => Ok((n_layers, *first)),
        _ => {
            let reason = "the layers of an encoder have as many heads each".to_owned();
            Err(hyper.wrong("attention.head_count", reason))
        }
    }
}

/// Whether the file has one matrix for queries, keys and values.
pub(crate) fn qkv_weights(weights: &dyn WeightSource) -> Result<QkvWeights, ModelError> {
    Ok(match optional_weight(weights, "blk.0.attn_qkv.weight")? {
        Some(_) => QkvWeights::Fused,
        None => QkvWeights::Separate,
    })
}

/// Tokens of an encoder see later ones.
pub(crate) fn refuse_causal(hyper: &Hyperparameters<'_>) -> Result<(), ModelError> {
    match hyper.optional::<bool>("attention.causal")? {
        Some(true) => {
            let reason = "true is not supported: tokens of an encoder see later ones".to_owned();
            Err(hyper.wrong("attention.causal", reason))
        }
        _ => Ok(()),
    }
}

/// The classification head, where the file has one. Files of llama.cpp have its tensors with or
/// without the key that names the pooling.
pub(crate) fn score_head(
    hyper: &Hyperparameters<'_>,
    weights: &dyn WeightSource,
    dim: usize,
) -> Result<Option<ScoreHead>, ModelError> {
    let ranks = hyper.optional::<u32>("pooling_type")? == Some(Pooling::Rank.code());
    let dense = match optional_weight(weights, HEAD_DENSE)? {
        Some(_) => HeadDense::Tanh,
        None => HeadDense::None,
    };
    let missing = |shape| ModelError::MissingTensor {
        name: HEAD_OUTPUT.to_owned(),
        shape,
    };
    match optional_weight(weights, HEAD_OUTPUT)? {
        Some(weight) => match *weight.shape() {
            [n_labels, _] => Ok(Some(ScoreHead { n_labels, dense })),
            ref got => Err(ModelError::TensorShape {
                name: HEAD_OUTPUT.to_owned(),
                wanted: vec![1, dim],
                got: got.to_vec(),
            }),
        },
        None if ranks || dense == HeadDense::Tanh => Err(missing(vec![1, dim])),
        None => Ok(None),
    }
}
