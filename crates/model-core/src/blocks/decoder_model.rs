//! [`DecoderModel`]: a decoder with a name and a trained context length, which gives logits or
//! final rows.

use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{Causality, LayerIdx, Pos};
use kv_graph::{Graph, GraphShape};

use super::{Decoder, DecoderLayer, DecoderRows, DraftHead, FusedHead};
use crate::architecture::{
    HeadReading, HeadRows, LayerRows, MaskPlace, Model, OutputKind, RowOwner,
};
use crate::error::ModelError;

/// The first position of a text whose token has one before it.
const FIRST_WITH_ROW: Pos = Pos(1);

/// A decoder with a name and a trained context length.
#[derive(Clone, Debug)]
pub struct DecoderModel {
    architecture: &'static str,
    decoder: Decoder,
    memory: LayerMap,
    context_length: usize,
    head: Head,
    causality: Causality,
    /// The head that drafts, in the file.
    draft_head: Option<DraftHead>,
}

/// The head after the last norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Head {
    /// The output matrix.
    Logits,
    /// The same, for masks.
    MaskLogits(MaskPlace),
    /// Nothing.
    None,
    /// That which drafts: not the decoder's own layers are computed, but its.
    Draft,
}

impl DecoderModel {
    /// A model from its settings.
    pub fn new(architecture: &'static str, decoder: Decoder, context_length: usize) -> Self {
        Self {
            architecture,
            memory: decoder.memory(),
            decoder,
            context_length,
            head: Head::Logits,
            causality: Causality::Causal,
            draft_head: None,
        }
    }

    /// The same decoder, in whose full layers tokens of pictures see no later ones.
    pub fn causal_in_full(self) -> Self {
        Self {
            causality: Causality::CausalInFull,
            ..self
        }
    }

    /// The same decoder, whose file has a head that drafts: computed where it is asked for
    /// ([`Model::with_draft_head`]).
    pub fn with_head_in_file(self, draft_head: Option<DraftHead>) -> Self {
        Self { draft_head, ..self }
    }

    /// The same decoder, whose logits are of masks: its mixers are [within the
    /// ubatch](super::Mixer::WithinBatch).
    pub fn of_masks(self, place: MaskPlace) -> Self {
        Self {
            head: Head::MaskLogits(place),
            ..self
        }
    }

    /// Its settings.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The layers that have keys and values of their own.
    fn owners(&self) -> Vec<RowOwner> {
        let layers = (0u32..).zip(&self.decoder.layers);
        let owner = |(at, layer): (u32, &DecoderLayer)| match layer.mixer.memory() {
            LayerMemory::Attention(memory) => Some(RowOwner {
                layer: LayerIdx(at),
                memory,
            }),
            _ => None,
        };
        layers.filter_map(owner).collect()
    }

    /// The head that reads rows of several layers, where this is one.
    fn fused(&self) -> Option<&FusedHead> {
        let head = self.decoder.draft_head.as_ref();
        head.filter(|_| self.head == Head::Draft)?.fused()
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
        self.fused().map_or(self.decoder.vocab, |fused| fused.vocab)
    }

    fn context_length(&self) -> usize {
        self.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.fused()
            .map_or(self.decoder.row_dim(), |fused| fused.dim)
    }

    fn given_dim(&self) -> usize {
        self.decoder.given_dim()
    }

    fn for_context(&self, n_tokens: usize) -> Option<Arc<dyn Model>> {
        let decoder = self.decoder.for_context(n_tokens)?;
        Some(Arc::new(Self {
            decoder,
            ..self.clone()
        }))
    }

    fn output(&self) -> OutputKind {
        match self.head {
            Head::Logits | Head::Draft => OutputKind::Logits,
            Head::MaskLogits(place) => OutputKind::MaskLogits(place),
            Head::None => OutputKind::Embeddings,
        }
    }

    fn causality(&self) -> Causality {
        match self.head {
            Head::Logits | Head::None | Head::Draft => self.causality,
            Head::MaskLogits(_) => Causality::NonCausal,
        }
    }

    fn without_head(&self) -> Option<Arc<dyn Model>> {
        match self.head {
            Head::None | Head::MaskLogits(_) | Head::Draft => None,
            Head::Logits => {
                let mut rows = Self {
                    head: Head::None,
                    draft_head: None,
                    ..self.clone()
                };
                rows.decoder.draft_head = None;
                rows.memory = rows.decoder.memory();
                Some(Arc::new(rows))
            }
        }
    }

    fn with_draft_head(&self) -> Option<Arc<dyn Model>> {
        let mut model = self.clone();
        model.decoder.draft_head = Some(self.draft_head.clone()?);
        model.memory = model.decoder.memory();
        Some(Arc::new(model))
    }

    fn draft_head(&self) -> Option<Arc<dyn Model>> {
        self.decoder.draft_head.as_ref()?;
        Some(Arc::new(Self {
            head: Head::Draft,
            ..self.clone()
        }))
    }

    fn layer_rows(&self) -> Option<LayerRows> {
        (self.head == Head::Logits).then(|| LayerRows {
            n_layers: self.decoder.layers.len(),
            dim: self.decoder.dim,
            vocab: self.decoder.vocab,
            output_weight: self.decoder.output_weight.clone(),
            owners: self.owners(),
        })
    }

    fn with_own_head(&self, head: DraftHead) -> Option<Arc<dyn Model>> {
        self.layer_rows()?;
        self.clone().with_head_in_file(Some(head)).with_draft_head()
    }

    fn head_reading(&self) -> HeadReading<'_> {
        if let Some(fused) = self.fused() {
            return HeadReading {
                tokens: fused.tokens.as_deref(),
                first: FIRST_WITH_ROW,
                ..HeadReading::default()
            };
        }
        let head = self.decoder.draft_head.as_ref();
        match head
            .filter(|_| self.head == Head::Draft)
            .and_then(DraftHead::sharing)
        {
            Some(sharing) => HeadReading {
                groups: sharing.groups.as_ref(),
                rows: HeadRows::OfModel,
                ..HeadReading::default()
            },
            None => HeadReading::default(),
        }
    }

    /// With per-layer inputs, these still need a token for each row.
    fn of_rows(&self) -> Option<Arc<dyn Model>> {
        if matches!(self.head, Head::MaskLogits(_) | Head::Draft) {
            return None;
        }
        let mut given = self.clone();
        given.decoder.rows = DecoderRows::Given;
        Some(Arc::new(given))
    }

    fn custom_ops(&self) -> CustomOps {
        self.decoder.custom_ops()
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(match self.head {
            Head::Logits | Head::MaskLogits(_) => self.decoder.graph(shape)?,
            Head::None => self.decoder.rows_graph(shape)?,
            Head::Draft => match self.decoder.head_graph(shape) {
                Some(graph) => graph?,
                None => self.decoder.graph(shape)?,
            },
        })
    }
}
