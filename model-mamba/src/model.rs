//! [`MambaModel`]: a decoder of mixers with a name and a trained context length.

use kv_core::graph::{Graph, GraphShape};
use kv_core::layers::LayerMap;
use model_core::architecture::{Model, ModelError};

use crate::decoder::MixerDecoder;

/// A model whose layers, or some of them, are recurrent.
#[derive(Clone, Debug)]
pub struct MambaModel {
    architecture: &'static str,
    decoder: MixerDecoder,
    memory: LayerMap,
    context_length: usize,
}

impl MambaModel {
    /// A model from its settings.
    pub fn new(architecture: &'static str, decoder: MixerDecoder, context_length: usize) -> Self {
        Self {
            architecture,
            memory: decoder.memory(),
            decoder,
            context_length,
        }
    }

    /// Its settings.
    pub fn decoder(&self) -> &MixerDecoder {
        &self.decoder
    }
}

impl Model for MambaModel {
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
