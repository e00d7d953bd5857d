//! [`CustomSpec`]: an operation that this crate does not have, as data in a graph.
//!
//! The graph names it, with its settings, weights and shapes; what it computes is registered with a
//! backend (`CustomOp` of `kv-backend`). So such a graph prints itself, is compared and
//! snapshotted like any other. Does not know implementations.

use std::collections::BTreeMap;

use kv_core::ids::LayerIdx;
use kv_core::window::Window;
use serde::{Deserialize, Serialize};

use crate::op::{Input, Op};
use crate::spec::{DType, OpContext, OpResult, OpScope, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// A custom operation as a graph names it.
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
    /// The dependencies of a row of its result.
    #[serde(default, skip_serializing_if = "CustomScope::is_row")]
    pub scope: CustomScope,
}

/// The rows that a row of a custom operation's result depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CustomScope {
    /// The same row of the operands.
    #[default]
    Row,
    /// The rows up to it in its sequence, through the recurrent state of this layer.
    State(LayerIdx),
    /// All rows of its sequence in the ubatch, later ones too: a convolution over tokens, for
    /// example.
    Sequence,
}

impl CustomScope {
    fn is_row(&self) -> bool {
        *self == Self::Row
    }
}

impl CustomSpec {
    /// An operation of this name, without settings, weights or state.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Operands behind those with rows: the states, or what tokens see of their ubatch.
    pub fn n_other_operands(&self) -> usize {
        usize::from(!self.scope.is_row())
    }

    /// The layer whose recurrent state it reads and writes, where it has one.
    pub fn layer(&self) -> Option<LayerIdx> {
        match self.scope {
            CustomScope::State(layer) => Some(layer),
            CustomScope::Row | CustomScope::Sequence => None,
        }
    }

    /// The setting of this name.
    pub fn param(&self, name: &str) -> Option<f32> {
        self.params.get(name).copied()
    }
}

/// Sizes of a custom operation that its operands do not determine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CustomSizes<'a> {
    /// The shapes of the weights that its specification names.
    pub weights: &'a [&'a [usize]],
    /// Values of one row of the result.
    pub width: usize,
}

pub(crate) fn custom(custom: &CustomSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("custom", 0, |given| infer(given, custom)).any_operands();
    let spec = match custom.scope {
        CustomScope::Row => spec,
        CustomScope::State(_) | CustomScope::Sequence => spec.scope_of(OpScope::Tokens),
    };
    let spec = spec
        .setting("", &custom.name)
        .optional("layer", custom.layer());
    let params = custom.params.iter();
    let spec = params.fold(spec, |spec, (name, value)| spec.setting(name, value));
    spec.weights_as("w", &custom.weights)
}

const STATES: Op = Op::Input(Input::States);

/// The input that says which rows of a ubatch are one sequence.
const WHOLE_SEQUENCES: Op = Op::Input(Input::BatchVisibility {
    window: Window::Full,
});

fn infer(given: &OpContext<'_>, spec: &CustomSpec) -> Result<OpResult, String> {
    let (rows, shape) = (given.operands, given.graph);
    let rows = match (spec.scope, rows.split_last()) {
        (CustomScope::Row, _) => rows,
        (CustomScope::State(_), Some((states, rows))) if states.op == STATES => rows,
        (CustomScope::State(_), _) => return Err("the states as its last operand".into()),
        (CustomScope::Sequence, Some((seen, rows))) if seen.op == WHOLE_SEQUENCES => rows,
        (CustomScope::Sequence, _) => {
            return Err("what tokens see of their whole ubatch as its last operand".into());
        }
    };
    let n_rows = rows.first().and_then(|x| x.shape.first().copied());
    let mut all = rows.iter();
    let (Some(n_rows), true) = (
        n_rows,
        all.all(|x| x.shape.first().copied() == n_rows && x.dtype == DType::F32),
    ) else {
        return Err("operands f32[n, ..]".into());
    };
    if spec.n_other_operands() > 0 && n_rows != shape.n_tokens {
        return Err("a row for each token".into());
    }
    if given.weights.len() != spec.weights.len() {
        let (wanted, got) = (spec.weights.len(), given.weights.len());
        return Err(format!("the shapes of {wanted} weights, not of {got}"));
    }
    let result = OpResult::f32([n_rows, given.width()]);
    Ok(given
        .weights
        .iter()
        .fold(result, |result, &shape| result.weight(shape)))
}

impl GraphBuilder {
    /// A custom operation on rows: `operands` are `[n, ..]` each, the result is `[n, width]`. One
    /// with a state has the states input ([`Input::States`]) as its last operand, one on whole
    /// sequences [`Input::BatchVisibility`] with [`Window::Full`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where operands have no rows, or not the same number; where there are
    /// not as many shapes as weights; where a state or whole sequences are wanted and the last
    /// operand is not what they need.
    pub fn custom(
        &mut self,
        name: &str,
        spec: &CustomSpec,
        operands: &[NodeId],
        sizes: CustomSizes<'_>,
    ) -> Result<NodeId, GraphError> {
        let weights = spec.weights.iter().map(|name| self.weight_name(name));
        let custom = CustomSpec {
            weights: weights.collect(),
            ..spec.clone()
        };
        let claim = Claim {
            shape: &[sizes.width],
            weights: sizes.weights,
        };
        self.push(name, Op::Custom { custom }, operands, claim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Graph, GraphShape};

    fn builder() -> (GraphBuilder, NodeId, NodeId) {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        let states = b.input(Input::States).unwrap();
        (b, x, states)
    }

    fn sizes<'a>(weights: &'a [&'a [usize]]) -> CustomSizes<'a> {
        CustomSizes { weights, width: 6 }
    }

    fn spec() -> CustomSpec {
        CustomSpec {
            params: [("gamma".to_owned(), 0.5)].into(),
            weights: vec!["w".to_owned()],
            scope: CustomScope::State(LayerIdx(2)),
            ..CustomSpec::new("decay")
        }
    }

    #[test]
    fn it_prints_itself_and_comes_back_from_json() {
        let (mut b, x, states) = builder();
        let y = b
            .custom("y", &spec(), &[x, states], sizes(&[&[4, 2]]))
            .unwrap();
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        let line = "%2 y: f32[3, 6] = custom(%0, %1, decay, layer=2, gamma=0.5, w=w)";
        assert!(text.contains(line), "{text}");
        assert_eq!(graph.weights()[0].shape, [4, 2]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn what_reads_other_tokens_has_one_operand_more() {
        let whole = CustomSpec {
            scope: CustomScope::Sequence,
            ..CustomSpec::new("whole")
        };
        for (spec, n_others, scope) in [
            (CustomSpec::new("rows"), 0, OpScope::Row),
            (spec(), 1, OpScope::Tokens),
            (whole, 1, OpScope::Tokens),
        ] {
            assert_eq!(spec.n_other_operands(), n_others, "{}", spec.name);
            assert_eq!(custom(&spec).scope(), scope, "{}", spec.name);
        }
        assert_eq!(spec().param("gamma"), Some(0.5));
    }

    #[test]
    fn operands_weights_and_states_must_fit() {
        let (mut b, x, states) = builder();
        let error = |e: Result<NodeId, GraphError>| e.unwrap_err().to_string();
        let shapes: &[&[usize]] = &[&[4, 2]];
        let without = error(b.custom("a", &spec(), &[x], sizes(shapes)));
        assert!(
            without.contains("the states as its last operand"),
            "{without}"
        );
        let nothing = error(b.custom("b", &spec(), &[states], sizes(shapes)));
        assert!(nothing.contains("operands f32[n, ..]"), "{nothing}");
        let whole = CustomSpec {
            scope: CustomScope::Sequence,
            ..spec()
        };
        let visibility = |window| Input::BatchVisibility { window };
        let full = b.input(visibility(Window::Full)).unwrap();
        let short = b.input(visibility(Window::Symmetric(3))).unwrap();
        assert!(b.custom("d", &whole, &[x, full], sizes(shapes)).is_ok());
        for operands in [&[x][..], &[x, states], &[x, short]] {
            let refused = error(b.custom("e", &whole, operands, sizes(shapes)));
            assert!(refused.contains("see of their whole ubatch"), "{refused}");
        }
        let weights = error(b.custom("c", &spec(), &[x, states], sizes(&[])));
        assert!(
            weights.contains("the shapes of 1 weights, not of 0"),
            "{weights}"
        );
    }
}
