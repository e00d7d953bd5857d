//! A model whose layers keep the rows of recent tokens apart, so that old ones can have other
//! types.
//!
//! Invariant: it is the model that was given, but for its layers ([`LayerMap::with_recent`]) and
//! its graphs ([`Graph::with_recent`]). Knows no types.

use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::Causality;
use kv_core::layers::LayerMap;
use kv_graph::{Graph, GraphShape};

use crate::adapters::Adapters;
use crate::architecture::{HeadReading, Model, ModelError, OutputKind, SourceEncoder};

/// The model over its own layers, or over what [`LayerMap::with_recent`] made of them. Its graphs
/// are refused where they read rows of any age
/// ([`GraphError::AnyAge`](kv_graph::GraphError::AnyAge)).
pub fn with_layers(model: Arc<dyn Model>, layers: &LayerMap) -> Arc<dyn Model> {
    if layers.recent().is_empty() || !model.layers().recent().is_empty() {
        return model;
    }
    let layers = layers.clone();
    Arc::new(RecentRowsModel { model, layers })
}

/// A model whose layers keep recent rows apart.
#[derive(Debug)]
struct RecentRowsModel {
    model: Arc<dyn Model>,
    layers: LayerMap,
}

impl RecentRowsModel {
    fn other(&self, model: Option<Arc<dyn Model>>) -> Option<Arc<dyn Model>> {
        model.map(|model| with_layers(model, &self.layers))
    }
}

impl Model for RecentRowsModel {
    fn architecture(&self) -> &str {
        self.model.architecture()
    }

    fn layers(&self) -> &LayerMap {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn context_length(&self) -> usize {
        self.model.context_length()
    }

    fn embedding_dim(&self) -> usize {
        self.model.embedding_dim()
    }

    fn given_dim(&self) -> usize {
        self.model.given_dim()
    }

    fn output(&self) -> OutputKind {
        self.model.output()
    }

    fn causality(&self) -> Causality {
        self.model.causality()
    }

    fn has_no_use_for(&self, tensor: &str) -> bool {
        self.model.has_no_use_for(tensor)
    }

    fn for_context(&self, n_tokens: usize) -> Option<Arc<dyn Model>> {
        self.other(self.model.for_context(n_tokens))
    }

    fn without_head(&self) -> Option<Arc<dyn Model>> {
        self.other(self.model.without_head())
    }

    fn with_draft_head(&self) -> Option<Arc<dyn Model>> {
        // Its layers are others, so it has to be asked for before recent rows are kept apart.
        None
    }

    fn draft_head(&self) -> Option<Arc<dyn Model>> {
        self.other(self.model.draft_head())
    }

    fn head_reading(&self) -> HeadReading<'_> {
        self.model.head_reading()
    }

    fn of_rows(&self) -> Option<Arc<dyn Model>> {
        self.other(self.model.of_rows())
    }

    fn source_encoder(&self) -> Option<SourceEncoder> {
        let SourceEncoder { model, start } = self.model.source_encoder()?;
        let model = with_layers(model, &self.layers);
        Some(SourceEncoder { model, start })
    }

    fn adapters(&self) -> Option<&Arc<Adapters>> {
        self.model.adapters()
    }

    fn with_active_adapters(&self, n_active: usize) -> Option<Arc<dyn Model>> {
        self.other(self.model.with_active_adapters(n_active))
    }

    fn custom_ops(&self) -> CustomOps {
        self.model.custom_ops()
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let graph = self.model.graph(shape)?;
        Ok(graph.with_recent(&self.layers)?)
    }
}
