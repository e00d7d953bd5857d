//! [`LlamaModel`]: a decoder with a name and a trained context length.

use kv_core::graph::{Graph, GraphShape};
use kv_core::layers::LayerMap;
use model_core::architecture::{Model, ModelError};
use model_core::blocks::Decoder;

/// A model of the Llama family.
#[derive(Clone, Debug)]
pub struct LlamaModel {
    architecture: &'static str,
    decoder: Decoder,
    memory: LayerMap,
    context_length: usize,
}

impl LlamaModel {
    /// A model from its settings.
    pub fn new(architecture: &'static str, decoder: Decoder, context_length: usize) -> Self {
        let memory = decoder.memory();
        Self {
            architecture,
            decoder,
            memory,
            context_length,
        }
    }

    /// Its settings.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }
}

impl Model for LlamaModel {
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

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(self.decoder.graph(shape)?)
    }
}
