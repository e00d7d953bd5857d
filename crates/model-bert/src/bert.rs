//! [`Bert`]: learnt positions, full attention, norms after the blocks
//! (Devlin et al., arXiv 1810.04805).

use std::sync::Arc;

use kv_core::graph::Activation;
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, FeedForwardBlock, FeedForwardForm, Norm, NormKind, QkvBias, QkvWeights,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};

use crate::encoder::{Encoder, EncoderLayer, EncoderNorms, TOKEN_TYPES};
use crate::model::EncoderModel;
use crate::read;

/// The architecture `bert`.
#[derive(Clone, Copy, Debug)]
pub struct Bert;

const NAME: &str = "bert";

fn layer(
    heads: HeadSizes,
    weights: QkvWeights,
    hidden: usize,
    activation: Activation,
) -> EncoderLayer {
    EncoderLayer {
        attention: AttentionBlock {
            weights,
            bias: QkvBias::All,
            ..heads.into()
        },
        feed_forward: FeedForwardBlock {
            hidden,
            activation,
            form: FeedForwardForm::PlainWithBias,
        },
    }
}

const fn norm(eps: f32) -> Norm {
    Norm {
        kind: NormKind::LayerWithBias,
        eps,
    }
}

/// Rows of the matrix of parts of texts, where there is one; its width is checked with all others.
fn token_types(weights: &dyn WeightSource, dim: usize) -> Result<Option<usize>, ModelError> {
    let Some(weight) = optional_weight(weights, TOKEN_TYPES)? else {
        return Ok(None);
    };
    match *weight.shape() {
        [n_types, _] if n_types > 0 => Ok(Some(n_types)),
        ref got => Err(ModelError::TensorShape {
            name: TOKEN_TYPES.to_owned(),
            wanted: vec![2, dim],
            got: got.to_vec(),
        }),
    }
}

impl Architecture for Bert {
    fn name(&self) -> &'static str {
        NAME
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, NAME);
        read::refuse_causal(&hyper)?;
        let dim = hyper.count("embedding_length")?;
        let (n_layers, heads) = read::heads(&hyper, dim)?;
        let hidden = hyper.count("feed_forward_length")?;
        let activation = read::activation(&hyper)?;
        let context_length = hyper.count("context_length")?;
        let encoder = Encoder {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            positions: Some(context_length),
            token_types: token_types(weights, dim)?,
            norm: norm(hyper.layer_norm_eps()?),
            norms: EncoderNorms::PostNorm,
            layers: vec![layer(heads, read::qkv_weights(weights)?, hidden, activation); n_layers],
            head: read::score_head(&hyper, weights, dim)?,
        };
        Ok(Arc::new(EncoderModel::new(NAME, encoder, context_length)))
    }

    /// Two layers of the size of BERT base.
    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let heads = HeadSizes {
            n_heads: 12,
            kv_heads: 12,
            k_dim: 64,
            v_dim: 64,
        };
        let encoder = Encoder {
            vocab: 30_522,
            dim: 768,
            positions: Some(512),
            token_types: Some(2),
            norm: norm(1e-12),
            norms: EncoderNorms::PostNorm,
            layers: vec![layer(heads, QkvWeights::Separate, 3072, Activation::GeluErf); 2],
            head: None,
        };
        Ok(Arc::new(EncoderModel::new(NAME, encoder, 512)))
    }
}
