//! Checks of the types that rows and states are stored or swapped in against the model.
//!
//! Invariant: a choice that an operation cannot compute with, or that saves nothing, is refused
//! with the type that is stored. Knows no backend.

use kv_backend::{BackendError, check_state_types};
use kv_graph::GraphShape;
use kv_rows::{KvType, RowShape};
use model_core::architecture::Model;

use crate::config::{ConfigError, Settings};

/// States are more sensitive than K and V: what they are rounded to stays in all that follows.
const NARROWEST_STATE: KvType = KvType::Q8_0;

impl Settings {
    /// Whether the model's operations compute with the type of their states.
    pub(crate) fn check_state_type(&self, model: &dyn Model) -> Result<(), ConfigError> {
        let is_plain = |kv_type| kv_type == KvType::F32;
        let mut types = self.layout.states().iter().map(|s| s.state_type.kv_type());
        if types.all(is_plain) {
            return Ok(());
        }
        let shape = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        // A model without a graph is refused where it is first compiled.
        let Ok(graph) = model.graph(shape) else {
            return Ok(());
        };
        match check_state_types(&graph, &self.layout) {
            Err(BackendError::StateTypeOfOp {
                layer,
                op,
                state_type,
                ..
            }) => Err(ConfigError::StateType {
                architecture: model.architecture().to_owned(),
                op,
                layer,
                state_type,
            }),
            _ => Ok(()),
        }
    }

    /// Whether rows are smaller as what they are swapped as; of states some, or the only rows.
    pub(crate) fn check_swap_type(&self, kv_type: KvType) -> Result<(), ConfigError> {
        let layers = self.layout.layers().iter();
        let shapes = layers.flat_map(|layer| [Some(layer.k), layer.stored_v()]);
        let shapes: Vec<RowShape> = shapes.flatten().collect();
        let mut states = self.layout.states().iter();
        let state = states.find(|states| states.row.state_row > 0);
        let is_smaller = |shape: &RowShape| RowShape { kv_type, ..*shape }.bytes() < shape.bytes();
        let larger = shapes.iter().find(|shape| !is_smaller(shape));
        match (larger, state) {
            (Some(shape), _) => Err(ConfigError::SwapType {
                kv_type,
                stored: shape.kv_type,
            }),
            (None, None) if shapes.is_empty() => Err(ConfigError::NothingToSwap { kv_type }),
            (None, Some(states))
                if shapes.is_empty() && self.swapped_state_type(kv_type).is_none() =>
            {
                Err(ConfigError::SwapType {
                    kv_type,
                    stored: states.state_type.kv_type(),
                })
            }
            _ => Ok(()),
        }
    }

    /// The type of swapped states where K and V are as this type: as they are, but q8_0 at the
    /// least; `None` as they are stored, where that makes them no smaller.
    pub(crate) fn swapped_state_type(&self, wanted: KvType) -> Option<KvType> {
        let bytes = |kv_type: KvType| kv_type.row_bytes(NARROWEST_STATE.block_len());
        let kv_type = if bytes(wanted) < bytes(NARROWEST_STATE) {
            NARROWEST_STATE
        } else {
            wanted
        };
        let mut states = self.layout.states().iter();
        let is_larger = |stored: KvType| bytes(kv_type) < bytes(stored);
        states
            .any(|states| is_larger(states.state_type.kv_type()))
            .then_some(kv_type)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::{
        Causality,
        layers::{LayerMap, LayerMemory, RecurrentMemory},
    };
    use kv_rows::{KvType, KvTypes, StateType};

    use crate::{ConfigError, EngineConfig};
    use model_tests::sizes::{CELLS, STATES, Sizes};

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
            ..EngineConfig::default()
        };
        let model = Sizes {
            layers: LayerMap::new(layers.to_vec()),
            causality: Causality::Causal,
        };
        config.sizes(&model)?.check_swap_type(swap_type)
    }

    const F16: (KvType, StateType) = (KvType::F16, StateType::F16);
    const F32: (KvType, StateType) = (KvType::F32, StateType::F32);

    #[test]
    fn rows_are_swapped_as_a_smaller_type() {
        swapped(&[CELLS], F16, KvType::Q8_0).unwrap();
        swapped(&[CELLS, INPUTS], F16, KvType::Q8_0).unwrap();
        let refused = swapped(&[CELLS], F16, KvType::F16).unwrap_err();
        let (kv_type, stored) = (KvType::F16, KvType::F16);
        assert_eq!(refused, ConfigError::SwapType { kv_type, stored });
    }

    #[test]
    fn states_alone_must_be_smaller() {
        for kv_type in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
            swapped(&[INPUTS, STATES], F32, kv_type).unwrap();
        }
        let refused = swapped(&[STATES], F16, KvType::F16).unwrap_err();
        let (kv_type, stored) = (KvType::F16, KvType::F16);
        assert_eq!(refused, ConfigError::SwapType { kv_type, stored });
    }

    #[test]
    fn states_next_to_rows_may_stay_as_they_are() {
        let stored = (KvType::F32, StateType::F16);
        swapped(&[CELLS, STATES], stored, KvType::F16).unwrap();
    }

    #[test]
    fn where_nothing_is_stored_nothing_can_be_swapped() {
        for layers in [[LayerMemory::Nothing], [INPUTS]] {
            let refused = swapped(&layers, F32, KvType::Q8_0).unwrap_err();
            let kv_type = KvType::Q8_0;
            assert_eq!(refused, ConfigError::NothingToSwap { kv_type });
        }
    }
}
