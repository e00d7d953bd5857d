//! Whether the types that rows and states are stored or swapped in suit the model.
//!
//! Invariant: a choice that an operation cannot compute with, or that saves nothing, is refused
//! before anything is allocated. Knows no backend.

use kv_core::KvType;
use kv_core::backend::{BackendError, check_state_types};
use kv_core::graph::GraphShape;
use kv_core::layers::RowShape;
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
    pub(crate) fn check_swap_type(&self) -> Result<(), ConfigError> {
        let Some(kv_type) = self.swap_type else {
            return Ok(());
        };
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
            (None, Some(states)) if shapes.is_empty() && self.swapped_state_type().is_none() => {
                Err(ConfigError::SwapType {
                    kv_type,
                    stored: states.state_type.kv_type(),
                })
            }
            _ => Ok(()),
        }
    }

    /// How states are swapped: as K and V are, but as q8_0 at the least; `None` as they are stored,
    /// where that makes them no smaller.
    pub(crate) fn swapped_state_type(&self) -> Option<KvType> {
        let wanted = self.swap_type?;
        let bytes = |kv_type: KvType| kv_type.row_bytes(NARROWEST_STATE.block_len());
        let kv_type = match bytes(wanted) < bytes(NARROWEST_STATE) {
            true => NARROWEST_STATE,
            false => wanted,
        };
        let mut states = self.layout.states().iter();
        let is_larger = |stored: KvType| bytes(kv_type) < bytes(stored);
        states
            .any(|states| is_larger(states.state_type.kv_type()))
            .then_some(kv_type)
    }
}
