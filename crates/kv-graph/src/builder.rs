//! [`GraphBuilder`]: adds nodes and infers shapes as it goes.
//!
//! Invariant: what [`GraphBuilder::finish`] returns has operands before users, unique names and
//! fitting shapes. The methods that add operations are in [`ops`](crate::ops), each next to the
//! description it adds. Does not know architectures; third-party models build with it too.

use std::collections::HashMap;

use kv_core::ids::LayerIdx;

use crate::op::{Input, Op};
use crate::scope::ScopeLayer;
use crate::spec::{OpContext, OpResult};
use crate::{Graph, GraphShape, Node, NodeId, WeightUse};

/// A graph that cannot be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraphError {
    /// Two nodes have one name.
    #[error("node '{name}' exists already; names must be unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A node reads rows of which the recent ones are kept elsewhere.
    #[error(
        "'{node}' ({op}) reads the rows of layer {layer} of any age: they cannot have other types once \
         they are old"
    )]
    AnyAge {
        /// The node.
        node: String,
        /// Its operation.
        op: &'static str,
        /// The layer.
        layer: LayerIdx,
    },
    /// An operand is no earlier node.
    #[error("node '{node}': operand %{} is no earlier node", operand.0)]
    UnknownOperand {
        /// The node.
        node: String,
        /// The operand.
        operand: NodeId,
    },
    /// Operands do not fit the operation.
    #[error("node '{node}': {op} wants {wanted}, got {got:?}")]
    Shape {
        /// The node.
        node: String,
        /// The operation's name.
        op: &'static str,
        /// The operands that it wants.
        wanted: String,
        /// The operands' shapes.
        got: Vec<Vec<usize>>,
    },
    /// A weight is used with two shapes.
    #[error("weight '{name}' is used as {first:?} and as {second:?}")]
    WeightShape {
        /// The weight.
        name: String,
        /// Its shape at the first use.
        first: Vec<usize>,
        /// Its shape now.
        second: Vec<usize>,
    },
    /// Attention over rows that no earlier node stores.
    #[error("no node has stored rows of layer {layer}")]
    NothingStored {
        /// The layer.
        layer: LayerIdx,
    },
    /// A node with too many or too few operands.
    #[error("node '{node}': {op} has {wanted} operands, not {got}")]
    OperandCount {
        /// The node.
        node: String,
        /// The operation's name.
        op: &'static str,
        /// Operands that it has.
        wanted: usize,
        /// Operands given.
        got: usize,
    },
    /// A node whose shape, type or weights do not follow from its operation and operands.
    #[error("node '{node}' is not what its operation and operands give")]
    NotAsBuilt {
        /// The node.
        node: String,
    },
    /// A graph that cannot be computed by two devices, one after the other.
    #[error("the graph cannot be split after {n_first} blocks: {reason}")]
    CannotSplit {
        /// Blocks before the point.
        n_first: u32,
        /// The limit that is exceeded.
        reason: String,
    },
    /// A mixture whose experts cannot be computed apart from the rest of the graph.
    #[error("the experts of '{route}' cannot be computed by another device: {reason}")]
    CannotDetach {
        /// The node that chooses experts.
        route: String,
        /// The node that is in the way, and why.
        reason: String,
    },
    /// A text that is no graph.
    #[error("not a graph in JSON form: {0}")]
    Json(String),
}

/// Names of a matrix or gain and of its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affine<'a> {
    /// The matrix or gain.
    pub weight: &'a str,
    /// The bias, where there is one.
    pub bias: Option<&'a str>,
}

impl<'a> Affine<'a> {
    /// Without a bias.
    pub const fn new(weight: &'a str) -> Self {
        Self { weight, bias: None }
    }

    /// With this bias.
    pub const fn bias(self, bias: &'a str) -> Self {
        Self {
            bias: Some(bias),
            ..self
        }
    }
}

/// One row of a weight of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRow<'a> {
    /// The weight, `[n_rows, dim]`.
    pub weight: &'a str,
    /// The number of rows it has.
    pub n_rows: usize,
    /// The number of the row.
    pub row: usize,
}

/// Shapes that do not follow from an operation and its operands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Claim<'a> {
    /// The last dimensions of the result.
    pub(super) shape: &'a [usize],
    /// Of the operation's weights, in the order of its description.
    pub(super) weights: &'a [&'a [usize]],
}

impl<'a> Claim<'a> {
    pub(super) fn shape(shape: &'a [usize]) -> Self {
        Self {
            shape,
            weights: &[],
        }
    }
}

/// Builds a [`Graph`] node by node.
///
/// ```
/// use kv_core::LayerIdx;
/// use kv_graph::{GraphBuilder, GraphShape, Input};
///
/// let mut b = GraphBuilder::new(GraphShape { n_tokens: 3, n_outputs: 3 });
/// let tokens = b.input(Input::Tokens)?;
/// let mut x = b.embed("inp_embd", tokens, "token_embd.weight", [100, 8])?;
/// for layer in [LayerIdx(0), LayerIdx(1)] {
///     // Nodes get `-0`, weights `blk.0.`.
///     let mut b = b.scope(layer);
///     let normed = b.rms_norm("attn_norm", x, "attn_norm.weight", 1e-5)?;
///     x = b.add("l_out", x, normed)?;
/// }
/// let graph = b.finish(&[x])?;
/// assert!(graph.find("attn_norm-1").is_some());
/// assert_eq!(graph.weights()[2].name, "blk.1.attn_norm.weight");
/// # Ok::<(), kv_graph::GraphError>(())
/// ```
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
    names: HashMap<String, NodeId>,
    /// By name, which of the graph's weights it is.
    weights: HashMap<String, usize>,
    /// The layer whose names nodes and weights get.
    pub(super) layer: Option<ScopeLayer>,
}

impl GraphBuilder {
    /// An empty graph of this shape.
    pub fn new(shape: GraphShape) -> Self {
        let graph = Graph {
            shape,
            nodes: Vec::new(),
            outputs: Vec::new(),
            weights: Vec::new(),
        };
        Self {
            graph,
            names: HashMap::new(),
            weights: HashMap::new(),
            layer: None,
        }
    }

    /// Rows in and out.
    pub fn shape(&self) -> GraphShape {
        self.graph.shape
    }

    /// Shape of a node added earlier; empty for an unknown one.
    pub fn shape_of(&self, id: NodeId) -> &[usize] {
        self.graph.node(id).map_or(&[], |n| &n.shape)
    }

    /// The node that stored the rows of `layer`: what attention over them needs, of the layer
    /// itself or of one that shares them.
    ///
    /// # Errors
    /// [`GraphError::NothingStored`] where no node has.
    pub fn stored(&self, layer: LayerIdx) -> Result<NodeId, GraphError> {
        let stores = |op: &Op| match op {
            Op::StoreKv { layer: of } | Op::StoreK { layer: of } => *of == layer,
            _ => false,
        };
        let mut ids = (0u32..).map(NodeId).zip(&self.graph.nodes);
        let found = ids.find(|(_, node)| stores(&node.op)).map(|(id, _)| id);
        found.ok_or(GraphError::NothingStored { layer })
    }

    /// The finished graph, whose results are `outputs`.
    ///
    /// # Errors
    /// [`GraphError::UnknownOperand`] where an output is no node.
    pub fn finish(mut self, outputs: &[NodeId]) -> Result<Graph, GraphError> {
        let n_nodes = self.graph.nodes.len();
        if let Some(&operand) = outputs.iter().find(|o| o.as_usize() >= n_nodes) {
            return Err(GraphError::UnknownOperand {
                node: "output".into(),
                operand,
            });
        }
        self.graph.outputs = outputs.to_vec();
        Ok(self.graph)
    }

    pub(super) fn known_input(&self, input: Input) -> Option<NodeId> {
        let &id = self.names.get(&input.node_name())?;
        (self.graph.node(id)?.op == Op::Input(input)).then_some(id)
    }

    /// A node of another graph, with operands of this one.
    ///
    /// # Errors
    /// [`GraphError`] where its name is taken, or the operands are not of the shapes that it had.
    pub fn copy_node(
        &mut self,
        graph: &Graph,
        node: &Node,
        operands: &[NodeId],
    ) -> Result<NodeId, GraphError> {
        if let Op::Input(input) = node.op {
            return self.input(input);
        }
        let shape_of = |name| graph.weights.iter().find(|w| w.name == name);
        let spec = node.op.spec();
        let shapes = spec
            .weights()
            .map(|name| Some(shape_of(name)?.shape.as_slice()));
        let Some(shapes) = shapes.collect::<Option<Vec<_>>>() else {
            return Err(GraphError::NotAsBuilt {
                node: node.name.clone(),
            });
        };
        let claim = Claim {
            shape: &node.shape,
            weights: &shapes,
        };
        self.add_node(node.name.clone(), node.op.clone(), operands, claim)
    }

    /// Adds a node, with the layer of the scope in its name. `op` has its weights' whole names.
    pub(super) fn push(
        &mut self,
        name: &str,
        op: Op,
        operands: &[NodeId],
        claim: Claim<'_>,
    ) -> Result<NodeId, GraphError> {
        let name = self.node_name(name);
        self.add_node(name, op, operands, claim)
    }

    /// Adds a node of this very name.
    pub(super) fn add_node(
        &mut self,
        name: String,
        op: Op,
        operands: &[NodeId],
        claim: Claim<'_>,
    ) -> Result<NodeId, GraphError> {
        let inferred = self.infer(&name, &op, operands, claim)?;
        if self.names.contains_key(&name) {
            return Err(GraphError::DuplicateName { name });
        }
        let mut new_weights: Vec<WeightUse> = Vec::new();
        for (weight, shape) in op.spec().weights().zip(inferred.weights) {
            let known = self.weights.get(weight);
            let known = known.and_then(|&at| self.graph.weights.get(at));
            match known.or_else(|| new_weights.iter().find(|w| w.name == weight)) {
                Some(known) if known.shape == shape => {}
                Some(known) => {
                    return Err(GraphError::WeightShape {
                        name: weight.to_owned(),
                        first: known.shape.clone(),
                        second: shape,
                    });
                }
                None => new_weights.push(WeightUse {
                    name: weight.to_owned(),
                    shape,
                }),
            }
        }
        for new in new_weights {
            self.weights
                .insert(new.name.clone(), self.graph.weights.len());
            self.graph.weights.push(new);
        }
        // A graph of 2^32 nodes cannot be held in memory.
        let id = NodeId(u32::try_from(self.graph.nodes.len()).unwrap_or(u32::MAX));
        self.names.insert(name.clone(), id);
        self.graph.nodes.push(Node {
            name,
            op,
            operands: operands.to_vec(),
            shape: inferred.shape,
            dtype: inferred.dtype,
        });
        Ok(id)
    }

    /// Applies the description of `op` to its operands.
    fn infer(
        &self,
        node: &str,
        op: &Op,
        operands: &[NodeId],
        claim: Claim<'_>,
    ) -> Result<OpResult, GraphError> {
        let mut nodes = Vec::with_capacity(operands.len());
        for &operand in operands {
            let known = self.graph.node(operand);
            nodes.push(known.ok_or_else(|| GraphError::UnknownOperand {
                node: node.to_owned(),
                operand,
            })?);
        }
        let spec = op.spec();
        if let Some(wanted) = spec.n_operands().filter(|&n| n != operands.len()) {
            return Err(GraphError::OperandCount {
                node: node.to_owned(),
                op: spec.name(),
                wanted,
                got: operands.len(),
            });
        }
        let given = OpContext {
            graph: self.graph.shape,
            operands: &nodes,
            result: claim.shape,
            weights: claim.weights,
        };
        spec.infer(&given).map_err(|wanted| GraphError::Shape {
            node: node.to_owned(),
            op: spec.name(),
            wanted,
            got: nodes.iter().map(|node| node.shape.clone()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> GraphBuilder {
        GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        })
    }

    #[test]
    fn a_shape_that_does_not_fit_is_refused_with_both_sides() {
        let mut b = builder();
        let tokens = b.input(Input::Tokens).unwrap();
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        let y = b.linear("y", x, "w", 6).unwrap();
        let err = b.add("sum", x, y).unwrap_err();
        assert_eq!(
            err.to_string(),
            "node 'sum': add wants two equal shapes, got [[3, 4], [3, 6]]"
        );
    }

    #[test]
    fn names_are_unique_and_inputs_are_shared() {
        let mut b = builder();
        let tokens = b.input(Input::Tokens).unwrap();
        assert_eq!(b.input(Input::Tokens), Ok(tokens));
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        assert_eq!(
            b.scale("embd", x, 2.0),
            Err(GraphError::DuplicateName {
                name: "embd".into()
            })
        );
    }

    #[test]
    fn many_weights_take_time_in_proportion() {
        let started = std::time::Instant::now();
        let mut b = builder();
        let x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        for i in 0..100_000 {
            b.linear(&format!("y{i}"), x, &format!("a.weight.of.layer.{i}"), 6)
                .unwrap();
        }
        // Comparing each name with all names before it took a minute.
        assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
    }

    #[test]
    fn a_weight_has_one_shape() {
        let mut b = builder();
        let tokens = b.input(Input::Tokens).unwrap();
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        assert!(b.linear("logits", x, "tok", 10).is_ok(), "tied embeddings");
        assert!(matches!(
            b.linear("other", x, "tok", 11),
            Err(GraphError::WeightShape { .. })
        ));
    }
}
