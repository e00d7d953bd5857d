//! Tests of whole models on any device: `simulator.rs` calls them, and `on_a_gpu.rs` for `cuda.rs`,
//! `metal.rs` and `opencl.rs`.

#![allow(clippy::unwrap_used, clippy::panic)]
#![allow(dead_code)] // each program uses a part of this

pub(crate) mod encoders;
pub(crate) mod fixtures;
pub(crate) mod replays;
pub(crate) mod soak;
pub(crate) mod sources;
pub(crate) mod states;
pub(crate) mod texts;

use std::sync::Arc;

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_gpu::Precision;
use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, Registry};
use model_tests::{Case, checks};

/// The bound on the error of a recipe's logits, whose spread is about 3.
pub(crate) fn tolerance(precision: Precision, recipe: &str) -> f32 {
    match precision {
        Precision::Precise => checks::tolerance_of(recipe),
        // Embeddings off by a millionth move these logits by 4e-4 and more
        // ([`checks::NOISY_TOLERANCE`]), and halves are off by 500 millionths.
        Precision::Fast if matches!(recipe, "gemma3n" | "zamba2") => 0.8,
        // What int8 activations and halves move them by.
        Precision::Fast => 400.0 * checks::TOLERANCE,
    }
}

/// Adds every architecture.
pub(crate) fn register(registry: &mut Registry) {
    model_bert::register(registry);
    model_llama::register(registry);
    model_mamba::register(registry);
}

/// A model with its weights.
#[derive(Clone)]
pub(crate) struct OpenedModel {
    pub(crate) model: Arc<dyn Model>,
    pub(crate) weights: Arc<dyn WeightSource>,
}

impl OpenedModel {
    pub(crate) fn new(case: &Case) -> Self {
        let (weights, metadata) = case.open();
        let model = case.registry().model(&metadata, &*weights).unwrap();
        Self { model, weights }
    }

    pub(crate) fn engine<B: Backend>(&self, backend: B, config: &EngineConfig) -> Engine<B> {
        let (model, weights) = (Arc::clone(&self.model), Arc::clone(&self.weights));
        Engine::new(backend, model, weights, config).unwrap()
    }
}
