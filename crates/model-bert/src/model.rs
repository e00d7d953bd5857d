//! [`EncoderModel`]: an encoder with a name and a trained context length, which gives rows or
//! scores.

use kv_core::Causality;
use kv_core::layers::{LayerMap, LayerMemory};
use kv_graph::{Graph, GraphShape};
use model_core::architecture::{Model, ModelError, OutputKind};

use crate::encoder::Encoder;
use crate::head::ScoreHead;

/// A model that gives a row for every token, or scores of the first, and remembers nothing.
#[derive(Clone, Debug)]
pub struct EncoderModel {
    architecture: &'static str,
    encoder: Encoder,
    memory: LayerMap,
    context_length: usize,
}

impl EncoderModel {
    /// A model from its settings.
    pub fn new(architecture: &'static str, encoder: Encoder, context_length: usize) -> Self {
        Self {
            architecture,
            memory: LayerMap::new(vec![LayerMemory::Nothing; encoder.layers.len()]),
            encoder,
            context_length,
        }
    }

    /// Its settings.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }
}

impl Model for EncoderModel {
    fn architecture(&self) -> &str {
        self.architecture
    }

    fn layers(&self) -> &LayerMap {
        &self.memory
    }

    fn vocab_size(&self) -> usize {
        self.encoder.vocab
    }

    fn context_length(&self) -> usize {
        self.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.encoder.dim
    }

    fn output(&self) -> OutputKind {
        match self.encoder.head {
            None => OutputKind::Embeddings,
            Some(ScoreHead { n_labels, .. }) => OutputKind::Scores { n_labels },
        }
    }

    fn causality(&self) -> Causality {
        Causality::NonCausal
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(self.encoder.graph(shape)?)
    }
}
