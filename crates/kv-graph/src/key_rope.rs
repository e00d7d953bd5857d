//! How a model's keys depend on their positions, read from its graph.
//!
//! The graph is data: the K operand of each [`Op::StoreKv`] says what was done to keys before they
//! were stored. Invariant: a rotation is reported only where stored keys can be rotated further by
//! it; where something else happened to keys after their rotation, that is an error.

use kv_core::ids::LayerIdx;

use crate::rope::{LayerRope, RopeSpec, Rotation};
use crate::weights::{WeightError, WeightSource};
use crate::{Graph, Input, NodeId, Op};

/// Keys that cannot be moved to other positions.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyRopeError {
    /// Something that a rotation cannot be exchanged with happens between RoPE and storing.
    #[error(
        "layer {layer} stores keys that '{node}' ({op}) changed after their rotation: they cannot \
         be rotated further"
    )]
    ChangedAfterRope {
        /// The layer.
        layer: LayerIdx,
        /// The node that changed them.
        node: String,
        /// Its operation.
        op: &'static str,
    },
    /// Keys that hold the layer's values and are rotated with them.
    #[error("layer {layer}: keys are also values, which no position may change")]
    ValuesInKeys {
        /// The layer.
        layer: LayerIdx,
    },
    /// Positions that were added to the rows that keys are made of.
    #[error("keys hold the rows of '{weight}' for their positions: they cannot be moved to others")]
    LearntPositions {
        /// The rows.
        weight: String,
    },
    /// The divisors of a layer's frequencies cannot be read.
    #[error(transparent)]
    Factors(#[from] WeightError),
}

impl Graph {
    /// The dependence of the stored keys of each layer on their positions, with divisors of
    /// frequencies from `weights`.
    ///
    /// # Errors
    /// [`KeyRopeError`], for the first layer whose keys cannot be moved.
    pub fn key_ropes(&self, weights: &dyn WeightSource) -> Result<Vec<LayerRope>, KeyRopeError> {
        let mut ropes = Vec::new();
        for node in self.nodes() {
            if let (Op::Embed { weight }, Some(&of)) = (&node.op, node.operands.first())
                && self.node(of).map(|of| &of.op) == Some(&Op::Input(Input::Positions))
            {
                let weight = weight.clone();
                return Err(KeyRopeError::LearntPositions { weight });
            }
            let (Op::StoreKv { layer } | Op::StoreK { layer }, Some(&keys)) =
                (&node.op, node.operands.first())
            else {
                continue;
            };
            let rope = match self.rope_of(*layer, keys) {
                // What would be rotated is also what the layer takes as values, or behind it.
                Ok(Some(_)) | Err(KeyRopeError::ChangedAfterRope { .. })
                    if matches!(node.op, Op::StoreK { .. }) =>
                {
                    return Err(KeyRopeError::ValuesInKeys { layer: *layer });
                }
                rope => rope?,
            };
            let rotation = match rope {
                Some(rope) => {
                    let factors = rope.factors.as_deref().map(|name| weights.require(name));
                    let factors = factors.transpose()?.map(|weight| weight.to_f32());
                    Some(Rotation::new(rope.clone(), factors.as_deref()))
                }
                None => None,
            };
            ropes.push(LayerRope {
                layer: *layer,
                rotation,
            });
        }
        Ok(ropes)
    }

    /// The rotation of the keys at `id`; `None` where they were made without one.
    fn rope_of(&self, layer: LayerIdx, id: NodeId) -> Result<Option<&RopeSpec>, KeyRopeError> {
        let Some(node) = self.node(id) else {
            return Ok(None);
        };
        let before = |at: usize| match node.operands.get(at) {
            Some(&operand) => self.rope_of(layer, operand),
            None => Ok(None),
        };
        match &node.op {
            // Text moves in all sections alike; images do not move.
            Op::Rope { rope } | Op::RopeSections { rope, .. } => Ok(Some(rope)),
            // A product with a matrix makes keys of what no longer has a position.
            Op::Linear { .. }
            | Op::HeadLinear { .. }
            | Op::Embed { .. }
            | Op::Attend { .. }
            | Op::AttendPartial { .. }
            | Op::AttendBatch { .. }
            | Op::AttendSparse { .. }
            | Op::Kqv { .. }
            | Op::Input(_) => Ok(None),
            Op::Scale { .. } => before(0),
            Op::Reshape if self.keeps_heads(id) => before(0),
            op => match (0..node.operands.len()).find_map(|at| before(at).transpose()) {
                None => Ok(None),
                Some(Err(error)) => Err(error),
                Some(Ok(_)) => Err(KeyRopeError::ChangedAfterRope {
                    layer,
                    node: node.name.clone(),
                    op: op.name(),
                }),
            },
        }
    }

    /// True if the last dimension of a node is its operand's.
    fn keeps_heads(&self, id: NodeId) -> bool {
        let last = |id: NodeId| self.node(id)?.shape.last().copied();
        let operand = self.node(id).and_then(|node| node.operands.first());
        operand.is_some_and(|&operand| last(operand) == last(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::{RopeScaling, RopeStyle};
    use crate::weights::MemoryWeights;
    use crate::{GraphBuilder, GraphShape, Input};
    use kv_core::ids::{PartIdx, PosDelta};

    fn rope(factors: Option<&str>) -> RopeSpec {
        RopeSpec {
            style: RopeStyle::Norm,
            n_rot: 4,
            base: 100.0,
            scaling: RopeScaling::None,
            factors: factors.map(str::to_owned),
        }
    }

    /// A graph that stores what `make` makes of `[tokens, 2, 6]` keys and positions.
    fn stores(make: impl FnOnce(&mut GraphBuilder, NodeId, NodeId) -> NodeId) -> Graph {
        let shape = GraphShape {
            n_tokens: 3,
            n_outputs: 0,
        };
        let mut g = GraphBuilder::new(shape);
        let x = g.input(Input::Embeddings { dim: 12 }).unwrap();
        let positions = g.input(Input::Positions).unwrap();
        let cells = g.input(Input::Cells { part: PartIdx(0) }).unwrap();
        let k = g.linear("k", x, "wk", 12).unwrap();
        let k = g.reshape("k_heads", k, &[3, 2, 6]).unwrap();
        let k = make(&mut g, k, positions);
        g.store_kv("store", LayerIdx(7), [k, k, cells]).unwrap();
        g.finish(&[]).unwrap()
    }

    #[test]
    fn the_rope_before_the_store_is_the_layers() {
        let graph = stores(|g, k, positions| {
            let k = g.rms_norm("k_norm", k, "gain", 1e-5).unwrap();
            let k = g.rope("k_rope", k, positions, &rope(None)).unwrap();
            g.scale("k_scaled", k, 0.5).unwrap()
        });
        let ropes = graph.key_ropes(&MemoryWeights::new()).unwrap();
        let wanted = LayerRope {
            layer: LayerIdx(7),
            rotation: Some(Rotation::new(rope(None), None)),
        };
        assert_eq!(ropes, [wanted]);
    }

    #[test]
    fn keys_without_a_rope_need_no_rotation() {
        let graph = stores(|g, k, _| g.rms_norm("k_norm", k, "gain", 1e-5).unwrap());
        let ropes = graph.key_ropes(&MemoryWeights::new()).unwrap();
        assert_eq!(ropes[0].rotation, None);
    }

    #[test]
    fn factors_are_read_and_missed_by_name() {
        let graph = stores(|g, k, positions| {
            g.rope("k_rope", k, positions, &rope(Some("factors")))
                .unwrap()
        });
        let error = graph.key_ropes(&MemoryWeights::new()).unwrap_err();
        assert!(error.to_string().contains("'factors'"), "{error}");
        let mut weights = MemoryWeights::new();
        weights.insert_f32("factors", &[2], &[2.0, 10.0]).unwrap();
        let ropes = graph.key_ropes(&weights).unwrap();
        let (cos, _) = ropes[0].rotation.as_ref().unwrap().angles(PosDelta(-2));
        assert_eq!(cos, [1f32.cos(), 0.02f32.cos()]);
    }

    #[test]
    fn d15d_keys_that_were_changed_after_their_rope_are_refused() {
        let graph = stores(|g, k, positions| {
            let k = g.rope("k_rope", k, positions, &rope(None)).unwrap();
            g.rms_norm("k_norm", k, "gain", 1e-5).unwrap()
        });
        let error = graph.key_ropes(&MemoryWeights::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "layer 7 stores keys that 'k_norm' (rms_norm) changed after their rotation: they cannot \
             be rotated further"
        );
    }

    #[test]
    fn keys_of_learnt_positions_are_refused() {
        let graph = stores(|g, k, positions| {
            let rows = g
                .embed("pos_embd", positions, "positions", [9, 12])
                .unwrap();
            let rows = g.reshape("pos_heads", rows, &[3, 2, 6]).unwrap();
            g.add("k_pos", k, rows).unwrap()
        });
        let error = graph.key_ropes(&MemoryWeights::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "keys hold the rows of 'positions' for their positions: they cannot be moved to others"
        );
    }

    #[test]
    fn heads_that_are_shaped_anew_after_their_rope_are_refused() {
        let shaped = |shape: [usize; 3]| {
            let graph = stores(|g, k, positions| {
                let k = g.rope("k_rope", k, positions, &rope(None)).unwrap();
                let flat = g
                    .reshape("k_flat", k, &[3, 12 / shape[2], shape[2]])
                    .unwrap();
                g.reshape("k_again", flat, &shape).unwrap()
            });
            graph.key_ropes(&MemoryWeights::new())
        };
        assert!(shaped([3, 2, 6]).unwrap()[0].rotation.is_some());
        let refused = shaped([3, 4, 3]).unwrap_err().to_string();
        assert!(
            refused.contains("'k_flat' (reshape) changed after"),
            "{refused}"
        );
    }
}
