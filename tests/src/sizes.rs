//! [`Sizes`]: a model for tests of what is planned, which never computes.

use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory};
use kv_core::{Causality, Window};
use kv_graph::{Graph, GraphError, GraphShape};
use model_core::architecture::{Model, ModelError};

/// Only what is asked of a model before it computes.
#[derive(Debug)]
pub struct Sizes {
    /// The memory of its layers.
    pub layers: LayerMap,
    /// The tokens that see each other.
    pub causality: Causality,
}

impl Model for Sizes {
    fn architecture(&self) -> &str {
        "sizes"
    }

    fn layers(&self) -> &LayerMap {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        10
    }

    fn context_length(&self) -> usize {
        20_000
    }

    fn embedding_dim(&self) -> usize {
        32
    }

    fn causality(&self) -> Causality {
        self.causality
    }

    fn graph(&self, _: GraphShape) -> Result<Graph, ModelError> {
        Err(ModelError::Graph(GraphError::Json(String::new())))
    }
}

/// Keys and values of 32 values each.
pub const CELLS: LayerMemory = LayerMemory::Attention(AttentionMemory {
    kv_heads: 1,
    k_dim: 32,
    v_dim: 32,
    window: Window::Full,
});

/// A state, and the last inputs of a convolution.
pub const STATES: LayerMemory = LayerMemory::Recurrent(RecurrentMemory {
    conv_row: 1,
    state_row: 1,
});
