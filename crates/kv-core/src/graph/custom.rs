//! [`CustomSpec`]: an operation that this crate does not have, as data in a graph.
//!
//! The graph names it, with its settings, weights and shapes; what it computes is registered with a
//! backend ([`CustomOp`](crate::backend::CustomOp)). So such a graph still prints itself, is compared
//! and snapshotted like any other. Knows nothing of implementations.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::NodeId;
use super::builder::{GraphBuilder, GraphError};
use super::op::{DType, Op};
use crate::ids::LayerIdx;

/// What a graph says of a custom operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CustomSpec {
    /// The name that its implementation has, for example `retention`.
    pub name: String,
    /// Settings, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub params: BTreeMap<String, f32>,
    /// Weights, in the order in which the implementation gets them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<String>,
    /// The layer whose recurrent state it reads and writes, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<LayerIdx>,
}

impl CustomSpec {
    /// An operation of this name, without settings, weights or state.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// The setting of this name.
    pub fn param(&self, name: &str) -> Option<f32> {
        self.params.get(name).copied()
    }
}

impl GraphBuilder {
    /// A custom operation on rows: `operands` are `[n, ..]` each, the result is `[n, width]`. One
    /// with a state has the states input ([`Input::States`](super::Input::States)) as its last
    /// operand. `weights` are the shapes of the weights that `spec` names.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where operands have no rows, or not the same number; where there are
    /// not as many shapes as weights; where a state is wanted and the last operand is not the
    /// states.
    pub fn custom(
        &mut self,
        name: &str,
        spec: &CustomSpec,
        operands: &[NodeId],
        (weights, width): (&[&[usize]], usize),
    ) -> Result<NodeId, GraphError> {
        let op = Op::Custom {
            custom: spec.clone(),
        };
        let rows = match (spec.layer, operands.split_last()) {
            (None, _) => operands,
            (Some(_), Some((&states, rows))) if self.is_states(states) => rows,
            _ => return Err(self.misfit(name, &op, "the states as its last operand", operands)),
        };
        let n_rows = rows
            .first()
            .and_then(|&x| self.shape_of(x).first().copied());
        let fit = |&x: &NodeId| {
            self.shape_of(x).first().copied() == n_rows && self.dtype_of(x) == Some(DType::F32)
        };
        let (Some(n_rows), true) = (n_rows, rows.iter().all(fit)) else {
            return Err(self.misfit(name, &op, "operands f32[n, ..]", operands));
        };
        if spec.layer.is_some() && n_rows != self.shape().n_tokens {
            return Err(self.misfit(name, &op, "a row for each token", operands));
        }
        if weights.len() != spec.weights.len() {
            let (wanted, got) = (spec.weights.len(), weights.len());
            let wanted = format!("the shapes of {wanted} weights, not of {got}");
            return Err(self.misfit(name, &op, &wanted, operands));
        }
        for (weight, shape) in spec.weights.iter().zip(weights) {
            self.declare(weight, shape)?;
        }
        self.push(
            name,
            op,
            operands.to_vec(),
            (vec![n_rows, width], DType::F32),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, GraphShape, Input};

    fn builder() -> (GraphBuilder, NodeId, NodeId) {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let states = b.input(Input::States).unwrap();
        (b, x, states)
    }

    fn spec() -> CustomSpec {
        CustomSpec {
            params: [("gamma".to_owned(), 0.5)].into(),
            weights: vec!["w".to_owned()],
            layer: Some(LayerIdx(2)),
            ..CustomSpec::new("decay")
        }
    }

    #[test]
    fn it_prints_itself_and_comes_back_from_json() {
        let (mut b, x, states) = builder();
        let y = b
            .custom("y", &spec(), &[x, states], (&[&[4, 2]], 6))
            .unwrap();
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        let line = "%2 y: f32[3, 6] = custom(%0, %1, decay, layer=2, gamma=0.5, w=w)";
        assert!(text.contains(line), "{text}");
        assert_eq!(graph.weights()[0].shape, [4, 2]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn operands_weights_and_states_must_fit() {
        let (mut b, x, states) = builder();
        let error = |e: Result<NodeId, GraphError>| e.unwrap_err().to_string();
        let shapes: &[&[usize]] = &[&[4, 2]];
        let without = error(b.custom("a", &spec(), &[x], (shapes, 6)));
        assert!(
            without.contains("the states as its last operand"),
            "{without}"
        );
        let nothing = error(b.custom("b", &spec(), &[states], (shapes, 6)));
        assert!(nothing.contains("operands f32[n, ..]"), "{nothing}");
        let weights = error(b.custom("c", &spec(), &[x, states], (&[], 6)));
        assert!(
            weights.contains("the shapes of 1 weights, not of 0"),
            "{weights}"
        );
    }
}
