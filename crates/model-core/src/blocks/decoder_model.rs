//! [`DecoderModel`]: a decoder with a name and a trained context length.

use std::sync::Arc;

use kv_core::graph::{Graph, GraphShape};
use kv_core::layers::LayerMap;

use super::Decoder;
use crate::architecture::Model;
use crate::error::ModelError;

/// A decoder with a name and a trained context length.
#[derive(Clone, Debug)]
pub struct DecoderModel {
    architecture: &'static str,
    decoder: Decoder,
    memory: LayerMap,
    context_length: usize,
}

impl DecoderModel {
    /// A model from its settings.
    pub fn new(architecture: &'static str, decoder: Decoder, context_length: usize) -> Self {
        Self {
            architecture,
            memory: decoder.memory(),
            decoder,
            context_length,
        }
    }

    /// Its settings.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }
}

impl Model for DecoderModel {
    fn architecture(&self) -> &str {
        self.architecture
    }

    fn layers(&self) -> &LayerMap {
        &self.memory
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab
    }

    fn context_length(&self) -> usize {
        self.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.decoder.dim
    }

    fn for_context(&self, n_tokens: usize) -> Option<Arc<dyn Model>> {
        let decoder = self.decoder.for_context(n_tokens)?;
        let model = Self::new(self.architecture, decoder, self.context_length);
        Some(Arc::new(model))
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(self.decoder.graph(shape)?)
    }
}
