//! [`AdaptedModel`]: a model with the adapters that it is loaded with.
//!
//! Invariant: without active adapters its graphs are the model's own, but for the control vector.

use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::Causality;
use kv_core::layers::LayerMap;
use kv_graph::{Graph, GraphShape};

use super::graph::Products;
use super::{AdapterError, Adapters, n_active};
use crate::architecture::{LayerRows, Model, ModelError, OutputKind, SourceEncoder};
use crate::blocks::DraftHead;

/// A model with adapters, for tokens of which none has more than some.
#[derive(Debug)]
pub struct AdaptedModel {
    model: Arc<dyn Model>,
    adapters: Arc<Adapters>,
    n_active: usize,
}

impl AdaptedModel {
    /// A model with these adapters, for tokens that have as many as texts have that do not say, and
    /// at least one where there is one.
    ///
    /// # Errors
    /// [`AdapterError::Graph`] where they cannot be added to the model's graphs.
    pub fn new(model: Arc<dyn Model>, adapters: Arc<Adapters>) -> Result<Self, AdapterError> {
        let at_least = usize::from(!adapters.is_empty());
        let n_active = n_active(adapters.default_scales()).max(at_least);
        let adapted = Self {
            model,
            adapters,
            n_active,
        };
        let shape = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        let graph = adapted.model.graph(shape)?;
        adapted.add_to(&graph)?;
        if let Some(control) = adapted.adapters.control() {
            control.check(&graph, adapted.model.architecture())?;
        }
        Ok(adapted)
    }

    fn add_to(&self, graph: &Graph) -> Result<Graph, AdapterError> {
        let products = Products {
            adapters: &self.adapters,
            n_active: self.n_active,
            architecture: self.model.architecture(),
        };
        products.add_to(graph)
    }

    fn other(&self, model: Option<Arc<dyn Model>>) -> Option<Arc<dyn Model>> {
        let model = model?;
        Some(Arc::new(Self {
            model,
            adapters: Arc::clone(&self.adapters),
            n_active: self.n_active,
        }))
    }
}

impl Model for AdaptedModel {
    fn architecture(&self) -> &str {
        self.model.architecture()
    }

    fn layers(&self) -> &LayerMap {
        self.model.layers()
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
        self.other(self.model.with_draft_head())
    }

    /// The model's own: what it reads of the model is the work of the adapters already.
    fn draft_head(&self) -> Option<Arc<dyn Model>> {
        self.model.draft_head()
    }

    fn layer_rows(&self) -> Option<LayerRows> {
        self.model.layer_rows()
    }

    fn with_own_head(&self, head: DraftHead) -> Option<Arc<dyn Model>> {
        self.other(self.model.with_own_head(head))
    }

    fn of_rows(&self) -> Option<Arc<dyn Model>> {
        self.other(self.model.of_rows())
    }

    fn source_encoder(&self) -> Option<SourceEncoder> {
        self.model.source_encoder()
    }

    fn custom_ops(&self) -> CustomOps {
        self.model.custom_ops()
    }

    fn adapters(&self) -> Option<&Arc<Adapters>> {
        Some(&self.adapters)
    }

    fn with_active_adapters(&self, n_active: usize) -> Option<Arc<dyn Model>> {
        Some(Arc::new(Self {
            model: Arc::clone(&self.model),
            adapters: Arc::clone(&self.adapters),
            n_active: n_active.min(self.adapters.len()),
        }))
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let graph = self.model.graph(shape)?;
        if self.n_active == 0 && self.adapters.control().is_none() {
            return Ok(graph);
        }
        self.add_to(&graph).map_err(|error| match error {
            AdapterError::Model(error) => error,
            other => ModelError::Adapters(other.to_string()),
        })
    }
}
