//! [`MambaLike`]: a member of the family, and how it and a file make a model.
//!
//! Knows no member.

use std::sync::Arc;

use kv_graph::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    Arrangement, Decoder, DecoderLayer, DecoderModel, DraftHead, LastNorm, Multipliers, Norm,
    NormKind, TOKEN_EMBEDDING,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::Hyperparameters;

/// One member of the family.
#[derive(Clone, Copy, Debug)]
pub struct MambaLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// Its layers, from a file.
    pub(crate) read: fn(&Hyperparameters<'_>, &dyn WeightSource) -> Result<WiredLayers, ModelError>,
    /// Two layers with settings of the usual size.
    pub(crate) example: fn() -> (ExampleSizes, WiredLayers),
}

/// Layers, and how a model is wired around them.
#[derive(Clone, Debug)]
pub(crate) struct WiredLayers {
    pub(crate) layers: Vec<DecoderLayer>,
    /// See [`Decoder::feed_forward_norm`].
    pub(crate) ffn_norm: &'static str,
    /// See [`Decoder::last_norm`].
    pub(crate) last_norm: LastNorm,
    /// Factors.
    pub(crate) multipliers: Multipliers,
    /// See [`Decoder::logit_cap`].
    pub(crate) logit_cap: Option<f32>,
}

impl From<Vec<DecoderLayer>> for WiredLayers {
    fn from(layers: Vec<DecoderLayer>) -> Self {
        Self {
            layers,
            ffn_norm: "ffn_norm.weight",
            last_norm: LastNorm::Output,
            multipliers: Multipliers::default(),
            logit_cap: None,
        }
    }
}

/// Sizes of a model without a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExampleSizes {
    pub(crate) vocab: usize,
    pub(crate) dim: usize,
    pub(crate) context_length: usize,
}

impl WiredLayers {
    /// A decoder whose embedding matrix is its output matrix too.
    fn decoder(self, [vocab, dim]: [usize; 2], eps: f32) -> Decoder {
        Decoder {
            vocab,
            dim,
            norm: Norm {
                kind: NormKind::Rms,
                eps,
            },
            arrangement: Arrangement::PreNorm,
            feed_forward_norm: self.ffn_norm,
            last_norm: self.last_norm,
            multipliers: self.multipliers,
            logit_cap: self.logit_cap,
            output_weight: TOKEN_EMBEDDING.to_owned(),
            layers: self.layers,
            ..Decoder::default()
        }
    }
}

impl Architecture for MambaLike {
    fn name(&self) -> &'static str {
        self.name
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name);
        let mut wired = (self.read)(&hyper, weights)?;
        let dim = hyper.count("embedding_length")?;
        let output_weight = hyper.output_weight(weights)?;
        let head = DraftHead::split_off(&mut wired.layers, &output_weight, &hyper, weights)?;
        let decoder = Decoder {
            output_weight,
            long_rope: hyper.long_rope(weights)?,
            ..wired.decoder([hyper.vocab(weights, dim)?, dim], hyper.norm_eps()?)
        };
        let context_length = hyper.count("context_length")?;
        let model = DecoderModel::new(self.name, decoder, context_length);
        Ok(Arc::new(model.with_head_in_file(head)))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let (sizes, wired) = (self.example)();
        let decoder = wired.decoder([sizes.vocab, sizes.dim], 1e-5);
        let model = DecoderModel::new(self.name, decoder, sizes.context_length);
        Ok(Arc::new(model))
    }
}
