//! [`WavTokenizerDec`]: the decoder of WavTokenizer (Ji et al., arXiv 2408.16532), which makes rows
//! of a spectrogram of audio codes, as the vocoder of OuteTTS.
//!
//! It is an encoder: all codes of a sequence see each other within one ubatch, and nothing is
//! remembered. A row has the magnitudes and then the phases of a frame; the inverse transform to
//! samples is the caller's. Convolutions and group norms over tokens are custom operations that the
//! model registers. Its files have no tokenizer.

mod graph;
mod ops;
mod read;

use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::Causality;
use kv_core::layers::{LayerMap, LayerMemory};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape};
use model_core::architecture::{Architecture, Model, ModelError, OutputKind};
use model_core::gguf::Metadata;
use model_core::hyperparameters::Hyperparameters;

use graph::{Decoder, POS_NET};

/// The architecture.
#[derive(Clone, Copy, Debug)]
pub struct WavTokenizerDec;

impl WavTokenizerDec {
    /// The name in `general.architecture`.
    const NAME: &'static str = "wavtokenizer-dec";
}

impl Architecture for WavTokenizerDec {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, Self::NAME);
        let decoder = Decoder::read(&hyper, weights)?;
        let context_length = hyper.count("context_length")?;
        Ok(Arc::new(WavTokenizerModel::new(decoder, context_length)))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let decoder = Decoder {
            vocab: 4096,
            features: 512,
            dim: 768,
            groups: 32,
            group_norm_eps: 1e-6,
            layer_norm_eps: 1e-6,
            n_conv_next: 2,
            hidden: 2304,
            output: 1282,
            last_norm: "attn_norm",
        };
        Ok(Arc::new(WavTokenizerModel::new(decoder, 8192)))
    }
}

/// A decoder with a trained context length.
#[derive(Clone, Debug)]
struct WavTokenizerModel {
    decoder: Decoder,
    memory: LayerMap,
    context_length: usize,
}

impl WavTokenizerModel {
    fn new(decoder: Decoder, context_length: usize) -> Self {
        let n_layers = POS_NET.len() + decoder.n_conv_next;
        Self {
            decoder,
            memory: LayerMap::new(vec![LayerMemory::Nothing; n_layers]),
            context_length,
        }
    }
}

impl Model for WavTokenizerModel {
    fn architecture(&self) -> &str {
        WavTokenizerDec::NAME
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
        self.decoder.output
    }

    fn output(&self) -> OutputKind {
        OutputKind::Embeddings
    }

    fn causality(&self) -> Causality {
        Causality::NonCausal
    }

    fn custom_ops(&self) -> CustomOps {
        CustomOps::new()
            .with(ops::Neighbors)
            .with(ops::DepthwiseConv)
            .with(ops::GroupNorm)
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(self.decoder.graph(shape)?)
    }
}
