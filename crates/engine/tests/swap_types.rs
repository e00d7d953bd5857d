//! Which types rows and states can be swapped as: those that take fewer bytes.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use engine::{ConfigError, EngineConfig};
use kv_core::graph::{Graph, GraphError, GraphShape};
use kv_core::kv_types::KvTypes;
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory};
use kv_core::{KvType, StateType, Window};
use model_core::architecture::{Model, ModelError};

/// Only what is asked of a model before it computes.
#[derive(Debug)]
struct Sizes(LayerMap);

impl Model for Sizes {
    fn architecture(&self) -> &str {
        "sizes"
    }

    fn layers(&self) -> &LayerMap {
        &self.0
    }

    fn vocab_size(&self) -> usize {
        10
    }

    fn context_length(&self) -> usize {
        64
    }

    fn embedding_dim(&self) -> usize {
        32
    }

    fn graph(&self, _: GraphShape) -> Result<Graph, ModelError> {
        Err(ModelError::Graph(GraphError::Json(String::new())))
    }
}

const ROWS: LayerMemory = LayerMemory::Attention(AttentionMemory {
    kv_heads: 1,
    k_dim: 32,
    v_dim: 32,
    window: Window::Full,
});

const STATE: LayerMemory = LayerMemory::Recurrent(RecurrentMemory {
    conv_row: 1,
    state_row: 1,
});

/// Only the last inputs of a convolution, which keep their type.
const INPUTS: LayerMemory = LayerMemory::Recurrent(RecurrentMemory {
    conv_row: 1,
    state_row: 0,
});

fn swapped(
    layers: &[LayerMemory],
    (rows, states): (KvType, StateType),
    swap_type: KvType,
) -> Result<(), ConfigError> {
    let config = EngineConfig {
        kv_types: KvTypes {
            state: states,
            ..KvTypes::from(rows)
        },
        swap_type: Some(swap_type),
        ..EngineConfig::default()
    };
    let model = Sizes(LayerMap::new(layers.to_vec()));
    config.sizes(&model).map(drop)
}

const F16: (KvType, StateType) = (KvType::F16, StateType::F16);
const F32: (KvType, StateType) = (KvType::F32, StateType::F32);

#[test]
fn rows_are_swapped_as_a_smaller_type() {
    swapped(&[ROWS], F16, KvType::Q8_0).unwrap();
    swapped(&[ROWS, INPUTS], F16, KvType::Q8_0).unwrap();
    let refused = swapped(&[ROWS], F16, KvType::F16).unwrap_err();
    let (kv_type, stored) = (KvType::F16, KvType::F16);
    assert_eq!(refused, ConfigError::SwapType { kv_type, stored });
}

#[test]
fn states_alone_must_be_smaller() {
    for kv_type in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
        swapped(&[INPUTS, STATE], F32, kv_type).unwrap();
    }
    let refused = swapped(&[STATE], F16, KvType::F16).unwrap_err();
    let (kv_type, stored) = (KvType::F16, KvType::F16);
    assert_eq!(refused, ConfigError::SwapType { kv_type, stored });
}

#[test]
fn states_next_to_rows_may_stay_as_they_are() {
    let stored = (KvType::F32, StateType::F16);
    swapped(&[ROWS, STATE], stored, KvType::F16).unwrap();
}

#[test]
fn where_nothing_is_stored_nothing_can_be_swapped() {
    for layers in [[LayerMemory::Nothing], [INPUTS]] {
        let refused = swapped(&layers, F32, KvType::Q8_0).unwrap_err();
        let kv_type = KvType::Q8_0;
        assert_eq!(refused, ConfigError::NothingToSwap { kv_type });
    }
}
