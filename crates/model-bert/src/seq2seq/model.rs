//! [`Seq2SeqModel`]: an encoder-decoder with a name, as its decoder or as its encoder.

use std::sync::Arc;

use kv_core::TokenId;
use kv_core::layers::LayerMap;
use kv_graph::{Graph, GraphShape};
use model_core::architecture::{Model, ModelError, OutputKind, SourceEncoder};

use super::graph::{Seq2Seq, Side};

/// A decoder that attends over sources, and the encoder of those ([`Model::source_encoder`]).
#[derive(Clone, Debug)]
pub struct Seq2SeqModel {
    architecture: &'static str,
    settings: Arc<Seq2Seq>,
    memory: LayerMap,
    context_length: usize,
    start: Vec<TokenId>,
    /// The side whose graph it gives.
    side: Side,
}

impl Seq2SeqModel {
    /// A model from its settings, whose texts begin with `start`.
    pub fn new(
        architecture: &'static str,
        settings: Seq2Seq,
        context_length: usize,
        start: Vec<TokenId>,
    ) -> Self {
        Self {
            architecture,
            memory: settings.memory(),
            settings: Arc::new(settings),
            context_length,
            start,
            side: Side::Decoder,
        }
    }

    /// Its settings.
    pub fn settings(&self) -> &Seq2Seq {
        &self.settings
    }
}

impl Model for Seq2SeqModel {
    fn architecture(&self) -> &str {
        self.architecture
    }

    fn layers(&self) -> &LayerMap {
        &self.memory
    }

    fn vocab_size(&self) -> usize {
        self.settings.vocab
    }

    fn context_length(&self) -> usize {
        self.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.settings.dim
    }

    fn output(&self) -> OutputKind {
        match self.side {
            Side::Decoder => OutputKind::Logits,
            Side::Encoder => OutputKind::Embeddings,
        }
    }

    fn source_encoder(&self) -> Option<SourceEncoder> {
        match self.side {
            Side::Encoder => None,
            Side::Decoder => Some(SourceEncoder {
                model: Arc::new(Self {
                    side: Side::Encoder,
                    ..self.clone()
                }),
                start: self.start.clone(),
            }),
        }
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(match self.side {
            Side::Decoder => self.settings.decoder_graph(shape)?,
            Side::Encoder => self.settings.encoder_graph(shape)?,
        })
    }
}
